// SPDX-License-Identifier: Apache-2.0
//! Slow requests of a disk and the stages that they waited in, while an operator asks for them
//! ([`Health::trace`]).
//!
//! A queue notes times only while the trace is on. A request that was submitted before has no time of
//! its submission: its whole time counts as time in the storage.

use crate::arrivals::Arrivals;
use crate::health::Health;
use crate::latency::{Nanos, Operation, monotonic};
use crate::request_table::DEPTH_MAX;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::atomic::{AtomicU64, AtomicUsize};
use std::time::Duration;
use virtio_blk::Kind;

/// A slow request. Its stages follow each other without a gap.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SlowRequest {
    /// The queue.
    pub queue: u16,
    /// The operation.
    pub operation: Operation,
    /// First sector of a read or a write, in units of 512 bytes.
    pub sector: Option<u64>,
    /// Bytes of the disk that it reads, writes, discards or clears.
    pub bytes: u64,
    /// The guest got an error.
    pub failed: bool,
    /// Its time in the ring before that of `limit`, at most: from the last look at the ring that did not
    /// show the chain, or from the kick if the queue waited for one. `None`: unknown, because the queue
    /// or the trace is younger than that look, or because a previous daemon took the chain.
    pub ring: Option<Duration>,
    /// The wait of its queue for a limit, right before the chain was taken. The driver may have made
    /// the chain available before or during that wait; the device cannot know.
    pub limit: Duration,
    /// Stages *chain* and *request*, and the wait for a resource of the storage: from the turn that
    /// takes the chain until the storage has the I/O.
    pub submit: Duration,
    /// In the storage.
    pub storage: Duration,
    /// From the completion to its publication in the used ring.
    pub used: Duration,
}

impl SlowRequest {
    /// The sum of all stages that are known.
    pub fn total(&self) -> Duration {
        self.ring.unwrap_or_default() + self.limit + self.submit + self.storage + self.used
    }
}

/// A message of a trace.
#[derive(Clone, Copy, Debug)]
pub enum Traced<'a> {
    /// A slow request.
    Slow(&'a SlowRequest),
    /// The kernel module had no room for so many slow requests before the next one.
    Lost(u64),
}

/// A data plane outside this process that notes times itself.
pub(crate) trait Tracer: Send + Sync {
    /// Returns whether it can.
    fn can_trace(&self) -> bool;

    /// Tells each request that takes this long from now on; 0: none. Waits for no storage.
    fn set_bound(&self, slower_than: Nanos);
}

/// Number of traced disks of this process.
static TRACED: AtomicUsize = AtomicUsize::new(0);

/// The time of a slow request in nanoseconds; 0: the disk is not traced.
#[derive(Default)]
pub(crate) struct TraceBound(AtomicU64);

impl TraceBound {
    pub(crate) fn nanos(&self) -> Nanos {
        self.0.load(Relaxed)
    }

    /// Sets the time and returns the old one.
    pub(crate) fn swap(&self, nanos: Nanos) -> Nanos {
        let old = self.0.swap(nanos, Relaxed);
        match (old > 0, nanos > 0) {
            (false, true) => TRACED.fetch_add(1, Relaxed),
            (true, false) => TRACED.fetch_sub(1, Relaxed),
            _ => 0,
        };
        old
    }
}

impl Drop for TraceBound {
    fn drop(&mut self) {
        self.swap(0);
    }
}

/// Returns whether some disk of this process is traced. Threads of the data plane note the times of
/// their sleeps then.
#[inline]
pub(crate) fn is_any_traced() -> bool {
    TRACED.load(Relaxed) > 0
}

/// The times of one queue's requests while its disk is traced.
#[derive(Debug, Default)]
pub(crate) struct QueueTrace {
    pub(crate) arrivals: Arrivals,
    /// The ring was empty, and an entry free, when kicks were last asked for: the next chain comes with a kick.
    pub(crate) awaits_kick: bool,
    /// By the index of the entry in the request table; made at the first use.
    noted: Vec<Noted>,
    /// Completed and unpublished requests.
    completed: Vec<Completed>,
}

#[derive(Clone, Copy, Debug, Default)]
struct Noted {
    taken_at: Nanos,
    ring: Option<Nanos>,
    limit: Nanos,
    submitted_at: Nanos,
}

