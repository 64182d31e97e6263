// SPDX-License-Identifier: Apache-2.0
//! Byte-range locks of an open file description.
// UNSAFETY: fcntl is a foreign function; a safe function wraps each use.
#![expect(unsafe_code)]

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;

/// Takes a shared lock on one byte; it conflicts with exclusive locks only.
pub(super) fn lock_shared(file: &File, byte: u64) -> io::Result<()> {
    fcntl(file, libc::F_OFD_SETLK, libc::F_RDLCK, byte, 1).map(|_| ())
}

/// Returns whether another open file description holds a lock on the byte.
pub(super) fn others_hold(file: &File, byte: u64) -> io::Result<bool> {
    let found = fcntl(file, libc::F_OFD_GETLK, libc::F_WRLCK, byte, 1)?;
    Ok(found != libc::F_UNLCK)
}

/// Releases the locks of this open file description on the range.
pub(super) fn unlock(file: &File, start: u64, len: u64) -> io::Result<()> {
    fcntl(file, libc::F_OFD_SETLK, libc::F_UNLCK, start, len).map(|_| ())
}

/// Calls `fcntl` and returns the lock type that the kernel leaves in the structure.
fn fcntl(file: &File, command: i32, kind: i32, start: u64, len: u64) -> io::Result<i32> {
    let mut lock = libc::flock {
        l_type: kind as libc::c_short,
        l_whence: libc::SEEK_SET as libc::c_short,
        l_start: start as libc::off_t,
        l_len: len as libc::off_t,
        // These commands require 0.
        l_pid: 0,
    };
    // SAFETY: `lock` is a valid structure that the kernel may write.
    match unsafe { libc::fcntl(file.as_raw_fd(), command, &raw mut lock) } {
        -1 => Err(io::Error::last_os_error()),
        _ => Ok(i32::from(lock.l_type)),
    }
}
