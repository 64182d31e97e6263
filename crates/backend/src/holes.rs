// SPDX-License-Identifier: Apache-2.0
//! Holes of a file.

use rustix::fs::SeekFrom;
use rustix::io::Errno;
use std::fs::File;
use std::io;
use std::ops::Range;

/// File systems whose `SEEK_DATA` names all data, also right after a write. On others a hole may be data
/// that has not reached the storage: OpenZFS, FUSE with a cache.
const EXACT: [u64; 4] = [
    0xef53,      // ext4
    0x5846_5342, // XFS
    0x9123_683e, // btrfs
    0x0102_1994, // tmpfs
];

/// Returns whether a hole of the file is a hole without doubt.
///
/// # Errors
/// The error of the system call.
pub fn are_exact(file: &File) -> io::Result<bool> {
    let kind = rustix::fs::fstatfs(file)?.f_type as u64 & 0xffff_ffff;
    Ok(EXACT.contains(&kind))
}

/// The first data in a range of the file; empty at its end if there is none. All of the range if the
/// storage knows no holes, as a block device.
///
/// # Errors
/// The error of the system call.
pub fn first_data(file: &File, range: Range<u64>) -> io::Result<Range<u64>> {
    let bounded = |at: u64| at.clamp(range.start, range.end);
    match rustix::fs::seek(file, SeekFrom::Data(range.start)) {
        Ok(start) if start < range.end => {
            let end = rustix::fs::seek(file, SeekFrom::Hole(start))?;
            Ok(bounded(start)..bounded(end))
        }
        Ok(_) | Err(Errno::NXIO) => Ok(range.end..range.end),
        Err(Errno::INVAL) => Ok(range),
        Err(why) => Err(why.into()),
    }
}
