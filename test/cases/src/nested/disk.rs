// SPDX-License-Identifier: Apache-2.0
//! The disk of a case: a block device or an image file, both checked afterwards.

use std::fs::File;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use bench::rig::null_blk_with_memory;
use kit::null_blk::NullBlk;
use tempfile::TempDir;

use kit::process::run_to_end;

const SIZE_MIB: u64 = 160;

/// Kind of the disk.
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
    /// The file `image` in a directory.
    File(TempDir),
}

impl Disk {
    /// Makes an empty disk.
    pub(super) fn create(kind: Kind) -> Result<Self> {
        Self::sized(kind, SIZE_MIB)
    }

    /// Makes an empty disk of so many MiB.
    pub(super) fn sized(kind: Kind, mib: u64) -> Result<Self> {
        Ok(match kind {
            Kind::Device => Self::Device(null_blk_with_memory("nested", mib, 2)?),
            Kind::File => {
                // Not in /tmp, which can be a tmpfs.
                let directory =
                    tempfile::Builder::new().prefix("nested-").tempdir_in("/var/tmp")?;
                let file = File::create(directory.path().join("image"))?;
                file.set_len(mib << 20).context("cannot make an image file")?;
                Self::File(directory)
            }
        })
    }

    /// Path of the device or the image.
    pub(super) fn path(&self) -> PathBuf {
        match self {
            Self::Device(device) => device.device().to_owned(),
            Self::File(directory) => directory.path().join("image"),
        }
    }

    /// Checks the ext4 file system on the disk, which must be sound.
    pub(super) fn check(&self) -> Result<()> {
        check_ext4(&self.path())
    }
}

/// Checks the ext4 file system on a device or image, which must be sound.
pub(super) fn check_ext4(path: &Path) -> Result<()> {
    run_to_end(&["e2fsck", "-f", "-n", &path.display().to_string()]).map(drop)
}
