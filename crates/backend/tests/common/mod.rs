// SPDX-License-Identifier: Apache-2.0
//! Images and devices for the tests.
#![allow(dead_code)] // Not every test program uses all of this file.

use backend::conformance::Target;
use backend::{File, FileOptions};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use tempfile::TempDir;

/// A folder of this build's, on a real file system.
pub(crate) const DISK: &str = env!("CARGO_TARGET_TMPDIR");
/// A folder in memory, which every Linux has.
pub(crate) const TMPFS: &str = "/dev/shm";

/// An image that is gone when dropped.
pub(crate) struct Image {
    pub(crate) path: PathBuf,
    _folder: TempDir,
}

impl Image {
    /// A sparse image of `size` bytes in a new folder below `place`.
    pub(crate) fn new(place: &str, size: u64) -> Result<Image, String> {
        let folder = TempDir::new_in(place).map_err(|why| format!("{place}: {why}"))?;
        let path = folder.path().join("image.raw");
        let file = fs::File::create(&path).map_err(|why| why.to_string())?;
        file.set_len(size).map_err(|why| why.to_string())?;
        Ok(Image { path, _folder: folder })
    }
}

/// A target of a fresh image below `place`.
pub(crate) fn file_target(place: &str, size: u64, options: FileOptions) -> Result<Target, String> {
    let image = Image::new(place, size)?;
    let file = File::open(&image.path, options).expect("the image opens");
    Ok(Target::new(file).keeping(image))
}

/// A loop device over an image, detached when dropped.
pub(crate) struct LoopDevice {
    pub(crate) path: PathBuf,
    _image: Image,
}

impl LoopDevice {
    /// Attaches a fresh image, or tells why it cannot be done here.
    pub(crate) fn new(size: u64, block: u32) -> Result<LoopDevice, String> {
        Self::attach(size, block, &[])
    }

    /// The same, refusing writes.
    pub(crate) fn read_only(size: u64) -> Result<LoopDevice, String> {
        Self::attach(size, 512, &["--read-only"])
    }

    fn attach(size: u64, block: u32, options: &[&str]) -> Result<LoopDevice, String> {
        let image = Image::new(DISK, size)?;
        let block = block.to_string();
        let args = ["--find", "--show", "--direct-io=on", "--sector-size", &block];
        let made = Command::new("losetup").args(args).args(options).arg(&image.path).output();
        let made = made.map_err(|why| format!("losetup: {why}"))?;
        if !made.status.success() {
            return Err(String::from_utf8_lossy(&made.stderr).trim().to_owned());
        }
        let path = PathBuf::from(String::from_utf8_lossy(&made.stdout).trim());
        Ok(LoopDevice { path, _image: image })
    }
}

impl Drop for LoopDevice {
    fn drop(&mut self) {
        let detached = Command::new("losetup").arg("--detach").arg(&self.path).status();
        if !detached.is_ok_and(|status| status.success()) {
            eprintln!("{} stays attached", self.path.display());
        }
    }
}

/// How many bytes of the file are allocated.
pub(crate) fn allocated_bytes(path: &Path) -> u64 {
    use std::os::unix::fs::MetadataExt;
    fs::metadata(path).expect("the image is there").blocks() * 512
}
