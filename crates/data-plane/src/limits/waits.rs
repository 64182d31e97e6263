// SPDX-License-Identifier: Apache-2.0
//! The order in which the queues of a disk in debt pay, and so take.

use super::{LEAD_MAX, Nanos};
use std::collections::BTreeSet;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Time after which another queue of a disk pays its debt, because the next payer has not looked.
const PAYER_PATIENCE: Nanos = 5 * LEAD_MAX;

/// The queues of a disk that wait, and the one that pays its debt in the name of the disk: with a
/// ticket of each queue, the disk would take more often than the others. The payer takes the next
/// request, so it is the queue that has waited longest.
#[derive(Debug, Default)]
pub(crate) struct Waits(Mutex<State>);

#[derive(Debug, Default)]
struct State {
    /// Number of waits so far, also the last [`Wait`].
    begun: Wait,
    waiting: BTreeSet<Wait>,
    payer: Option<Wait>,
    /// The time at which the payer looks next, or that of the end of the last payment.
    payer_due: Nanos,
}

/// Duty of a waiting queue of a disk in debt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Duty {
    /// Another queue pays.
    Wait,
    /// It pays from now on.
    BeginToPay,
    Pay,
}

/// The wait of a queue: a number that is higher than those of earlier waits of its disk.
pub(crate) type Wait = u64;

impl Waits {
    /// A queue of the disk begins to wait.
    pub(crate) fn begin(&self) -> Wait {
        let mut state = self.state();
        state.begun += 1;
        let wait = state.begun;
        state.waiting.insert(wait);
        wait
    }

    /// A queue waits no more, and pays no more.
    pub(crate) fn end(&self, wait: Wait, now: Nanos) {
        let mut state = self.state();
        state.waiting.remove(&wait);
        if state.payer == Some(wait) {
            state.payer = None;
            state.payer_due = now;
        }
    }

    /// A waiting queue of a disk in debt asks for its duty. The queue that has waited longest pays when no
    /// other one does, or any one if that one stays away for [`PAYER_PATIENCE`].
    pub(crate) fn duty(&self, wait: Wait, now: Nanos) -> Duty {
        let mut state = self.state();
        // Another queue may have removed this wait.
        state.waiting.insert(wait);
        let is_next = state.payer.is_none() && state.waiting.first() == Some(&wait);
        let is_left = now.saturating_sub(state.payer_due) >= PAYER_PATIENCE;
        let duty = match state.payer == Some(wait) {
            true => Duty::Pay,
            false if is_next || is_left => Duty::BeginToPay,
            false => return Duty::Wait,
        };
        if is_left {
            // Those before it are in the order again when they look.
            state.waiting = state.waiting.split_off(&wait);
        }
        state.payer = Some(wait);
        state.payer_due = now;
        duty
    }

    /// Returns whether another queue of the disk pays, and so takes next.
    pub(crate) fn has_other_payer(&self, wait: Option<Wait>) -> bool {
        self.state().payer.is_some_and(|payer| Some(payer) != wait)
    }

    /// A queue sleeps until `due`. If it pays, no other one does before.
    pub(crate) fn sleeps(&self, wait: Wait, due: Nanos) {
        let mut state = self.state();
        if state.payer == Some(wait) {
            state.payer_due = due;
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
