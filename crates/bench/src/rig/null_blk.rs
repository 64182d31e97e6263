// SPDX-License-Identifier: Apache-2.0
//! One null_blk device.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use serde::Serialize;

use super::{configfs, make_folder, modprobe, set};

/// How fast a device is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Speed {
    /// As fast as the block layer.
    Null,
    /// Each request takes this many microseconds, any number of them at a time.
    Slow(u32),
    /// So many MiB a second in all.
    Capped(u32),
}

impl Speed {
    /// Name in tables.
    pub fn name(self) -> String {
        match self {
            Self::Null => "null_blk".to_owned(),
            Self::Slow(us) => format!("null_blk {us} us"),
            Self::Capped(mib) => format!("null_blk {mib} MiB/s"),
        }
    }
}

/// A null_blk device; removed on drop.
#[derive(Debug)]
pub struct NullBlk {
    folder: PathBuf,
    device: PathBuf,
}

impl NullBlk {
    /// Makes a device with as many hardware queues as `queues`. `name` must be free.
    pub fn create(name: &str, size_mib: u64, queues: u16, speed: Speed) -> Result<Self> {
        Self::with(name, size_mib, queues, speed, false)
    }

    /// Makes a device that keeps what is written to it.
    pub fn with_memory(name: &str, size_mib: u64, queues: u16) -> Result<Self> {
        Self::with(name, size_mib, queues, Speed::Null, true)
    }

    fn with(name: &str, size_mib: u64, queues: u16, speed: Speed, memory: bool) -> Result<Self> {
        if !Path::new("/sys/module/null_blk").exists() {
            modprobe(&["null_blk", "nr_devices=0"])?;
        }
        let folder = configfs()?.join("nullb").join(name);
        make_folder(&folder)?;
        // From here on dropping it removes the folder again.
        let mut made = Self { folder, device: PathBuf::new() };
        let folder = made.folder.clone();
        set(&folder, "size", &size_mib.to_string())?;
        set(&folder, "submit_queues", &queues.to_string())?;
        set(&folder, "hw_queue_depth", "256")?;
        // Newer kernels give it a polled queue of its own accord; polling would outrun its timer.
        set(&folder, "poll_queues", "0")?;
        set(&folder, "memory_backed", if memory { "1" } else { "0" })?;
        match speed {
            Speed::Null => set(&folder, "irqmode", "1")?,
            Speed::Slow(us) => {
                set(&folder, "irqmode", "2")?;
                set(&folder, "completion_nsec", &(u64::from(us) * 1000).to_string())?;
            }
            Speed::Capped(mib) => set(&folder, "mbps", &mib.to_string())?,
        }
        set(&folder, "power", "1")?;
        let index = fs::read_to_string(folder.join("index")).context("null_blk has no index")?;
        made.device = device_of(name, index.trim());
        Ok(made)
    }

    /// The device node.
    pub fn device(&self) -> &Path {
        &self.device
    }
}

/// Newer kernels name the device after its folder, older ones after its number.
fn device_of(name: &str, index: &str) -> PathBuf {
    let named = Path::new("/dev").join(name);
    if named.exists() { named } else { PathBuf::from(format!("/dev/nullb{index}")) }
}

impl Drop for NullBlk {
    fn drop(&mut self) {
        // Fails where it was never switched on; the folder's removal is what counts.
        let _ = set(&self.folder, "power", "0");
        if let Err(error) = fs::remove_dir(&self.folder) {
            eprintln!("cannot remove {}: {error}", self.folder.display());
        }
    }
}
