// SPDX-License-Identifier: Apache-2.0
//! The storage of a measured server.

use std::path::{Path, PathBuf};

use anyhow::Result;
use kit::null_blk::NullBlk;
use tempfile::TempPath;

use crate::disk::create_by;
use crate::host::subject::Programs;
use crate::rig::{Speed, null_blk};

/// Size of a device in MiB.
const DEVICE_MIB: u64 = 1024;
/// Size of an image file in bytes; all of it is in memory.
const FILE_BYTES: u64 = 64 << 20;
/// The option of a qcow2 image, of `vhost-blk create` and `vhost-blk serve`.
const QCOW2: &str = "--format=qcow2";

/// A kind of storage.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Storage {
    /// A null_blk device.
    Device(Speed),
    /// A raw image file on a tmpfs, all of it allocated.
    Raw,
    /// A qcow2 image file on a tmpfs, all of it allocated.
    Qcow2,
    /// A raw file on the file system of a real disk.
    Disk,
}

impl Storage {
    /// Name in tables.
    pub fn name(self) -> String {
        match self {
            Self::Device(speed) => speed.name(),
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
    /// The file that servers share in turn.
    Shared(PathBuf),
}

impl Disk {
    /// Makes a device of this free name, or a file beside the sockets.
    pub(super) fn new(
        storage: Storage,
        name: &str,
        queues: u16,
        programs: &Programs,
    ) -> Result<Self> {
        let file = |format: &str| {
            let options = ["--preallocation=full", format];
            create_by(&programs.ours, programs.folder.join(name), FILE_BYTES, &options)
        };
        Ok(match storage {
            Storage::Device(speed) => Self::Device(null_blk(name, DEVICE_MIB, queues, speed)?),
            Storage::Raw => Self::Raw(file("--format=raw")?),
            Storage::Qcow2 => Self::Qcow2(file(QCOW2)?),
            Storage::Disk => Self::Shared(programs.disk.clone()),
        })
    }

    pub(super) fn path(&self) -> &Path {
        match self {
            Self::Device(device) => device.device(),
            Self::Raw(path) | Self::Qcow2(path) => path,
            Self::Shared(path) => path,
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
