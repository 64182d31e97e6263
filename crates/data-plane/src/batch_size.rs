// SPDX-License-Identifier: Apache-2.0
//! The batch size: requests that a queue hands to the storage at a time, and completions that the
//! thread shows to drivers at a time.
//!
//! Device, thread and driver work in parallel only while each of them has some of the requests in
//! flight. With large batches all requests go to and fro together: the device is idle while the
//! driver prepares the next requests, and the driver is idle while the device works. Small batches
//! cost system calls and calls of the driver. Device and host decide which of both is dearer, so a
//! trial decides: windows of time with the present and with another size take turns, and the rates
//! of finished requests are compared. The other size has to win by more than chance ([`crate::gain`]).
//! A trial compares neighbouring sizes and takes long. So a thread begins with a survey: three windows of each size, in
//! which a size that is far better than the first one wins.
//!
//! Only a deep queue begins a survey or a trial: with few requests the sizes hardly differ. Later windows count
//! whatever they show, because the tried size itself bounds the requests of a turn.
//! Kicks and the parts of a request do not count: a thread that sleeps more often gets more of them.

use crate::trial::{GAIN, Proof, Step, Trial, WINDOW, WINDOW_MAX, WINDOW_REQUESTS_MIN};
use std::time::Instant;

/// Batch sizes, in requests.
const SIZES: [usize; 5] = [1, 4, 8, 16, 32];
/// Position of the first size of a thread.
const FIRST: usize = 1;
/// Positions of the sizes in the order of the survey, and its windows.
const SURVEY_ORDER: [usize; SIZES.len()] = [FIRST, 2, 3, 4, 0];
const SURVEY_WINDOWS: usize = 3 * SIZES.len();
/// The rate that all windows of a size need in the survey to win, over the best window of the first size.
const SURVEY_GAIN: f64 = 1.15;
/// Requests in flight that make a queue a deep one.
const IN_FLIGHT_MIN: usize = 4;
/// Turns with work between two readings of the clock.
const TURNS_PER_CLOCK: u32 = 16;

/// One thread's batch size, and the trials that choose it.
#[derive(Debug)]
pub(crate) struct BatchSize {
    /// The size is fixed by the operator.
    fixed: Option<usize>,
    /// Position of the present size in [`SIZES`].
    chosen: usize,
    /// Position of the other size of the present trial.
    candidate: usize,
    /// The next trial is of a smaller size.
    smaller_next: bool,
    /// The survey, until it is complete.
    survey: Option<Survey>,
    trial: Trial,
    window: Window,
}

/// One window of each size, one of each in the reverse order, and one of each in the first order, so that a steady
/// change of the load makes no size win.
#[derive(Debug)]
struct Survey {
    windows: usize,
    /// The lowest and the highest rate of each size.
    rates: [(f64, f64); SIZES.len()],
}

impl Survey {
    fn new() -> Self {
        Survey { windows: 0, rates: [(f64::INFINITY, 0.0); SIZES.len()] }
    }

    /// Position of the size of the present window.
    fn position(&self) -> usize {
        let at = self.windows % SIZES.len();
        match self.windows / SIZES.len() {
            1 => SURVEY_ORDER[SIZES.len() - 1 - at],
            _ => SURVEY_ORDER[at],
        }
    }

    /// Counts a window with its rate. Returns the position of the size that wins after the last one.
    fn record_window(&mut self, rate: f64) -> Option<usize> {
        let (low, high) = &mut self.rates[self.position()];
        (*low, *high) = (low.min(rate), high.max(rate));
        self.windows += 1;
        if self.windows < SURVEY_WINDOWS {
            return None;
        }
        let wanted = SURVEY_GAIN * self.rates[FIRST].1;
        let low = |position: &usize| self.rates[*position].0;
        let far_better = (0..SIZES.len()).filter(|position| low(position) >= wanted);
        Some(far_better.max_by(|one, other| low(one).total_cmp(&low(other))).unwrap_or(FIRST))
    }
}

/// The finished requests since the window began.
#[derive(Debug)]
struct Window {
    since: Instant,
    turns: u32,
    requests: u64,
    /// A turn found a deep queue.
    is_deep: bool,
}

impl Window {
    fn since(since: Instant) -> Self {
        Window { since, turns: 0, requests: 0, is_deep: false }
    }
}

