// SPDX-License-Identifier: Apache-2.0
//! Slow requests of a disk and the stages that they waited in, while an operator asks for them
//! ([`Health::trace`]).
//!
//! A queue notes times only while the trace is on. A request that was submitted before has no time of
//! its submission: its whole time counts as time in the storage.

use crate::health::Health;
use crate::latency::{Nanos, Operation, monotonic};
use crate::request_table::DEPTH_MAX;
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
    /// The sum of all stages.
    pub fn total(&self) -> Duration {
        self.limit + self.submit + self.storage + self.used
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

/// The times of one queue's requests while its disk is traced.
#[derive(Debug, Default)]
pub(crate) struct QueueTrace {
    /// By the index of the entry in the in-flight table; made at the first use.
    submitted: Vec<Submitted>,
    /// Completed and unpublished requests.
    completed: Vec<Completed>,
}

#[derive(Clone, Copy, Debug, Default)]
struct Submitted {
    at: Nanos,
    limit: Nanos,
}

#[derive(Debug)]
struct Completed {
    operation: Operation,
    sector: Option<u64>,
    bytes: u64,
    failed: bool,
    limit: Nanos,
    taken_at: Nanos,
    submitted_at: Nanos,
    at: Nanos,
}

impl QueueTrace {
    /// Records that the storage gets the request of an entry now. A request that is tried again counts
    /// from the last try.
    #[cold]
    pub(crate) fn submitting(&mut self, index: u16, limit: Nanos) {
        if self.submitted.is_empty() {
            self.submitted = vec![Submitted::default(); DEPTH_MAX.into()];
        }
        self.submitted[usize::from(index)] = Submitted { at: monotonic(), limit };
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
        let noted = self.submitted.get(usize::from(index)).copied().unwrap_or_default();
        let is_known = noted.at >= taken_at; // otherwise it is of an earlier request of the entry
        let sector = match kind {
            Kind::Read { sector, .. } | Kind::Write { sector, .. } => Some(sector),
            _ => None,
        };
        self.completed.push(Completed {
            operation,
            sector,
            bytes: kind.disk_bytes(),
            failed,
            limit: if is_known { noted.limit } else { 0 },
            taken_at,
            submitted_at: noted.at.max(taken_at),
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
            let slow = SlowRequest {
                queue,
                operation: done.operation,
                sector: done.sector,
                bytes: done.bytes,
                failed: done.failed,
                limit: Duration::from_nanos(done.limit),
                submit: between(done.taken_at, done.submitted_at),
                storage: between(done.submitted_at, done.at),
                used: between(done.at, now),
            };
            let bound = Duration::from_nanos(health.slower_than());
            if !bound.is_zero() && slow.total() >= bound {
                health.tell_traced(Traced::Slow(&slow));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::health::ErrorPolicy;
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
        for (index, taken_at, limit) in [(0, begin, 0), (1, begin, 0), (2, begin, 15 * MS)] {
            trace.submitting(index, limit);
            trace.completed((index, taken_at), Operation::Read, READ, false);
        }
        trace.completed.iter_mut().for_each(|done| done.at = done.submitted_at + 2 * MS);
        trace.completed[0].at += 30 * MS;
        let last = trace.completed[0].at;
        trace.completed[1].at = last;
        trace.completed[1].submitted_at = last - MS;
        trace.completed[2].at = last;
        trace.published(3, last + MS, &health);
        let told = told.lock().unwrap();
        assert!(trace.is_empty() && told.len() == 3, "{told:?}");
        for slow in &*told {
            assert_eq!((slow.queue, slow.sector, slow.bytes), (3, Some(7), 4096));
            let whole = Duration::from_nanos(last + MS - begin) + slow.limit;
            assert_eq!(slow.total(), whole, "a gap or an overlap");
        }
        assert!(told[0].storage >= Duration::from_millis(32));
        assert!(told[1].submit >= Duration::from_millis(30));
        assert_eq!(told[2].limit, Duration::from_millis(15));
    }

    #[test]
    fn a_discard_is_told_with_the_bytes_of_all_its_ranges() {
        let health = Health::new(ErrorPolicy::Report, None);
        health.trace(Some(Duration::ZERO));
        let (told, mut trace) = (told(&health), QueueTrace::default());
        let discard = Kind::Discard { bytes: 12 << 20, longest_bytes: 8 << 20, durable: false };
        trace.submitting(0, 0);
        trace.completed((0, monotonic()), Operation::Discard, discard, false);
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
            trace.submitting(0, 0);
            trace.completed((0, monotonic()), Operation::Flush, Kind::Flush, false);
            trace.published(0, monotonic() + MS, &health);
        }
        assert!(told.lock().unwrap().is_empty());
    }

    #[test]
    fn a_request_from_before_the_trace_was_in_the_storage_all_the_time() {
        let health = Health::new(ErrorPolicy::Report, None);
        health.trace(Some(Duration::from_millis(1)));
        let (told, mut trace) = (told(&health), QueueTrace::default());
        trace.submitting(5, 9 * MS); // an earlier request of the entry
        let taken_at = monotonic() + 1;
        trace.completed((5, taken_at), Operation::Write, READ, true);
        trace.completed[0].at = taken_at + 40 * MS;
        trace.published(0, taken_at + 41 * MS, &health);
        let slow = told.lock().unwrap().remove(0);
        assert_eq!((slow.limit, slow.submit), (Duration::ZERO, Duration::ZERO));
        assert_eq!(slow.storage, Duration::from_millis(40));
        assert!(slow.failed);
    }
}
