// SPDX-License-Identifier: Apache-2.0
//! Limits on the rate of a disk, shared by all its queues.
//!
//! Each limit is a token bucket, kept as a clock: the time at which the next request may be taken. A
//! taken request advances the clock by its cost, and may advance it beyond the present time: that
//! debt delays the next request. An idle clock lags behind the present time by the burst at most.
//!
//! A queue asks before it takes a chain, so that no taken request waits for a limit, and a stop is
//! not delayed. A queue that has to wait sleeps for [`QUANTUM`] at least, and makes up for it by the
//! burst. The queue that took last sleeps longer than the others, which makes it their turn.

use std::num::NonZeroU64;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::atomic::{AtomicBool, AtomicU64};
use std::time::{Duration, Instant};

const NANOS: u128 = 1_000_000_000;
/// Minimum sleep of a queue that waits for a limit; bounds the wake-ups for a high limit.
const QUANTUM: Duration = Duration::from_millis(1);

/// Limits of a disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Requests per second, of any kind.
    pub iops: Option<NonZeroU64>,
    /// Bytes per second that requests read, write or zero; 16 discarded bytes count as one.
    pub bytes: Option<NonZeroU64>,
    /// Unused time that later requests may catch up on.
    pub burst: Duration,
}

impl Limits {
    /// The burst, unless the user wants another one. QEMU has the same.
    pub const BURST_DEFAULT: Duration = Duration::from_millis(100);
    /// Minimum burst: several times the longest sleep that a queue makes up for.
    pub const BURST_MIN: Duration = Duration::from_millis(10);
    /// Maximum burst.
    pub const BURST_MAX: Duration = Duration::from_secs(3600);

    /// No limit.
    pub const NONE: Limits = Limits { iops: None, bytes: None, burst: Limits::BURST_DEFAULT };

    /// Returns whether there is a limit.
    pub fn is_set(&self) -> bool {
        self.iops.is_some() || self.bytes.is_some()
    }
}

/// A point in time in nanoseconds since the epoch of the [`Limiter`].
pub(crate) type Nanos = u64;

/// The buckets of a disk. The threads use them without a lock: when two of them take a request at
/// the same time, the second one becomes debt.
#[derive(Debug)]
pub(crate) struct Limiter {
    epoch: Instant,
    is_set: AtomicBool,
    iops: Bucket,
    bytes: Bucket,
}

#[derive(Debug, Default)]
struct Bucket {
    /// Units per second; 0: no limit.
    rate: AtomicU64,
    /// The time at which the next request may be taken.
    clock: AtomicU64,
    burst: AtomicU64,
}

impl Bucket {
    fn set(&self, rate: Option<NonZeroU64>, burst: Duration, now: Nanos) {
        self.rate.store(rate.map_or(0, NonZeroU64::get), Relaxed);
        self.burst.store(u64::try_from(burst.as_nanos()).unwrap_or(u64::MAX), Relaxed);
        self.clock.store(now, Relaxed);
    }

    /// The time at which the next request may be taken; 0 without a limit.
    fn opens_at(&self) -> Nanos {
        if self.rate.load(Relaxed) == 0 { 0 } else { self.clock.load(Relaxed) }
    }

    fn charge(&self, units: u64, now: Nanos) {
        let Some(rate) = NonZeroU64::new(self.rate.load(Relaxed)) else { return };
        let cost = u128::from(units) * NANOS / u128::from(rate.get());
        let cost = u64::try_from(cost).unwrap_or(u64::MAX);
        let earliest = now.saturating_sub(self.burst.load(Relaxed));
        let advance = |clock: u64| Some(clock.max(earliest).saturating_add(cost));
        let _ = self.clock.fetch_update(Relaxed, Relaxed, advance); // the closure never refuses
    }
}

impl Limiter {
    pub(crate) fn new() -> Self {
        Limiter {
            epoch: Instant::now(),
            is_set: AtomicBool::new(false),
            iops: Bucket::default(),
            bytes: Bucket::default(),
        }
    }

    /// Replaces the limits, and forgives the debt of the old ones.
    pub(crate) fn set(&self, limits: &Limits) {
        let now = self.now();
        self.iops.set(limits.iops, limits.burst, now);
        self.bytes.set(limits.bytes, limits.burst, now);
        self.is_set.store(limits.is_set(), Relaxed);
    }

    #[inline]
    pub(crate) fn is_set(&self) -> bool {
        self.is_set.load(Relaxed)
    }

    pub(crate) fn now(&self) -> Nanos {
        self.epoch.elapsed().as_nanos() as u64
    }

    /// Charges a request that moves so many bytes.
    fn charge(&self, bytes: u64, now: Nanos) {
        self.iops.charge(1, now);
        self.bytes.charge(bytes, now);
    }

