// SPDX-License-Identifier: Apache-2.0
//! The notes of a queue for the trace of its disk: looks at the ring, and taken chains.

use super::RunningQueue;
use crate::latency::{Clock, Nanos};
use crate::request_table::Taken;

impl RunningQueue {
    /// Notes for the trace that the ring was empty. A full request table and a ring fault also yield no chain, and are
    /// not noted.
    #[cold]
    pub(super) fn note_none(&mut self, clock: &mut Clock) {
        if self.requests.has_free() && !self.faulted {
            self.trace.arrivals.none_at(clock.recent());
        }
    }

    /// Forgets the times of earlier looks at the ring.
    pub(crate) fn forget_arrivals(&mut self) {
        self.trace.arrivals.forget();
    }

    /// Notes for the trace that a chain was taken; a new one, or one that was in flight before.
    #[cold]
    pub(super) fn note_taken(&mut self, taken: &Taken, is_new: bool) {
        let (trace, virtqueue) = (&mut self.trace, &self.virtqueue);
        let waited =
            || trace.arrivals.took(self.stats.chains, taken.at, || virtqueue.available_max());
        let waited = is_new.then(waited).flatten();
        trace.took((taken.index(), taken.at), waited, self.throttle.waited());
    }

    /// Stage *submit* begins: the storage gets the request of an entry.
    #[inline]
    pub(crate) fn submitting(&mut self, index: u16) {
        if self.health.is_traced() {
            self.trace.submitting(index);
        }
    }

    /// Notes for the trace that the driver had not kicked until `at`, since it was asked to; `None`:
    /// not known.
    #[cold]
    pub(crate) fn note_no_kick(&mut self, at: Option<Nanos>) {
        match at.filter(|_| self.health.is_traced()) {
            Some(at) if self.trace.awaits_kick => self.trace.arrivals.none_at(at),
            Some(_) => {} // a chain may have been there all the time
            None => self.trace.arrivals.forget(),
        }
    }
}
