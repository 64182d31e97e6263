// SPDX-License-Identifier: Apache-2.0
//! Clones of files: a new file shares the space of another one until either of them is written.

use crate::file::sys;
use rustix::fs::{IFlags, ioctl_getflags, ioctl_setflags};
use std::fs::File;
use std::io;

/// Bytes of one call, which nothing interrupts: 65,536 extents of 4 KiB at most. A multiple of the
/// blocks of every file system.
const PIECE_BYTES: u64 = 256 << 20;
/// Bytes that show whether two files can share space: a multiple of the blocks of every file system.
const TRIAL_BYTES: u64 = 64 << 10;

/// Errors of [`clone`] and [`try_out`].
#[derive(Debug, thiserror::Error)]
pub enum CloneError {
    /// These two files cannot share space; a copy is possible.
    #[error("{}", reason(.0))]
    Refused(io::Error),
    /// The clone has failed, as a copy would.
    #[error(transparent)]
    Failed(io::Error),
    /// The caller has stopped the clone.
    #[error("it was stopped")]
    Stopped,
}

impl From<io::Error> for CloneError {
    fn from(why: io::Error) -> Self {
        match why.raw_os_error() {
            Some(
                libc::EXDEV
                | libc::EAGAIN // ZFS: the data is not written back
                | libc::EOPNOTSUPP
                | libc::ENOTTY
                | libc::ENOSYS
                | libc::EINVAL
                | libc::EPERM
                | libc::EACCES
                | libc::ETXTBSY,
            ) => CloneError::Refused(why),
            _ => CloneError::Failed(why),
        }
    }
}

/// The reason of the kernel in words.
fn reason(why: &io::Error) -> String {
    match why.raw_os_error() {
        Some(libc::EXDEV) => "they are on different file systems".to_owned(),
        Some(libc::EOPNOTSUPP | libc::ENOTTY | libc::ENOSYS) => {
            "their file system shares no space between files (XFS with reflink=1 and btrfs do)"
                .to_owned()
        }
        _ => format!("their file system refuses it for these two files: {why}"),
    }
}

/// Finds out whether the empty file `target` can share the space of `source`, which gets no change. The
/// target has a part of the source afterwards.
///
/// # Errors
/// [`CloneError`]; the target is empty.
pub fn try_out(source: &File, target: &File) -> Result<(), CloneError> {
    inherit_no_cow(source, target);
    let len = source.metadata()?.len().min(TRIAL_BYTES);
    Ok(sys::clone_range(source, 0, len, target)?)
}

/// Gives the file `target`, which is empty or had a [`try_out`], the content and the size of `source`,
/// whose space it shares. Nothing may change the source meanwhile. `goes_on` learns of the bytes that are
/// done, and stops by `false`. The clone is durable after a sync of the target.
///
/// # Errors
/// [`CloneError`]; the target may have a part of the source.
pub fn clone(
    source: &File,
    target: &File,
    goes_on: &mut dyn FnMut(u64) -> bool,
) -> Result<(), CloneError> {
    inherit_no_cow(source, target);
    let size = source.metadata()?.len();
    let mut done = 0;
    while done < size {
        if !goes_on(done) {
            return Err(CloneError::Stopped);
        }
        let len = PIECE_BYTES.min(size - done);
        // Only the last one may end inside of a block: with the file.
        sys::clone_range(source, done, len, target)?;
        done += len;
    }
    Ok(())
}

/// Gives the empty file `target` the attribute of btrfs that `source` may have (`chattr +C`): files with
/// it and without it share nothing.
fn inherit_no_cow(source: &File, target: &File) {
    let (Ok(source), Ok(own)) = (ioctl_getflags(source), ioctl_getflags(target)) else { return };
    if source.contains(IFlags::NOCOW) && !own.contains(IFlags::NOCOW) {
        let _ = ioctl_setflags(target, own | IFlags::NOCOW); // then the clone is refused
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_that_a_copy_would_not_have_are_refusals() {
        let of = |errno| CloneError::from(io::Error::from_raw_os_error(errno));
        for (errno, told) in [
            (libc::EXDEV, "different file systems"),
            (libc::EOPNOTSUPP, "shares no space"),
            (libc::ENOTTY, "shares no space"),
            (libc::EINVAL, "for these two files: Invalid argument"),
            (libc::EPERM, "Operation not permitted"),
        ] {
            let error = of(errno);
            assert!(matches!(&error, CloneError::Refused(_)), "{error}");
            assert!(error.to_string().contains(told), "{error}");
        }
        for errno in [libc::ENOSPC, libc::EDQUOT, libc::EIO, libc::EFBIG, libc::ENOMEM] {
            assert!(matches!(of(errno), CloneError::Failed(_)), "{errno}");
        }
    }
}
