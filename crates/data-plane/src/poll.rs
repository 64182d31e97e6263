// SPDX-License-Identifier: Apache-2.0
//! Adaptive polling: the time that an idle thread polls its rings before it sleeps.
//!
//! A short sleep suggests that polling would have found the work sooner. The cost of a wake-up is
//! part of a sleep, is unknown, and differs by a factor of a hundred between hosts. Therefore a
//! trial decides: the thread continues to poll while most polls find work, and otherwise pauses,
//! for longer each time. A long sleep ends polling until the next short one, and keeps the score.
//!
//! There is a trial for each of two waits, since one of them may pay and the other not: for drivers
//! alone, while the storage works on no request, and for the storage as well. A driver that sleeps
//! until its call comes back after a wake-up; a disk takes as long as it takes.
//!
//! A thread of the kernel that carries out an operation, such as a sync, may need this CPU. Polls that find
//! other work meanwhile look like success, and delay it.

use crate::backoff::Backoff;
use crate::latency::Nanos;
use std::time::{Duration, Instant};

/// Maximum cost of a wake-up on a slow host (a halted virtual CPU).
const WAKE_UP_MAX: Duration = Duration::from_micros(100);
/// Polls must find work more than twice as often as not: a hit adds one to the score, a miss
/// subtracts two. A trial starts with a small score and ends at 0.
const SCORE_TRIAL: u32 = 3;
const SCORE_MAX: u32 = 8;
const SCORE_MISS: u32 = 2;
/// Sleeps without polling after a failed trial: minimum and maximum.
const PAUSE_SLEEPS_MIN: u32 = 8;
const PAUSE_SLEEPS_MAX: u32 = 1024;
/// Polls between two readings of the clock.
const LOOKS_PER_CLOCK: u32 = 16;
/// Maximum time of a look, in picoseconds, by which looks without a reading are counted. A longer one
/// comes of a thread that has lost its CPU.
const LOOK_PS_MAX: u64 = 2_000_000;

/// A poll that has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Polled {
    /// It found work.
    pub(crate) won: bool,
    /// Its time.
    pub(crate) nanos: Nanos,
}

/// One thread's polling states.
#[derive(Debug)]
pub(crate) struct Polls {
    /// While the storage works on no request.
    drivers: AdaptivePoll,
    /// While it works on some, or a sync waits for FLUSHes of the drivers.
    storage: AdaptivePoll,
    /// The present wait, or the last one.
    wait: Wait,
}

/// The reason of a wait.
#[derive(Clone, Copy, Debug)]
enum Wait {
    /// New requests: the storage has none.
    Drivers,
    /// The storage as well.
    Storage,
    /// A kernel thread as well, which works beside other requests.
    KernelThreads,
}

impl Polls {
    /// Polls for at most `max` before each sleep; 0: never.
    pub(crate) fn new(max: Duration) -> Self {
        let poll = || AdaptivePoll::new(max);
        Polls { drivers: poll(), storage: poll(), wait: Wait::Drivers }
    }

    #[inline]
    fn present(&mut self) -> Option<&mut AdaptivePoll> {
        match self.wait {
            Wait::Drivers => Some(&mut self.drivers),
            Wait::Storage => Some(&mut self.storage),
            Wait::KernelThreads => None,
        }
    }

    /// Records that there was work. Returns the poll that it has ended.
    #[inline]
    pub(crate) fn worked(&mut self) -> Option<Polled> {
        self.present()?.worked()
    }

    /// Records that there was no work while the storage works on `in_storage` requests, and kernel threads carry
    /// out `in_kernel_threads` operations. Returns whether to poll again; `false`: sleep.
    #[inline]
    pub(crate) fn look_again(&mut self, in_storage: u32, in_kernel_threads: u32) -> bool {
        self.wait = match (in_storage, in_kernel_threads) {
            (0, _) => Wait::Drivers,
            // At depth 1 no other request looks like success.
            (2.., 1..) => Wait::KernelThreads,
            _ => Wait::Storage,
        };
        self.present().is_some_and(AdaptivePoll::look_again)
    }

    /// Records a sleep of the duration `slept`. Returns the poll before it.
    pub(crate) fn slept(&mut self, slept: Duration) -> Option<Polled> {
        self.present()?.slept(slept)
    }
}

/// The polling state of a wait.
#[derive(Debug)]
struct AdaptivePoll {
    max: Duration,
    /// The thread polls before it sleeps.
    polling: bool,
    /// Polls since the last work.
    looks: u32,
    idle_since: Option<Instant>,
    /// Time between the first and the last reading of the clock in this poll.
    read: Duration,
    /// Time of a look in picoseconds, as last measured.
    look_ps: u64,
    score: u32,
    /// The pause after a failed trial, in sleeps.
    pause: Backoff,
}

