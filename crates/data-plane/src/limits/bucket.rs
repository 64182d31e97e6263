// SPDX-License-Identifier: Apache-2.0
//! The clocks of limits and the debt of a disk: memory that the kernel module uses, too.

use super::Nanos;
use std::num::NonZeroU64;
use std::ops::Deref;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::{AcqRel, Relaxed};

const NANOS: u128 = 1_000_000_000;

/// `struct vhost_blk_limits` of the module, which has a page of this process for it.
#[repr(C, align(128))]
#[derive(Debug, Default)]
pub(crate) struct Clocks {
    pub(crate) version: AtomicU64,
    pub(crate) burst_ns: AtomicU64,
    pub(crate) iops: Bucket,
    pub(crate) bytes: Bucket,
    /// The highest tag of a disk.
    pub(crate) top: AtomicU64,
    /// The lowest tag of a disk that waits, told for the kernel plane.
    pub(crate) behind: AtomicU64,
    pub(crate) behind_ns: AtomicU64,
    pub(crate) behind_by: AtomicU64,
    reserved: [u64; 6],
}

/// `struct vhost_blk_debt` of the module: cost of the requests of a disk for which no clock was
/// advanced yet.
#[repr(C, align(16))]
#[derive(Debug, Default)]
pub(crate) struct Debt {
    pub(crate) iops: AtomicU64,
    pub(crate) bytes: AtomicU64,
}

/// A page of its own: the module pins it, and writes to it.
#[repr(C, align(4096))]
#[derive(Debug, Default)]
pub(crate) struct Page<T>(T);

impl<T> Deref for Page<T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.0
    }
}

#[repr(C)]
#[derive(Debug, Default)]
pub(crate) struct Bucket {
    /// Units per second; 0: no limit.
    pub(crate) rate: AtomicU64,
    /// The time at which the next request may be taken.
    pub(crate) clock: AtomicU64,
}

impl Bucket {
    pub(super) fn set(&self, rate: Option<NonZeroU64>, now: Nanos) {
        self.rate.store(rate.map_or(0, NonZeroU64::get), Relaxed);
        self.clock.store(now, Relaxed);
    }

    /// The time at which the next request may be taken; 0 without a limit.
    pub(super) fn opens_at(&self) -> Nanos {
        if self.rate.load(Relaxed) == 0 { 0 } else { self.clock.load(Relaxed) }
    }

    /// The cost of a request.
    pub(super) fn cost(&self, units: u64) -> Nanos {
        let Some(rate) = NonZeroU64::new(self.rate.load(Relaxed)) else { return 0 };
        let cost = u128::from(units) * NANOS / u128::from(rate.get());
        u64::try_from(cost).unwrap_or(u64::MAX)
    }

    /// Advances the clock. Returns the part of the cost by which it has advanced.
    pub(super) fn advance(&self, cost: Nanos, span: Span) -> Nanos {
        if cost == 0 {
            return 0;
        }
        let advance = |clock: u64| Some(span.after(clock, cost));
        let (Ok(before) | Err(before)) = self.clock.fetch_update(Relaxed, Relaxed, advance);
        span.part(before, cost)
    }

    /// Pays a part of the debt. Returns that part.
    pub(super) fn pay(&self, debt: &AtomicU64, span: Span) -> Nanos {
        let owed = debt.load(Relaxed);
        let part = span.part(self.clock.load(Relaxed), owed);
        // Taken off first: two queues never pay the same debt.
        if part == 0 || debt.compare_exchange(owed, owed - part, Relaxed, Relaxed).is_err() {
            return 0;
        }
        let paid = self.advance(part, span);
        add(debt, part - paid);
        paid
    }
}

/// Adds to a debt.
pub(super) fn add(debt: &AtomicU64, more: Nanos) {
    let more = |debt: u64| Some(debt.saturating_add(more));
    let _ = debt.fetch_update(AcqRel, Relaxed, more); // the closure never refuses
}

/// The span of time in which a clock advances.
#[derive(Clone, Copy)]
pub(super) struct Span {
    pub(super) earliest: Nanos,
    pub(super) latest: Nanos,
}

impl Span {
    /// The part of the cost that a clock has room for.
    fn part(self, clock: Nanos, cost: Nanos) -> Nanos {
        cost.min(self.latest.saturating_sub(clock.max(self.earliest)))
    }

    /// The clock after its advance.
    fn after(self, clock: Nanos, cost: Nanos) -> Nanos {
        clock.max(self.earliest) + self.part(clock, cost)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Nanos = 1_000_000_000;

    fn charge(bucket: &Bucket, units: u64, earliest: Nanos) {
        let span = Span { earliest, latest: Nanos::MAX };
        bucket.advance(bucket.cost(units), span);
    }

    fn bucket(rate: u64) -> Bucket {
        let bucket = Bucket::default();
        bucket.set(NonZeroU64::new(rate), SECOND);
        bucket
    }

    #[test]
    fn a_bucket_spaces_requests_by_their_cost() {
        let bucket = bucket(1000);
        assert_eq!(bucket.opens_at(), SECOND);
        charge(&bucket, 1, SECOND);
        assert_eq!(bucket.opens_at(), SECOND + SECOND / 1000);
        // A request that came late gets no credit without a burst.
        charge(&bucket, 500, 2 * SECOND);
        assert_eq!(bucket.opens_at(), 2 * SECOND + SECOND / 2);
        charge(&bucket, u64::MAX, 2 * SECOND);
        assert_eq!(bucket.opens_at(), u64::MAX);
    }

    #[test]
    fn an_idle_bucket_saves_up_the_burst_and_no_more() {
        let bucket = bucket(1000);
        let now = 100 * SECOND;
        let free = (0..1000).take_while(|_| {
            charge(&bucket, 1, now - SECOND / 10);
            bucket.opens_at() <= now
        });
        assert_eq!(free.count(), 100);
    }
}
