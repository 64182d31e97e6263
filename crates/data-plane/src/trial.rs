// SPDX-License-Identifier: Apache-2.0
//! Trials: windows of time with the present choice and with another one take turns, and the other choice has to win by
//! more than chance ([`crate::gain`]). The kernel module has the same (`kernel/vhost_blk/trial.c`).

use crate::backoff::Backoff;
use crate::gain::Gains;
use std::time::Duration;

/// Minimum duration of a window, and its minimum number of requests.
pub(crate) const WINDOW: Duration = Duration::from_millis(4);
pub(crate) const WINDOW_REQUESTS_MIN: u64 = 64;
/// A window that takes longer than this says nothing: the guest was idle meanwhile.
pub(crate) const WINDOW_MAX: Duration = Duration::from_millis(100);
/// Windows between two trials: minimum and maximum. The pause doubles after each trial without a
/// change.
const PAUSE_WINDOWS_MIN: u32 = 16;
const PAUSE_WINDOWS_MAX: u32 = 1024;

/// Gain that a change needs, as a share of the rate. A choice that is better for another reason may lose as much.
pub(crate) const GAIN: f64 = 0.03;
/// Windows of a block, in the order ABBA.
const BLOCK_WINDOWS: u32 = 4;
/// Windows of a trial at most, for each [`Proof`].
const SURE_WINDOWS: u32 = 256;
const LIKELY_WINDOWS: u32 = 24;

/// The proof that a change needs at the end of a trial.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Proof {
    /// The gain is more than chance.
    Sure,
    /// The mean gain is large enough: a wrong choice costs less than a late one.
    Likely,
}

/// The trials of one choice, and the pauses between them.
#[derive(Debug)]
pub(crate) struct Trial {
    proof: Proof,
    /// Windows of the present trial so far.
    windows: Option<u32>,
    /// Sums of the rates of the present block, with the present choice and with the other one.
    block: [f64; 2],
    gains: Gains,
    pause: Backoff,
}

/// The step of a trial that a window makes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Step {
    /// There is no trial.
    Pause,
    /// One begins with the next window.
    Begins,
    /// It needs more windows.
    GoesOn,
    /// It has ended. `changes`: the other choice is the present one from now on.
    Ended { changes: bool },
}

impl Trial {
    /// Begins with the shortest pause.
    pub(crate) fn new(proof: Proof) -> Self {
        let mut pause = Backoff::new(PAUSE_WINDOWS_MIN, PAUSE_WINDOWS_MAX);
        pause.begin();
        Trial { proof, windows: None, block: [0.0; 2], gains: Gains::default(), pause }
    }

    /// Returns whether the present window uses the other choice. The order is ABBA, so that a steady
    /// change of the load affects both alike.
    #[inline]
    pub(crate) fn tries_other(&self) -> bool {
        self.windows.is_some_and(|windows| matches!(windows % BLOCK_WINDOWS, 1 | 2))
    }

    /// Counts a window with its rate. `wanted` is the gain that the other choice needs for a change, as a share of the
    /// rate; negative: the loss that it may have.
    pub(crate) fn record_window(&mut self, rate: f64, wanted: f64) -> Step {
        let choice = usize::from(self.tries_other());
        let Some(windows) = &mut self.windows else {
            return self.begin();
        };
        *windows += 1;
        self.block[choice] += rate;
        if !windows.is_multiple_of(BLOCK_WINDOWS) {
            return Step::GoesOn;
        }
        let windows_max = match self.proof {
            Proof::Sure => SURE_WINDOWS,
            Proof::Likely => LIKELY_WINDOWS,
        };
        let last = *windows == windows_max;
        self.gains.count(std::mem::take(&mut self.block));
        let Some(changes) = self.gains.verdict(wanted, self.proof, last) else {
            return Step::GoesOn;
        };
        self.end(changes);
        Step::Ended { changes }
    }

    /// Begins a trial, if the pause is over.
    fn begin(&mut self) -> Step {
        if self.pause.pass() {
            return Step::Pause;
        }
        (self.block, self.gains) = Default::default();
        self.windows = Some(0);
        Step::Begins
    }

    fn end(&mut self, changes: bool) {
        self.windows = None;
        if changes {
            self.pause.reset();
        }
        self.pause.begin();
    }

    /// Returns whether a trial is running.
    #[inline]
    pub(crate) fn is_running(&self) -> bool {
        self.windows.is_some()
    }

    /// Forgets all trials. The next one follows after the shortest pause.
    pub(crate) fn begin_anew(&mut self) {
        self.end(true); // as after a change, with the shortest pause
    }

    /// Ends a trial without a result, if there is one. The next one follows without a pause.
    pub(crate) fn abandon(&mut self) {
        self.windows = None;
    }
}

#[cfg(test)]
impl Trial {
    pub(crate) fn pause(&self) -> &Backoff {
        &self.pause
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Counts windows of equal rates until a trial begins. Returns their number.
    fn pause(trial: &mut Trial) -> u32 {
        let mut windows = 1;
        while trial.record_window(1.0, GAIN) == Step::Pause {
            windows += 1;
        }
        windows
    }

    #[test]
    fn the_windows_of_both_choices_have_the_order_abba() {
        let mut trial = Trial::new(Proof::Sure);
        for _ in 0..2 {
            pause(&mut trial);
            let order: Vec<_> = (1..=8)
                .map(|_| {
                    let tries_other = trial.tries_other();
                    assert_eq!(trial.record_window(1.0, GAIN), Step::GoesOn);
                    tries_other
                })
                .collect();
            assert_eq!(order, [false, true, true, false, false, true, true, false]);
            trial.end(false);
            assert!(!trial.tries_other());
        }
    }

    #[test]
    fn a_trial_of_equal_rates_ends_with_its_last_window() {
        for (proof, windows) in [(Proof::Sure, SURE_WINDOWS), (Proof::Likely, LIKELY_WINDOWS)] {
            let mut trial = Trial::new(proof);
            pause(&mut trial);
            let steps: Vec<_> = (1..=windows).map(|_| trial.record_window(1.0, 0.0)).collect();
            let (last, before) = steps.split_last().expect("windows");
            assert_eq!(*last, Step::Ended { changes: false });
            assert!(before.iter().all(|step| *step == Step::GoesOn));
        }
    }

    #[test]
    fn pauses_double_until_a_change_and_an_abandoned_trial_begins_again_at_once() {
        let mut trial = Trial::new(Proof::Sure);
        let mut next = |changes: bool| {
            let windows = pause(&mut trial);
            trial.end(changes);
            windows
        };
        assert_eq!([false, false, true, false].map(&mut next), [17, 33, 65, 17]);
        pause(&mut trial);
        trial.abandon();
        assert_eq!(pause(&mut trial), 1);
    }
}
