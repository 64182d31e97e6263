// SPDX-License-Identifier: Apache-2.0
//! Syncs, and the record of the first failed one.
//!
//! If the kernel cannot write pages of the page cache, it drops them and reports the error *once*
//! for each open file: the next sync succeeds although the data is lost. Therefore each lane has an open
//! file of its own for its syncs, one at a time ([`Syncs`]), so that each gets the error, and a failed
//! sync is recorded for the disk ([`SyncFailure`]): every later sync on any lane fails until the image is
//! reopened. A file that is opened after another program got the error does not get it: so each new lane asks
//! the open file of the disk, too ([`Shared::look_for_losses`]).

use super::gather::Gather;
use super::lane::Shared;
use super::{place, sys};
use crate::{IoError, Slot};
use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::os::unix::fs::OpenOptionsExt;
use std::sync::atomic::{AtomicI32, Ordering};
use std::time::{Duration, Instant};

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

    /// Makes the file durable, its attributes included.
    ///
    /// # Errors
    /// The error of the sync, which is recorded: a completed write may be lost.
    pub(crate) fn sync_all(&self) -> io::Result<()> {
        self.shared.recorded(self.shared.file.sync_all())
    }

    /// Checks that no completed write is lost. Without O_DIRECT only a sync tells that.
    ///
    /// # Errors
    /// The errno of a sync that failed, now or earlier.
    pub fn check_writes(&self) -> io::Result<()> {
        match self.limits.direct {
            Some(_) => {
                self.shared.look_for_losses();
                self.shared.sync_failure.check().map_err(io::Error::other)
            }
            None => self.shared.sync(),
        }
    }
}

impl Shared {
    /// Makes all completed writes durable.
    ///
    /// # Errors
    /// The errno of a sync that failed, now or earlier: a completed write may be lost.
    pub(super) fn sync(&self) -> io::Result<()> {
        let _ = self.recorded(self.file.sync_data());
        self.sync_failure.check().map_err(io::Error::other)
    }

    /// Records a failed sync.
    fn recorded(&self, synced: io::Result<()>) -> io::Result<()> {
        synced.inspect_err(|error| {
            self.sync_failure.remember(error.raw_os_error().unwrap_or(libc::EIO), &self.name);
        })
    }

