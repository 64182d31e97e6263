// SPDX-License-Identifier: Apache-2.0
//! Latencies of requests, by operation: from the turn of the loop that takes the chain to its
//! publication. The kernel module counts in the same way.

use rustix::time::{ClockId, clock_gettime};
use std::ops::AddAssign;
use std::time::Duration;
use virtio_blk::Kind;

/// Number of buckets of a [`Histogram`].
pub const LATENCY_BUCKETS: usize = 24;

/// Operations of a disk whose latencies are counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Operation {
    /// IN.
    Read,
    /// OUT.
    Write,
    /// FLUSH.
    Flush,
    /// DISCARD, WRITE_ZEROES, SECURE_ERASE.
    Discard,
}

impl Operation {
    /// All operations, in the order of their numbers.
    pub const ALL: [Operation; 4] =
        [Operation::Read, Operation::Write, Operation::Flush, Operation::Discard];

    /// The name in metrics and in the lines of the kernel module.
    pub fn name(self) -> &'static str {
        match self {
            Operation::Read => "read",
            Operation::Write => "write",
            Operation::Flush => "flush",
            Operation::Discard => "discard",
        }
    }

    /// The operation of a request; `None`: its latency is not counted.
    #[inline]
    pub(crate) fn of(kind: Kind) -> Option<Operation> {
        match kind {
            Kind::Read { .. } => Some(Operation::Read),
            Kind::Write { .. } => Some(Operation::Write),
            Kind::Flush => Some(Operation::Flush),
            Kind::GetId => None,
            _ => Some(Operation::Discard),
        }
    }
}

/// Latencies of one operation.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Histogram {
    /// Requests by latency: bucket *i* has those of less than 2^*i* microseconds that belong to no
    /// earlier bucket, the last one all others.
    pub buckets: [u64; LATENCY_BUCKETS],
    /// Sum of the latencies in microseconds.
    pub sum_us: u64,
}

impl Histogram {
    /// Exclusive upper bound of a bucket; `None` for the last one, which has none.
    pub fn bound(bucket: usize) -> Option<Duration> {
        (bucket + 1 < LATENCY_BUCKETS).then(|| Duration::from_micros(1 << bucket))
    }

    /// Number of requests.
    pub fn count(&self) -> u64 {
        self.buckets.iter().sum()
    }

    #[inline]
    fn add(&mut self, latency_us: u64) {
        let bucket = (u64::BITS - latency_us.leading_zeros()) as usize;
        self.buckets[bucket.min(LATENCY_BUCKETS - 1)] += 1;
        self.sum_us += latency_us;
    }
}

/// Latencies of a queue, by [`Operation`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Latencies(pub [Histogram; 4]);

impl Latencies {
    /// The latencies of an operation.
    pub fn of(&self, operation: Operation) -> &Histogram {
        &self.0[operation as usize]
    }

    #[inline]
    pub(crate) fn add(&mut self, operation: Operation, latency: Nanos) {
        self.0[operation as usize].add(latency / 1000);
    }
}

impl AddAssign for Latencies {
    fn add_assign(&mut self, more: Self) {
        for (own, more) in self.0.iter_mut().zip(more.0) {
            own.buckets.iter_mut().zip(more.buckets).for_each(|(own, more)| *own += more);
            own.sum_us += more.sum_us;
        }
    }
}

/// A time of the monotonic clock in nanoseconds.
pub(crate) type Nanos = u64;

/// Reads the monotonic clock.
#[inline]
pub(crate) fn monotonic() -> Nanos {
    let time = clock_gettime(ClockId::Monotonic);
    time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
}

/// The clock of one thread. Caches the last reading of the clock, so that a turn after a sleep or a
/// publication does not read it again.
#[derive(Debug, Default)]
pub(crate) struct Clock {
    last: Option<Nanos>,
}

impl Clock {
    /// Reads the clock.
    #[inline]
    pub(crate) fn read(&mut self) -> Nanos {
        *self.last.insert(monotonic())
    }

    /// The time of the last reading, if it is still valid, or of now.
    #[inline]
    pub(crate) fn recent(&mut self) -> Nanos {
        match self.last {
            Some(at) => at,
            None => self.read(),
        }
    }

    /// Makes the last reading invalid: time has passed.
    #[inline]
    pub(crate) fn forget(&mut self) {
        self.last = None;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bucket_has_the_latencies_below_its_bound() {
        let mut latencies = Latencies::default();
        let samples = [0, 1, 2, 3, 4, 1000, 1 << 21, 1 << 22, u64::from(u32::MAX)];
        samples.iter().for_each(|&us| latencies.add(Operation::Write, us * 1000));
        let histogram = latencies.of(Operation::Write);
        let filled: Vec<(usize, u64)> =
            (0..).zip(histogram.buckets).filter(|(_, count)| *count > 0).collect();
        assert_eq!(filled, [(0, 1), (1, 1), (2, 2), (3, 1), (10, 1), (22, 1), (23, 2)]);
        assert_eq!(Histogram::bound(10), Some(Duration::from_micros(1024)));
        assert_eq!(Histogram::bound(23), None);
        assert_eq!((histogram.count(), histogram.sum_us), (9, samples.iter().sum()));
        assert_eq!(latencies.of(Operation::Read).count(), 0);
        let mut sum = latencies;
        sum += latencies;
        assert_eq!(sum.of(Operation::Write).count(), 18);
        assert_eq!(sum.of(Operation::Write).sum_us, 2 * histogram.sum_us);
    }

    #[test]
    fn a_reading_is_used_until_it_is_forgotten() {
        let mut clock = Clock::default();
        let first = clock.recent();
        std::thread::sleep(Duration::from_millis(2));
        assert_eq!(clock.recent(), first);
        clock.forget();
        let second = clock.recent();
        assert!(second >= first + 2_000_000);
        assert!(clock.read() >= second);
    }
}
