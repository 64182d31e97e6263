// SPDX-License-Identifier: Apache-2.0
//! Coalescing of calls: a driver that still gives chains is at work, and a call only interrupts it.
//! So the call waits while chains and completions follow each other closely, within bounds.
//!
//! That pays where the driver's CPU is the bottleneck, and costs time where the driver waits for the
//! device. Only a trial shows which: windows of time with and without coalescing take turns, and
//! their rates decide; if these are close, the number of calls does. The kernel module decides in
//! the same way (`kernel/vhost_blk/coalesce.c`).
//!
//! A driver that waits for each request has no trial: its queue is never deeper than one request.

use crate::latency::Nanos;
use crate::plane::Coalesce;
use crate::trial::{self, GAIN, Proof, Step, Trial, WINDOW_REQUESTS_MIN};
use std::ops::AddAssign;
use std::time::Duration;

const MICROSECOND: Nanos = 1000;
const WINDOW: Nanos = trial::WINDOW.as_nanos() as Nanos;
const WINDOW_MAX: Nanos = trial::WINDOW_MAX.as_nanos() as Nanos;

/// Time after which a held call is due: the next turn of the thread sends it.
const HOLD_MAX: Nanos = 100 * MICROSECOND;
/// Time without a new chain or completion after which the driver is taken to wait; at most the
/// maximum of polling.
const HOLD_IDLE: Nanos = 30 * MICROSECOND;
/// Maximum requests that a held call answers.
const HOLD_REQUESTS_MAX: u64 = 16;

/// Share of the calls with which coalescing may lose [`GAIN`] of the rate. With more it has to gain as much.
const FEWER_CALLS: f64 = 2.0 / 3.0;

/// The held call of one queue, and the trials that decide about coalescing.
#[derive(Debug)]
pub(crate) struct Coalescer {
    mode: Coalesce,
    idle_max: Nanos,
    held: Option<Held>,
    /// Requests that were published since the last call.
    uncalled: u64,
    /// Calls are held, as the last trial decided.
    chosen: bool,
    trial: Trial,
    /// Tallies of the present trial, with the present choice and with the other one.
    tallies: [Tally; 2],
    /// The last window took too long.
    was_idle: bool,
    window: Window,
}

/// A call that the driver asked for.
#[derive(Debug)]
struct Held {
    since: Nanos,
    /// The last look at which chains or completions had come, and their number by then.
    moved_at: Nanos,
    progress: u64,
}

/// Requests and calls since the window began.
#[derive(Debug, Default)]
struct Window {
    since: Nanos,
    requests: u64,
    calls: u64,
    /// The greatest depth.
    deepest: u64,
}

#[derive(Clone, Copy, Debug, Default)]
struct Tally {
    requests: u64,
    calls: u64,
}

impl Tally {
    fn calls_per_request(&self) -> f64 {
        self.calls as f64 / self.requests as f64
    }
}

impl AddAssign for Tally {
    fn add_assign(&mut self, window: Tally) {
        self.requests += window.requests;
        self.calls += window.calls;
    }
}

impl Coalescer {
    /// Holds calls by `mode`. The thread polls for `poll_max` at most; 0: no call is held.
    pub(crate) fn new(mode: Coalesce, poll_max: Duration) -> Self {
        let mode = if poll_max.is_zero() { Coalesce::Off } else { mode };
        Coalescer {
            mode,
            idle_max: HOLD_IDLE.min(poll_max.as_nanos() as Nanos),
            held: None,
            uncalled: 0,
            chosen: false,
            trial: Trial::new(Proof::Likely),
            tallies: [Tally::default(); 2],
            was_idle: false,
            window: Window::default(),
        }
    }

    /// Counts requests that the driver can see now. `depth`: those and all others that it waited for.
    #[inline]
    pub(crate) fn published(&mut self, requests: u64, depth: u64) {
        self.uncalled += requests;
        self.window.deepest = self.window.deepest.max(depth);
    }

    /// Returns whether a call is held.
    #[inline]
    pub(crate) fn is_holding(&self) -> bool {
        self.held.is_some()
    }

