// SPDX-License-Identifier: Apache-2.0
//! Ways to attach a disk to an inner guest.

use std::path::Path;

use anyhow::{Result, bail};
use bench::rig::{ScsiTarget, Speed, null_blk};
use bench::setup;
use clap::ValueEnum;
use kit::null_blk::NullBlk;
use kit::system::modprobe;
use serde_json::json;

use crate::nested::daemon::{Daemon, Plane, QUEUE_SIZE};
use crate::nested::guest::{Guest, QEMU};

const SIZE_MIB: u64 = 1024;

/// A way to attach a disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(super) enum Way {
    /// vhost-user-blk, the daemon's kernel plane.
    Kernel,
    /// vhost-user-blk, the daemon's io_uring plane.
    Uring,
    /// The kernel plane with `--coalesce on`.
    KernelHold,
    /// The io_uring plane with `--coalesce on`.
    UringHold,
    /// QEMU's virtio-blk with an iothread, aio=native.
    QemuNative,
    /// QEMU's virtio-blk with an iothread, aio=io_uring.
    QemuUring,
    /// QEMU's virtio-blk with an iothread for each queue, aio=native.
    QemuMapping,
    /// vhost-scsi with a worker for each queue.
    VhostScsi,
}

impl Way {
    /// Name in tables.
    pub(super) const fn name(self) -> &'static str {
        match self {
            Self::Kernel => "vhost-blk kernel",
            Self::Uring => "vhost-blk io_uring",
            Self::KernelHold => "vhost-blk kernel, calls held",
            Self::UringHold => "vhost-blk io_uring, calls held",
            Self::QemuNative => "QEMU native",
            Self::QemuUring => "QEMU io_uring",
            Self::QemuMapping => "QEMU vq-mapping",
            Self::VhostScsi => "vhost-scsi",
        }
    }

    /// The disk's name in QEMU and in the guest.
    fn id(self) -> &'static str {
        match self {
            Self::Kernel => "kernel",
            Self::Uring => "uring",
            Self::KernelHold => "kernelhold",
            Self::UringHold => "uringhold",
            Self::QemuNative => "native",
            Self::QemuUring => "qemuuring",
            Self::QemuMapping => "mapping",
            Self::VhostScsi => "scsi",
        }
    }
}

/// True for the name of one of QEMU's own virtio-blk devices.
pub(super) fn is_qemu(name: &str) -> bool {
    [Way::QemuNative, Way::QemuUring, Way::QemuMapping].iter().any(|way| way.name() == name)
}

/// A disk on a separate device, ready for QEMU.
#[derive(Debug)]
pub(super) struct Attached {
    /// Way in which the disk is attached.
    pub(super) way: Way,
    /// QEMU's arguments.
    pub(super) args: Vec<String>,
    // In the order in which they must end.
    daemon: Option<Daemon>,
    _target: Option<ScsiTarget>,
    device: NullBlk,
}

impl Attached {
    /// Makes the device and starts the process that serves it.
    pub(super) fn start(way: Way, program: &Path, speed: Speed, queues: u16) -> Result<Self> {
        let device = null_blk(&format!("nested-{}", way.id()), SIZE_MIB, queues, speed)?;
        let path = device.device();
        let (mut daemon, mut target) = (None, None);
        let args = match way {
            Way::Kernel | Way::Uring | Way::KernelHold | Way::UringHold => {
                let in_kernel = matches!(way, Way::Kernel | Way::KernelHold);
                let plane = if in_kernel { Plane::Kernel } else { Plane::Uring };
                let num = format!("--num-queues={queues}");
                let threads = format!("--threads={queues}");
                let held = matches!(way, Way::KernelHold | Way::UringHold);
                let coalesce = format!("--coalesce={}", if held { "on" } else { "auto" });
                let more = [num.as_str(), threads.as_str(), coalesce.as_str()];
                let made = Daemon::start(program, path, way.id(), plane, &more)?;
                daemon.insert(made).qemu_args(queues)
            }
            Way::VhostScsi => {
                let made = ScsiTarget::create(2, path)?;
                scsi_args(target.insert(made).wwpn(), queues)
            }
            Way::QemuNative => qemu_args(way, path, "native", queues, 1),
            Way::QemuUring => qemu_args(way, path, "io_uring", queues, 1),
            Way::QemuMapping => qemu_args(way, path, "native", queues, queues),
        };
        Ok(Self { way, args, daemon, _target: target, device })
    }

