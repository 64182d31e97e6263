// SPDX-License-Identifier: Apache-2.0
//! The image: opens and reads it, and never writes it.

use super::{Finding, Outcome};
use backend::Disk;
use backend::file::{File, FileError, FileOptions};
use backend::lock::{Access, LockError, lock_image};
use std::fs::OpenOptions;
use std::io;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;

/// An alignment in bytes that suffices for any storage.
const BLOCK_BYTES: usize = 4096;

/// Opens an image of any format as a raw one.
pub(super) fn open(path: &Path) -> Result<File, FileError> {
    let options = FileOptions { read_only: true, container: true, ..FileOptions::default() };
    File::open(path, options)
}

pub(super) fn direct(path: &Path) -> Finding {
    let shown = path.display();
    let options = FileOptions { read_only: true, ..FileOptions::default() };
    let disk = match File::open(path, options) {
        Ok(disk) => disk,
        Err(error) => return Finding::new("o_direct", Outcome::Fail, error.to_string()),
    };
    if disk.fell_back_from_direct() {
        let message = format!("the file system of {shown} refuses it; the page cache is used");
        return Finding::new("o_direct", Outcome::Warn, message)
            .remedy("put the image on a file system that has it, or give --direct off");
    }
    match read_a_block(path) {
        Ok(()) => {
            let sectors = disk.info().capacity_sectors;
            let message = format!("read a block of {shown} ({sectors} sectors) with it");
            match disk.notices() {
                [] => Finding::new("o_direct", Outcome::Ok, message),
                notices => {
                    let message = format!("{message}; {}", notices.join("; "));
                    Finding::new("o_direct", Outcome::Warn, message)
                }
            }
        }
        Err(error) => {
            Finding::new("o_direct", Outcome::Fail, format!("reading {shown} failed: {error}"))
                .remedy("check the storage (dmesg), or give --direct off")
        }
    }
}

fn read_a_block(path: &Path) -> io::Result<()> {
    let file = OpenOptions::new().read(true).custom_flags(libc::O_DIRECT).open(path)?;
    let mut memory = vec![0u8; 2 * BLOCK_BYTES];
    let start = memory.as_ptr().align_offset(BLOCK_BYTES);
    file.read_at(&mut memory[start..start + BLOCK_BYTES], 0).map(|_| ())
}

/// Takes the same lock as `serve`, and releases it at once.
pub(super) fn lock(path: &Path) -> Finding {
    let taken = std::fs::File::open(path).map(|file| lock_image(&file, path, Access::Write));
    match taken {
        Ok(Ok(())) => Finding::new("lock", Outcome::Ok, "nobody else uses the image"),
        Ok(Err(error @ (LockError::InUse { .. } | LockError::Claimed { .. }))) => {
            Finding::new("lock", Outcome::Fail, error.to_string())
        }
        Ok(Err(error)) => Finding::new("lock", Outcome::Warn, error.to_string()),
        Err(error) => Finding::new("lock", Outcome::Fail, format!("not tried: {error}"))
            .remedy("check the path and its permissions"),
    }
}