impl AdaptivePoll {
    fn new(max: Duration) -> Self {
        AdaptivePoll {
            max,
            polling: false,
            looks: 0,
            idle_since: None,
            read: Duration::ZERO,
            look_ps: 0,
            score: 0,
            pause: Backoff::new(PAUSE_SLEEPS_MIN, PAUSE_SLEEPS_MAX),
        }
    }

    /// Records that there was work: a poll that preceded it is a hit.
    #[inline]
    fn worked(&mut self) -> Option<Polled> {
        if self.looks == 0 {
            return None;
        }
        self.score = (self.score + 1).min(SCORE_MAX);
        if self.score == SCORE_MAX {
            self.pause.reset();
        }
        Some(Polled { won: true, nanos: self.end() })
    }

    /// Ends a poll, and returns its time. Looks before the first reading of the clock and after the last
    /// one count as the last measured ones.
    fn end(&mut self) -> Nanos {
        let looks = std::mem::take(&mut self.looks);
        let measured = looks.saturating_sub(LOOKS_PER_CLOCK) / LOOKS_PER_CLOCK * LOOKS_PER_CLOCK;
        self.idle_since = None;
        let read = std::mem::take(&mut self.read).as_nanos() as Nanos; // some milliseconds at most
        read + u64::from(looks - measured) * self.look_ps / 1000
    }

    /// Records that there was no work. Returns whether to poll again; `false`: sleep.
    #[inline]
    fn look_again(&mut self) -> bool {
        if !self.polling {
            return false;
        }
        self.looks += 1;
        if !self.looks.is_multiple_of(LOOKS_PER_CLOCK) {
            return true;
        }
        let since = *self.idle_since.get_or_insert_with(Instant::now);
        self.read_clock(since.elapsed());
        self.read < self.max
    }

    /// Notes a reading of the clock.
    fn read_clock(&mut self, since_first: Duration) {
        self.read = since_first;
        if let Some(looks @ 1..) = self.looks.checked_sub(LOOKS_PER_CLOCK) {
            let look_ps = since_first.as_nanos() as u64 * 1000 / u64::from(looks);
            self.look_ps = look_ps.min(LOOK_PS_MAX);
        }
    }

    /// Records a sleep of the duration `slept` and decides whether to poll before the next one.
    fn slept(&mut self, slept: Duration) -> Option<Polled> {
        let missed = (self.looks > 0).then(|| Polled { won: false, nanos: self.end() });
        if missed.is_some() {
            self.miss();
        }
        if slept > self.max + WAKE_UP_MAX || self.max.is_zero() {
            self.polling = false;
        } else if missed.is_none() && !self.pause.pass() && !self.polling {
            self.polling = true;
            if self.score == 0 {
                self.score = SCORE_TRIAL;
            }
        }
        missed
    }

