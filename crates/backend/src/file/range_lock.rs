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
//! deadlock.

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
}

/// The writers of all lanes of one disk, in the order of arrival.
#[derive(Debug, Default)]
pub(super) struct RangeLock {
    writers: Mutex<(u64, VecDeque<Writer>)>,
}

impl RangeLock {
    /// Enters a writer of `range` (bytes; whole blocks). `modifies`: it is a read-modify-write.
    pub(super) fn enter(&self, range: Range<u64>, modifies: bool) -> Ticket {
        let mut guard = self.lock();
        let (last, writers) = &mut *guard;
        *last += 1;
        let ticket = Ticket::new(*last).expect("counts from 1 and never wraps");
        writers.push_back(Writer { ticket, range, modifies });
        ticket
    }

    /// Returns whether the writer may start its operations.
    pub(super) fn may_proceed(&self, ticket: Ticket) -> bool {
        let guard = self.lock();
        let writers = &guard.1;
        let Some(own) = writers.iter().find(|writer| writer.ticket == ticket) else { return true };
        writers.iter().take_while(|writer| writer.ticket < ticket).all(|before| {
            let apart = before.range.end <= own.range.start || own.range.end <= before.range.start;
            apart || !(before.modifies || own.modifies)
        })
    }

    /// Removes a writer; later ones may proceed.
    pub(super) fn leave(&self, ticket: Ticket) {
        self.lock().1.retain(|writer| writer.ticket != ticket);
    }

    fn lock(&self) -> MutexGuard<'_, (u64, VecDeque<Writer>)> {
        self.writers.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn whole_blocks_do_not_wait_for_each_other() {
        let lock = RangeLock::default();
        let tickets = [lock.enter(0..8192, false), lock.enter(4096..8192, false)];
        assert!(tickets.into_iter().all(|ticket| lock.may_proceed(ticket)));
    }

    #[test]
    fn a_read_modify_write_is_alone_on_its_block() {
        let lock = RangeLock::default();
        let whole = lock.enter(0..8192, false);
        let modify = lock.enter(4096..8192, true);
        let (later, elsewhere) = (lock.enter(0..8192, false), lock.enter(8192..12288, true));
        assert!(lock.may_proceed(whole) && !lock.may_proceed(modify) && !lock.may_proceed(later));
        assert!(lock.may_proceed(elsewhere), "another block");
        lock.leave(whole);
        assert!(lock.may_proceed(modify) && !lock.may_proceed(later));
        lock.leave(modify);
        assert!(lock.may_proceed(later));
    }

    #[test]
    fn nobody_overtakes() {
        let lock = RangeLock::default();
        let first = lock.enter(0..4096, false);
        let modify = lock.enter(0..4096, true);
        let late = lock.enter(0..4096, false);
        assert!(!lock.may_proceed(late), "it would keep the read-modify-write waiting");
        lock.leave(modify);
        assert!(lock.may_proceed(first) && lock.may_proceed(late));
    }
}