impl BatchSize {
    /// A size that adapts, or is `fixed`.
    pub(crate) fn new(fixed: Option<usize>) -> Self {
        BatchSize {
            fixed,
            chosen: FIRST,
            candidate: FIRST,
            smaller_next: true,
            survey: Some(Survey::new()),
            trial: Trial::new(Proof::Sure),
            window: Window::since(Instant::now()),
        }
    }

    /// The size for the next turn.
    #[inline]
    pub(crate) fn size(&self) -> usize {
        match (self.fixed, &self.survey) {
            (Some(fixed), _) => fixed,
            (None, Some(survey)) => SIZES[survey.position()],
            (None, None) if self.trial.tries_other() => SIZES[self.candidate],
            (None, None) => SIZES[self.chosen],
        }
    }

    /// The size that is fixed, or that the survey or the last trial chose.
    pub(crate) fn chosen(&self) -> usize {
        self.fixed.unwrap_or(SIZES[self.chosen])
    }

    /// Returns whether only the rings show a deep queue: the size is so small that the storage never has enough
    /// requests, and no turn of this window has left a chain in its ring.
    #[inline]
    pub(crate) fn wants_depth(&self) -> bool {
        self.fixed.is_none() && !self.window.is_deep && self.size() < IN_FLIGHT_MIN
    }

    /// Records that a turn left a chain in its ring because of the size.
    #[inline]
    pub(crate) fn left_chain(&mut self) {
        self.window.is_deep = true;
    }

    /// Records the operations that a turn handed to the storage, the requests that it showed to drivers, and the most
    /// that one of their queues had just before (`depth`). `in_storage`: the requests of the thread that the storage had
    /// between the two; without any, the size makes no difference.
    #[inline]
    pub(crate) fn record_turn(
        &mut self,
        submitted: usize,
        (finished, depth): (u64, u64),
        in_storage: usize,
    ) {
        if in_storage == 0 || submitted as u64 + finished == 0 || self.fixed.is_some() {
            return;
        }
        let window = &mut self.window;
        window.turns += 1;
        window.requests += finished;
        window.is_deep |= depth >= IN_FLIGHT_MIN as u64;
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
        let is_deep = self.window.is_deep;
        self.window = Window::since(now);
        if elapsed >= WINDOW_MAX {
            self.trial.abandon();
        } else if is_deep || self.has_begun() {
            self.measured(rate);
        }
    }

    /// A survey or a trial is running.
    fn has_begun(&self) -> bool {
        self.survey.as_ref().map_or(self.trial.is_running(), |survey| survey.windows > 0)
    }

    /// Records the rate of a window.
    fn measured(&mut self, rate: f64) {
        if let Some(survey) = &mut self.survey {
            if let Some(best) = survey.record_window(rate) {
                tracing::debug!(size = SIZES[best], "batch size of the survey");
                (self.chosen, self.survey) = (best, None);
            }
            return;
        }
        match self.trial.record_window(rate, GAIN) {
            Step::Pause | Step::GoesOn => {}
            Step::Begins => self.choose_candidate(),
            Step::Ended { changes } => self.end_trial(changes),
        }
    }

    fn choose_candidate(&mut self) {
        let at_end = if self.smaller_next { 0 } else { SIZES.len() - 1 };
        self.smaller_next ^= self.chosen == at_end;
        self.candidate = if self.smaller_next { self.chosen - 1 } else { self.chosen + 1 };
    }

    fn end_trial(&mut self, wins: bool) {
        if wins {
            tracing::debug!(from = SIZES[self.chosen], to = SIZES[self.candidate], "batch size");
            self.chosen = self.candidate;
        } else {
            self.smaller_next = !self.smaller_next;
        }
    }
}

#[cfg(test)]
impl BatchSize {
    /// Turns of the present window.
    pub(crate) fn turns(&self) -> u32 {
        self.window.turns
    }

    /// Goes on with this size, as after a survey.
    pub(crate) fn choose(&mut self, size: usize) {
        self.survey = None;
        self.chosen = SIZES.iter().position(|other| *other == size).expect("one of the sizes");
    }

