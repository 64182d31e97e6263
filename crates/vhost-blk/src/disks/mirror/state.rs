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
//! A withdrawal is decided against the begin of the rest under the lock, and a cancel against that of the move:
//! neither begins after it, and it is not accepted after that. In the state ended the guest goes on in the old storage. A
//! client may order the completion in any state; one order at a time.

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
            Phase::Completing | Phase::Drained | Phase::Moving => "completing",
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
    /// The incomplete file.
    part: Option<PathBuf>,
}

/// The order of a client to complete the mirror.
#[derive(Debug)]
enum Order {
    None,
    /// The client waits.
    Given {
        update_config: bool,
    },
    /// For the client, which takes it.
    Answered(Result<Completed, String>),
    /// The mirror has ended without a client that waits.
    Ended(String),
}

impl Order {
    fn is_given(&self) -> bool {
        matches!(self, Order::Given { .. })
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

    /// Orders the completion.
    ///
    /// # Errors
    /// Cause and remedy.
    pub(super) fn order(&self, update_config: bool) -> Result<(), String> {
        let mut state = self.lock();
        match &state.order {
            Order::None => state.order = Order::Given { update_config },
            Order::Ended(told) => return Err(told.clone()),
            Order::Given { .. } | Order::Answered(_) => {
                return Err("another client completes it; wait for that".to_owned());
            }
        }
        drop(state);
        self.changed.notify_all();
        Ok(())
    }

    /// The answer to the order. Waits for it at most so long.
    pub(super) fn answer(&self, patience: Duration) -> Option<Result<Completed, String>> {
        let deadline = Instant::now() + patience;
        let mut state = self.lock();
        loop {
            if let Order::Answered(_) = state.order
                && let Order::Answered(answer) = std::mem::replace(&mut state.order, Order::None)
            {
                return Some(answer);
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return None;
            }
            state = self.wait(state, left);
        }
    }

    /// Withdraws the order. `false`: it was answered, or is about to be.
    pub(super) fn withdraw(&self) -> bool {
        let mut state = self.lock();
        let withdraws =
            !matches!(state.phase, Phase::Drained | Phase::Moving) && state.order.is_given();
        if withdraws {
            state.order = Order::None;
        }
        drop(state);
        if withdraws {
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
    pub(super) fn begin_rest(&self) -> Result<(), String> {
        let mut state = self.lock();
        match state.order {
            _ if state.is_cancelled => return Err(CANCELLED.to_owned()),
            Order::Given { .. } => state.phase = Phase::Drained,
            _ => return Err(WITHDRAWN.to_owned()),
        }
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
        if !state.is_cancelled && matches!(state.order, Order::None) {
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

    /// The order that waits: whether the configuration file is to be rewritten.
    pub(super) fn ordered(&self) -> Option<bool> {
        match self.lock().order {
            Order::Given { update_config } => Some(update_config),
            _ => None,
        }
    }

    /// Changes the phase.
    pub(super) fn enter(&self, phase: Phase) {
        self.lock().phase = phase;
    }

    /// Notes the bytes of the first copy.
    pub(super) fn copied(&self, bytes: u64) {
        self.lock().copied_bytes = bytes;
    }

    /// Returns whether writes of the guest wait for the copy.
    pub(super) fn holds_writes(&self) -> bool {
        self.lock().phase == Phase::Completing && self.brake.waiting() > 0
    }

    /// Answers an order that cannot be carried out now; the mirror goes on.
    pub(super) fn refuse(&self, told: String) {
        let mut state = self.lock();
        if let Order::Given { .. } = state.order {
            state.order = Order::Answered(Err(told));
        }
        drop(state);
        self.changed.notify_all();
    }

    /// Answers the order at the end of the mirror, which the table does not have any more.
    pub(super) fn end(&self, outcome: Result<Completed, String>) {
        let mut state = self.lock();
        state.order = match (&state.order, outcome) {
            (Order::Given { .. }, outcome) => Order::Answered(outcome),
            (_, Err(told)) => Order::Ended(told),
            (_, Ok(_)) => Order::Ended("it is complete; see vhost-blk ctl status".to_owned()),
        };
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

    fn ordered() -> Mirror {
        let mirror = Mirror::new("b".into(), 1 << 20);
        mirror.order(false).unwrap();
        mirror.enter(Phase::Completing);
        mirror
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
        let mirror = ordered();
        mirror.cancel();
        assert_eq!(mirror.begin_rest(), Err(CANCELLED.to_owned()));
        let mirror = ordered();
        mirror.begin_rest().unwrap();
        mirror.cancel();
        assert_eq!(mirror.begin_move(), Err(CANCELLED.to_owned()));
        mirror.enter(Phase::Ended);
        assert_eq!(mirror.cancelled(), Ok(()));
        let mirror = ordered();
        assert!(mirror.withdraw());
        assert_eq!(mirror.begin_rest(), Err(WITHDRAWN.to_owned()));
        let mirror = ordered();
        mirror.begin_rest().unwrap();
        assert!(!mirror.withdraw(), "the mirror cannot go on");
        assert_eq!(mirror.begin_move(), Ok(()));
        mirror.cancel();
        assert!(!mirror.is_cancelled());
        assert!(!mirror.withdraw(), "its client gets the answer of the move");
        mirror.enter(Phase::Moved);
        mirror.end(Ok(completed()));
        assert!(mirror.cancelled().unwrap_err().contains("has moved to the new storage"));
        assert!(mirror.answer(Duration::ZERO).unwrap().is_ok());
    }

    #[test]
    fn a_cancel_during_a_move_that_fails_has_its_way() {
        let mirror = ordered();
        mirror.begin_move().unwrap();
        mirror.cancel();
        mirror.enter(Phase::Ended);
        assert_eq!(mirror.cancelled(), Ok(()));
    }
}
