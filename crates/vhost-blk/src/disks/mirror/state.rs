// SPDX-License-Identifier: Apache-2.0
//! The state of a mirror, which its thread and the clients share. It changes under one lock.
//!
//! | State | Begins | Next |
//! |---|---|---|
//! | copying | with the mirror | ready, after the first copy of the whole disk |
//! | ready | changed parts are copied, again and again | completing, when a client has ordered that |
//! | completing | the brake is on | ready, if the exchange is refused or withdrawn; drained |
//! | drained | [`Mirror::begin_rest`]: the disk takes no request, and the target gets the rest | moving; ended |
//! | moving | [`Mirror::begin_move`]: the drained disk has its whole content in the new storage | moved; ended, if the old image or the configuration cannot be changed |
//! | moved | the guest goes on in the new storage | |
//! | ended | a cancel, an error of the source or of the target, or a target that does not answer | |
//!
//! The lock orders a withdrawal and the begin of the rest, and a cancel and the begin of the move: the first of the two
//! excludes the other. In the state ended the guest goes on in the old storage.
//!
//! | State of the order | Begins | Next |
//! |---|---|---|
//! | none | with the mirror | given; none is given after [`Mirror::end`] |
//! | given | [`Mirror::order`], in any state of the mirror | answered; none, if it is withdrawn |
//! | answered | [`Mirror::refuse`], [`Mirror::end`] | none, when its client has taken the answer |
//!
//! Each order has a number: the refusal of one that was withdrawn does not answer the next.

use super::Completed;
use backend::wrap::{Brake, Written};
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// The answer to a client that has gone.
pub(super) const WITHDRAWN: &str =
    "the client has gone, and the mirror goes on; repeat the command";
/// The reason of a mirror that was cancelled.
pub(super) const CANCELLED: &str =
    "the mirror was cancelled, and the disk goes on in its old storage; begin it again with --to";
/// The answer to a cancel that comes too late.
const MOVED: &str =
    "its guest has moved to the new storage; to move it back, mirror it again with --to";

/// The phase of a mirror.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    /// The disk is copied for the first time.
    Copying,
    /// Everything was copied once, and changes are copied as they come.
    Ready,
    /// The guest is about to go on in the new storage.
    Completing,
    /// The disk is drained for that.
    Drained,
    /// It cannot be kept from that any more.
    Moving,
    /// It goes on there.
    Moved,
    /// The guest stays in the old storage.
    Ended,
}

impl Phase {
    /// Its name in the control protocol.
    pub fn name(self) -> &'static str {
        match self {
            Phase::Copying => "copying",
            Phase::Ready => "ready",
            Phase::Completing => "completing",
            Phase::Drained | Phase::Moving => "drained",
            Phase::Moved => "moved",
            Phase::Ended => "ended",
        }
    }
}

/// A mirror in progress.
#[derive(Debug)]
pub(in crate::disks) struct Mirror {
    target: PathBuf,
    brake: Arc<Brake>,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug)]
struct State {
    phase: Phase,
    copied_bytes: u64,
    is_cancelled: bool,
    order: Order,
    /// Orders that were given.
    orders: u64,
    /// The answer to an order after the end of the mirror.
    over: Option<String>,
    /// The incomplete file.
    part: Option<PathBuf>,
}

/// The order of a client to complete the mirror.
#[derive(Debug)]
enum Order {
    None,
    /// The client waits.
    Given(Ordered),
    /// For the client of this number, which takes it.
    Answered(u64, Result<Completed, String>),
}

/// An order that was given.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Ordered {
    pub(super) number: u64,
    /// Rewrite the configuration file.
    pub(super) update_config: bool,
}

impl Order {
    fn given(&self) -> Option<Ordered> {
        match self {
            Order::Given(ordered) => Some(*ordered),
            _ => None,
        }
    }
}

impl Mirror {
    pub(super) fn new(target: PathBuf, capacity_bytes: u64) -> Self {
        let brake = Arc::new(Brake::new(Arc::new(Written::new(capacity_bytes))));
        let state = State {
            phase: Phase::Copying,
            copied_bytes: 0,
            is_cancelled: false,
            order: Order::None,
            orders: 0,
            over: None,
            part: None,
        };
        Mirror { target, brake, state: Mutex::new(state), changed: Condvar::new() }
    }

    pub(super) fn target(&self) -> &Path {
        &self.target
    }

    /// The brake of the disk, with the notes of its changes.
    pub(super) fn brake(&self) -> &Arc<Brake> {
        &self.brake
    }

