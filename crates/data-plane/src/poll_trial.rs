// SPDX-License-Identifier: Apache-2.0
//! The trial of the `IOPOLL` ring: do polled transfers finish faster than those with interrupts?
//!
//! Polling costs a thread that never sleeps while I/O is in flight, so it has to win. Windows of time
//! with the two rings take turns, and the rates of transfers decide. A thread tries for all its disks
//! with poll queues, because they share its rings and its time.

use crate::backoff::Backoff;
use std::time::{Duration, Instant};

/// Minimum duration of a window, and its minimum number of transfers.
const WINDOW: Duration = Duration::from_millis(4);
const WINDOW_TRANSFERS_MIN: u32 = 64;
/// A window that takes longer than this says nothing: the guest was idle meanwhile.
const WINDOW_MAX: Duration = Duration::from_millis(100);
/// Windows of a trial, half of them polled.
const TRIAL_WINDOWS: u32 = 32;
/// Gain of the rate that polling needs.
const GAIN: f64 = 1.03;
/// Windows between two trials: minimum and maximum. The pause doubles after each trial without a
/// change.
const PAUSE_WINDOWS_MIN: u32 = 16;
const PAUSE_WINDOWS_MAX: u32 = 1024;
/// Transfers between two readings of the clock.
const TRANSFERS_PER_CLOCK: u32 = 16;

/// The choice of one thread's ring for reads and writes of devices with poll queues.
#[derive(Debug)]
pub(crate) struct PollTrial {
    /// Transfers are polled, as the last trial decided.
    chosen: bool,
    /// Windows of the present trial, and the rates with interrupts and polled.
    trial: Option<(u32, [f64; 2])>,
    /// The pause between two trials, in windows.
    pause: Backoff,
    since: Instant,
    transfers: u32,
}

impl PollTrial {
    /// Begins with polled transfers.
    pub(crate) fn new() -> Self {
        let mut pause = Backoff::new(PAUSE_WINDOWS_MIN, PAUSE_WINDOWS_MAX);
        pause.begin();
        PollTrial { chosen: true, trial: None, pause, since: Instant::now(), transfers: 0 }
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

    /// Returns whether transfers of the present window are polled. The order is ABBA, so that a
    /// steady change of the load affects both alike.
    #[inline]
    fn polls(&self) -> bool {
        let differs = self.trial.is_some_and(|(windows, _)| matches!(windows % 4, 1 | 2));
        self.chosen != differs
    }

    #[cold]
    fn look(&mut self, now: Instant) {
        let elapsed = now - self.since;
        if elapsed < WINDOW || (self.transfers < WINDOW_TRANSFERS_MIN && elapsed < WINDOW_MAX) {
            return;
        }
        let rate = f64::from(self.transfers) / elapsed.as_secs_f64();
        (self.since, self.transfers) = (now, 0);
        if elapsed < WINDOW_MAX {
            self.measured(rate);
        } else {
            self.trial = None;
        }
    }

    /// Records the rate of a window.
    fn measured(&mut self, rate: f64) {
        let polls = self.polls();
        let Some((windows, rates)) = &mut self.trial else {
            if !self.pause.pass() {
                self.trial = Some((0, [0.0; 2]));
            }
            return;
        };
        rates[usize::from(polls)] += rate;
        *windows += 1;
        if *windows == TRIAL_WINDOWS {
            let [interrupts, polled] = *rates;
            self.end_trial(polled > interrupts * GAIN);
        }
    }

    fn end_trial(&mut self, pays: bool) {
        self.trial = None;
        if pays != self.chosen {
            tracing::debug!(polled = pays, "transfers of devices with poll queues");
            self.chosen = pays;
            self.pause.reset();
        }
        self.pause.begin();
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
    fn polling_ends_where_it_gains_nothing() {
        let mut trial = PollTrial::new();
        assert!(polled(&mut trial, 4000, [1.0, 1.0]) < 300);
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
            trial.transfers = WINDOW_TRANSFERS_MIN;
            trial.look(now);
        }
        assert!(trial.trial.is_none());
        assert_eq!(trial.pause, PollTrial::new().pause);
    }

    #[test]
    fn a_window_has_its_time_and_its_transfers() {
        let mut trial = PollTrial::new();
        let before = trial.since;
        for _ in 0..WINDOW_TRANSFERS_MIN {
            assert!(trial.polls_next());
        }
        trial.look(before + WINDOW / 2);
        assert_eq!((trial.since, trial.transfers), (before, WINDOW_TRANSFERS_MIN));
        trial.look(before + WINDOW);
        assert_eq!((trial.since, trial.transfers), (before + WINDOW, 0));
    }
}
