// SPDX-License-Identifier: Apache-2.0
//! The pace of a copy whose bandwidth is limited.

use std::num::NonZeroU64;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Longest wait for the bandwidth before the next look at it: a client may have changed it.
pub(crate) const LOOK: Duration = Duration::from_millis(50);

/// Least bytes that are copied at once.
pub(crate) const PIECE_MIN: u64 = 64 << 10;

/// The bandwidth of a copy, which a client can change while the copy runs.
#[derive(Debug, Default)]
pub struct Bandwidth(
    /// Bytes per second; 0: no limit. It orders nothing.
    AtomicU64,
);

impl Bandwidth {
    /// A bandwidth in bytes per second; `None`: no limit.
    pub fn new(bandwidth: Option<NonZeroU64>) -> Self {
        Bandwidth(AtomicU64::new(bandwidth.map_or(0, NonZeroU64::get)))
    }

    /// Bytes per second.
    pub fn get(&self) -> Option<NonZeroU64> {
        NonZeroU64::new(self.0.load(Ordering::Relaxed))
    }

    /// Changes the bandwidth. Returns whether it was another one.
    pub(crate) fn set(&self, bandwidth: Option<NonZeroU64>) -> bool {
        let bandwidth = bandwidth.map_or(0, NonZeroU64::get);
        self.0.swap(bandwidth, Ordering::Relaxed) != bandwidth
    }
}

/// The time at which a copy may go on.
#[derive(Debug)]
pub(crate) struct Pace {
    bandwidth: Arc<Bandwidth>,
    /// The bandwidth when bytes were copied last.
    copied_at: Option<NonZeroU64>,
    /// Bytes that were copied since `since`.
    bytes: u64,
    since: Instant,
}

impl Pace {
    /// A copy that begins now.
    pub(crate) fn new(bandwidth: Arc<Bandwidth>) -> Self {
        Pace { copied_at: bandwidth.get(), bandwidth, bytes: 0, since: Instant::now() }
    }

    /// Time that the copied bytes take with the present bandwidth: after a change, at most that of one piece.
    fn time(&self) -> Duration {
        let Some(rate) = self.bandwidth.get() else { return Duration::ZERO };
        let has_changed = self.copied_at != Some(rate);
        let most = if has_changed { PIECE_MIN.max(rate.get() / 10) } else { u64::MAX };
        Duration::from_secs_f64(self.bytes.min(most) as f64 / rate.get() as f64)
    }

    /// The time until the next bytes are due.
    pub(crate) fn wait(&self) -> Duration {
        self.time().saturating_sub(self.since.elapsed())
    }

    /// Records that so many bytes were copied. Time that the copy lost before is not made up for.
    pub(crate) fn copied(&mut self, bytes: u64) {
        if self.wait().is_zero() {
            (self.bytes, self.since) = (0, Instant::now());
        }
        self.bytes += bytes;
        self.copied_at = self.bandwidth.get();
    }

    /// Bytes to copy at once: a tenth of a second of the bandwidth.
    pub(crate) fn piece(&self) -> u64 {
        self.bandwidth.get().map_or(u64::MAX, |rate| rate.get() / 10)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_take_their_time_and_without_a_limit_none() {
        let mut pace = Pace::new(Arc::default());
        pace.copied(1 << 40);
        assert_eq!(pace.wait(), Duration::ZERO);
        assert_eq!(pace.piece(), u64::MAX);
        let mut pace = Pace::new(Arc::new(Bandwidth::new(NonZeroU64::new(1000))));
        pace.copied(60_000);
        pace.copied(60_000);
        assert!(pace.wait() > Duration::from_secs(119), "{:?}", pace.wait());
        assert_eq!(pace.piece(), 100);
    }

    #[test]
    fn a_new_bandwidth_holds_for_bytes_that_are_waited_for() {
        let bandwidth = Arc::new(Bandwidth::new(NonZeroU64::new(1000)));
        let mut pace = Pace::new(Arc::clone(&bandwidth));
        pace.copied(PIECE_MIN);
        assert!(bandwidth.set(NonZeroU64::new(500)) && !bandwidth.set(NonZeroU64::new(500)));
        assert!(pace.wait() > Duration::from_secs(100), "{:?}", pace.wait());
        // A large piece of before does not hold the copy up for longer than a small one.
        pace.copied(1 << 30);
        assert!(bandwidth.set(NonZeroU64::new(1000)));
        assert!(pace.wait() < Duration::from_secs(66), "{:?}", pace.wait());
        assert!(bandwidth.set(None));
        assert_eq!((pace.wait(), bandwidth.get()), (Duration::ZERO, None));
    }
}