    /// The phase, and the bytes of the first copy.
    pub(super) fn progress(&self) -> (Phase, u64) {
        let state = self.lock();
        (state.phase, state.copied_bytes)
    }

    /// Orders the completion. Returns the number of the order.
    ///
    /// # Errors
    /// Cause and remedy.
    pub(super) fn order(&self, update_config: bool) -> Result<u64, String> {
        let mut state = self.lock();
        if let Some(told) = &state.over {
            return Err(told.clone());
        }
        if !matches!(state.order, Order::None) {
            return Err("another client completes it; wait for that".to_owned());
        }
        state.orders += 1;
        let number = state.orders;
        state.order = Order::Given(Ordered { number, update_config });
        drop(state);
        self.changed.notify_all();
        Ok(number)
    }

    /// The answer to an order. Waits for it at most so long.
    pub(super) fn answer(
        &self,
        number: u64,
        patience: Duration,
    ) -> Option<Result<Completed, String>> {
        let deadline = Instant::now() + patience;
        let mut state = self.lock();
        loop {
            match std::mem::replace(&mut state.order, Order::None) {
                Order::Answered(of, answer) if of == number => return Some(answer),
                other => state.order = other,
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return None;
            }
            state = self.wait(state, left);
        }
    }

    /// Withdraws an order. `false`: it was answered, or is about to be.
    pub(super) fn withdraw(&self, number: u64) -> bool {
        let mut state = self.lock();
        let withdraws = !matches!(state.phase, Phase::Drained | Phase::Moving)
            && state.order.given().is_some_and(|ordered| ordered.number == number);
        if withdraws {
            state.order = Order::None;
            // Under the lock: not in the completion of the next order.
            self.brake.release();
        }
        withdraws
    }

    /// Asks for the end, unless the move has begun. Writes of the guest that wait go on.
    pub(in crate::disks) fn cancel(&self) {
        let mut state = self.lock();
        if matches!(state.phase, Phase::Moving | Phase::Moved) {
            return;
        }
        state.is_cancelled = true;
        drop(state);
        self.brake.release();
        self.changed.notify_all();
    }

    /// Begins the copy of the rest, after which the mirror does not go on. The disk is drained.
    ///
    /// # Errors
    /// The mirror was cancelled, or the order withdrawn.
    pub(super) fn begin_rest(&self, ordered: Ordered) -> Result<(), String> {
        let mut state = self.lock();
        if state.is_cancelled {
            return Err(CANCELLED.to_owned());
        }
        if state.order.given() != Some(ordered) {
            return Err(WITHDRAWN.to_owned());
        }
        state.phase = Phase::Drained;
        Ok(())
    }

    /// Begins the move of the guest, which no cancel stops then.
    ///
    /// # Errors
    /// The mirror was cancelled.
    pub(super) fn begin_move(&self) -> Result<(), String> {
        let mut state = self.lock();
        if state.is_cancelled {
            return Err(CANCELLED.to_owned());
        }
        state.phase = Phase::Moving;
        Ok(())
    }

    /// The answer to a cancel of a mirror that has ended.
    ///
    /// # Errors
    /// The guest has moved before.
    pub(super) fn cancelled(&self) -> Result<(), String> {
        if self.lock().phase == Phase::Moved { Err(MOVED.to_owned()) } else { Ok(()) }
    }

    pub(super) fn is_cancelled(&self) -> bool {
        self.lock().is_cancelled
    }

    /// Waits at most so long for an order or a cancel.
    pub(super) fn pause(&self, patience: Duration) {
        let state = self.lock();
        if !state.is_cancelled && state.order.given().is_none() {
            drop(self.wait(state, patience));
        }
    }

    /// Waits at most so long for a cancel.
    pub(super) fn pause_unless_cancelled(&self, patience: Duration) {
        let state = self.lock();
        if !state.is_cancelled {
            drop(self.wait(state, patience));
        }
    }

    /// The order that waits.
    pub(super) fn ordered(&self) -> Option<Ordered> {
        self.lock().order.given()
    }

    /// Changes the phase.
    pub(super) fn enter(&self, phase: Phase) {
        self.lock().phase = phase;
    }

    /// Notes the bytes of the first copy.
    pub(super) fn copied(&self, bytes: u64) {
        self.lock().copied_bytes = bytes;
    }