    /// Holds a call that the driver has asked for now (`asked`) or before, unless it is due. Returns whether to call now.
    /// `progress` grows with each chain and each completion.
    pub(crate) fn hold_unless_due(&mut self, asked: bool, progress: u64, now: Nanos) -> bool {
        if !self.coalesces() {
            return true;
        }
        let fresh = Held { since: now, moved_at: now, progress };
        let held = match asked {
            true => self.held.get_or_insert(fresh),
            false => self.held.as_mut().expect("a call is held"),
        };
        if held.progress != progress {
            (held.moved_at, held.progress) = (now, progress);
        }
        self.uncalled >= HOLD_REQUESTS_MAX
            || now.saturating_sub(held.since) >= HOLD_MAX
            || now.saturating_sub(held.moved_at) >= self.idle_max
    }

    /// Records a call.
    pub(crate) fn called(&mut self, now: Nanos) {
        self.held = None;
        let requests = std::mem::take(&mut self.uncalled);
        if self.mode != Coalesce::Auto {
            return;
        }
        let window = &mut self.window;
        window.calls += 1;
        window.requests += requests;
        self.look_at_window(now);
    }

    /// Returns whether calls are held, by the mode or by the last trial.
    pub(crate) fn is_chosen(&self) -> bool {
        match self.mode {
            Coalesce::On => true,
            Coalesce::Off => false,
            Coalesce::Auto => self.chosen,
        }
    }

    /// Returns whether calls of the present window are held.
    fn coalesces(&self) -> bool {
        match self.mode {
            Coalesce::On => true,
            Coalesce::Off => false,
            Coalesce::Auto => self.chosen != self.trial.tries_other(),
        }
    }

    /// Ends the window, if it is long enough.
    fn look_at_window(&mut self, now: Nanos) {
        let nanos = now.saturating_sub(self.window.since);
        let few = self.window.requests < WINDOW_REQUESTS_MIN;
        if nanos < WINDOW || (few && nanos < WINDOW_MAX) {
            return;
        }
        let window =
            std::mem::replace(&mut self.window, Window { since: now, ..Window::default() });
        let idle = nanos >= WINDOW_MAX;
        let was_idle = std::mem::replace(&mut self.was_idle, idle);
        if window.deepest <= 1 || idle && was_idle {
            self.begin_anew();
        } else if idle {
            // One such window is a gap between two loads, which may be alike.
            self.trial.abandon();
        } else {
            let rate = window.requests as f64 / nanos as f64;
            self.count(rate, Tally { requests: window.requests, calls: window.calls });
        }
    }

    /// Forgets a load: the driver waits for each request, or has few of them.
    fn begin_anew(&mut self) {
        self.chosen = false;
        self.trial.begin_anew();
    }

    /// Counts a window in the trial, or in the pause before the next one.
    fn count(&mut self, rate: f64, window: Tally) {
        self.tallies[usize::from(self.trial.tries_other())] += window;
        match self.trial.record_window(rate, self.wanted()) {
            Step::Begins => self.tallies = Default::default(),
            Step::Ended { changes: true } => {
                self.chosen = !self.chosen;
                tracing::debug!(coalesce = self.chosen, "calls of the driver");
            }
            Step::Pause | Step::GoesOn | Step::Ended { changes: false } => {}
        }
    }

