// SPDX-License-Identifier: Apache-2.0
//! Decides whether a sync waits for the FLUSHes that the last one has answered.
//!
//! Writers that each wait for a FLUSH fall into two groups: while one is synced, the other one writes. Each sync then
//! covers half of the writers. A sync that waits until all of them have a FLUSH covers all, and is as long. That pays
//! where a sync takes as long as the writes between two of them, and costs time where the writers do something else.
//! Only a trial shows which:
//!
//! | Phase | Syncs wait | Ends after | Next |
//! |---|---|---|---|
//! | without | no | [`WINDOW`] syncs | with |
//! | with | yes | [`WINDOW`] syncs | kept: yes, if the rate of FLUSHes is [`GAIN`] times that without; else no |
//! | with | yes | [`MISSES_MAX`] waits in a row in vain, or a [`GAP`] | kept: no |
//! | kept: yes | yes | [`KEPT_MAX`] syncs, or as many waits in vain | without |
//! | kept: no | no | [`KEPT_MIN`] syncs, twice as many after each further no, up to [`KEPT_MAX`] | without |
//!
//! One writer alone has no trial, and no wait. A window begins with a sync of several FLUSHes, and again after a gap.

use std::time::{Duration, Instant};

/// Syncs of several FLUSHes in a window.
const WINDOW: u32 = 32;
/// Syncs until the next trial. The storage may have slowed the last one by chance.
const KEPT_MIN: u32 = 64;
const KEPT_MAX: u32 = 1024;
/// Waits in a row that end without the expected FLUSHes.
const MISSES_MAX: u32 = 4;
/// The rate of FLUSHes that waits have to bring.
const GAIN: f64 = 1.1;
/// Longest wait, in times of the last sync, and at all.
const WAIT_SYNCS: u32 = 4;
const WAIT_MAX: Duration = Duration::from_millis(2);
/// A longer time between two syncs is a gap between two loads.
const GAP: Duration = Duration::from_millis(10);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    Without,
    With,
    Kept { waits: bool },
}

/// The trial, and its present window.
pub(super) struct Gather {
    phase: Phase,
    syncs: u32,
    flushes: u64,
    misses: u32,
    begun: Instant,
    last: Instant,
    /// FLUSHes a second without waits.
    rate_without: f64,
    /// Syncs after a trial without success.
    pause: u32,
}

impl Gather {
    pub(super) fn new(now: Instant) -> Self {
        Gather {
            phase: Phase::Without,
            syncs: 0,
            flushes: 0,
            misses: 0,
            begun: now,
            last: now,
            rate_without: 0.0,
            pause: KEPT_MIN,
        }
    }

    /// A trial that has found waits to pay.
    #[cfg(test)]
    pub(super) fn that_waits(now: Instant) -> Self {
        Gather { phase: Phase::Kept { waits: true }, ..Gather::new(now) }
    }

    /// A sync of this length has answered `answered` FLUSHes, and `waiting` others have come meanwhile. Returns the
    /// FLUSHes that the next sync waits for, and the longest wait.
    pub(super) fn synced(
        &mut self,
        now: Instant,
        took: Duration,
        answered: usize,
        waiting: usize,
    ) -> Option<(usize, Duration)> {
        let idle = now.saturating_duration_since(std::mem::replace(&mut self.last, now));
        if idle > GAP.max(took * WAIT_SYNCS) {
            self.cut(now);
            return None;
        }
        let is_of_several = answered + waiting >= 2;
        if !is_of_several && self.syncs == 0 {
            self.begin(self.phase, now);
            return None;
        }
        // The syncs of one FLUSH count for the rate: with waits there may be fewer of them.
        self.flushes += answered as u64;
        if !is_of_several {
            return None;
        }
        self.syncs += 1;
        self.look(now);
        let wait = (took * WAIT_SYNCS).min(WAIT_MAX);
        self.waits().then_some((answered + waiting, wait))
    }

    /// The expected FLUSHes have come.
    pub(super) fn hit(&mut self) {
        self.misses = 0;
    }

    /// They have not come in time.
    pub(super) fn missed(&mut self) {
        self.misses += 1;
    }

    fn waits(&self) -> bool {
        matches!(self.phase, Phase::With | Phase::Kept { waits: true })
    }

    /// A gap has cut the window. A trial that bursts cut again and again has no success.
    fn cut(&mut self, now: Instant) {
        match self.phase {
            Phase::Without => self.begin(Phase::Without, now),
            Phase::With => self.begin(Phase::Kept { waits: false }, now),
            Phase::Kept { .. } => {}
        }
    }

    /// Ends the window, if it is long enough.
    fn look(&mut self, now: Instant) {
        let is_full = self.syncs >= WINDOW;
        let misses = self.misses >= MISSES_MAX;
        let next = match self.phase {
            Phase::Without if is_full => {
                self.rate_without = self.rate(now);
                Phase::With
            }
            Phase::With if misses || is_full => {
                Phase::Kept { waits: !misses && self.rate(now) >= GAIN * self.rate_without }
            }
            Phase::Kept { waits: true } if misses || self.syncs >= KEPT_MAX => {
                self.pause = KEPT_MIN;
                Phase::Without
            }
            Phase::Kept { waits: false } if self.syncs >= self.pause => {
                self.pause = (self.pause * 2).min(KEPT_MAX);
                Phase::Without
            }
            _ => return,
        };
        self.begin(next, now);
    }

