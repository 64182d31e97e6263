// SPDX-License-Identifier: Apache-2.0
//! The storage of a measured server.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};
use kit::null_blk::NullBlk;
use kit::system::modprobe;
use tempfile::TempPath;

use crate::disk::create_by;
use crate::host::subject::Programs;
use crate::rig::{Speed, null_blk};

/// Size of a device in MiB.
const DEVICE_MIB: u64 = 1024;
/// Size of an image file in bytes; all of it is in memory.
const FILE_BYTES: u64 = 64 << 20;
/// Disks in memory, and KiB of each: random writes fill them.
const RAM_DISKS: usize = 16;
const RAM_KIB: u64 = 64 << 10;
/// Serial number of the controller of `lab exec --nvme`.
const NVME_SERIAL: &str = "zeros";
/// The option of a qcow2 image, of `vhost-blk create` and `vhost-blk serve`.
const QCOW2: &str = "--format=qcow2";

/// A kind of storage.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Storage {
    /// A null_blk device.
    Device(Speed),
    /// A disk in the kernel's memory (brd).
    Ram,
    /// A disk of the lab's NVMe controller, which QEMU emulates (`lab exec --nvme`). Its driver has
    /// poll queues.
    Nvme,
    /// A raw image file on a tmpfs, all of it allocated.
    Raw,
    /// A qcow2 image file on a tmpfs, all of it allocated.
    Qcow2,
    /// A raw file on the file system of a real disk.
    Disk,
}

impl Storage {
    /// An error with the reason if this machine lacks the device.
    pub(super) fn is_possible(self) -> Result<()> {
        match self {
            Self::Ram => ram_disk(0).map(drop),
            Self::Nvme => nvme_disk(0).map(drop),
            _ => Ok(()),
        }
    }

    /// True if the device can be polled for completions.
    pub(super) fn is_polled(self) -> bool {
        matches!(self, Self::Nvme | Self::Device(Speed::Polled))
    }

    /// Name in tables.
    pub fn name(self) -> String {
        match self {
            Self::Device(speed) => speed.name(),
            Self::Ram => "brd".to_owned(),
            Self::Nvme => "NVMe, poll queues".to_owned(),
            Self::Raw => "file".to_owned(),
            Self::Qcow2 => "qcow2".to_owned(),
            Self::Disk => "disk".to_owned(),
        }
    }
}

/// The device or file of a server; removed on drop, but for a shared one.
#[derive(Debug)]
pub(super) enum Disk {
    Device(NullBlk),
    Raw(TempPath),
    Qcow2(TempPath),
    /// A device node that stays.
    Node(PathBuf),
    /// The file that servers share in turn.
    Shared(PathBuf),
}

impl Disk {
    /// Makes the device of this number, which no other server has, or a file beside the sockets.
    pub(super) fn new(
        storage: Storage,
        number: usize,
        queues: u16,
        programs: &Programs,
    ) -> Result<Self> {
        let name = &format!("bench{number}");
        let file = |format: &str| {
            let options = ["--preallocation=full", format];
            create_by(&programs.ours, programs.directory.join(name), FILE_BYTES, &options)
        };
        Ok(match storage {
            Storage::Device(speed) => Self::Device(null_blk(name, DEVICE_MIB, queues, speed)?),
            Storage::Ram => Self::Node(ram_disk(number)?),
            Storage::Nvme => Self::Node(nvme_disk(number)?),
            Storage::Raw => Self::Raw(file("--format=raw")?),
            Storage::Qcow2 => Self::Qcow2(file(QCOW2)?),
            Storage::Disk => Self::Shared(programs.disk.clone()),
        })
    }

    pub(super) fn path(&self) -> &Path {
        match self {
            Self::Device(device) => device.device(),
            Self::Raw(path) | Self::Qcow2(path) => path,
            Self::Shared(path) | Self::Node(path) => path,
        }
    }

    /// Options of `vhost-blk serve`.
    pub(super) fn options(&self) -> Vec<String> {
        let mut options = vec![format!("--blk-file={}", self.path().display())];
        if matches!(self, Self::Qcow2(_)) {
            options.push(QCOW2.to_owned());
        }
        options
    }
}

/// The disk of this number in the kernel's memory. The module is loaded at the first use.
fn ram_disk(number: usize) -> Result<PathBuf> {
    modprobe("brd", &[&format!("rd_nr={RAM_DISKS}"), &format!("rd_size={RAM_KIB}")])?;
    let path = PathBuf::from(format!("/dev/ram{number}"));
    ensure!(path.exists(), "brd has no disk {number}: was it loaded with fewer?");
    Ok(path)
}

/// The disk of this number of the lab's NVMe controller.
fn nvme_disk(number: usize) -> Result<PathBuf> {
    let controller = nvme_controller(Path::new("/sys/class/nvme"))?;
    let path = Path::new("/dev").join(format!("{controller}n{}", number + 1));
    ensure!(path.exists(), "{} is not there", path.display());
    Ok(path)
}

/// The name of that controller, from the directory of all of them.
fn nvme_controller(class: &Path) -> Result<String> {
    for entry in fs::read_dir(class).context("this kernel has no NVMe controller")? {
        let controller = entry?;
        let serial = fs::read_to_string(controller.path().join("serial"))?;
        if serial.trim() == NVME_SERIAL {
            return Ok(controller.file_name().display().to_string());
        }
    }
    bail!("no NVMe controller with the serial number {NVME_SERIAL}: boot with `lab exec --nvme`")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_controller_is_found_by_its_serial_number() {
        let class = tempfile::tempdir().unwrap();
        assert!(nvme_controller(class.path()).unwrap_err().to_string().contains("--nvme"));
        for (name, serial) in [("nvme0", "lab\n"), ("nvme1", "zeros   \n")] {
            let directory = class.path().join(name);
            fs::create_dir(&directory).unwrap();
            fs::write(directory.join("serial"), serial).unwrap();
        }
        assert_eq!(nvme_controller(class.path()).unwrap(), "nvme1");
    }
}