    /// The time at which a request may be taken, if it may not be taken now.
    fn closed_until(&self, now: Nanos) -> Option<Nanos> {
        let at = self.iops.opens_at().max(self.bytes.opens_at());
        (at > now).then(|| at.max(now + QUANTUM.as_nanos() as u64))
    }
}

/// The view of one queue on the limits of its disk.
#[derive(Debug, Default)]
pub(crate) struct Turn {
    /// There is a limit.
    limited: bool,
    /// The queue takes no chain before; 0: it may take one.
    closed_until: Nanos,
}

impl Turn {
    /// Looks at the limits, before chains are taken. Returns whether a wait begins.
    #[inline]
    pub(crate) fn look(&mut self, limiter: &Limiter) -> bool {
        self.limited = limiter.is_set();
        if !self.limited {
            self.closed_until = 0;
            return false;
        }
        self.look_at_clock(limiter)
    }

    fn look_at_clock(&mut self, limiter: &Limiter) -> bool {
        let now = limiter.now();
        if now < self.closed_until {
            return false;
        }
        self.closed_until = limiter.closed_until(now).unwrap_or(0);
        self.closed_until > 0
    }

    /// Returns whether the queue may take a chain.
    #[inline]
    pub(crate) fn is_open(&self) -> bool {
        self.closed_until == 0
    }

    /// Charges a taken request. Returns whether a wait begins.
    #[inline]
    pub(crate) fn took(&mut self, limiter: &Limiter, bytes: u64) -> bool {
        self.limited && self.charge(limiter, bytes)
    }

    fn charge(&mut self, limiter: &Limiter, bytes: u64) -> bool {
        let now = limiter.now();
        limiter.charge(bytes, now);
        let others_first = |at: Nanos| at.saturating_add(QUANTUM.as_nanos() as u64);
        self.closed_until = limiter.closed_until(now).map_or(0, others_first);
        self.closed_until > 0
    }

    /// The rest of the wait; `None`: there is none.
    pub(crate) fn wait(&self, limiter: &Limiter) -> Option<Duration> {
        let left = || Duration::from_nanos(self.closed_until.saturating_sub(limiter.now()));
        (self.closed_until > 0).then(left)
    }

    /// Ends the wait: the limits have changed.
    pub(crate) fn reset(&mut self) {
        self.closed_until = 0;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Nanos = 1_000_000_000;

    fn bucket(rate: u64, burst: Duration) -> Bucket {
        let bucket = Bucket::default();
        bucket.set(NonZeroU64::new(rate), burst, SECOND);
        bucket
    }

    #[test]
    fn a_bucket_spaces_requests_by_their_cost() {
        let bucket = bucket(1000, Duration::ZERO);
        assert_eq!(bucket.opens_at(), SECOND);
        bucket.charge(1, SECOND);
        assert_eq!(bucket.opens_at(), SECOND + SECOND / 1000);
        // A request that came late gets no credit without a burst.
        bucket.charge(500, 2 * SECOND);
        assert_eq!(bucket.opens_at(), 2 * SECOND + SECOND / 2);
        bucket.charge(u64::MAX, 2 * SECOND);
        assert_eq!(bucket.opens_at(), u64::MAX);
    }

    #[test]
    fn an_idle_bucket_saves_up_the_burst_and_no_more() {
        let bucket = bucket(1000, Duration::from_millis(100));
        let now = 100 * SECOND;
        let free = (0..1000).take_while(|_| {
            bucket.charge(1, now);
            bucket.opens_at() <= now
        });
        assert_eq!(free.count(), 100);
    }

    #[test]
    fn a_disk_without_limits_never_closes() {
        let limiter = Limiter::new();
        let mut turn = Turn::default();
        for _ in 0..10 {
            assert!(!turn.look(&limiter) && turn.is_open());
            assert!(!turn.took(&limiter, u64::MAX) && turn.is_open());
        }
        assert_eq!(turn.wait(&limiter), None);
    }

    #[test]
    fn a_debt_closes_all_queues_and_a_new_limit_forgives_it() {
        let limiter = Limiter::new();
        let bytes = NonZeroU64::new(1000);
        let limits = Limits { bytes, ..Limits::NONE };
        limiter.set(&limits);
        let (mut one, mut other) = (Turn::default(), Turn::default());
        assert!(!one.look(&limiter) && one.is_open());
        assert!(one.took(&limiter, 60_000));
        assert!(other.look(&limiter) && !other.is_open());
        assert!(!other.look(&limiter), "one wait begins once");
        let (mine, its) = (one.wait(&limiter).unwrap(), other.wait(&limiter).unwrap());
        assert!(mine > its && its > Duration::from_secs(59), "{mine:?} {its:?}");
        limiter.set(&limits);
        one.reset();
        assert!(!one.look(&limiter) && one.is_open());
        assert!(one.took(&limiter, 60_000));
        limiter.set(&Limits::NONE);
        assert!(!one.look(&limiter) && one.is_open(), "it waits for a limit that is gone");
    }
}
