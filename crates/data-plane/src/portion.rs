// SPDX-License-Identifier: Apache-2.0
//! The portion: requests that a queue hands to the storage at a time, and completions that the
//! thread shows to drivers at a time.
//!
//! Device, thread and driver work in parallel only while each of them has some of the requests in
//! flight. With large portions all requests go to and fro together: the device is idle while the
//! driver prepares the next requests, and the driver is idle while the device works. Small portions
//! cost system calls and calls of the driver. Device and host decide which of both is dearer, so a
//! trial decides: windows of time with the present and with another size take turns, and the rates
//! of finished requests are compared. The other size has to win clearly. Kicks and the parts of a
//! request do not count: a thread that sleeps more often gets more of them.

use crate::backoff::Backoff;
use std::time::{Duration, Instant};

/// Portion sizes, in requests.
const SIZES: [usize; 5] = [1, 4, 8, 16, 32];
/// Position of the first size of a thread.
const FIRST: usize = 1;
/// A thread with fewer requests in flight makes no trial: the sizes hardly differ.
const IN_FLIGHT_MIN: usize = 4;
/// Minimum duration of a window, and its minimum number of finished requests.
const WINDOW: Duration = Duration::from_millis(4);
const WINDOW_REQUESTS_MIN: u64 = 64;
/// A window that takes longer than this says nothing: the guest was idle meanwhile.
const WINDOW_MAX: Duration = Duration::from_millis(100);
/// Windows of a trial, half of them with each size.
const TRIAL_WINDOWS: u32 = 32;
/// Gain of the rate that a change of the size needs.
const GAIN: f64 = 1.03;
/// A candidate with less than this share of the present rate ends the trial early.
const HOPELESS: f64 = 0.9;
/// Windows of a trial that may end early: twice the order of [`Trial::uses_candidate`].
const EARLY_WINDOWS: u32 = 8;
/// Windows between two trials: minimum and maximum. The pause doubles after each trial without a
/// change.
const PAUSE_WINDOWS_MIN: u32 = 16;
const PAUSE_WINDOWS_MAX: u32 = 1024;
/// Turns with work between two readings of the clock.
const TURNS_PER_CLOCK: u32 = 16;

/// One thread's portion size, and the trials that choose it.
#[derive(Debug)]
pub(crate) struct Portion {
    /// The size is fixed by the operator.
    fixed: Option<usize>,
    /// Position of the present size in [`SIZES`].
    chosen: usize,
    trial: Option<Trial>,
    /// The next trial is of a smaller size.
    smaller_next: bool,
    /// The pause between two trials, in windows.
    pause: Backoff,
    window: Window,
}

/// The finished requests since the window began.
#[derive(Debug)]
struct Window {
    since: Instant,
    turns: u32,
    requests: u64,
    /// The most requests in flight after a turn.
    in_flight: usize,
}

impl Window {
    fn since(since: Instant) -> Self {
        Window { since, turns: 0, requests: 0, in_flight: 0 }
    }
}

/// Rates of the present size and of the candidate.
#[derive(Debug)]
struct Trial {
    candidate: usize,
    windows: u32,
    rates: [f64; 2],
}

impl Trial {
    /// Returns whether the present window uses the candidate. The order is ABBA, so that a steady
    /// change of the load affects both sizes alike.
    fn uses_candidate(&self) -> bool {
        matches!(self.windows % 4, 1 | 2)
    }

    /// Returns whether both sizes had enough windows. A trial of a poor size costs the guest its
    /// rate, so it ends early.
    fn is_over(&self) -> bool {
        let [present, other] = self.rates;
        let hopeless = self.windows.is_multiple_of(EARLY_WINDOWS) && other < present * HOPELESS;
        self.windows == TRIAL_WINDOWS || hopeless
    }
}

impl Portion {
    /// A portion that adapts, or has a `fixed` size.
    pub(crate) fn new(fixed: Option<usize>) -> Self {
        let mut pause = Backoff::new(PAUSE_WINDOWS_MIN, PAUSE_WINDOWS_MAX);
        pause.begin();
        Portion {
            fixed,
            chosen: FIRST,
            trial: None,
            smaller_next: false,
            pause,
            window: Window::since(Instant::now()),
        }
    }

    /// The size for the next turn.
    #[inline]
    pub(crate) fn size(&self) -> usize {
        match (self.fixed, &self.trial) {
            (Some(fixed), _) => fixed,
            (None, Some(trial)) if trial.uses_candidate() => SIZES[trial.candidate],
            (None, _) => SIZES[self.chosen],
        }
    }

    /// The size that is fixed, or that the last trial chose.
    pub(crate) fn chosen(&self) -> usize {
        self.fixed.unwrap_or(SIZES[self.chosen])
    }

    /// Records the operations that a turn handed to the storage, the requests that it showed to drivers,
    /// and those that the storage had between the two. Without any, the size makes no difference.
    #[inline]
    pub(crate) fn turned(&mut self, submitted: usize, finished: u64, in_flight: usize) {
        if in_flight == 0 || submitted as u64 + finished == 0 || self.fixed.is_some() {
            return;
        }
        let window = &mut self.window;
        window.turns += 1;
        window.requests += finished;
        window.in_flight = window.in_flight.max(in_flight);
        if window.turns.is_multiple_of(TURNS_PER_CLOCK) {
            self.look(Instant::now());
        }
    }

