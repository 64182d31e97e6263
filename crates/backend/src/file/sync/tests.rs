// SPDX-License-Identifier: Apache-2.0
//! Syncs that wait for the FLUSHes that the last one has answered.

use super::*;
use std::collections::BTreeMap;

const SYNC: Duration = Duration::from_micros(100);

/// The syncs of a lane that has found waits to pay.
fn syncs(now: Instant) -> Syncs {
    let file = tempfile::tempfile().expect("a file");
    Syncs { gather: Gather::that_waits(now), ..Syncs::with(file, now) }
}

/// Syncs that wait: the I/O 0 has led a sync, 1 and 2 have come meanwhile, and 1 has the timer.
fn gathering() -> (Syncs, Instant) {
    let now = Instant::now();
    let mut syncs = syncs(now);
    assert_eq!(syncs.enter(Slot(0), now), Part::Leads);
    assert_eq!(syncs.enter(Slot(1), now), Part::Waits);
    assert_eq!(syncs.enter(Slot(2), now), Part::Waits);
    let now = now + SYNC;
    let end = syncs.end(Slot(0), true, now);
    assert_eq!((end.followers.len(), end.leader), (0, None));
    assert_eq!(end.gathers, Some((Slot(1), 4 * SYNC)));
    (syncs, now)
}

#[test]
fn a_sync_begins_with_the_last_flush_that_is_expected() {
    let (mut syncs, now) = gathering();
    assert_eq!(syncs.enter(Slot(0), now), Part::Leads);
    assert_eq!(syncs.take_late_timer(), Some(Slot(1)));
    assert_eq!(syncs.event(Slot(1), now), Part::Waits);
    let end = syncs.end(Slot(0), true, now + SYNC);
    assert_eq!((end.followers, end.leader, end.gathers), (vec![Slot(1), Slot(2)], None, None));
    // The first one of the next three has the timer.
    assert_eq!(syncs.enter(Slot(2), now + SYNC), Part::Gathers(4 * SYNC));
}

#[test]
fn a_sync_begins_without_flushes_that_do_not_come() {
    let (mut syncs, now) = gathering();
    assert_eq!(syncs.event(Slot(1), now + 4 * SYNC), Part::Leads);
    assert_eq!(syncs.take_late_timer(), None);
    let end = syncs.end(Slot(1), true, now + 5 * SYNC);
    assert_eq!(end.followers, [Slot(2)]);
    // None of the two that were answered comes in time.
    assert_eq!(syncs.enter(Slot(3), now + 10 * SYNC), Part::Leads);
}

#[test]
fn a_flush_whose_sync_ends_before_its_timer_ends_with_the_timer() {
    let (mut syncs, now) = gathering();
    assert_eq!(syncs.enter(Slot(0), now), Part::Leads);
    assert_eq!(syncs.end(Slot(0), true, now).followers, [Slot(2)]);
    assert_eq!(syncs.event(Slot(1), now), Part::Ended);
    assert_eq!(syncs.event(Slot(2), now), Part::Ended);
}

#[test]
fn after_a_sync_that_was_not_carried_out_one_without_a_timer_leads() {
    let (mut syncs, now) = gathering();
    assert_eq!(syncs.enter(Slot(0), now), Part::Leads);
    let end = syncs.end(Slot(0), false, now);
    assert_eq!((end.leader, end.gathers), (Some(Slot(2)), None));
    let end = syncs.end(Slot(2), false, now);
    assert_eq!((end.leader, end.gathers), (None, None));
    assert_eq!(syncs.event(Slot(1), now), Part::Leads);
}

/// The outstanding event of an I/O.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Outstanding {
    Sync,
    Timer,
    Nop,
}

/// I/Os that want syncs, and their events in any order.
struct Model {
    syncs: Syncs,
    now: Instant,
    /// The number of the step at which each one has come.
    come: BTreeMap<u32, u32>,
    outstanding: BTreeMap<u32, Outstanding>,
    /// The step at which the running sync has begun.
    begun: u32,
    step: u32,
}

impl Model {
    fn push(&mut self, slot: Slot, op: Outstanding) {
        assert_eq!(self.outstanding.insert(slot.0, op), None, "two events of one slot");
    }

    fn take_part(&mut self, slot: Slot, part: Part) {
        match part {
            Part::Leads => {
                self.begun = self.step;
                self.push(slot, Outstanding::Sync);
            }
            Part::Gathers(_) => self.push(slot, Outstanding::Timer),
            Part::Waits => {}
            Part::Ended => drop(self.come.remove(&slot.0).expect("it waits")),
        }
        if let Some(slot) = self.syncs.take_late_timer() {
            assert_eq!(self.outstanding[&slot.0], Outstanding::Timer);
        }
    }

    fn enter(&mut self, slot: u32) {
        self.come.insert(slot, self.step);
        let part = self.syncs.enter(Slot(slot), self.now);
        self.take_part(Slot(slot), part);
    }

    fn event(&mut self, slot: u32, has_run: bool) {
        let slot = Slot(slot);
        if self.outstanding.remove(&slot.0) != Some(Outstanding::Sync) {
            let part = self.syncs.event(slot, self.now);
            return self.take_part(slot, part);
        }
        assert!(self.syncs.leads(slot));
        self.come.remove(&slot.0).expect("it waits");
        let covered = self.syncs.followers.clone();
        let end = self.syncs.end(slot, has_run, self.now);
        if has_run {
            assert!(
                covered.iter().all(|slot| self.come[&slot.0] <= self.begun),
                "data was not there"
            );
        }
        assert!(has_run || end.followers.is_empty());
        for slot in end.followers {
            self.push(slot, Outstanding::Nop);
        }
        if let Some(slot) = end.leader {
            self.take_part(slot, Part::Leads);
        }
        if let Some((slot, delay)) = end.gathers {
            self.take_part(slot, Part::Gathers(delay));
        }
    }
}

#[test]
fn each_flush_ends_after_a_sync_that_began_after_it_in_any_order_of_events() {
    for seed in 0..200 {
        let mut random = fastrand::Rng::with_seed(seed);
        let now = Instant::now();
        let (come, outstanding) = (BTreeMap::new(), BTreeMap::new());
        let mut model = Model { syncs: syncs(now), now, come, outstanding, begun: 0, step: 0 };
        for step in 0..400 {
            model.step = step;
            model.now += SYNC.mul_f64(random.f64());
            let slot = random.u32(..6);
            let pending: Vec<u32> = model.outstanding.keys().copied().collect();
            match model.come.contains_key(&slot) {
                false => model.enter(slot),
                true => model.event(pending[random.usize(..pending.len())], random.u8(..8) > 0),
            }
        }
        // Without further FLUSHes, all end.
        for _ in 0..100 {
            let Some((&slot, _)) = model.outstanding.first_key_value() else { break };
            model.step += 1;
            model.event(slot, true);
        }
        assert!(
            model.come.is_empty() && model.outstanding.is_empty(),
            "{seed}: some wait for ever"
        );
    }
}
