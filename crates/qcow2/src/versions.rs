// SPDX-License-Identifier: Apache-2.0
//! The age of known places, and the wait until no I/O uses an old one any more.
//!
//! A place in a file may be given to other data only if no I/O uses it under its old meaning. So each
//! user (a lane, a reader of a backup) publishes the epoch in which its oldest use began, and forgets the
//! places that leave in an epoch when it begins a use in it. The thread of the image first begins an epoch,
//! and gives its places away after all users have left the epochs before.
//!
//! All accesses to epochs are sequentially consistent: a user publishes its epoch, and then reads the present one
//! again; the thread begins an epoch, and then reads what the users have published. So the thread sees
//! the use, or the user sees the new epoch. The places of an epoch are in the list before it begins, so that a
//! user that sees the epoch finds them.

use crate::disk_thread::Work;
use crate::unmap::DISCARDED_MAX;
use rangemap::RangeSet;
use std::collections::VecDeque;
use std::ops::Range;
use std::sync::atomic::Ordering::{Relaxed, SeqCst};
use std::sync::atomic::{AtomicU64, AtomicUsize};
use std::sync::mpsc::Sender;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// The published epoch of a user without any use.
const NOWHERE: u64 = u64::MAX;

/// Maximum changes of the disk that are remembered. A user that has missed more forgets all that it knows of
/// backing files and zeroes.
const CHANGES_MAX: usize = 1024;

/// Maximum epochs whose places are remembered. A user that was idle for longer forgets all that it knows.
const EPOCHS_MAX: usize = 16;

/// Ranges of the disk.
pub(crate) type Ranges = RangeSet<u64>;

/// The age of a known place.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Version {
    /// Ends places in backing files, and zeroes, where the disk changes.
    pub(crate) generation: u64,
    /// Ends the places that leave.
    pub(crate) epoch: u64,
}

/// The present version of an image, and the users of its places.
#[derive(Debug, Default)]
pub(crate) struct Versions {
    generation: AtomicU64,
    /// The parts of the disk that the newest generations have changed, the present generation last.
    changes: Mutex<VecDeque<Range<u64>>>,
    epoch: AtomicU64,
    /// The newest epochs, each with the parts of the disk whose places leave, the oldest first.
    leaving: Mutex<VecDeque<(u64, Arc<Ranges>)>>,
    users: Mutex<Vec<Arc<AtomicU64>>>,
    /// Messages about discards that the thread has not taken.
    discards: AtomicUsize,
    /// Questions of lanes so far.
    questions: AtomicU64,
    /// Commits whose end is not durable.
    commits: AtomicU64,
    /// As many of them have become durable.
    synced: AtomicU64,
}

impl Versions {
    /// The present version.
    pub(crate) fn now(&self) -> Version {
        Version { generation: self.generation.load(SeqCst), epoch: self.epoch.load(SeqCst) }
    }

    /// Ends what is known of backing files and of zeroes in a part of the disk, which is about to get
    /// content of its own. Only the thread of the image changes the disk.
    pub(crate) fn change(&self, part: Range<u64>) {
        let mut changes = self.changes();
        changes.push_back(part);
        if changes.len() > CHANGES_MAX {
            changes.pop_front();
        }
        self.generation.fetch_add(1, SeqCst);
    }

    /// Counts a commit whose end is not durable. Its answers follow.
    pub(crate) fn committed(&self) {
        self.commits.fetch_add(1, SeqCst);
    }

    /// Commits so far, for [`Versions::synced`].
    pub(crate) fn commits(&self) -> u64 {
        self.commits.load(SeqCst)
    }

    /// Takes the end of a sync that began when there were so many commits.
    pub(crate) fn synced(&self, commits: u64) {
        self.synced.fetch_max(commits, SeqCst);
    }

    /// Returns whether the tables need a sync to be durable.
    pub(crate) fn need_sync(&self) -> bool {
        self.synced.load(SeqCst) < self.commits()
    }

