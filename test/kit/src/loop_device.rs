// SPDX-License-Identifier: Apache-2.0
//! Loop devices.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

use crate::system::{run, run_quietly};

/// A loop device, detached when dropped. It works on when its file is deleted.
#[derive(Debug)]
#[non_exhaustive]
pub struct LoopDevice {
    /// The device node.
    pub path: PathBuf,
}

impl LoopDevice {
    /// Attaches `file` to a free device, with further `options` of losetup.
    pub fn attach(file: &Path, options: &[&str]) -> Result<LoopDevice> {
        let file = file.to_str().context("the name of the file is not UTF-8")?;
        let path = run("losetup", &[&["--find", "--show"], options, &[file]].concat())?;
        Ok(LoopDevice { path: path.into() })
    }

    /// Gives the device the present size of its file.
    pub fn update_size(&self) -> Result<()> {
        run("losetup", &["--set-capacity", &self.path.to_string_lossy()]).map(drop)
    }
}

impl Drop for LoopDevice {
    fn drop(&mut self) {
        run_quietly("losetup", &["--detach", &self.path.to_string_lossy()]);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_that_does_not_exist_is_not_attached() {
        let why = LoopDevice::attach(Path::new("/nonexistent"), &["--read-only"]).unwrap_err();
        assert!(format!("{why:#}").contains("/nonexistent"), "{why:#}");
    }
}
