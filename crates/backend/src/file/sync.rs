// SPDX-License-Identifier: Apache-2.0
//! Syncs, and the record of the first failed one.
//!
//! If the kernel cannot write pages of the page cache, it drops them and reports the error *once*
//! for each open file: the next sync succeeds although the data is lost. Therefore concurrent syncs
//! use separate open files ([`SyncFiles`]), so that each gets the error, and a failed sync is
//! recorded for the disk ([`SyncFailure`]): every later sync on any lane fails until the image is
//! reopened.

use crate::IoError;
use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::sync::atomic::{AtomicI32, Ordering};

/// Open files of a lane for syncs; it bounds the syncs that run at the same time.
pub(super) const SYNC_FILES: u16 = 4;

/// The errno of the disk's first failed sync.
#[derive(Debug, Default)]
pub(super) struct SyncFailure(AtomicI32);

impl SyncFailure {
    /// Records a failure and logs the first one.
    pub(super) fn remember(&self, errno: i32, disk: &str) {
        let first = self.0.compare_exchange(0, errno, Ordering::AcqRel, Ordering::Acquire).is_ok();
        if first {
            let error = io::Error::from_raw_os_error(errno);
            tracing::error!(
                disk,
                %error,
                "a sync failed: completed writes may be lost; every FLUSH fails until the image is \
                 reopened; check the storage and the guest's data, then restart the daemon"
            );
        }
    }

    /// Returns the recorded failure as an error.
    pub(super) fn check(&self) -> Result<(), IoError> {
        match self.0.load(Ordering::Acquire) {
            0 => Ok(()),
            errno => Err(IoError::Errno(errno)),
        }
    }
}

/// Returns whether a write-through write with this error may have failed in its sync. The other
/// errors occur before the storage gets any data: no completed write is lost.
pub(super) fn may_be_of_a_sync(errno: i32) -> bool {
    use libc::{EBADF, EDQUOT, EFAULT, EFBIG, EINVAL, ENOMEM, ENOSPC, EPERM};
    ![EBADF, EDQUOT, EFAULT, EFBIG, EINVAL, ENOMEM, ENOSPC, EPERM].contains(&errno)
}

/// A lane's pool of open files for syncs.
pub(super) struct SyncFiles {
    files: Vec<File>,
    free: Vec<u16>,
}

impl SyncFiles {
    pub(super) fn of(file: &File, read_only: bool) -> io::Result<Self> {
        let files = (0..SYNC_FILES).map(|_| open_again(file, read_only));
        Ok(SyncFiles { files: files.collect::<Result<_, _>>()?, free: (0..SYNC_FILES).collect() })
    }

    pub(super) fn fds(&self) -> impl Iterator<Item = RawFd> {
        self.files.iter().map(AsRawFd::as_raw_fd)
    }

    /// Takes a file; `None` while all are in use.
    pub(super) fn take(&mut self) -> Option<u16> {
        self.free.pop()
    }

    /// Returns a file to the pool.
    pub(super) fn give(&mut self, number: u16) {
        debug_assert!(!self.free.contains(&number));
        self.free.push(number);
    }
}

/// Opens the same image again, without O_DIRECT.
pub(super) fn open_again(file: &File, read_only: bool) -> io::Result<File> {
    let path = format!("/proc/self/fd/{}", file.as_raw_fd());
    OpenOptions::new().read(true).write(!read_only).open(path)
}
