// SPDX-License-Identifier: Apache-2.0
//! File systems: made, checked, and the disk that they need.

use anyhow::{Context, Result};

use crate::outcome::skip;
use crate::power_cut;
use crate::system::{modprobe, run};

/// A kind of file system.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FileSystem {
    /// ext4.
    Ext4,
    /// ext4 that continues after a lost write.
    Ext4WithoutJournal,
    /// XFS.
    Xfs,
}

impl FileSystem {
    /// Name for `mount`.
    pub fn name(self) -> &'static str {
        match self {
            Self::Ext4 | Self::Ext4WithoutJournal => "ext4",
            Self::Xfs => "xfs",
        }
    }

    /// MiB of the smallest disk for this file system.
    pub fn disk_mib(self) -> u64 {
        match self {
            Self::Ext4 | Self::Ext4WithoutJournal => 128,
            Self::Xfs => 320,
        }
    }

    /// Physical block in bytes that the file system needs to survive a power cut.
    pub fn physical_block_bytes(self) -> u32 {
        match self {
            Self::Ext4 | Self::Ext4WithoutJournal => power_cut::EXT4_BLOCK,
            Self::Xfs => power_cut::SECTOR,
        }
    }

    /// Makes such a file system on a device.
    ///
    /// # Errors
    /// The program failed; its output is in the error.
    pub fn make(self, device: &str) -> Result<()> {
        match self {
            Self::Ext4 => run("mkfs.ext4", &["-q", "-F", device]),
            Self::Ext4WithoutJournal => {
                run("mkfs.ext4", &["-q", "-F", "-O", "^has_journal", device])
            }
            Self::Xfs => {
                modprobe("xfs", &[]).map_err(|_| skip("this kernel has no XFS"))?;
                run("mkfs.xfs", &["-q", "-f", device])
            }
        }
        .map(drop)
    }

    /// Looks for faults, without repairing them.
    ///
    /// # Errors
    /// There are faults; the program's output is in the error.
    pub fn check(self, device: &str) -> Result<()> {
        match self {
            Self::Ext4 | Self::Ext4WithoutJournal => run("e2fsck", &["-f", "-n", device]),
            Self::Xfs => run("xfs_repair", &["-n", device]),
        }
        .map(drop)
        .context("the file system is damaged")
    }
}
