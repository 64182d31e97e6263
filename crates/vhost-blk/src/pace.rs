// SPDX-License-Identifier: Apache-2.0
//! The pace of a copy whose bandwidth is limited.

use std::num::NonZeroU64;
use std::time::{Duration, Instant};

/// The time at which a copy may go on.
#[derive(Debug)]
pub(crate) struct Pace {
    /// Bytes per second.
    bandwidth: Option<NonZeroU64>,
    due: Instant,
}

impl Pace {
    /// A copy that begins now, of so many bytes per second.
    pub(crate) fn new(bandwidth: Option<NonZeroU64>) -> Self {
        Pace { bandwidth, due: Instant::now() }
    }

    /// The time at which the next bytes are due.
    pub(crate) fn due(&self) -> Instant {
        self.due
    }

    /// The time until then.
    pub(crate) fn wait(&self) -> Duration {
        self.due.saturating_duration_since(Instant::now())
    }

    /// Records that so many bytes were copied. Time that the copy lost before is not made up for.
    pub(crate) fn copied(&mut self, bytes: u64) {
        if let Some(rate) = self.bandwidth {
            let time = Duration::from_secs_f64(bytes as f64 / rate.get() as f64);
            self.due = self.due.max(Instant::now()) + time;
        }
    }

    /// Bytes to copy at once: a tenth of a second of the bandwidth.
    pub(crate) fn piece(&self) -> u64 {
        self.bandwidth.map_or(u64::MAX, |rate| rate.get() / 10)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_take_their_time_and_without_a_limit_none() {
        let mut pace = Pace::new(None);
        pace.copied(1 << 40);
        assert_eq!(pace.wait(), Duration::ZERO);
        assert_eq!(pace.piece(), u64::MAX);
        let mut pace = Pace::new(NonZeroU64::new(1000));
        pace.copied(60_000);
        pace.copied(60_000);
        assert!(pace.wait() > Duration::from_secs(119), "{:?}", pace.wait());
        assert_eq!(pace.piece(), 100);
    }
}