    fn rate(&self, now: Instant) -> f64 {
        self.flushes as f64 / now.saturating_duration_since(self.begun).as_secs_f64().max(1e-9)
    }

    fn begin(&mut self, phase: Phase, now: Instant) {
        (self.phase, self.begun) = (phase, now);
        (self.syncs, self.flushes, self.misses) = (0, 0, 0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SYNC: Duration = Duration::from_micros(100);

    /// [`KEPT_MAX`] syncs of a load: for each, the FLUSHes of eight that it answers, and the time since the last one, both
    /// with and without waits. Returns the number of those after which the next one waits.
    fn waits_of(
        gather: &mut Gather,
        now: &mut Instant,
        rate: impl Fn(bool) -> (usize, Duration),
    ) -> u32 {
        let mut waits = 0;
        for _ in 0..KEPT_MAX {
            let (answered, cycle) = rate(gather.waits());
            *now += cycle;
            waits += u32::from(gather.synced(*now, SYNC, answered, 8 - answered).is_some());
            gather.hit();
        }
        waits
    }

    #[test]
    fn syncs_wait_where_that_answers_more_flushes() {
        let mut now = Instant::now();
        let mut gather = Gather::new(now);
        let pays = |waits| if waits { (8, 2 * SYNC) } else { (4, SYNC + SYNC / 2) };
        let waits = waits_of(&mut gather, &mut now, pays);
        assert_eq!(waits, KEPT_MAX - WINDOW + 1);
        let mut gather = Gather::new(now);
        let does_not_pay = |waits| if waits { (8, 2 * SYNC) } else { (4, SYNC) };
        // Trials after 64, 128, 256 and 512 syncs.
        let waits = waits_of(&mut gather, &mut now, does_not_pay);
        assert_eq!(waits, 4 * WINDOW);
        assert_eq!(waits_of(&mut gather, &mut now, does_not_pay), WINDOW);
    }

    #[test]
    fn a_wait_has_a_bound_and_ends_with_those_that_are_in_vain() {
        let mut now = Instant::now();
        let mut gather = Gather::new(now);
        for _ in 0..WINDOW {
            now += SYNC;
            gather.synced(now, SYNC, 2, 2);
        }
        for _ in 0..MISSES_MAX {
            now += SYNC;
            assert_eq!(gather.synced(now, SYNC, 2, 2), Some((4, SYNC * WAIT_SYNCS)));
            gather.missed();
        }
        now += SYNC;
        assert_eq!(gather.synced(now, SYNC, 2, 2), None);
        let mut gather = Gather::new(now);
        gather.begin(Phase::Kept { waits: true }, now);
        assert_eq!(gather.synced(now, SYNC * 1000, 2, 2), Some((4, WAIT_MAX)));
    }

    #[test]
    fn one_writer_alone_and_the_first_sync_after_a_gap_do_not_wait() {
        let mut now = Instant::now();
        let mut gather = Gather::new(now);
        gather.begin(Phase::Kept { waits: true }, now);
        for _ in 0..WINDOW {
            now += SYNC;
            assert_eq!(gather.synced(now, SYNC, 1, 0), None);
        }
        now += SYNC;
        assert_eq!(gather.synced(now, SYNC, 1, 1), Some((2, SYNC * WAIT_SYNCS)));
        now += GAP * 2;
        assert_eq!(gather.synced(now, SYNC, 1, 1), None);
        now += SYNC;
        assert!(gather.synced(now, SYNC, 1, 1).is_some(), "the gap says nothing about the waits");
    }

    /// Two writers that do other work as well: their FLUSHes overlap in every fourth sync, and waits join them at the
    /// same rate.
    #[test]
    fn waits_that_only_join_flushes_are_no_gain() {
        let mut now = Instant::now();
        let mut gather = Gather::new(now);
        let (mut waits, mut syncs) = (0, 0);
        while syncs < 8 * KEPT_MAX {
            let shared: &[(usize, usize)] =
                if gather.waits() { &[(2, 0)] } else { &[(1, 0), (1, 1), (1, 0), (1, 0)] };
            for &(answered, waiting) in shared {
                now += 3 * SYNC * answered as u32;
                waits += u32::from(gather.synced(now, SYNC, answered, waiting).is_some());
                syncs += 1;
            }
        }
        // The windows of the trials, no more.
        assert!(waits <= 16 * WINDOW, "{waits} of {syncs} waited");
    }

    #[test]
    fn bursts_that_cut_each_trial_have_few_waits() {
        let mut now = Instant::now();
        let mut gather = Gather::new(now);
        let mut waits = 0;
        for _ in 0..500 {
            now += GAP * 2;
            for _ in 0..50 {
                now += SYNC;
                waits += u32::from(gather.synced(now, SYNC, 4, 4).is_some());
                gather.hit();
            }
        }
        assert!(waits < 50 * 500 / 20, "{waits}");
    }
}