    /// The gain that a change needs: coalescing may lose a little, if it saves calls, and must gain otherwise.
    fn wanted(&self) -> f64 {
        let mut calls = self.tallies.map(|tally| tally.calls_per_request());
        if self.chosen {
            calls.reverse();
        }
        let [without, with] = calls;
        let saves_calls = with <= without * FEWER_CALLS;
        if saves_calls == self.chosen { GAIN } else { -GAIN }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A driver, and the time.
    struct Load {
        calls: Coalescer,
        now: Nanos,
        progress: u64,
        /// Requests that stay in flight beside each batch.
        in_flight: u64,
    }

    impl Load {
        fn new(mode: Coalesce) -> Self {
            Load { calls: Coalescer::new(mode, POLL_MAX), now: 1, progress: 0, in_flight: 0 }
        }

        /// Publishes batches for `nanos`. `time` has the nanoseconds of a batch whose call is held
        /// or not. Returns the calls and the batches.
        fn run(&mut self, nanos: Nanos, batch: u64, time: impl Fn(bool) -> Nanos) -> (u64, u64) {
            let (end, mut calls, mut batches) = (self.now + nanos, 0, 0);
            while self.now < end {
                self.calls.published(batch, batch + self.in_flight);
                self.progress += 2 * batch;
                let due = self.calls.hold_unless_due(true, self.progress, self.now);
                if due {
                    self.calls.called(self.now);
                }
                self.now += time(!due);
                batches += 1;
                calls += u64::from(due);
            }
            (calls, batches)
        }

        /// Publishes requests one at a time to a driver that waits for each call, `time` nanoseconds
        /// after it. Returns the calls that were held.
        fn run_asleep(&mut self, nanos: Nanos, time: Nanos) -> u64 {
            let (end, mut held) = (self.now + nanos, 0);
            while self.now < end {
                self.calls.published(1, 1);
                self.progress += 2;
                if !self.calls.hold_unless_due(true, self.progress, self.now) {
                    held += 1;
                    self.now += HOLD_IDLE;
                    assert!(self.calls.hold_unless_due(false, self.progress, self.now));
                }
                self.calls.called(self.now);
                self.now += time;
            }
            held
        }
    }

    /// A load whose calls are coalesced.
    fn coalescing() -> Load {
        let mut load = Load::new(Coalesce::Auto);
        load.run(SECOND, 4, |held| if held { 10 } else { 20 } * MICROSECOND);
        assert!(load.calls.chosen);
        load
    }

    const POLL_MAX: Duration = Duration::from_micros(50);
    const MILLISECOND: Nanos = 1000 * MICROSECOND;
    const SECOND: Nanos = 1000 * MILLISECOND;

    #[test]
    fn where_calls_are_dear_they_are_soon_coalesced() {
        let mut load = Load::new(Coalesce::Auto);
        let dear = |held| if held { 10 * MICROSECOND } else { 20 * MICROSECOND };
        load.run(SECOND, 2, dear);
        let (calls, batches) = load.run(SECOND / 10, 2, dear);
        assert!(calls * 6 < batches, "{calls} calls for {batches} batches of 2");
    }

    #[test]
    fn where_the_driver_waits_for_calls_each_one_comes_at_once() {
        let mut load = Load::new(Coalesce::Auto);
        let waits = |held| if held { 20 * MICROSECOND } else { 10 * MICROSECOND };
        load.run(10 * SECOND, 2, waits);
        let (calls, batches) = load.run(10 * SECOND, 2, waits);
        assert!(calls * 50 > batches * 49, "{calls} calls for {batches} batches");
    }

    #[test]
    fn at_the_same_rate_fewer_calls_are_better() {
        let mut load = Load::new(Coalesce::Auto);
        load.run(SECOND, 2, |_| 10 * MICROSECOND);
        assert!(load.calls.chosen);
        // Trials become rare.
        load.run(20 * SECOND, 2, |_| 10 * MICROSECOND);
        let (calls, batches) = load.run(10 * SECOND, 2, |_| 10 * MICROSECOND);
        assert!(calls * 6 < batches, "{calls} calls for {batches} batches of 2");
    }

    #[test]
    fn requests_of_a_deep_queue_that_end_one_at_a_time_share_calls() {
        let mut load = Load::new(Coalesce::Auto);
        load.in_flight = 31;
        load.run(SECOND, 1, |_| 10 * MICROSECOND);
        let (calls, requests) = load.run(SECOND / 10, 1, |_| 10 * MICROSECOND);
        assert!(calls * 6 < requests, "{calls} calls for {requests} requests");
    }

    #[test]
    fn two_percent_of_the_rate_are_worth_fewer_calls_and_five_are_not() {
        for (time, holds) in [(102, true), (105, false)] {
            let mut load = Load::new(Coalesce::Auto);
            load.run(2 * SECOND, 2, |held| if held { time } else { 100 } * MICROSECOND / 10);
            assert_eq!(load.calls.chosen, holds, "{time} for 100");
        }
    }

    #[test]
    fn a_driver_with_one_request_at_a_time_never_waits_for_a_call() {
        let mut load = Load::new(Coalesce::Auto);
        assert_eq!(load.run_asleep(20 * SECOND, 10 * MICROSECOND), 0);
        assert!(!load.calls.trial.is_running());
    }

    #[test]
    fn a_load_that_becomes_shallow_is_followed() {
        let mut load = coalescing();
        load.run_asleep(2 * WINDOW_MAX, 10 * MICROSECOND);
        let held = load.run_asleep(SECOND, 10 * MICROSECOND);
        assert_eq!(held, 0);
    }

    #[test]
    fn a_load_that_becomes_slow_is_followed() {
        let mut load = coalescing();
        load.run(3 * WINDOW_MAX, 2, |_| 5 * MILLISECOND);
        let (calls, batches) = load.run(SECOND, 2, |_| 5 * MILLISECOND);
        assert_eq!(calls, batches);
    }

    #[test]
    fn a_gap_in_the_load_changes_nothing() {
        let mut load = coalescing();
        load.now += SECOND;
        let (calls, batches) = load.run(10 * WINDOW, 4, |_| 10 * MICROSECOND);
        assert!(calls * 3 < batches, "{calls} calls for {batches} batches of 4");
    }

    #[test]
    fn a_deep_load_after_a_shallow_one_is_tried_soon() {
        let mut load = coalescing();
        let dear = |held| if held { 10 * MICROSECOND } else { 20 * MICROSECOND };
        // Trials become rare.
        load.run(30 * SECOND, 4, dear);
        load.run_asleep(SECOND, 10 * MICROSECOND);
        assert!(!load.calls.chosen);
        load.run(50 * WINDOW, 4, dear);
        assert!(load.calls.chosen);
    }

    #[test]
    fn trials_become_rare_while_nothing_changes() {
        let mut load = Load::new(Coalesce::Auto);
        let waits = |held| if held { 20 * MICROSECOND } else { 10 * MICROSECOND };
        load.run(30 * SECOND, 2, waits);
        let (calls, batches) = load.run(5 * SECOND, 2, waits);
        assert!((batches - calls) * 100 < batches, "{calls} calls for {batches} batches");
    }

    #[test]
    fn a_call_is_held_while_there_is_progress_and_never_longer_than_its_bounds() {
        let mut calls = Coalescer::new(Coalesce::On, POLL_MAX);
        let mut due = |at, asked, progress, requests| {
            calls.published(requests, requests);
            let due = calls.hold_unless_due(asked, progress, at);
            if due {
                calls.called(at);
            }
            due
        };
        assert!(!due(0, true, 1, 1));
        assert!(!due(HOLD_IDLE - 1, false, 1, 0));
        assert!(due(HOLD_IDLE, false, 1, 0), "the driver waits");
        let mut at = 1000 * MICROSECOND;
        let began = at;
        assert!(!due(at, true, 2, 1));
        let mut progress = 2;
        while at + 10 * MICROSECOND < began + HOLD_MAX {
            at += 10 * MICROSECOND;
            progress += 1;
            assert!(!due(at, false, progress, 0));
        }
        assert!(due(began + HOLD_MAX, false, progress + 1, 0), "the driver may wait for the first");
        assert!(!due(began + HOLD_MAX, true, 100, HOLD_REQUESTS_MAX - 1));
        assert!(due(began + HOLD_MAX, true, 101, 1), "many requests wait");
    }

    #[test]
    fn without_coalescing_or_polling_no_call_is_held() {
        for (mode, poll_max) in [(Coalesce::Off, POLL_MAX), (Coalesce::On, Duration::ZERO)] {
            let mut calls = Coalescer::new(mode, poll_max);
            calls.published(1, 1);
            assert!(calls.hold_unless_due(true, 1, 0));
            assert!(!calls.is_holding());
        }
    }

    #[test]
    fn no_call_is_held_for_longer_than_the_thread_may_poll() {
        let mut calls = Coalescer::new(Coalesce::On, Duration::from_micros(5));
        calls.published(1, 1);
        assert!(!calls.hold_unless_due(true, 1, 0));
        assert!(!calls.hold_unless_due(false, 1, 5 * MICROSECOND - 1));
        assert!(calls.hold_unless_due(false, 1, 5 * MICROSECOND));
    }
}
