// SPDX-License-Identifier: Apache-2.0
//! Trials: windows of time with the present choice and with another one take turns, and their owner compares the
//! results. The kernel module has the same (`kernel/vhost_blk/trial.c`).

use crate::backoff::Backoff;
use std::ops::AddAssign;
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

/// The trials of one choice, and the pauses between them. `T` is the result of windows.
#[derive(Debug)]
pub(crate) struct Trial<T> {
    /// Windows of the present trial so far.
    windows: Option<u32>,
    /// Results of the present choice and of the other one.
    tallies: [T; 2],
    pause: Backoff,
}

/// The step of a trial that a window makes.
#[derive(Debug)]
pub(crate) enum Step<T> {
    /// There is no trial.
    Pause,
    /// One begins with the next window.
    Begins,
    /// It has so many windows, with these results of the present choice and of the other one. Its owner ends it.
    Counted(u32, [T; 2]),
}

impl<T: AddAssign + Copy + Default> Trial<T> {
    /// Begins with the shortest pause.
    pub(crate) fn new() -> Self {
        let mut pause = Backoff::new(PAUSE_WINDOWS_MIN, PAUSE_WINDOWS_MAX);
        pause.begin();
        Trial { windows: None, tallies: [T::default(); 2], pause }
    }

    /// Returns whether the present window uses the other choice. The order is ABBA, so that a steady
    /// change of the load affects both alike.
    #[inline]
    pub(crate) fn differs(&self) -> bool {
        self.windows.is_some_and(|windows| matches!(windows % 4, 1 | 2))
    }

    /// Counts a window.
    pub(crate) fn count(&mut self, window: T) -> Step<T> {
        let differs = usize::from(self.differs());
        match &mut self.windows {
            Some(windows) => {
                self.tallies[differs] += window;
                *windows += 1;
                Step::Counted(*windows, self.tallies)
            }
            None if self.pause.pass() => Step::Pause,
            None => {
                self.tallies = [T::default(); 2];
                self.windows = Some(0);
                Step::Begins
            }
        }
    }

    /// Ends a trial. `changes`: the other choice is the present one from now on.
    pub(crate) fn end(&mut self, changes: bool) {
        self.windows = None;
        if changes {
            self.pause.reset();
        }
        self.pause.begin();
    }

    /// Ends a trial without a result, if there is one. The next one follows without a pause.
    pub(crate) fn abandon(&mut self) {
        self.windows = None;
    }
}

#[cfg(test)]
impl<T> Trial<T> {
    pub(crate) fn is_running(&self) -> bool {
        self.windows.is_some()
    }

    pub(crate) fn pause(&self) -> &Backoff {
        &self.pause
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Counts windows of 1 until a trial begins. Returns their number.
    fn pause(trial: &mut Trial<u32>) -> u32 {
        let mut windows = 1;
        while matches!(trial.count(1), Step::Pause) {
            windows += 1;
        }
        windows
    }

    #[test]
    fn the_windows_of_both_choices_have_the_order_abba_and_results_of_their_own() {
        let mut trial = Trial::<u32>::new();
        for _ in 0..2 {
            pause(&mut trial);
            let order: Vec<_> = (1..=8)
                .map(|number| {
                    let differs = trial.differs();
                    let counted = trial.count(if differs { 100 } else { 1 });
                    assert!(matches!(counted, Step::Counted(windows, _) if windows == number));
                    (differs, counted)
                })
                .collect();
            let differs: Vec<_> = order.iter().map(|(differs, _)| *differs).collect();
            assert_eq!(differs, [false, true, true, false, false, true, true, false]);
            assert!(matches!(order[7].1, Step::Counted(8, [4, 400])));
            trial.end(false);
            assert!(!trial.differs());
        }
    }

    #[test]
    fn pauses_double_until_a_change_and_an_abandoned_trial_begins_again_at_once() {
        let mut trial = Trial::<u32>::new();
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
