// SPDX-License-Identifier: Apache-2.0
//! The trial of the `IOPOLL` ring, which compares polled transfers with those that end by an interrupt.
//!
//! Polling costs a thread that never sleeps while I/O is in flight, so it has to win. Windows of time
//! with the two rings take turns, and the rates of transfers decide. A thread tries for all its disks
//! with poll queues, because they share its rings and its time. Few transfers are not polled: the thread would wait for
//! most of the time without a sleep.

use crate::trial::{GAIN, Proof, Step, Trial, WINDOW, WINDOW_MAX, WINDOW_REQUESTS_MIN};
use std::time::Instant;

/// Transfers between two readings of the clock.
const TRANSFERS_PER_CLOCK: u64 = 16;

/// The choice of one thread's ring for reads and writes of devices with poll queues.
#[derive(Debug)]
pub(crate) struct PollTrial {
    /// Transfers are polled, as the last trial decided.
    chosen: bool,
    /// The last window had few transfers.
    is_slow: bool,
    trial: Trial,
    since: Instant,
    transfers: u64,
}

impl PollTrial {
    /// Begins with polled transfers.
    pub(crate) fn new() -> Self {
        PollTrial {
            chosen: true,
            is_slow: false,
            trial: Trial::new(Proof::Sure),
            since: Instant::now(),
            transfers: 0,
        }
    }

    /// Counts a transfer. Returns whether it is to be polled.
    #[inline]
    pub(crate) fn polls_next(&mut self) -> bool {
        self.transfers += 1;
        if self.transfers.is_multiple_of(TRANSFERS_PER_CLOCK) {
            self.look(Instant::now());
        }
        self.polls()
    }

    /// Returns whether transfers of the present window are polled.
    #[inline]
    fn polls(&self) -> bool {
        !self.is_slow && self.chosen != self.trial.tries_other()
    }

    #[cold]
    fn look(&mut self, now: Instant) {
        let elapsed = now - self.since;
        if elapsed < WINDOW || (self.transfers < WINDOW_REQUESTS_MIN && elapsed < WINDOW_MAX) {
            return;
        }
        let rate = self.transfers as f64 / elapsed.as_secs_f64();
        (self.since, self.transfers) = (now, 0);
        let was_slow = std::mem::replace(&mut self.is_slow, elapsed >= WINDOW_MAX);
        if self.is_slow {
            self.trial.abandon();
        } else if !was_slow {
            self.measured(rate);
        }
    }

    /// Records the rate of a window.
    fn measured(&mut self, rate: f64) {
        // Interrupts may lose what polling has to gain.
        let wanted = if self.chosen { -GAIN } else { GAIN };
        if self.trial.record_window(rate, wanted) == (Step::Ended { changes: true }) {
            self.chosen = !self.chosen;
            tracing::debug!(polled = self.chosen, "transfers of devices with poll queues");
        }
    }
}

#[cfg(test)]
impl PollTrial {
    /// A thread whose last trial decided.
    pub(crate) fn decided(polls: bool) -> Self {
        PollTrial { chosen: polls, ..PollTrial::new() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Runs windows with the rates of interrupts and of polling. Returns how many were polled.
    fn polled(trial: &mut PollTrial, windows: u32, rates: [f64; 2]) -> u32 {
        let mut polled = 0;
        for number in 0..windows {
            // A load that changes by a tenth from window to window.
            let load = if number % 3 == 0 { 0.9 } else { 1.0 };
            let polls = trial.polls();
            polled += u32::from(polls);
            trial.measured(load * rates[usize::from(polls)]);
        }
        polled
    }

    #[test]
    fn polling_stays_where_it_is_faster() {
        let mut trial = PollTrial::new();
        assert!(polled(&mut trial, 4000, [1.0, 1.3]) > 3700);
        assert!(trial.chosen);
    }

    #[test]
    fn few_transfers_are_not_polled_until_a_window_has_more() {
        let mut trial = PollTrial::new();
        let mut now = trial.since;
        let mut window = |time, transfers| {
            now += time;
            trial.transfers = transfers;
            trial.look(now);
            trial.polls()
        };
        assert_eq!([(); 3].map(|()| window(WINDOW_MAX, WINDOW_REQUESTS_MIN - 1)), [false; 3]);
        assert!(window(WINDOW, WINDOW_REQUESTS_MIN));
    }

    #[test]
    fn polling_ends_where_it_gains_nothing() {
        let mut trial = PollTrial::new();
        polled(&mut trial, 4000, [1.0, 1.0]);
        assert!(!trial.chosen);
        // Trials become rare.
        let polled = polled(&mut trial, 4000, [1.0, 1.0]);
        assert!(polled < 200, "{polled} of 4000 windows");
        assert!(!trial.chosen);
    }

    #[test]
    fn a_device_that_changes_is_followed() {
        let mut trial = PollTrial::new();
        polled(&mut trial, 4000, [1.0, 0.6]);
        assert!(!trial.chosen);
        polled(&mut trial, 4000, [1.0, 1.6]);
        assert!(trial.chosen);
    }

    #[test]
    fn an_idle_guest_makes_no_trial() {
        let mut trial = PollTrial::new();
        let mut now = trial.since;
        for _ in 0..200 {
            now += WINDOW_MAX;
            trial.transfers = WINDOW_REQUESTS_MIN;
            trial.look(now);
        }
        assert!(!trial.trial.is_running());
        assert_eq!(trial.trial.pause(), PollTrial::new().trial.pause());
    }

    #[test]
    fn a_window_has_its_time_and_its_transfers() {
        let mut trial = PollTrial::new();
        let before = trial.since;
        for _ in 0..WINDOW_REQUESTS_MIN {
            assert!(trial.polls_next());
        }
        trial.look(before + WINDOW / 2);
        assert_eq!((trial.since, trial.transfers), (before, WINDOW_REQUESTS_MIN));
        trial.look(before + WINDOW);
        assert_eq!((trial.since, trial.transfers), (before + WINDOW, 0));
    }
}