    fn miss(&mut self) {
        self.score = self.score.saturating_sub(SCORE_MISS);
        if self.score == 0 {
            self.polling = false;
            self.pause.begin();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MAX: Duration = Duration::from_micros(50);
    const SHORT: Duration = Duration::from_micros(60);
    const LONG: Duration = Duration::from_millis(10);

    fn polls(poll: &mut AdaptivePoll) -> bool {
        poll.look_again()
    }

    #[test]
    fn a_short_sleep_starts_polling() {
        let mut poll = AdaptivePoll::new(MAX);
        assert!(!polls(&mut poll));
        poll.slept(SHORT);
        assert!(polls(&mut poll));
    }

    #[test]
    fn a_long_sleep_ends_polling() {
        let mut poll = AdaptivePoll::new(MAX);
        poll.slept(SHORT);
        poll.slept(LONG);
        assert!(!polls(&mut poll));
    }

    #[test]
    fn polls_that_find_nothing_end_polling_for_longer_each_time() {
        let mut poll = AdaptivePoll::new(MAX);
        let mut sleeps_until_polling = Vec::new();
        for _ in 0..12 {
            let mut sleeps = 0;
            while !polls(&mut poll) {
                poll.slept(SHORT);
                sleeps += 1;
            }
            sleeps_until_polling.push(sleeps);
            poll.slept(SHORT); // a miss
            polls(&mut poll);
            poll.slept(SHORT); // and another
        }
        assert!(sleeps_until_polling.is_sorted());
        assert_eq!(sleeps_until_polling.last(), Some(&(PAUSE_SLEEPS_MAX + 1)));
    }

    #[test]
    fn polls_before_long_sleeps_are_misses() {
        let mut poll = AdaptivePoll::new(MAX);
        let mut missed = 0;
        for sleep in 0..10_000 {
            polls(&mut poll);
            missed += u32::from(poll.slept(if sleep % 2 == 0 { SHORT } else { LONG }).is_some());
        }
        assert!(missed < 50, "{missed} polls found nothing");
    }

    #[test]
    fn a_long_sleep_after_each_burst_does_not_end_polling_in_it() {
        let mut poll = AdaptivePoll::new(MAX);
        poll.slept(SHORT);
        for _ in 0..100 {
            for _ in 0..SCORE_MAX {
                assert!(polls(&mut poll));
                poll.worked();
            }
            polls(&mut poll);
            poll.slept(LONG);
            assert!(!polls(&mut poll));
            poll.slept(SHORT);
        }
    }

    #[test]
    fn polls_that_find_work_go_on() {
        let mut poll = AdaptivePoll::new(MAX);
        poll.slept(SHORT);
        for _ in 0..1000 {
            assert!(polls(&mut poll));
            poll.worked();
        }
    }

    #[test]
    fn polls_that_find_work_only_every_other_time_end() {
        let mut poll = AdaptivePoll::new(MAX);
        poll.slept(SHORT);
        for _ in 0..2 * SCORE_MAX {
            polls(&mut poll);
            poll.worked();
            polls(&mut poll);
            poll.slept(SHORT);
        }
        assert!(!polls(&mut poll));
    }

    #[test]
    fn a_slow_disk_does_not_end_polling_for_drivers() {
        let mut polls = Polls::new(MAX);
        polls.look_again(0, 0);
        polls.slept(SHORT);
        for _ in 0..100 {
            assert!(polls.look_again(0, 0), "the driver comes soon");
            polls.worked();
            assert!(!polls.look_again(1, 0), "the disk does not");
            polls.slept(LONG);
        }
    }

    #[test]
    fn nothing_polls_while_a_kernel_thread_works_beside_other_requests() {
        let mut polls = Polls::new(MAX);
        polls.look_again(2, 0);
        polls.slept(SHORT);
        for _ in 0..100 {
            assert!(!polls.look_again(2, 1), "it may need this CPU");
            polls.slept(LONG);
            assert!(polls.look_again(2, 0), "sleeps for it tell nothing about the device");
            polls.worked();
            assert!(polls.look_again(1, 1), "nothing else waits");
            polls.worked();
        }
    }

    #[test]
    fn idle_drivers_do_not_end_polling_for_a_fast_disk() {
        let mut polls = Polls::new(MAX);
        polls.look_again(1, 0);
        polls.slept(SHORT);
        for _ in 0..100 {
            assert!(polls.look_again(1, 0));
            polls.worked();
            assert!(!polls.look_again(0, 0));
            polls.slept(LONG);
        }
    }

    /// A poll with `looks` looks, whose readings of the clock say that each takes 50 ns.
    fn looked(looks: u32) -> AdaptivePoll {
        let mut poll = AdaptivePoll::new(Duration::from_secs(3600));
        poll.slept(SHORT);
        for _ in 0..looks {
            assert!(polls(&mut poll));
            if poll.looks.is_multiple_of(LOOKS_PER_CLOCK) {
                poll.read_clock(Duration::from_nanos(50) * (poll.looks - LOOKS_PER_CLOCK));
            }
        }
        poll
    }

    #[test]
    fn a_poll_has_the_time_of_all_its_looks() {
        for looks in [32, 33, 47, 48, 1000] {
            let nanos = 50 * u64::from(looks);
            assert_eq!(looked(looks).worked(), Some(Polled { won: true, nanos }), "{looks} looks");
            assert_eq!(looked(looks).slept(SHORT), Some(Polled { won: false, nanos }), "{looks}");
        }
        assert_eq!(looked(0).worked(), None);
        assert_eq!(looked(0).slept(SHORT), None);
    }

    #[test]
    fn looks_of_a_poll_without_a_reading_count_as_the_last_measured_ones() {
        let mut poll = looked(64);
        poll.worked();
        (0..15).for_each(|_| assert!(polls(&mut poll)));
        assert_eq!(poll.worked(), Some(Polled { won: true, nanos: 15 * 50 }));
        // The thread lost its CPU for a second, which later looks do not count.
        (0..31).for_each(|_| assert!(polls(&mut poll)));
        poll.looks += 1;
        poll.read_clock(Duration::from_secs(1));
        assert!(poll.worked().unwrap().nanos >= 1_000_000_000);
        assert!(polls(&mut poll));
        assert_eq!(poll.worked(), Some(Polled { won: true, nanos: LOOK_PS_MAX / 1000 }));
    }

    #[test]
    fn a_bound_of_zero_never_polls() {
        let mut poll = AdaptivePoll::new(Duration::ZERO);
        poll.slept(Duration::ZERO);
        assert!(!polls(&mut poll));
    }
}
