// SPDX-License-Identifier: Apache-2.0
//! Serializes writers that share a block of O_DIRECT.
//!
//! A guest may write less than one block of O_DIRECT. The lane then reads the block, changes it and
//! writes it back (*read-modify-write*). A write of another lane to the rest of the block must not
//! happen in between: it would be lost. On such storage each I/O that changes data enters its range
//! here, extended to whole blocks, before its first operation:
//!
//! * a read-modify-write waits for every earlier overlapping writer, and
//! * every writer waits for an earlier overlapping read-modify-write.
//!
//! Writers of whole blocks do not wait for each other, and reads do not wait. The order is first
//! come, first served: a writer waits only for earlier ones, so there is no starvation and no
//! deadlock. The end of the last writer that it waits for continues it, on its own thread.

use crate::{Remote, Token};
use std::collections::VecDeque;
use std::num::NonZeroU64;
use std::ops::Range;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// A position in the queue of writers.
pub(crate) type Ticket = NonZeroU64;

#[derive(Debug)]
struct Writer {
    ticket: Ticket,
    /// In bytes; whole blocks.
    range: Range<u64>,
    modifies: bool,
    /// Earlier writers that it waits for.
    blockers: usize,
    /// Continues it when there is none any more.
    waiter: Option<(Remote, Token)>,
}

impl Writer {
    fn conflicts_with(&self, other: &Writer) -> bool {
        let apart = self.range.end <= other.range.start || other.range.end <= self.range.start;
        !apart && (self.modifies || other.modifies)
    }
}

/// The writers of all lanes of one disk, in the order of arrival.
#[derive(Debug, Default)]
pub(super) struct RangeLock {
    writers: Mutex<(u64, VecDeque<Writer>)>,
}

impl RangeLock {
    /// Enters a writer of `range` (bytes; whole blocks). `modifies`: it is a read-modify-write. Returns its ticket, and
    /// whether it may start its operations. If not, the event of `waiter` tells it later.
    pub(super) fn enter(
        &self,
        range: Range<u64>,
        modifies: bool,
        waiter: impl FnOnce() -> (Remote, Token),
    ) -> (Ticket, bool) {
        let mut guard = self.lock();
        let (last, writers) = &mut *guard;
        *last += 1;
        let ticket = Ticket::new(*last).expect("counts from 1 and never wraps");
        let mut writer = Writer { ticket, range, modifies, blockers: 0, waiter: None };
        writer.blockers = writers.iter().filter(|before| before.conflicts_with(&writer)).count();
        let may_proceed = writer.blockers == 0;
        writer.waiter = (!may_proceed).then(waiter);
        writers.push_back(writer);
        (ticket, may_proceed)
    }

    /// Removes a writer; later ones may proceed.
    pub(super) fn leave(&self, ticket: Ticket) {
        self.remove(ticket).into_iter().for_each(|(remote, token)| remote.complete(token, 0));
    }

    /// Removes a writer. Returns the waiters of those that wait for no other one.
    fn remove(&self, ticket: Ticket) -> Vec<(Remote, Token)> {
        let mut guard = self.lock();
        let writers = &mut guard.1;
        let Ok(place) = writers.binary_search_by_key(&ticket, |writer| writer.ticket) else {
            return Vec::new();
        };
        let Some(gone) = writers.remove(place) else { return Vec::new() };
        let mut ready = Vec::new();
        for later in writers.range_mut(place..).filter(|later| later.conflicts_with(&gone)) {
            later.blockers -= 1;
            if later.blockers == 0 {
                ready.extend(later.waiter.take());
            }
        }
        ready
    }

    fn lock(&self) -> MutexGuard<'_, (u64, VecDeque<Writer>)> {
        self.writers.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Slot;
    use crate::conformance::Delivered;

    /// Writers with the numbers in which they enter.
    #[derive(Default)]
    struct Writers {
        lock: RangeLock,
        delivered: Delivered,
        tickets: Vec<Ticket>,
    }

    impl Writers {
        /// Returns whether it may proceed.
        fn enter(&mut self, range: Range<u64>, modifies: bool) -> bool {
            let token = Token { slot: Slot(self.tickets.len() as u32), layer: 0 };
            let remote = self.delivered.remote();
            let (ticket, may_proceed) = self.lock.enter(range, modifies, || (remote, token));
            self.tickets.push(ticket);
            may_proceed
        }

        /// Returns the writers that may proceed from then on.
        fn leave(&mut self, number: usize) -> Vec<u32> {
            self.lock.leave(self.tickets[number]);
            std::iter::from_fn(|| self.delivered.poll()).map(|(token, _)| token.slot.0).collect()
        }
    }

    #[test]
    fn whole_blocks_do_not_wait_for_each_other() {
        let mut writers = Writers::default();
        assert!(writers.enter(0..8192, false) && writers.enter(4096..8192, false));
        assert_eq!((writers.leave(0), writers.leave(1)), (vec![], vec![]));
    }

    #[test]
    fn a_read_modify_write_is_alone_on_its_block() {
        let mut writers = Writers::default();
        assert!(writers.enter(0..8192, false));
        assert!(!writers.enter(4096..8192, true) && !writers.enter(0..8192, false));
        assert!(writers.enter(8192..12288, true), "another block");
        assert_eq!(writers.leave(3), [0; 0]);
        assert_eq!(writers.leave(0), [1]);
        assert_eq!(writers.leave(1), [2]);
    }

    #[test]
    fn no_writer_overtakes() {
        let mut writers = Writers::default();
        assert!(writers.enter(0..4096, false) && !writers.enter(0..4096, true));
        assert!(!writers.enter(0..4096, false), "it would keep the read-modify-write waiting");
        assert_eq!(writers.leave(1), [2], "the one in front of it has gone, without its turn");
        assert_eq!(writers.leave(0), [0; 0]);
    }

    #[test]
    fn all_that_wait_for_one_writer_proceed_when_it_leaves_and_a_late_leave_changes_nothing() {
        let mut writers = Writers::default();
        assert!(writers.enter(0..4096, true));
        assert!((1..=3000).all(|_| !writers.enter(0..4096, false)));
        assert_eq!(writers.leave(0).len(), 3000);
        assert_eq!(writers.leave(0), [0; 0]);
    }
}
