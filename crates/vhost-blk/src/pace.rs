// SPDX-License-Identifier: Apache-2.0
//! The pace of a copy whose bandwidth is limited.

use std::num::NonZeroU64;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Longest wait for the bandwidth before the next look at it: a client may have changed it.
pub(crate) const LOOK: Duration = Duration::from_millis(50);

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
    /// Bytes that were copied since `since`.
    bytes: u64,
    since: Instant,
}

impl Pace {
    /// A copy that begins now.
    pub(crate) fn new(bandwidth: Arc<Bandwidth>) -> Self {
        Pace { bandwidth, bytes: 0, since: Instant::now() }
    }

    /// Time that the copied bytes take with the present bandwidth.
    fn time(&self) -> Duration {
        let time =
            |rate: NonZeroU64| Duration::from_secs_f64(self.bytes as f64 / rate.get() as f64);
        self.bandwidth.get().map_or(Duration::ZERO, time)
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
        pace.copied(1 << 20);
        assert!(bandwidth.set(NonZeroU64::new(2000)) && !bandwidth.set(NonZeroU64::new(2000)));
        let expected = Duration::from_secs(523)..Duration::from_secs(525);
        assert!(expected.contains(&pace.wait()), "{:?}", pace.wait());
        assert!(bandwidth.set(None));
        assert_eq!((pace.wait(), bandwidth.get()), (Duration::ZERO, None));
    }
}