    /// Answers an order that cannot be carried out now; the mirror goes on.
    pub(super) fn refuse(&self, number: u64, told: String) {
        let mut state = self.lock();
        if state.order.given().is_some_and(|ordered| ordered.number == number) {
            state.order = Order::Answered(number, Err(told));
        }
        drop(state);
        self.changed.notify_all();
    }

    /// Answers the order at the end of the mirror, which the table does not have any more.
    pub(super) fn end(&self, outcome: Result<Completed, String>) {
        let mut state = self.lock();
        state.over = Some(match &outcome {
            Err(told) => told.clone(),
            Ok(_) => "it is complete; see vhost-blk ctl status".to_owned(),
        });
        if let Some(ordered) = state.order.given() {
            state.order = Order::Answered(ordered.number, outcome);
        }
        drop(state);
        self.changed.notify_all();
    }

    /// Notes the path of the incomplete file.
    pub(super) fn has_part(&self, path: &Path) {
        self.lock().part = Some(path.to_owned());
    }

    /// Removes the incomplete file, for an exit without a drain.
    pub(in crate::disks) fn remove_part(&self) {
        if let Some(part) = &self.lock().part {
            let _ = fs::remove_file(part); // it may have its name
        }
    }

    fn wait<'a>(&self, state: MutexGuard<'a, State>, patience: Duration) -> MutexGuard<'a, State> {
        self.changed.wait_timeout(state, patience).unwrap_or_else(PoisonError::into_inner).0
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ordered() -> (Mirror, Ordered) {
        let mirror = Mirror::new("b".into(), 1 << 20);
        mirror.order(false).unwrap();
        mirror.enter(Phase::Completing);
        let order = mirror.ordered().unwrap();
        (mirror, order)
    }

    fn completed() -> Completed {
        Completed {
            image: "b".into(),
            before: "a".into(),
            options: String::new(),
            config: None,
            is_marked: true,
            pause: Duration::ZERO,
        }
    }

    #[test]
    fn a_cancel_or_a_withdrawal_comes_in_time_or_not_at_all() {
        let (mirror, order) = ordered();
        mirror.cancel();
        assert_eq!(mirror.begin_rest(order), Err(CANCELLED.to_owned()));
        let (mirror, order) = ordered();
        mirror.begin_rest(order).unwrap();
        mirror.cancel();
        assert_eq!(mirror.begin_move(), Err(CANCELLED.to_owned()));
        mirror.enter(Phase::Ended);
        assert_eq!(mirror.cancelled(), Ok(()));
        let (mirror, order) = ordered();
        assert!(mirror.withdraw(order.number));
        assert_eq!(mirror.begin_rest(order), Err(WITHDRAWN.to_owned()));
        let (mirror, order) = ordered();
        mirror.begin_rest(order).unwrap();
        assert!(!mirror.withdraw(order.number), "the mirror cannot go on");
        assert_eq!(mirror.begin_move(), Ok(()));
        mirror.cancel();
        assert!(!mirror.is_cancelled());
        assert!(!mirror.withdraw(order.number), "its client gets the answer of the move");
        mirror.enter(Phase::Moved);
        mirror.end(Ok(completed()));
        assert!(mirror.cancelled().unwrap_err().contains("has moved to the new storage"));
        assert!(mirror.answer(order.number, Duration::ZERO).unwrap().is_ok());
    }

    #[test]
    fn a_cancel_during_a_move_that_fails_has_its_way() {
        let (mirror, _) = ordered();
        mirror.begin_move().unwrap();
        mirror.cancel();
        mirror.enter(Phase::Ended);
        assert_eq!(mirror.cancelled(), Ok(()));
    }

    #[test]
    fn the_end_of_an_order_is_not_that_of_the_next() {
        let (mirror, first) = ordered();
        assert!(mirror.withdraw(first.number));
        let second = mirror.order(true).unwrap();
        mirror.refuse(first.number, "late".to_owned());
        assert!(!mirror.withdraw(first.number));
        assert_eq!(mirror.begin_rest(first), Err(WITHDRAWN.to_owned()));
        assert_eq!(mirror.ordered().map(|order| order.number), Some(second));
        mirror.refuse(second, "now".to_owned());
        assert!(mirror.answer(first.number, Duration::ZERO).is_none());
        // The end leaves an answer that its client has not taken yet, and no order comes after it.
        mirror.end(Err("over".to_owned()));
        assert_eq!(mirror.answer(second, Duration::ZERO).unwrap().unwrap_err(), "now");
        assert_eq!(mirror.order(false), Err("over".to_owned()));
    }
}