#[derive(Debug)]
struct Completed {
    operation: Operation,
    sector: Option<u64>,
    bytes: u64,
    failed: bool,
    /// With the time of an entry that was noted after the request was taken only.
    noted: Noted,
    at: Nanos,
}

impl QueueTrace {
    /// Records that the chain of an entry was taken, `ring` in the ring at most, and `limit` waiting
    /// for a limit.
    #[cold]
    pub(crate) fn took(
        &mut self,
        (index, taken_at): (u16, Nanos),
        ring: Option<Nanos>,
        limit: Nanos,
    ) {
        let ring = ring.map(|ring| ring.saturating_sub(limit));
        *self.entry(index) = Noted { taken_at, ring, limit, submitted_at: taken_at };
    }

    /// Records that the storage gets the request of an entry now. A request that is tried again counts
    /// from the last try.
    #[cold]
    pub(crate) fn submitting(&mut self, index: u16) {
        self.entry(index).submitted_at = monotonic();
    }

    fn entry(&mut self, index: u16) -> &mut Noted {
        if self.noted.is_empty() {
            self.noted = vec![Noted::default(); DEPTH_MAX.into()];
        }
        &mut self.noted[usize::from(index)]
    }

    /// Records that the request of an entry, taken at this time, has completed now.
    #[cold]
    pub(crate) fn completed(
        &mut self,
        (index, taken_at): (u16, Nanos),
        operation: Operation,
        kind: Kind,
        failed: bool,
    ) {
        let noted = self.noted.get(usize::from(index)).copied().unwrap_or_default();
        let is_its = noted.taken_at == taken_at; // otherwise it is of an earlier request of the entry
        let submitted_at = noted.submitted_at.max(taken_at);
        let unknown = Noted { taken_at, submitted_at, ..Noted::default() };
        let sector = match kind {
            Kind::Read { sector, .. } | Kind::Write { sector, .. } => Some(sector),
            _ => None,
        };
        self.completed.push(Completed {
            operation,
            sector,
            bytes: kind.disk_bytes(),
            failed,
            noted: if is_its { noted } else { unknown },
            at: monotonic(),
        });
    }

    /// Returns whether no request waits for its publication.
    #[inline]
    pub(crate) fn is_empty(&self) -> bool {
        self.completed.is_empty()
    }