    /// The disk's node in the guest.
    pub(super) fn node(&self, guest: &mut Guest) -> Result<String> {
        if self.way != Way::VhostScsi {
            return guest.virtio_disk(self.way.id());
        }
        guest.ok("modprobe virtio_scsi && modprobe sd_mod")?;
        // The only SCSI disk; it appears some time after its driver.
        guest.ok("for i in $(seq 100); do [ -b /dev/sda ] && exit 0; sleep 0.1; done; exit 1")?;
        Ok("/dev/sda".to_owned())
    }

    /// The device that serves the disk.
    pub(super) fn device(&self) -> &Path {
        self.device.device()
    }

    /// Ends the process that serves the disk.
    pub(super) fn stop(self) -> Result<()> {
        self.daemon.map_or(Ok(()), Daemon::stop)
    }
}

fn scsi_args(wwpn: &str, queues: u16) -> Vec<String> {
    let device = format!(
        "vhost-scsi-pci,wwpn={wwpn},num_queues={queues},virtqueue_size={QUEUE_SIZE},\
         worker_per_virtqueue=on"
    );
    vec!["-device".to_owned(), device]
}

fn qemu_args(way: Way, path: &Path, aio: &str, queues: u16, threads: u16) -> Vec<String> {
    let id = way.id();
    let threads: Vec<_> = (0..threads).map(|i| format!("{id}-thread{i}")).collect();
    let mut args = Vec::new();
    for thread in &threads {
        args.extend(["-object".to_owned(), format!("iothread,id={thread}")]);
    }
    let blockdev = format!(
        "driver=host_device,node-name={id},filename={},cache.direct=on,aio={aio}",
        path.display()
    );
    let mut device = json!({
        "driver": "virtio-blk-pci", "drive": id, "serial": id, "num-queues": queues,
        "queue-size": QUEUE_SIZE,
    });
    match threads.as_slice() {
        [only] if way != Way::QemuMapping => device["iothread"] = json!(only),
        all => {
            let mapping = all.iter().map(|thread| json!({ "iothread": thread }));
            device["iothread-vq-mapping"] = mapping.collect();
        }
    }
    args.extend(["-blockdev".to_owned(), blockdev, "-device".to_owned(), device.to_string()]);
    args
}

/// First version of QEMU that gives each queue a thread of its own.
const MAPPING_SINCE: u32 = 9;

/// Removes the ways that this machine does not support, and prints them.
pub(super) fn possible(ways: &mut Vec<Way>) -> Result<()> {
    for way in [Way::Kernel, Way::KernelHold] {
        if ways.contains(&way) && !Path::new("/dev/vhost-blk").exists() {
            leave_out(ways, way, "/dev/vhost-blk is missing");
        }
    }
    if ways.contains(&Way::VhostScsi) && modprobe("vhost_scsi", &[]).is_err() {
        leave_out(ways, Way::VhostScsi, "this kernel has no module vhost_scsi");
    }
    let version = setup::version(QEMU);
    if ways.contains(&Way::QemuMapping) && major(&version).is_none_or(|it| it < MAPPING_SINCE) {
        leave_out(ways, Way::QemuMapping, &format!("{version} is older than {MAPPING_SINCE}"));
    }
    if ways.is_empty() {
        bail!("nothing is left to measure");
    }
    Ok(())
}

fn leave_out(ways: &mut Vec<Way>, way: Way, why: &str) {
    eprintln!("nested: {why}: {} is left out", way.name());
    ways.retain(|known| *known != way);
}

/// The major number in the line that QEMU says about its version.
fn major(version: &str) -> Option<u32> {
    let (_, number) = version.split_once("version ")?;
    number.split('.').next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_major_number_of_qemu_is_read() {
        let said = "QEMU emulator version 10.0.13 (Debian 1:10.0.13+ds-0+deb13u1)";
        assert_eq!(major(said), Some(10));
        assert_eq!(major("not usable (No such file or directory)"), None);
    }

    #[test]
    fn mapping_gives_each_queue_a_thread_and_the_others_share_one() {
        let mapping = qemu_args(Way::QemuMapping, Path::new("/dev/x"), "native", 2, 2);
        assert!(mapping.last().unwrap().contains("{\"iothread\":\"mapping-thread1\"}"));
        let native = qemu_args(Way::QemuNative, Path::new("/dev/x"), "native", 2, 1);
        assert!(native.last().unwrap().contains("\"iothread\":\"native-thread0\""));
    }
}