    /// Records the loss of writes that the kernel has not reported through the open file of the disk yet.
    fn look_for_losses(&self) {
        use libc::{EINVAL, ENOSYS, EPERM, ESPIPE};
        let checked = sys::check_written(&self.file);
        let is_refused = |error: &io::Error| {
            error.raw_os_error().is_some_and(|it| [EINVAL, ENOSYS, EPERM, ESPIPE].contains(&it))
        };
        if !checked.as_ref().is_err_and(is_refused) {
            let _ = self.recorded(checked);
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
///
/// | State | `leader` | `gathering` | A FLUSH comes | Ends by |
/// |---|---|---|---|---|
/// | idle | no | no | leads, or begins to gather | |
/// | gathers | no | yes | waits; the last expected one leads | its timer: the first one leads |
/// | runs | yes | no | waits | the end of the sync |
///
/// The I/O that begins to gather has a timer, which is an event of its slot: it does not end before, also if its sync
/// does. So the timer is ended when the sync begins.
pub(super) struct Syncs {
    file: File,
    /// The I/O that gets the event of the running sync.
    leader: Option<Slot>,
    /// The other I/Os that the running sync is for.
    followers: Vec<Slot>,
    /// The I/Os that the next sync is for.
    waiting: Vec<Slot>,
    gather: Gather,
    /// The number of I/Os that the next sync should be for, and the time at which it begins without them.
    expected: Option<(usize, Instant)>,
    /// The I/O whose timer ends the wait.
    gathering: Option<Slot>,
    /// The I/Os whose timers run.
    timers: Vec<Slot>,
    /// The I/Os of these whose sync has ended.
    ended: Vec<Slot>,
    /// The I/O whose timer is to be ended.
    late_timer: Option<Slot>,
    /// The start of the running sync.
    begun: Instant,
}

/// The part of an I/O in a sync.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Part {
    /// It starts the sync.
    Leads,
    /// The end of a sync continues it.
    Waits,
    /// It waits for others this long.
    Gathers(Duration),
    /// Its sync has ended.
    Ended,
}

/// The end of a sync.
#[derive(Default)]
pub(super) struct SyncEnd {
    /// The sync was for these I/Os, too.
    pub(super) followers: Vec<Slot>,
    /// The next sync is for this I/O, and for all others that wait.
    pub(super) leader: Option<Slot>,
    /// This I/O waits for others as long.
    pub(super) gathers: Option<(Slot, Duration)>,
}

impl Syncs {
    pub(super) fn of(shared: &Shared, read_only: bool) -> io::Result<Self> {
        let file = open_again(&shared.file, read_only, 0)?;
        // After the opening: from then on `file` gets each error.
        shared.look_for_losses();
        Ok(Syncs::with(file, Instant::now()))
    }

    fn with(file: File, now: Instant) -> Self {
        Syncs {
            file,
            leader: None,
            followers: Vec::new(),
            waiting: Vec::new(),
            gather: Gather::new(now),
            expected: None,
            gathering: None,
            timers: Vec::new(),
            ended: Vec::new(),
            late_timer: None,
            begun: now,
        }
    }

    pub(super) fn fd(&self) -> RawFd {
        self.file.as_raw_fd()
    }

    /// An I/O wants a sync.
    pub(super) fn enter(&mut self, slot: Slot, now: Instant) -> Part {
        match self.leader {
            Some(leader) if leader == slot => return Part::Leads,
            Some(_) => {
                self.waiting.push(slot);
                return Part::Waits;
            }
            None => {}
        }
        self.waiting.push(slot);
        let Some((expected, deadline)) = self.expected.filter(|(_, deadline)| *deadline > now)
        else {
            return self.begin(slot, now);
        };
        match self.gathering {
            _ if self.waiting.len() >= expected => {
                self.gather.hit();
                self.begin(slot, now)
            }
            Some(_) => Part::Waits,
            None => {
                self.gathering = Some(slot);
                self.timers.push(slot);
                Part::Gathers(deadline - now)
            }
        }
    }

    /// Begins the sync of all that wait. `slot`, one of them, leads.
    fn begin(&mut self, slot: Slot, now: Instant) -> Part {
        (self.leader, self.begun) = (Some(slot), now);
        self.late_timer = self.gathering.take().filter(|slot| self.timers.contains(slot));
        self.expected = None;
        self.followers.append(&mut self.waiting);
        self.followers.retain(|other| *other != slot);
        Part::Leads
    }

    /// The I/O whose timer the caller ends.
    pub(super) fn take_late_timer(&mut self) -> Option<Slot> {
        self.late_timer.take()
    }

    /// Returns whether the I/O leads the running sync.
    pub(super) fn leads(&self, slot: Slot) -> bool {
        self.leader == Some(slot)
    }

    /// An event of an I/O that does not lead: the end of its timer, if it has one, or that of its sync.
    pub(super) fn event(&mut self, slot: Slot, now: Instant) -> Part {
        let remove = |slots: &mut Vec<Slot>| {
            let at = slots.iter().position(|other| *other == slot);
            at.map(|at| slots.swap_remove(at)).is_some()
        };
        if !remove(&mut self.timers) || remove(&mut self.ended) {
            return Part::Ended;
        }
        if self.gathering != Some(slot) {
            return Part::Waits;
        }
        self.gather.missed();
        self.begin(slot, now)
    }

    /// The I/O of `slot` ends. If it has led a sync, the caller starts the next one, and continues the
    /// followers. If the sync was not carried out (`!has_run`), the followers wait for the next one instead.
    pub(super) fn end(&mut self, slot: Slot, has_run: bool, now: Instant) -> SyncEnd {
        if self.leader != Some(slot) {
            return SyncEnd::default();
        }
        self.leader = None;
        let mut followers = std::mem::take(&mut self.followers);
        if has_run {
            let took = now.saturating_duration_since(self.begun);
            let next = self.gather.synced(now, took, 1 + followers.len(), self.waiting.len());
            self.expected = next.map(|(expected, wait)| (expected, now + wait));
            let has_timer = |slot: &Slot| self.timers.contains(slot);
            self.ended.extend(followers.iter().copied().filter(has_timer));
            followers.retain(|slot| !self.timers.contains(slot));
        } else {
            self.expected = None;
            followers.append(&mut self.waiting);
            self.waiting = std::mem::take(&mut followers);
        }
        let mut end = SyncEnd { followers, ..SyncEnd::default() };
        let Some(&first) = self.waiting.first() else { return end };
        let free = self.waiting.iter().copied().find(|slot| !self.timers.contains(slot));
        match (free, self.expected) {
            // Its timer begins the sync.
            (None, _) => self.gathering = Some(first),
            (Some(slot), None) => {
                self.begin(slot, now);
                end.leader = Some(slot);
            }
            (Some(slot), Some((_, deadline))) => {
                self.gathering = Some(slot);
                self.timers.push(slot);
                end.gathers = Some((slot, deadline - now));
            }
        }
        end
    }
}

/// Opens the same image again, with these `O_*` flags only.
pub(super) fn open_again(file: &File, read_only: bool, flags: i32) -> io::Result<File> {
    OpenOptions::new().read(true).write(!read_only).custom_flags(flags).open(place(file))
}

#[cfg(test)]
mod tests;