    /// Tells the slow ones among the requests that are published now.
    #[cold]
    pub(crate) fn published(&mut self, queue: u16, now: Nanos, health: &Health) {
        let between = |from: Nanos, to: Nanos| Duration::from_nanos(to.saturating_sub(from));
        for done in self.completed.drain(..) {
            let noted = done.noted;
            let slow = SlowRequest {
                queue,
                operation: done.operation,
                sector: done.sector,
                bytes: done.bytes,
                failed: done.failed,
                ring: noted.ring.map(Duration::from_nanos),
                limit: Duration::from_nanos(noted.limit),
                submit: between(noted.taken_at, noted.submitted_at),
                storage: between(noted.submitted_at, done.at),
                used: between(done.at, now),
            };
            let bound = Duration::from_nanos(health.slower_than());
            if !bound.is_zero() && slow.total() >= bound {
                health.report_traced(Traced::Slow(&slow));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error_rules::ErrorPolicy;
    use std::sync::{Arc, Mutex};

    const READ: Kind = Kind::Read { sector: 7, bytes: 4096 };
    const MS: Nanos = 1_000_000;

    fn told(health: &Health) -> Arc<Mutex<Vec<SlowRequest>>> {
        let all = Arc::new(Mutex::new(Vec::new()));
        let told = Arc::clone(&all);
        health.set_trace_hook(Box::new(move |traced| {
            let Traced::Slow(slow) = traced else { panic!("nothing is lost") };
            told.lock().unwrap().push(slow.clone());
        }));
        all
    }

    #[test]
    fn only_slow_requests_are_told_and_their_stages_add_up() {
        let health = Health::new(ErrorPolicy::Report, None);
        health.trace(Some(Duration::from_millis(20)));
        let (told, mut trace) = (told(&health), QueueTrace::default());
        let begin = monotonic();
        let waits = [(None, 0), (None, 0), (Some(12 * MS), 15 * MS), (Some(40 * MS), 15 * MS)];
        for (index, (ring, limit)) in (0..).zip(waits) {
            trace.took((index, begin), ring, limit);
            trace.submitting(index);
            trace.completed((index, begin), Operation::Read, READ, false);
        }
        trace.completed.iter_mut().for_each(|done| done.at = done.noted.submitted_at + 2 * MS);
        trace.completed[0].at += 30 * MS;
        let last = trace.completed[0].at;
        trace.completed[1].noted.submitted_at = last - MS;
        trace.completed[1..].iter_mut().for_each(|done| done.at = last);
        trace.published(3, last + MS, &health);
        let told = told.lock().unwrap();
        assert!(trace.is_empty() && told.len() == 4, "{told:?}");
        for slow in &*told {
            assert_eq!((slow.queue, slow.sector, slow.bytes), (3, Some(7), 4096));
            let whole = Duration::from_nanos(last + MS - begin) + slow.limit;
            assert_eq!(slow.total(), whole + slow.ring.unwrap_or_default(), "a gap or an overlap");
        }
        let ms = Duration::from_millis;
        assert!(told[0].storage >= ms(32) && told[1].submit >= ms(30));
        let waits: Vec<_> = told.iter().map(|slow| (slow.ring, slow.limit)).collect();
        let none = (None, Duration::ZERO);
        // The limit is a part of the time in the ring.
        assert_eq!(waits, [none, none, (Some(ms(0)), ms(15)), (Some(ms(25)), ms(15))]);
    }

    #[test]
    fn a_request_that_may_have_waited_in_the_ring_is_slow() {
        let health = Health::new(ErrorPolicy::Report, None);
        health.trace(Some(Duration::from_secs(9)));
        let (told, mut trace) = (told(&health), QueueTrace::default());
        let begin = monotonic();
        for (index, ring) in [(0, 8), (1, 9)] {
            trace.took((index, begin), Some(ring * 1000 * MS), 0);
            trace.completed((index, begin), Operation::Read, READ, false);
        }
        trace.published(0, monotonic(), &health);
        let told = told.lock().unwrap();
        let rings: Vec<_> = told.iter().map(|slow| slow.ring).collect();
        assert_eq!(rings, [Some(Duration::from_secs(9))], "or this took a second");
    }

    #[test]
    fn a_discard_is_told_with_the_bytes_of_all_its_ranges() {
        let health = Health::new(ErrorPolicy::Report, None);
        health.trace(Some(Duration::ZERO));
        let (told, mut trace) = (told(&health), QueueTrace::default());
        let discard = Kind::Discard { bytes: 12 << 20, longest_bytes: 8 << 20, durable: false };
        let taken_at = monotonic();
        trace.took((0, taken_at), None, 0);
        trace.completed((0, taken_at), Operation::Discard, discard, false);
        trace.published(0, monotonic() + MS, &health);
        let slow = told.lock().unwrap().remove(0);
        assert_eq!((slow.sector, slow.bytes), (None, 12 << 20));
    }

    #[test]
    fn a_fast_request_and_one_after_the_trace_are_not_told() {
        let health = Health::new(ErrorPolicy::Report, None);
        let (told, mut trace) = (told(&health), QueueTrace::default());
        for bound in [Some(Duration::from_secs(60)), None] {
            health.trace(bound);
            let taken_at = monotonic();
            trace.took((0, taken_at), None, 0);
            trace.completed((0, taken_at), Operation::Flush, Kind::Flush, false);
            trace.published(0, monotonic() + MS, &health);
        }
        assert!(told.lock().unwrap().is_empty());
    }

    #[test]
    fn a_request_from_before_the_trace_was_in_the_storage_all_the_time() {
        let health = Health::new(ErrorPolicy::Report, None);
        health.trace(Some(Duration::from_millis(1)));
        let (told, mut trace) = (told(&health), QueueTrace::default());
        trace.took((5, monotonic()), Some(9 * MS), 9 * MS); // an earlier request of the entry
        trace.submitting(5);
        let taken_at = monotonic() + 1;
        trace.completed((5, taken_at), Operation::Write, READ, true);
        trace.completed[0].at = taken_at + 40 * MS;
        trace.published(0, taken_at + 41 * MS, &health);
        let slow = told.lock().unwrap().remove(0);
        assert_eq!((slow.ring, slow.limit, slow.submit), (None, Duration::ZERO, Duration::ZERO));
        assert_eq!(slow.storage, Duration::from_millis(40));
        assert!(slow.failed);
    }
}
