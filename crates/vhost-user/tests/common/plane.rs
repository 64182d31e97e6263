// SPDX-License-Identifier: Apache-2.0
//! The data plane of the tests, chosen from outside, so that the same programs also run on the
//! kernel's plane in a virtual machine that has the module:
//!
//! * `VHOST_BLK_TEST_PLANE=kernel`: queues start on the kernel's plane if the test's disk suits
//!   it; a test with wrappers around its disk says so and runs on the daemon's own.
//! * `VHOST_BLK_TEST_DISK=PATH`: in that case, the place of "in memory" disks: a directory for
//!   image files, or a block device of 16 MiB (overwritten; run with `--test-threads=1`).

use super::DISK_BYTES;
use backend::{Disk, File, FileOptions, Info, Lane, Mem, ResizeError};
use std::io::Write;
use std::os::fd::BorrowedFd;
use std::os::unix::fs::FileTypeExt;
use std::path::PathBuf;
use tempfile::TempDir;

/// True if the tests run on the kernel's plane.
pub fn is_kernel() -> bool {
    match std::env::var("VHOST_BLK_TEST_PLANE").as_deref() {
        Ok("kernel") => true,
        Ok("uring") | Err(_) => false,
        Ok(other) => panic!("VHOST_BLK_TEST_PLANE={other}; say kernel or uring"),
    }
}

/// Returns `true` and prints a line if the tests run on the kernel's plane, which differs because
/// of `why`.
pub fn skip_on_kernel(why: &str) -> bool {
    if is_kernel() {
        println!("SKIP: on the kernel's data plane {why}");
    }
    is_kernel()
}

/// As [`skip_on_kernel`], for a part of a test. The other parts run, so the test counts as passed.
pub fn skip_part_on_kernel(why: &str) -> bool {
    if is_kernel() {
        println!("PARTLY SKIPPED: on the kernel's data plane {why}");
    }
    is_kernel()
}

/// Returns `true` if queues can move to a kernel; else prints a line and returns `false`.
pub fn kernel_or_skip() -> bool {
    let is_there = std::path::Path::new(data_plane::DEVICE_PATH).exists();
    if !is_there {
        println!("SKIP: no /dev/vhost-blk: load the kernel module, or run this in the lab");
    }
    is_there
}

/// A disk without wrappers.
pub struct Plain {
    disk: Box<dyn Disk>,
    _directory: Option<TempDir>,
}

impl Plain {
    /// A disk in memory or, for the kernel, at the place that the environment names.
    pub fn new() -> Self {
        match is_kernel() {
            true => Plain::for_kernel(),
            false => Plain {
                disk: Box::new(Mem::new(DISK_BYTES).expect("address space")),
                _directory: None,
            },
        }
    }

    /// A disk of zeroes in a file or on a block device.
    pub fn for_kernel() -> Self {
        let place =
            std::env::var_os("VHOST_BLK_TEST_DISK").map_or_else(std::env::temp_dir, PathBuf::from);
        let kind = std::fs::metadata(&place).expect("VHOST_BLK_TEST_DISK is there").file_type();
        let (path, directory) = match kind.is_block_device() {
            true => {
                let mut device =
                    std::fs::OpenOptions::new().write(true).open(&place).expect("the device opens");
                device.write_all(&vec![0; DISK_BYTES as usize]).expect("the device has 16 MiB");
                device.sync_all().expect("the device is written");
                (place, None)
            }
            false => {
                let directory = TempDir::new_in(&place).expect("a directory for the image");
                let path = directory.path().join("image.raw");
                let image = std::fs::File::create(&path).expect("an image");
                image.set_len(DISK_BYTES).expect("its size");
                (path, Some(directory))
            }
        };
        let disk = File::open(&path, FileOptions::default()).expect("the disk opens");
        assert_eq!(disk.info().capacity_sectors * 512, DISK_BYTES, "the size of {path:?}");
        Plain { disk: Box::new(disk), _directory: directory }
    }
}

impl Disk for Plain {
    fn info(&self) -> Info {
        self.disk.info()
    }

    fn resize(&self, bytes: Option<u64>) -> Result<(), ResizeError> {
        self.disk.resize(bytes)
    }

    fn sync(&self) -> std::io::Result<()> {
        self.disk.sync()
    }

    fn open_lane(&self) -> std::io::Result<Box<dyn Lane>> {
        self.disk.open_lane()
    }

    fn kernel_file(&self) -> Result<BorrowedFd<'_>, &'static str> {
        self.disk.kernel_file()
    }
}
