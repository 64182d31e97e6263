// SPDX-License-Identifier: Apache-2.0
//! Storage inside a lab VM: devices of chosen speed, made through configfs and removed on drop.

mod null_blk;
mod scsi_target;

pub use null_blk::{Speed, null_blk, null_blk_with_memory};
pub use scsi_target::ScsiTarget;

use std::fs;
use std::path::Path;

use anyhow::{Context, Result};

fn make_folder(path: &Path) -> Result<()> {
    fs::create_dir(path).with_context(|| format!("cannot make {}", path.display()))
}

fn set(folder: &Path, name: &str, value: &str) -> Result<()> {
    let path = folder.join(name);
    fs::write(&path, value).with_context(|| format!("cannot write {value} to {}", path.display()))
}
