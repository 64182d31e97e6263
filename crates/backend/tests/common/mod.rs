// SPDX-License-Identifier: Apache-2.0
//! Images and devices for the tests.
#![allow(dead_code)] // Not every test program uses all of this file.

use backend::conformance::Target;
use backend::{Disk, File, FileOptions};
use kit::loop_device::LoopDevice;
use std::fs;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use tempfile::TempDir;

/// A directory of this build on a real file system.
pub(crate) const DISK: &str = env!("CARGO_TARGET_TMPDIR");
/// A directory in memory. Every Linux has it.
pub(crate) const TMPFS: &str = "/dev/shm";

/// An image file, deleted on drop.
pub(crate) struct Image {
    pub(crate) path: PathBuf,
    _directory: TempDir,
}

impl Image {
    /// A sparse image of `size` bytes in a new directory below `place`.
    pub(crate) fn new(place: &str, size: u64) -> Result<Image, String> {
        let directory = TempDir::new_in(place).map_err(|why| format!("{place}: {why}"))?;
        let path = directory.path().join("image.raw");
        let file = fs::File::create(&path).map_err(|why| why.to_string())?;
        file.set_len(size).map_err(|why| why.to_string())?;
        Ok(Image { path, _directory: directory })
    }
}

/// A target of a fresh image below `place`.
pub(crate) fn file_target(place: &str, size: u64, options: FileOptions) -> Result<Target, String> {
    let image = Image::new(place, size)?;
    let file = File::open(&image.path, options).expect("the image opens");
    Ok(Target::new(file).keeping(image))
}

/// A target `around` a file in a fresh image.
pub(crate) fn around_file(
    size: u64,
    around: impl FnOnce(Arc<dyn Disk>) -> Target,
) -> Result<Target, String> {
    let image = Image::new(DISK, size)?;
    let file = File::open(&image.path, FileOptions::default()).expect("the image opens");
    let target = around(Arc::new(file));
    let keep: Box<dyn std::any::Any> = Box::new((target.keep, image));
    Ok(Target { keep, ..target })
}

/// A loop device over a fresh image, with O_DIRECT and further `options` of losetup. If that is impossible here, the
/// error names the reason.
pub(crate) fn loop_device(size: u64, options: &[&str]) -> Result<LoopDevice, String> {
    let image = Image::new(DISK, size)?;
    let options = [&["--direct-io=on"], options].concat();
    LoopDevice::attach(&image.path, &options).map_err(|why| format!("{why:#}"))
}

/// An option for blocks of 4096 bytes.
pub(crate) const BLOCKS_OF_4K: [&str; 1] = ["--sector-size=4096"];

/// A file system on a loop device of 4096-byte sectors, as on a host with 4Kn disks: O_DIRECT
/// refuses anything smaller there. Unmounted when dropped.
pub(crate) struct Mounted {
    pub(crate) directory: TempDir,
    _device: LoopDevice,
}

impl Mounted {
    /// Formats and mounts a loop device with `mkfs` (`mkfs.ext4`, `mkfs.xfs`). If that is
    /// impossible here, the error names the reason.
    pub(crate) fn with_4k_sectors(mkfs: &str) -> Result<Mounted, String> {
        let device = loop_device(320 << 20, &BLOCKS_OF_4K)?;
        let directory = TempDir::new_in(DISK).map_err(|why| why.to_string())?;
        run(Command::new(mkfs).arg("-q").arg(&device.path))?;
        run(Command::new("mount").arg(&device.path).arg(directory.path()))?;
        let mounted = Mounted { directory, _device: device };
        let image = mounted.image(4096);
        let small = fs::OpenOptions::new().write(true).custom_flags(libc::O_DIRECT).open(&image);
        let memory = [0; 1024];
        let from = memory.as_ptr().align_offset(512);
        let write = small.map_err(|why| why.to_string())?.write_at(&memory[from..from + 512], 0);
        assert!(write.is_err(), "O_DIRECT takes 512 bytes on {mkfs} with 4096-byte sectors");
        fs::remove_file(image).map_err(|why| why.to_string())?;
        Ok(mounted)
    }

    /// Creates a sparse image in the file system.
    pub(crate) fn image(&self, size: u64) -> PathBuf {
        let path = self.directory.path().join("image.raw");
        let file = fs::File::create(&path).expect("an image can be made");
        file.set_len(size).expect("its size can be set");
        path
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        if let Err(why) = run(Command::new("umount").arg(self.directory.path())) {
            eprintln!("{} stays mounted: {why}", self.directory.path().display());
        }
    }
}

fn run(command: &mut Command) -> Result<(), String> {
    let output = command.output().map_err(|why| format!("{command:?}: {why}"))?;
    let said = String::from_utf8_lossy(&output.stderr);
    output.status.success().then_some(()).ok_or_else(|| format!("{command:?}: {}", said.trim()))
}

/// Allocated bytes of the file.
pub(crate) fn allocated_bytes(path: &Path) -> u64 {
    use std::os::unix::fs::MetadataExt;
    fs::metadata(path).expect("the image is there").blocks() * 512
}
