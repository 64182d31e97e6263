// SPDX-License-Identifier: Apache-2.0
//! Holes of a file.

use rustix::fs::SeekFrom;
use rustix::io::Errno;
use std::fs::File;
use std::io;
use std::ops::Range;

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
