// SPDX-License-Identifier: Apache-2.0
//! Syncs, and the record of the first failed one.
//!
//! If the kernel cannot write pages of the page cache, it drops them and reports the error *once*
//! for each open file: the next sync succeeds although the data is lost. Therefore each lane has an open
//! file of its own for its syncs, one at a time ([`Syncs`]), so that each gets the error, and a failed
//! sync is recorded for the disk ([`SyncFailure`]): every later sync on any lane fails until the image is
//! reopened.

use super::place;
use crate::{IoError, Slot};
use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::os::unix::fs::OpenOptionsExt;
use std::sync::atomic::{AtomicI32, Ordering};

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

impl super::File {
    /// Returns whether a sync has failed since the file was opened: completed writes may be lost, and
    /// every FLUSH fails.
    pub fn has_failed_sync(&self) -> bool {
        self.shared.sync_failure.check().is_err()
    }

    /// Checks that no completed write is lost. Without O_DIRECT only a sync tells that.
    ///
    /// # Errors
    /// The errno of a sync that failed, now or earlier.
    pub fn check_writes(&self) -> io::Result<()> {
        match self.limits.direct {
            Some(_) => self.shared.sync_failure.check().map_err(io::Error::other),
            None => self.shared.sync(),
        }
    }
}

/// Returns whether a write-through write with this error may have failed in its sync. The other
/// errors occur before the storage gets any data: no completed write is lost.
pub(super) fn may_be_of_a_sync(errno: i32) -> bool {
    use libc::{EBADF, EDQUOT, EFAULT, EFBIG, EINVAL, ENOMEM, ENOSPC, EPERM};
    ![EBADF, EDQUOT, EFAULT, EFBIG, EINVAL, ENOMEM, ENOSPC, EPERM].contains(&errno)
}

/// The syncs of a lane: one at a time. I/Os that come meanwhile wait for its end, because it may not cover
/// their data. Then one sync is for all of them: the first one leads.
pub(super) struct Syncs {
    file: File,
    /// The I/O that gets the event of the running sync.
    leader: Option<Slot>,
    /// The other I/Os that the running sync is for.
    followers: Vec<Slot>,
    /// None without a running sync.
    waiting: Vec<Slot>,
}

/// The end of a sync.
#[derive(Default)]
pub(super) struct SyncEnd {
    /// The sync was for these I/Os, too.
    pub(super) followers: Vec<Slot>,
    /// The next sync is for this I/O, and for all others that wait.
    pub(super) leader: Option<Slot>,
}

impl Syncs {
    pub(super) fn of(file: &File, read_only: bool) -> io::Result<Self> {
        let file = open_again(file, read_only, 0)?;
        Ok(Syncs { file, leader: None, followers: Vec::new(), waiting: Vec::new() })
    }

    pub(super) fn fd(&self) -> RawFd {
        self.file.as_raw_fd()
    }

    /// Returns whether the I/O of `slot` leads a sync now. Otherwise it waits.
    pub(super) fn lead(&mut self, slot: Slot) -> bool {
        let leader = *self.leader.get_or_insert(slot);
        if leader != slot {
            self.waiting.push(slot);
        }
        leader == slot
    }

    /// The I/O of `slot` ends. If it has led a sync, the caller starts the next one, and continues the
    /// followers. If the sync was not carried out (`!has_run`), the followers wait for the next one instead.
    pub(super) fn end(&mut self, slot: Slot, has_run: bool) -> SyncEnd {
        if self.leader != Some(slot) {
            return SyncEnd::default();
        }
        let mut waiting = if has_run { Vec::new() } else { std::mem::take(&mut self.followers) };
        waiting.append(&mut self.waiting);
        let mut waiting = waiting.into_iter();
        self.leader = waiting.next();
        let followers = std::mem::replace(&mut self.followers, waiting.collect());
        SyncEnd { followers, leader: self.leader }
    }
}

/// Opens the same image again, with these `O_*` flags only.
pub(super) fn open_again(file: &File, read_only: bool, flags: i32) -> io::Result<File> {
    OpenOptions::new().read(true).write(!read_only).custom_flags(flags).open(place(file))
}