    #[cold]
    fn look(&mut self, now: Instant) {
        let elapsed = now - self.window.since;
        if elapsed < WINDOW || (self.window.requests < WINDOW_REQUESTS_MIN && elapsed < WINDOW_MAX)
        {
            return;
        }
        let rate = self.window.requests as f64 / elapsed.as_secs_f64();
        let says_something = elapsed < WINDOW_MAX && self.window.in_flight >= IN_FLIGHT_MIN;
        self.window = Window::since(now);
        if says_something {
            self.measured(rate);
        } else {
            self.trial = None;
        }
    }

    /// Records the rate of a window.
    fn measured(&mut self, rate: f64) {
        let Some(trial) = &mut self.trial else {
            if !self.pause.pass() {
                self.begin_trial();
            }
            return;
        };
        trial.rates[usize::from(trial.uses_candidate())] += rate;
        trial.windows += 1;
        if trial.is_over() {
            self.end_trial();
        }
    }

    fn begin_trial(&mut self) {
        let at_end = if self.smaller_next { 0 } else { SIZES.len() - 1 };
        self.smaller_next ^= self.chosen == at_end;
        let candidate = if self.smaller_next { self.chosen - 1 } else { self.chosen + 1 };
        self.trial = Some(Trial { candidate, windows: 0, rates: [0.0; 2] });
    }

    fn end_trial(&mut self) {
        let Some(Trial { candidate, rates: [present, other], .. }) = self.trial.take() else {
            return;
        };
        if other > present * GAIN {
            tracing::debug!(from = SIZES[self.chosen], to = SIZES[candidate], "portion size");
            self.chosen = candidate;
            self.pause.reset();
        } else {
            self.smaller_next = !self.smaller_next;
        }
        self.pause.begin();
    }
}

#[cfg(test)]
impl Portion {
    /// Turns of the present window.
    pub(crate) fn turns(&self) -> u32 {
        self.window.turns
    }

    /// Finished requests of the present window.
    pub(crate) fn finished(&self) -> u64 {
        self.window.requests
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Runs windows in which each size has its rate; returns the size chosen at the end.
    fn settled(portion: &mut Portion, windows: u32, rate: impl Fn(usize) -> f64) -> usize {
        for number in 0..windows {
            // A load that changes by a tenth from window to window.
            let load = if number % 3 == 0 { 0.9 } else { 1.0 };
            let rate = load * rate(portion.size());
            portion.measured(rate);
        }
        SIZES[portion.chosen]
    }

    #[test]
    fn where_calls_are_dear_the_portion_grows() {
        let mut portion = Portion::new(None);
        assert_eq!(settled(&mut portion, 2000, |size| size as f64), 32);
    }

    #[test]
    fn where_the_device_waits_for_the_driver_the_portion_shrinks() {
        let mut portion = Portion::new(None);
        portion.chosen = SIZES.len() - 1;
        assert_eq!(settled(&mut portion, 4000, |size| 1.0 / size as f64), 1);
    }

    #[test]
    fn the_best_size_in_the_middle_is_found_and_kept() {
        let best_at_8 = |size: usize| if size == 8 { 1.0 } else { 0.8 };
        let mut portion = Portion::new(None);
        assert_eq!(settled(&mut portion, 2000, best_at_8), 8);
        assert_eq!(settled(&mut portion, 2000, best_at_8), 8);
    }

    #[test]
    fn a_load_that_changes_is_followed() {
        let mut portion = Portion::new(None);
        assert_eq!(settled(&mut portion, 2000, |size| size as f64), 32);
        assert_eq!(settled(&mut portion, 9000, |size| 1.0 / size as f64), 1);
    }

    #[test]
    fn trials_become_rare_while_nothing_changes() {
        let mut portion = Portion::new(None);
        let in_trial = (0..10_000)
            .filter(|_| {
                portion.measured(if portion.size() == SIZES[FIRST] { 2.0 } else { 1.0 });
                portion.trial.is_some()
            })
            .count();
        assert!(in_trial < 1000, "{in_trial} of 10000 windows");
    }

    #[test]
    fn a_trial_of_a_poor_size_is_short() {
        let in_trial = |poor: f64| {
            let mut portion = Portion::new(None);
            (0..1000)
                .filter(|_| {
                    let rate = if portion.size() == SIZES[FIRST] { 1.0 } else { poor };
                    portion.measured(rate);
                    portion.trial.is_some()
                })
                .count()
        };
        assert_eq!(in_trial(0.95), 4 * in_trial(0.8));
    }

    #[test]
    fn a_window_of_a_shallow_queue_or_an_idle_guest_starts_no_trial() {
        let mut portion = Portion::new(None);
        let mut now = Instant::now();
        for pause in [WINDOW, WINDOW_MAX] {
            for _ in 0..100 {
                now += pause;
                portion.window.requests = WINDOW_REQUESTS_MIN;
                portion.window.in_flight = if pause == WINDOW { 1 } else { 32 };
                portion.look(now);
            }
        }
        assert!(portion.trial.is_none());
        assert_eq!(portion.pause, Portion::new(None).pause);
    }

    #[test]
    fn a_thread_that_hands_out_one_request_at_a_time_still_makes_trials() {
        let mut portion = Portion::new(None);
        portion.chosen = 0;
        let mut now = Instant::now();
        for _ in 0..2000 {
            now += WINDOW;
            portion.turned(1, 1, IN_FLIGHT_MIN);
            portion.window.requests = WINDOW_REQUESTS_MIN * portion.size() as u64;
            portion.look(now);
        }
        assert_eq!(portion.size(), 32);
    }

    #[test]
    fn a_fixed_size_stays() {
        let mut portion = Portion::new(Some(7));
        (0..10_000).for_each(|_| portion.turned(7, 7, 7));
        assert_eq!(portion.size(), 7);
    }
}
