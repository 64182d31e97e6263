// SPDX-License-Identifier: Apache-2.0
//! The machines, and the additional parts of the guest machine.
//!
//! The *host machine* is one that guests would run on. The *nested machine* is the same in another
//! QEMU, and guests do run in it. The *guest machine* is itself the guest: it has empty PCI Express
//! slots and a line to QEMU's monitor, by which the cases inside plug virtio disks. A helper on the
//! real machine serves the disks that are not QEMU's own; the cases have a line to it, too. The
//! *Debian machine* is a host machine with systemd, on which the packages are installed. The
//! *libvirt machine* has libvirt besides. The *Ceph machine* is a host machine with Ceph.

use std::fmt;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Result, bail};
use clap::ValueEnum;
use kit::set::Set;
use tempfile::TempDir;

use crate::guest::escaped;
use crate::vm::systemd_root::{self, SystemdRoot};
use kit::interrupt;
use kit::process::{OwnedChild, StopWith, TICK};
use kit::sched::Patience;

/// Empty slots of the guest machine, numbered from 1.
const SLOTS: u32 = 8;

/// Directory for images of plugged disks, in memory.
const IMAGES: &str = "/dev/shm";

/// Time for the helper to listen, without its waits for a CPU.
const HELPER_TIMEOUT: Duration = Duration::from_secs(10);

/// The helper does not listen in time, for no known reason.
#[derive(Debug)]
pub(crate) struct HelperLate(String);

impl fmt::Display for HelperLate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (seconds, said) = (HELPER_TIMEOUT.as_secs(), &self.0);
        write!(f, "the helper did not listen within {seconds} s: {said}")
    }
}

impl std::error::Error for HelperLate {}

/// The kind of machine to boot.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, ValueEnum)]
pub enum Machine {
    /// One that guests run on: for the host's module.
    #[default]
    Host,
    /// The same, with guests inside: emulated by a QEMU under which they come up.
    Nested,
    /// One that is a guest: for the guest's driver.
    Guest,
    /// Debian 12 with systemd as the first process: for the packages.
    Debian12,
    /// The same with Debian 13.
    Debian13,
    /// Debian 12 with libvirt and QEMU: for guests that libvirt starts.
    Libvirt,
    /// A host machine with the programs of Ceph: for a cluster inside it.
    Ceph,
}

impl Machine {
    /// The machine that the cases of a set run in.
    pub fn of(set: Set) -> Self {
        match set {
            Set::Gating | Set::Plain | Set::Uring | Set::Full => Machine::Host,
            Set::Nested => Machine::Nested,
            Set::Guest | Set::GuestFull => Machine::Guest,
            Set::Debian12 => Machine::Debian12,
            Set::Debian13 => Machine::Debian13,
            Set::Libvirt => Machine::Libvirt,
            Set::Ceph => Machine::Ceph,
        }
    }

    /// The root image of a machine with systemd.
    pub(crate) fn systemd_root(self) -> Option<&'static SystemdRoot> {
        match self {
            Machine::Host | Machine::Nested | Machine::Guest | Machine::Ceph => None,
            Machine::Debian12 => Some(&systemd_root::DEBIAN12),
            Machine::Debian13 => Some(&systemd_root::DEBIAN13),
            Machine::Libvirt => Some(&systemd_root::LIBVIRT),
        }
    }

    /// Packages that its root image has and that of the host machine has not.
    pub(crate) fn more_packages(self) -> &'static [&'static str] {
        match self {
            Machine::Ceph => &["ceph-mon", "ceph-osd", "ceph-common"],
            _ => &[],
        }
    }

    /// The beginning of the names of its logs.
    pub(crate) fn log_prefix(self) -> &'static str {
        match self {
            Machine::Host => "",
            Machine::Nested => "nested-",
            Machine::Guest => "guest-",
            Machine::Debian12 => "debian12-",
            Machine::Debian13 => "debian13-",
            Machine::Libvirt => "libvirt-",
            Machine::Ceph => "ceph-",
        }
    }

    /// Default number of virtual CPUs.
    pub fn vcpus(self) -> u32 {
        match self {
            Machine::Guest => 4,
            _ => 2,
        }
    }
}

/// The helper of a guest machine; on drop it ends and its images are removed.
#[derive(Debug)]
pub(crate) struct Helper {
    // Dropped before its directory.
    _child: OwnedChild,
    dir: TempDir,
}

impl Helper {
    /// Starts the helper and waits until it listens.
    pub(crate) fn start() -> Result<Self> {
        let program = std::env::current_exe()?;
        let place =
            if Path::new(IMAGES).is_dir() { PathBuf::from(IMAGES) } else { std::env::temp_dir() };
        let dir = tempfile::Builder::new().prefix("lab-disks-").tempdir_in(place)?;
        let args = [
            program.to_string_lossy().into_owned(),
            "serve-disks".to_owned(),
            "--directory".to_owned(),
            dir.path().to_string_lossy().into_owned(),
        ];
        let log = dir.path().join("helper.log");
        let mut child = OwnedChild::spawn(&args, &log, StopWith::Kill)?;
        let patience = Patience::new(child.id(), HELPER_TIMEOUT);
        while !dir.path().join("helper").exists() {
            interrupt::check()?;
            let said = || fs::read_to_string(&log).unwrap_or_default();
            if let Some(status) = child.try_wait()? {
                bail!("the helper has ended ({status}): {}", said());
            }
            if patience.is_over() {
                return Err(HelperLate(said()).into());
            }
            std::thread::sleep(TICK);
        }
        Ok(Self { _child: child, dir })
    }

    /// Its output.
    pub(crate) fn log(&self) -> String {
        let bytes = fs::read(self.dir.path().join("helper.log")).unwrap_or_default();
        String::from_utf8_lossy(&bytes).lines().map(|line| format!("  helper| {line}\n")).collect()
    }

    /// QEMU's arguments: memory that disk servers can map, slots, both lines. They follow the
    /// device of serial ports.
    pub(crate) fn args(&self, memory_mib: u32) -> Vec<String> {
        let at = |name: &str| escaped(&self.dir.path().join(name));
        let mut args = vec![
            "-object".to_owned(),
            format!("memory-backend-memfd,id=memory,size={memory_mib}M,share=on"),
            "-machine".to_owned(),
            "memory-backend=memory".to_owned(),
            "-object".to_owned(),
            "iothread,id=disks".to_owned(),
            // The kernel itself handles the slots, as on a machine without ACPI.
            "-global".to_owned(),
            "ICH9-LPC.acpi-pci-hotplug-with-bridge-support=off".to_owned(),
        ];
        for slot in 1..=SLOTS {
            args.push("-device".to_owned());
            args.push(format!("pcie-root-port,id=slot{slot},chassis={slot},slot={slot}"));
        }
        args.push("-chardev".to_owned());
        args.push(format!("socket,id=monitor,path={},server=on,wait=off", at("monitor")));
        args.extend(["-mon".to_owned(), "chardev=monitor,mode=control".to_owned()]);
        for (name, socket) in [("monitor", at("monitor")), ("helper", at("helper"))] {
            args.push("-chardev".to_owned());
            args.push(format!("socket,id=line-{name},path={socket}"));
            args.push("-device".to_owned());
            args.push(format!("virtserialport,chardev=line-{name},name=lab.{name}"));
        }
        args
    }
}
