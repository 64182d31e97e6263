// SPDX-License-Identifier: Apache-2.0
//! The two machines, and what the second has in addition.
//!
//! The *host machine* is one that guests would run on. The *guest machine* is itself the guest: it
//! has empty PCI Express slots and a line to QEMU's monitor, by which the cases inside plug the
//! virtio disks they want. A helper on the real machine serves those disks that are not QEMU's own;
//! the cases have a line to it, too.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use clap::ValueEnum;
use tempfile::TempDir;

use crate::guest::escaped;
use crate::interrupt;
use crate::process::{OwnedChild, StopWith, TICK};

/// The program that has the guest machine's cases and is its helper.
pub const GUEST_PROGRAM: &str = "guest-cases";

/// Empty slots of the guest machine, numbered from 1.
const SLOTS: u32 = 8;

/// Where images of plugged disks lie: in memory.
const IMAGES: &str = "/dev/shm";

const HELPER_TIMEOUT: Duration = Duration::from_secs(10);

/// Which machine is booted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, ValueEnum)]
pub enum Machine {
    /// One that guests run on: for the host's module.
    #[default]
    Host,
    /// One that is a guest: for the guest's driver.
    Guest,
}

impl Machine {
    /// Virtual CPUs unless the user says otherwise.
    pub fn vcpus(self) -> u32 {
        match self {
            Machine::Host => 2,
            Machine::Guest => 4,
        }
    }
}

/// The helper of a guest machine; dropping it ends it and removes the images.
#[derive(Debug)]
pub(crate) struct Helper {
    // Ends before its folder goes.
    _child: OwnedChild,
    dir: TempDir,
}

impl Helper {
    /// Starts the helper and waits until it listens.
    pub(crate) fn start() -> Result<Self> {
        let program = program()?;
        let place =
            if Path::new(IMAGES).is_dir() { PathBuf::from(IMAGES) } else { std::env::temp_dir() };
        let dir = tempfile::Builder::new().prefix("lab-disks-").tempdir_in(place)?;
        let args = [
            program.to_string_lossy().into_owned(),
            "host".to_owned(),
            "--folder".to_owned(),
            dir.path().to_string_lossy().into_owned(),
        ];
        let log = dir.path().join("helper.log");
        let mut child = OwnedChild::spawn(&args, &log, StopWith::Kill)?;
        let deadline = Instant::now() + HELPER_TIMEOUT;
        while !dir.path().join("helper").exists() {
            interrupt::check()?;
            if child.try_wait()?.is_some() || Instant::now() > deadline {
                let said = fs::read_to_string(&log).unwrap_or_default();
                bail!("{GUEST_PROGRAM} does not help: {said}");
            }
            std::thread::sleep(TICK);
        }
        Ok(Self { _child: child, dir })
    }

    /// What it wrote.
    pub(crate) fn log(&self) -> String {
        let bytes = fs::read(self.dir.path().join("helper.log")).unwrap_or_default();
        String::from_utf8_lossy(&bytes).lines().map(|line| format!("  helper| {line}\n")).collect()
    }

    /// QEMU's arguments: memory that servers of disks can map, slots, both lines. They come behind
    /// the device of serial ports.
    pub(crate) fn args(&self, memory_mib: u32) -> Vec<String> {
        let at = |name: &str| escaped(&self.dir.path().join(name));
        let mut args = vec![
            "-object".to_owned(),
            format!("memory-backend-memfd,id=memory,size={memory_mib}M,share=on"),
            "-machine".to_owned(),
            "memory-backend=memory".to_owned(),
            "-object".to_owned(),
            "iothread,id=disks".to_owned(),
            // The slots are the kernel's own to handle, as on a machine without ACPI.
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

/// The program, which has to lie beside the lab's own.
pub fn program() -> Result<PathBuf> {
    let path = std::env::current_exe()?.with_file_name(GUEST_PROGRAM);
    if !path.exists() {
        bail!("no {}: build it (cargo build --release -p {GUEST_PROGRAM})", path.display());
    }
    path.canonicalize().context("the program's path")
}
