// SPDX-License-Identifier: Apache-2.0
//! Finds requests that are in flight for too long.
//!
//! A queue has one time of the next check and no timer for a request. A check finds the oldest
//! request in flight; the next one is due when that request can be too old at the earliest. So a
//! queue is checked once for each time limit, whatever its load.

use crate::latency::Nanos;
use std::time::Duration;

/// Interval of the checks of a queue that is stalled.
const RECHECK_MAX: Duration = Duration::from_secs(1);

/// The watch of one queue.
#[derive(Debug)]
pub(crate) struct StallWatch {
    /// `None`: the watch is off.
    limit: Option<Nanos>,
    check_at: Nanos,
    stalled: bool,
}

/// A change that a check has found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum StallChange {
    /// The oldest request is in flight for this time.
    Began(Duration),
    Ended,
}

impl StallWatch {
    pub(crate) fn new(limit: Option<Duration>) -> Self {
        let nanos = |limit: Duration| u64::try_from(limit.as_nanos()).unwrap_or(u64::MAX);
        StallWatch { limit: limit.map(nanos), check_at: 0, stalled: false }
    }

    #[inline]
    pub(crate) fn is_on(&self) -> bool {
        self.limit.is_some()
    }

    /// Returns whether the last check has found a stall.
    pub(crate) fn is_stalled(&self) -> bool {
        self.stalled
    }

    /// Returns whether a check is due.
    pub(crate) fn is_due(&self, now: Nanos) -> bool {
        self.is_on() && now >= self.check_at
    }

    /// Time until the next check.
    pub(crate) fn due_in(&self, now: Nanos) -> Option<Duration> {
        self.limit.map(|_| Duration::from_nanos(self.check_at.saturating_sub(now)))
    }

    /// Checks the queue. `oldest` is the time at which its oldest request in flight was taken.
    pub(crate) fn check(&mut self, oldest: Option<Nanos>, now: Nanos) -> Option<StallChange> {
        let limit = self.limit?;
        let age = oldest.map(|oldest| now.saturating_sub(oldest));
        let exceeds = age.is_some_and(|age| age >= limit);
        self.check_at = match (exceeds, oldest) {
            (true, _) => now.saturating_add(limit.min(RECHECK_MAX.as_nanos() as u64)),
            (false, oldest) => oldest.unwrap_or(now).saturating_add(limit),
        };
        let changed = exceeds != std::mem::replace(&mut self.stalled, exceeds);
        changed.then_some(match age.filter(|_| exceeds) {
            Some(age) => StallChange::Began(Duration::from_nanos(age)),
            None => StallChange::Ended,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Nanos = 1_000_000_000;

    fn watch() -> StallWatch {
        StallWatch::new(Some(Duration::from_secs(10)))
    }

    #[test]
    fn a_stall_is_found_once_at_its_deadline_and_its_end_soon_after() {
        let mut watch = watch();
        assert_eq!(watch.check(Some(2 * SECOND), 5 * SECOND), None);
        assert!(!watch.is_due(12 * SECOND - 1) && watch.is_due(12 * SECOND));
        let began = Some(StallChange::Began(Duration::from_secs(10)));
        assert_eq!(watch.check(Some(2 * SECOND), 12 * SECOND), began);
        assert_eq!(watch.due_in(12 * SECOND), Some(Duration::from_secs(1)));
        assert_eq!(watch.check(Some(2 * SECOND), 13 * SECOND), None, "it is told once");
        assert_eq!(watch.check(Some(13 * SECOND), 14 * SECOND), Some(StallChange::Ended));
        assert_eq!(watch.check(None, 24 * SECOND), None);
    }

    #[test]
    fn a_busy_queue_is_checked_once_for_each_time_limit() {
        let mut watch = watch();
        let turns = (0..100 * SECOND).step_by(SECOND as usize / 10);
        let checks = turns.filter(|&now| {
            // Each request takes 100 ms.
            let due = watch.is_due(now);
            due && watch.check(Some(now.saturating_sub(SECOND / 10)), now).is_none()
        });
        assert!(checks.count() <= 11);
    }

    #[test]
    fn without_a_limit_nothing_is_due() {
        let mut off = StallWatch::new(None);
        assert!(!off.is_due(u64::MAX) && off.due_in(0).is_none());
        assert_eq!(off.check(Some(0), u64::MAX), None);
    }
}
