// SPDX-License-Identifier: Apache-2.0
//! Storage inside a lab VM: devices of chosen speed, made through configfs and removed on drop.

mod null_blk;
mod scsi_target;

pub use null_blk::{NullBlk, Speed};
pub use scsi_target::ScsiTarget;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};

/// Loads a kernel module; where the kernel lacks it, the error says so.
pub fn modprobe(args: &[&str]) -> Result<()> {
    let output = Command::new("modprobe")
        .args(args)
        .output()
        .context("cannot run modprobe (install kmod)")?;
    if !output.status.success() {
        let text = String::from_utf8_lossy(&output.stderr);
        bail!("cannot load kernel module {}: {}", args[0], text.trim());
    }
    Ok(())
}

/// The mount point of configfs, mounted if need be.
fn configfs() -> Result<PathBuf> {
    let place = PathBuf::from("/sys/kernel/config");
    if !place.exists() {
        modprobe(&["configfs"])?;
    }
    let mounts = fs::read_to_string("/proc/mounts")?;
    let mounted = mounts.lines().any(|line| line.split(' ').nth(1) == Some("/sys/kernel/config"));
    if !mounted {
        let status = Command::new("mount")
            .args(["-t", "configfs", "configfs", "/sys/kernel/config"])
            .status()
            .context("cannot run mount")?;
        if !status.success() {
            bail!("cannot mount configfs at {}", place.display());
        }
    }
    Ok(place)
}

fn make_folder(path: &Path) -> Result<()> {
    fs::create_dir(path).with_context(|| format!("cannot make {}", path.display()))
}

fn set(folder: &Path, name: &str, value: &str) -> Result<()> {
    let path = folder.join(name);
    fs::write(&path, value).with_context(|| format!("cannot write {value} to {}", path.display()))
}
