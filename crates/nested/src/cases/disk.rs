// SPDX-License-Identifier: Apache-2.0
//! The disk of a case: a block device or an image file, both looked at again afterwards.

use std::fs::File;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use bench::rig::NullBlk;
use tempfile::TempDir;

use crate::exec::run;

const SIZE_MIB: u64 = 160;

/// What the disk is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// A block device.
    Device,
    /// An image file on the VM's own file system.
    File,
}

/// A disk; removed on drop.
#[derive(Debug)]
pub(super) enum Disk {
    /// null_blk that keeps its data.
    Device(NullBlk),
    /// The file `image` in a folder.
    File(TempDir),
}

impl Disk {
    /// Makes an empty disk.
    pub(super) fn create(kind: Kind) -> Result<Self> {
        Ok(match kind {
            Kind::Device => Self::Device(NullBlk::with_memory("nested", SIZE_MIB, 2)?),
            Kind::File => {
                // Not in /tmp, which may be a tmpfs.
                let folder = tempfile::Builder::new().prefix("nested-").tempdir_in("/var/tmp")?;
                let file = File::create(folder.path().join("image"))?;
                file.set_len(SIZE_MIB << 20).context("cannot make an image file")?;
                Self::File(folder)
            }
        })
    }

    /// Its path.
    pub(super) fn path(&self) -> PathBuf {
        match self {
            Self::Device(device) => device.device().to_owned(),
            Self::File(folder) => folder.path().join("image"),
        }
    }

    /// An ext4 file system on it has to be without fault.
    pub(super) fn check(&self) -> Result<()> {
        check_ext4(&self.path())
    }
}

fn check_ext4(path: &Path) -> Result<()> {
    run(&["e2fsck", "-f", "-n", &path.display().to_string()]).map(drop)
}
