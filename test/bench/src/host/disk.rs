// SPDX-License-Identifier: Apache-2.0
//! The storage of a measured server.

use std::fs::File;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, ensure};
use kit::null_blk::NullBlk;
use tempfile::TempPath;

use crate::rig::{Speed, null_blk};

/// Size of a device in MiB.
const DEVICE_MIB: u64 = 1024;
/// Size of an image file in MiB; all of it is in memory.
const FILE_MIB: u64 = 64;

/// A kind of storage.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Storage {
    /// A null_blk device.
    Device(Speed),
    /// A raw image file on a tmpfs, all of it allocated.
    Raw,
    /// A qcow2 image file on a tmpfs, all of it allocated.
    Qcow2,
}

impl Storage {
    /// Name in tables.
    pub fn name(self) -> String {
        match self {
            Self::Device(speed) => speed.name(),
            Self::Raw => "file".to_owned(),
            Self::Qcow2 => "qcow2".to_owned(),
        }
    }

    /// Further options of `vhost-blk serve`.
    pub(super) fn options(self) -> &'static [&'static str] {
        match self {
            Self::Qcow2 => &["--format=qcow2"],
            Self::Device(_) | Self::Raw => &[],
        }
    }
}

/// The device or file of a server; removed on drop.
#[derive(Debug)]
pub(super) enum Disk {
    Device(NullBlk),
    File(TempPath),
}

impl Disk {
    /// Makes a device of this free name, or a file in `folder` by the program `vhost_blk`.
    pub(super) fn new(
        storage: Storage,
        name: &str,
        queues: u16,
        folder: &Path,
        vhost_blk: &Path,
    ) -> Result<Self> {
        let format = match storage {
            Storage::Device(speed) => {
                return Ok(Self::Device(null_blk(name, DEVICE_MIB, queues, speed)?));
            }
            Storage::Raw => "raw",
            Storage::Qcow2 => "qcow2",
        };
        let path = folder.join(format!("{name}.{format}"));
        let size = format!("{FILE_MIB}M");
        let status = Command::new(vhost_blk)
            .args(["create", "--format", format, "--preallocation", "full"])
            .arg(&path)
            .arg(&size)
            .status()
            .with_context(|| format!("starting {}", vhost_blk.display()))?;
        ensure!(status.success(), "vhost-blk create {} failed", path.display());
        File::open(&path)?.sync_all()?;
        Ok(Self::File(TempPath::try_from_path(path)?))
    }

    pub(super) fn path(&self) -> &Path {
        match self {
            Self::Device(device) => device.device(),
            Self::File(path) => path,
        }
    }
}