    /// The parts of the disk that have changed in the generations after `known`, up to `now`; `None`: some
    /// are not remembered.
    pub(crate) fn changed_since(&self, known: u64, now: u64) -> Option<Vec<Range<u64>>> {
        let changes = self.changes();
        let forgotten = self.generation.load(SeqCst) - changes.len() as u64;
        let skipped = known.checked_sub(forgotten)? as usize;
        Some(changes.iter().skip(skipped).take((now - known) as usize).cloned().collect())
    }

    fn changes(&self) -> MutexGuard<'_, VecDeque<Range<u64>>> {
        self.changes.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Ends the known places of these parts of the disk. Returns the new epoch. Only the thread of the image
    /// begins one.
    pub(crate) fn begin_epoch(&self, leaving: Ranges) -> u64 {
        let epoch = self.epoch.load(SeqCst) + 1;
        let mut all = self.leaving();
        all.push_back((epoch, Arc::new(leaving)));
        if all.len() > EPOCHS_MAX {
            all.pop_front();
        }
        drop(all);
        self.epoch.store(epoch, SeqCst);
        epoch
    }

    /// The parts of the disk whose places have left in the epochs after `known`, up to `now`; `None`: some
    /// are not remembered.
    pub(crate) fn left_since(&self, known: u64, now: u64) -> Option<Vec<Arc<Ranges>>> {
        let all = self.leaving();
        let wanted = all.iter().filter(|(epoch, _)| (known + 1..=now).contains(epoch));
        let left: Vec<_> = wanted.map(|(_, ranges)| Arc::clone(ranges)).collect();
        (left.len() as u64 == now - known).then_some(left)
    }

    fn leaving(&self) -> MutexGuard<'_, VecDeque<(u64, Arc<Ranges>)>> {
        self.leaving.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns whether each use that began before `epoch` has ended.
    pub(crate) fn have_left(&self, epoch: u64) -> bool {
        self.users().iter().all(|oldest| oldest.load(SeqCst) >= epoch)
    }

    /// The thread has taken a message about a discard.
    pub(crate) fn took_discard(&self) {
        self.discards.fetch_sub(1, Relaxed);
    }

    /// Questions that lanes have asked so far.
    pub(crate) fn questions(&self) -> u64 {
        self.questions.load(Relaxed)
    }

    fn users(&self) -> MutexGuard<'_, Vec<Arc<AtomicU64>>> {
        self.users.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A user of places in the files of an image.
#[derive(Debug)]
pub(crate) struct User {
    versions: Arc<Versions>,
    /// The published epoch.
    oldest: Arc<AtomicU64>,
    /// Uses by the epoch of their begin, the oldest first. There is none without a use in front.
    uses: VecDeque<(u64, usize)>,
    wake: Sender<Work>,
}

impl User {
    /// A user, whose end of old uses wakes the thread of the image.
    pub(crate) fn new(versions: &Arc<Versions>, wake: Sender<Work>) -> User {
        let oldest = Arc::new(AtomicU64::new(NOWHERE));
        versions.users().push(Arc::clone(&oldest));
        User { versions: Arc::clone(versions), oldest, uses: VecDeque::new(), wake }
    }

    /// The versions of the image.
    pub(crate) fn versions(&self) -> &Versions {
        &self.versions
    }

    /// Counts a question to the thread.
    pub(crate) fn asks(&self) {
        self.versions.questions.fetch_add(1, Relaxed);
    }

    /// Tells the thread that the data of a range was punched out of the file, unless too many messages
    /// wait: such data keeps its place.
    pub(crate) fn tell_discarded(&self, at: u64, len: u64) {
        let discards = &self.versions.discards;
        if discards.load(Relaxed) < DISCARDED_MAX {
            discards.fetch_add(1, Relaxed);
            let _ = self.wake.send(Work::Discarded(at, len)); // a thread that has ended unmaps nothing
        }
    }

    /// Begins a use of places that are known in the present version. Returns its epoch.
    pub(crate) fn enter(&mut self) -> u64 {
        let mut epoch = self.versions.epoch.load(SeqCst);
        while self.uses.is_empty() {
            self.oldest.store(epoch, SeqCst);
            let now = self.versions.epoch.load(SeqCst);
            if now == epoch {
                break;
            }
            epoch = now;
        }
        match self.uses.back_mut() {
            Some((last, count)) if *last == epoch => *count += 1,
            _ => self.uses.push_back((epoch, 1)),
        }
        epoch
    }

