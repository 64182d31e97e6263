// SPDX-License-Identifier: Apache-2.0
//! null_blk devices, made through configfs (Documentation/block/null_blk.rst).

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

use crate::system::{modprobe, run};

/// Mount point of configfs.
const CONFIGFS: &str = "/sys/kernel/config";

/// A device; removed on drop.
#[derive(Debug)]
pub struct NullBlk {
    instance: Instance,
    device: PathBuf,
}

impl NullBlk {
    /// Makes a device that is switched off. `name` must be free.
    pub fn new(name: &str) -> Result<Self> {
        modprobe("null_blk", &["nr_devices=0"])?;
        let directory = configfs()?.join("nullb").join(name);
        fs::create_dir(&directory)
            .with_context(|| format!("cannot make {}", directory.display()))?;
        Ok(Self { instance: Instance(directory), device: PathBuf::new() })
    }

    /// Sets an attribute of a device that is not switched on yet.
    pub fn set(&self, attribute: &str, value: u64) -> Result<()> {
        self.instance.set(attribute, value)
    }

    /// Switches it on.
    pub fn power_on(&mut self) -> Result<()> {
        self.instance.power(true)?;
        let directory = &self.instance.0;
        let index = fs::read_to_string(directory.join("index")).context("null_blk has no index")?;
        // Newer kernels name the device after its directory, older ones after its number.
        let named =
            Path::new("/dev").join(directory.file_name().context("a directory has a name")?);
        let numbered = PathBuf::from(format!("/dev/nullb{}", index.trim()));
        self.device = if named.exists() { named } else { numbered };
        Ok(())
    }

    /// The device node, once it is switched on.
    pub fn device(&self) -> &Path {
        &self.device
    }

    /// Its directory in configfs, for changes while the device is in use.
    pub fn instance(&self) -> &Instance {
        &self.instance
    }
}

impl Drop for NullBlk {
    fn drop(&mut self) {
        if let Err(why) = self.instance.remove() {
            eprintln!("clean-up: {why:#}");
        }
    }
}

/// The directory of a device in configfs.
#[derive(Clone, Debug)]
pub struct Instance(PathBuf);

impl Instance {
    fn set(&self, attribute: &str, value: u64) -> Result<()> {
        let path = self.0.join(attribute);
        fs::write(&path, value.to_string())
            .with_context(|| format!("cannot write {value} to {}", path.display()))
    }

    /// Removes the device (or brings it back), as in a surprise removal.
    pub fn power(&self, on: bool) -> Result<()> {
        self.set("power", on.into())
    }

    /// Removes the directory if it exists.
    pub fn remove(&self) -> Result<()> {
        if !self.0.exists() {
            return Ok(());
        }
        self.power(false)?;
        fs::remove_dir(&self.0).context("cannot remove a null_blk instance")
    }
}

/// The mount point of configfs; mounts it if needed.
pub fn configfs() -> Result<PathBuf> {
    let place = PathBuf::from(CONFIGFS);
    if !place.exists() {
        modprobe("configfs", &[])?;
    }
    let mounts = fs::read_to_string("/proc/mounts")?;
    if !mounts.lines().any(|line| line.split(' ').nth(1) == Some(CONFIGFS)) {
        run("mount", &["-t", "configfs", "configfs", CONFIGFS])?;
    }
    Ok(place)
}
