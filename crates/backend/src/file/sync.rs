// SPDX-License-Identifier: Apache-2.0
//! Syncs, and the record of the first failed one.
//!
//! If the kernel cannot write pages of the page cache, it drops them and reports the error *once*
//! for each open file: the next sync succeeds although the data is lost. Therefore concurrent syncs
//! use separate open files ([`SyncFiles`]), so that each gets the error, and a failed sync is
//! recorded for the disk ([`SyncFailure`]): every later sync on any lane fails until the image is
//! reopened.

use crate::{IoError, Slot};
use std::collections::VecDeque;
use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::os::unix::fs::OpenOptionsExt;
use std::sync::atomic::{AtomicI32, Ordering};

/// Open files of a lane for syncs; it bounds the syncs that run at the same time.
pub(super) const SYNC_FILES: u16 = 2;

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

/// A lane's pool of open files for syncs. I/Os that find none free wait for the end of a running sync,
/// which may not cover their data. Then one sync is for all of them: the first one leads, and owns the
/// file.
pub(super) struct SyncFiles {
    files: Vec<SyncFile>,
    free: Vec<u16>,
    /// No file is free while an I/O waits.
    waiting: VecDeque<Slot>,
}

struct SyncFile {
    file: File,
    /// The I/O that leads the running sync, if it has waited, until the event of the sync.
    leader: Option<Slot>,
    /// The other I/Os that the running sync is for.
    followers: Vec<Slot>,
}

/// The end of a sync.
pub(super) struct SyncEnd {
    /// The sync was for these I/Os, too.
    pub(super) followers: Vec<Slot>,
    /// The file is used for the sync of this I/O, and of all others that wait.
    pub(super) leader: Option<Slot>,
}

impl SyncFiles {
    pub(super) fn of(file: &File, read_only: bool) -> io::Result<Self> {
        let open = |_| {
            let file = open_again(file, read_only, 0)?;
            Ok(SyncFile { file, leader: None, followers: Vec::new() })
        };
        Ok(SyncFiles {
            files: (0..SYNC_FILES).map(open).collect::<io::Result<_>>()?,
            free: (0..SYNC_FILES).collect(),
            waiting: VecDeque::new(),
        })
    }

    pub(super) fn fds(&self) -> impl Iterator<Item = RawFd> {
        self.files.iter().map(|one| one.file.as_raw_fd())
    }

    /// Takes a file. `None` while all are in use: the I/O of `slot` waits.
    pub(super) fn take(&mut self, slot: Slot) -> Option<u16> {
        let number = self.free.pop();
        if number.is_none() {
            self.waiting.push_back(slot);
        }
        number
    }

    /// Ends the sync of a file. The caller starts the next one, and continues the followers.
    pub(super) fn end(&mut self, number: u16) -> SyncEnd {
        debug_assert!(!self.free.contains(&number));
        let leader = self.waiting.pop_front();
        let one = &mut self.files[usize::from(number)];
        one.leader = leader;
        let followers = std::mem::replace(&mut one.followers, self.waiting.drain(..).collect());
        if leader.is_none() {
            self.free.push(number);
        }
        SyncEnd { followers, leader }
    }

    /// The file of a sync that an I/O leads after it has waited; `None`: it was a follower.
    pub(super) fn led_by(&mut self, slot: Slot) -> Option<u16> {
        let number = self.files.iter().position(|one| one.leader == Some(slot))?;
        self.files[number].leader = None;
        Some(number as u16)
    }
}

/// Opens the same image again, with these `O_*` flags only.
pub(super) fn open_again(file: &File, read_only: bool, flags: i32) -> io::Result<File> {
    let path = format!("/proc/self/fd/{}", file.as_raw_fd());
    OpenOptions::new().read(true).write(!read_only).custom_flags(flags).open(path)
}