    /// Ends a use that began in `epoch`.
    pub(crate) fn leave(&mut self, epoch: u64) {
        if let Some((_, count)) = self.uses.iter_mut().find(|(of, _)| *of == epoch) {
            *count -= 1;
        }
        let before = self.uses.len();
        while self.uses.front().is_some_and(|(_, count)| *count == 0) {
            self.uses.pop_front();
        }
        if self.uses.len() == before {
            return;
        }
        self.oldest.store(self.uses.front().map_or(NOWHERE, |(epoch, _)| *epoch), SeqCst);
        if self.versions.epoch.load(SeqCst) > epoch {
            let _ = self.wake.send(Work::Left); // a thread that has ended needs no wake-up
        }
    }
}

impl Drop for User {
    fn drop(&mut self) {
        // An I/O without a waiter may still run: its places are given away no more.
        if self.uses.is_empty() {
            self.versions.users().retain(|oldest| !Arc::ptr_eq(oldest, &self.oldest));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc::{Receiver, channel};

    fn user() -> (Arc<Versions>, User, Receiver<Work>) {
        let versions = Arc::new(Versions::default());
        let (wake, woken) = channel();
        let user = User::new(&versions, wake);
        (versions, user, woken)
    }

    #[test]
    fn an_epoch_waits_for_the_uses_that_began_before_it_and_for_no_other() {
        let (versions, mut user, woken) = user();
        let old = [user.enter(), user.enter()];
        let epoch = versions.begin_epoch(Ranges::new());
        assert!(!versions.have_left(epoch));
        let new = user.enter();
        assert_eq!((old, new), ([0, 0], 1));
        user.leave(old[0]);
        assert!(!versions.have_left(epoch) && woken.try_recv().is_err());
        user.leave(old[1]);
        assert!(versions.have_left(epoch));
        assert!(matches!(woken.try_recv(), Ok(Work::Left)), "the thread of the image is woken");
        user.leave(new);
        assert!(woken.try_recv().is_err(), "it waits for nobody");
    }

    #[test]
    fn the_places_of_the_newest_epochs_are_remembered() {
        let versions = Versions::default();
        let ranges = |n: u64| std::iter::once(n..n + 1).collect::<Ranges>();
        (1..=EPOCHS_MAX as u64 + 3).for_each(|n| assert_eq!(versions.begin_epoch(ranges(n)), n));
        let left = |known, now| -> Option<Vec<Ranges>> {
            Some(versions.left_since(known, now)?.iter().map(|left| (**left).clone()).collect())
        };
        assert_eq!(left(16, 18), Some(vec![ranges(17), ranges(18)]));
        assert_eq!(left(3, 19).map(|left| left.len()), Some(16));
        assert_eq!(left(2, 19), None);
        assert_eq!(left(19, 19), Some(vec![]));
    }

    #[test]
    fn the_newest_changes_are_remembered() {
        let versions = Versions::default();
        (0..CHANGES_MAX as u64 + 2).for_each(|n| versions.change(n..n + 1));
        assert_eq!(versions.changed_since(2, 5), Some(vec![2..3, 3..4, 4..5]));
        let now = versions.now().generation;
        let last = std::iter::once(now - 1..now).collect();
        assert_eq!(versions.changed_since(now - 1, now), Some(last));
        assert_eq!(versions.changed_since(now, now), Some(vec![]));
        assert_eq!(versions.changed_since(1, now), None);
    }

    #[test]
    fn an_idle_user_and_one_that_has_gone_hold_nothing() {
        let (versions, mut idle, _woken) = user();
        let used = idle.enter();
        idle.leave(used);
        drop(User::new(&versions, channel().0));
        assert!(versions.have_left(versions.begin_epoch(Ranges::new())));
        assert_eq!(versions.users().len(), 1);
    }

    #[test]
    fn a_user_that_goes_with_a_use_holds_its_places_for_ever() {
        let (versions, mut user, _woken) = user();
        user.enter();
        let epoch = versions.begin_epoch(Ranges::new());
        drop(user);
        assert!(!versions.have_left(epoch));
    }
}