    /// The present window has found a deep queue.
    pub(crate) fn is_deep(&self) -> bool {
        self.window.is_deep
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
    fn settled(batch_size: &mut BatchSize, windows: u32, rate: impl Fn(usize) -> f64) -> usize {
        for number in 0..windows {
            // A load that changes by a tenth from window to window.
            let load = if number % 3 == 0 { 0.9 } else { 1.0 };
            let rate = load * rate(batch_size.size());
            batch_size.measured(rate);
        }
        SIZES[batch_size.chosen]
    }

    /// A thread whose survey kept the first size.
    fn after_a_survey() -> BatchSize {
        BatchSize { survey: None, ..BatchSize::new(None) }
    }

    #[test]
    fn where_calls_are_dear_batches_grow() {
        let mut batch_size = after_a_survey();
        assert_eq!(settled(&mut batch_size, 2000, |size| size as f64), 32);
    }

    /// The size chosen by a survey in which one size has this rate, and the others 1.
    fn surveyed(better: usize, rate: f64) -> usize {
        let mut batch_size = BatchSize::new(None);
        let rate = |size| if size == better { rate } else { 1.0 };
        let chosen = settled(&mut batch_size, SURVEY_WINDOWS as u32, rate);
        assert!(batch_size.survey.is_none());
        chosen
    }

    #[test]
    fn a_size_that_is_far_better_wins_in_the_survey() {
        assert_eq!([32, 1].map(|size| surveyed(size, 1.5)), [32, 1]);
    }

    #[test]
    fn a_size_that_is_a_little_better_does_not_win_in_the_survey() {
        assert_eq!(surveyed(32, 1.1), 4);
    }

    #[test]
    fn a_steady_change_of_the_load_wins_no_survey() {
        let mut batch_size = BatchSize::new(None);
        (0..SURVEY_WINDOWS).for_each(|window| batch_size.measured(1.0 + window as f64));
        assert_eq!(batch_size.chosen(), SIZES[FIRST]);
    }

    #[test]
    fn a_pause_in_a_window_of_the_first_size_wins_no_survey() {
        for slow in [0, 9, 10] {
            let mut batch_size = BatchSize::new(None);
            (0..SURVEY_WINDOWS)
                .for_each(|window| batch_size.measured(if window == slow { 0.2 } else { 1.0 }));
            assert_eq!((batch_size.chosen(), batch_size.survey.is_none()), (SIZES[FIRST], true));
        }
    }

    #[test]
    fn chance_rarely_wins_a_survey() {
        let mut random = fastrand::Rng::with_seed(9);
        let mut changes = |noise: f64| {
            let mut one = |_: &u32| {
                let mut batch_size = BatchSize::new(None);
                // The sum of four has the noise of a bell curve, more or less.
                let mut noise = || (0..4).map(|_| random.f64() - 0.5).sum::<f64>() * 1.73 * noise;
                (0..SURVEY_WINDOWS).for_each(|_| batch_size.measured(1.0 + noise()));
                batch_size.chosen != FIRST
            };
            (0..2000).filter(|survey| one(survey)).count()
        };
        assert!(changes(0.15) < 60, "of 2000 on a disk whose rate varies");
        assert!(changes(0.33) < 200, "of 2000 beside a busy client");
    }

    #[test]
    fn an_idle_window_of_a_survey_is_repeated() {
        let mut batch_size = BatchSize::new(None);
        (0..4).for_each(|_| batch_size.measured(1.0));
        batch_size.window.requests = WINDOW_REQUESTS_MIN;
        batch_size.window.is_deep = true;
        batch_size.look(batch_size.window.since + WINDOW_MAX);
        assert_eq!(batch_size.survey.as_ref().map(|survey| survey.windows), Some(4));
    }

    #[test]
    fn where_the_device_waits_for_the_driver_batches_shrink() {
        let mut batch_size = after_a_survey();
        batch_size.chosen = SIZES.len() - 1;
        assert_eq!(settled(&mut batch_size, 4000, |size| 1.0 / size as f64), 1);
    }

    #[test]
    fn the_best_size_in_the_middle_is_found_and_kept() {
        let best_at_8 = |size: usize| if size == 8 { 1.0 } else { 0.8 };
        let mut batch_size = BatchSize::new(None);
        assert_eq!(settled(&mut batch_size, 2000, best_at_8), 8);
        assert_eq!(settled(&mut batch_size, 2000, best_at_8), 8);
    }

    #[test]
    fn a_load_that_changes_is_followed() {
        let mut batch_size = BatchSize::new(None);
        assert_eq!(settled(&mut batch_size, 2000, |size| size as f64), 32);
        assert_eq!(settled(&mut batch_size, 9000, |size| 1.0 / size as f64), 1);
    }

    #[test]
    fn trials_become_rare_while_nothing_changes() {
        let mut batch_size = BatchSize::new(None);
        let in_trial = (0..10_000)
            .filter(|_| {
                batch_size.measured(if batch_size.size() == SIZES[FIRST] { 2.0 } else { 1.0 });
                batch_size.trial.is_running()
            })
            .count();
        assert!(in_trial < 1000, "{in_trial} of 10000 windows");
    }

    #[test]
    fn a_trial_of_a_poor_size_is_short() {
        let in_trial = |other: f64| {
            let mut batch_size = BatchSize::new(None);
            let measure = |_: &u32| {
                let rate = if batch_size.size() == SIZES[FIRST] { 1.0 } else { other };
                batch_size.measured(rate);
                batch_size.trial.is_running()
            };
            (0..1000).filter(measure).count()
        };
        assert!(in_trial(0.8) * 5 < in_trial(1.0));
    }

    #[test]
    fn a_window_of_a_shallow_queue_or_an_idle_guest_starts_no_trial() {
        let mut batch_size = BatchSize::new(None);
        let mut now = Instant::now();
        for pause in [WINDOW, WINDOW_MAX] {
            for _ in 0..100 {
                now += pause;
                batch_size.window.requests = WINDOW_REQUESTS_MIN;
                batch_size.window.is_deep = pause == WINDOW_MAX;
                batch_size.look(now);
            }
        }
        assert!(!batch_size.trial.is_running());
        assert_eq!(batch_size.trial.pause(), BatchSize::new(None).trial.pause());
    }

    /// Windows of turns with as many requests as the size, `depth` at most, that the storage completes at once.
    fn run_at_depth(batch_size: &mut BatchSize, depth: usize, windows: u32) {
        let mut now = Instant::now();
        for _ in 0..windows {
            now += WINDOW;
            let requests = batch_size.size().min(depth);
            if batch_size.wants_depth() && requests < depth {
                batch_size.left_chain();
            }
            batch_size.record_turn(requests, (requests as u64, requests as u64), requests);
            batch_size.window.requests = WINDOW_REQUESTS_MIN * requests as u64;
            batch_size.look(now);
        }
    }

    #[test]
    fn a_deep_queue_of_storage_that_completes_at_once_gets_large_batches() {
        let mut batch_size = BatchSize::new(None);
        run_at_depth(&mut batch_size, 32, SURVEY_WINDOWS as u32);
        assert_eq!(batch_size.chosen(), 32, "by the survey");
        let mut batch_size = after_a_survey();
        run_at_depth(&mut batch_size, 32, 2000);
        assert_eq!(batch_size.chosen(), 32, "by trials, of which the first is of a smaller size");
    }

    #[test]
    fn a_thread_that_hands_out_one_request_at_a_time_still_makes_trials() {
        let mut batch_size = after_a_survey();
        batch_size.chosen = 0;
        run_at_depth(&mut batch_size, 32, 2000);
        assert_eq!(batch_size.chosen(), 32);
    }

    #[test]
    fn few_requests_begin_no_survey_and_no_trial() {
        for mut batch_size in [BatchSize::new(None), after_a_survey()] {
            run_at_depth(&mut batch_size, IN_FLIGHT_MIN - 1, 1000);
            assert_eq!((batch_size.size(), batch_size.has_begun()), (SIZES[FIRST], false));
        }
    }

    #[test]
    fn a_trial_whose_load_becomes_shallow_ends() {
        let mut batch_size = after_a_survey();
        while !batch_size.trial.is_running() {
            run_at_depth(&mut batch_size, 32, 1);
        }
        run_at_depth(&mut batch_size, 1, 300);
        assert!(!batch_size.trial.is_running());
    }

    #[test]
    fn a_fixed_size_counts_no_window_of_a_survey_or_trial() {
        let mut batch_size = BatchSize::new(Some(7));
        (0..10_000).for_each(|_| batch_size.record_turn(7, (7, 7), 7));
        assert_eq!((batch_size.size(), batch_size.turns()), (7, 0));
    }

    #[test]
    fn many_shallow_queues_are_no_deep_one() {
        let mut batch_size = BatchSize::new(None);
        batch_size.record_turn(8, (8, 1), 8);
        assert!(!batch_size.is_deep());
    }
}
