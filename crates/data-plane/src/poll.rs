// SPDX-License-Identifier: Apache-2.0
//! Adaptive polling: how long an idle thread looks at its rings before it sleeps.
//!
//! The window grows while sleeps turn out short enough to have been polled away, and shrinks to
//! nothing when they do not, so that an idle queue costs nothing.

use std::time::{Duration, Instant};

/// The first window after nothing.
const WINDOW_MIN: Duration = Duration::from_micros(4);
/// Looks at the rings between two looks at the clock.
const LOOKS_PER_CLOCK: u32 = 16;

/// One thread's polling state.
#[derive(Debug)]
pub(crate) struct AdaptivePoll {
    max: Duration,
    window: Duration,
    idle_since: Option<Instant>,
    looks: u32,
}

impl AdaptivePoll {
    pub(crate) fn new(max: Duration) -> Self {
        AdaptivePoll { max, window: Duration::ZERO, idle_since: None, looks: 0 }
    }

    /// There was work: the next idle time starts anew.
    #[inline]
    pub(crate) fn worked(&mut self) {
        self.idle_since = None;
    }

    /// There was no work: whether to look again rather than sleep.
    #[inline]
    pub(crate) fn look_again(&mut self) -> bool {
        if self.window.is_zero() {
            return false;
        }
        self.looks += 1;
        if !self.looks.is_multiple_of(LOOKS_PER_CLOCK) {
            return true;
        }
        let since = *self.idle_since.get_or_insert_with(Instant::now);
        since.elapsed() < self.window
    }

    /// A sleep lasted `slept`: adapts the window.
    pub(crate) fn slept(&mut self, slept: Duration) {
        self.idle_since = None;
        let worth_polling = slept <= self.max;
        self.window = if worth_polling {
            (self.window * 2).clamp(WINDOW_MIN.min(self.max), self.max)
        } else {
            let half = self.window / 2;
            if half < WINDOW_MIN { Duration::ZERO } else { half }
        };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MAX: Duration = Duration::from_micros(64);

    #[test]
    fn short_sleeps_grow_the_window_up_to_its_bound() {
        let mut poll = AdaptivePoll::new(MAX);
        for _ in 0..20 {
            poll.slept(Duration::from_micros(10));
        }
        assert_eq!(poll.window, MAX);
    }

    #[test]
    fn long_sleeps_shrink_the_window_to_nothing() {
        let mut poll = AdaptivePoll { window: MAX, ..AdaptivePoll::new(MAX) };
        for _ in 0..6 {
            poll.slept(Duration::from_millis(10));
        }
        assert_eq!(poll.window, Duration::ZERO);
        assert!(!poll.look_again());
    }

    #[test]
    fn a_bound_of_zero_never_polls() {
        let mut poll = AdaptivePoll::new(Duration::ZERO);
        poll.slept(Duration::ZERO);
        assert!(!poll.look_again());
    }
}
