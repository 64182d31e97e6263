// SPDX-License-Identifier: Apache-2.0
//! The state of a merge, which its threads and the clients share. It changes under one lock.
//!
//! | State | Begins | Next |
//! |---|---|---|
//! | open | with the merge | cancelled; moving |
//! | cancelled | [`MergeState::cancel`], or the move has failed | |
//! | moving | [`MergeState::begin_move`]: the drained disk has its whole content in the backing file | cancelled |

use super::CANCELLED;
use backend::wrap::{Brake, Written};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Step {
    Open,
    Cancelled,
    Moving,
}

/// A merge in progress.
#[derive(Debug)]
pub(in crate::disks) struct MergeState {
    step: Mutex<Step>,
    /// The brake of the disk, with the notes of its changes.
    pub(super) brake: Arc<Brake>,
}

impl MergeState {
    pub(super) fn new(capacity_bytes: u64) -> Self {
        let brake = Arc::new(Brake::new(Arc::new(Written::new(capacity_bytes))));
        MergeState { step: Mutex::new(Step::Open), brake }
    }

    /// Asks for the end. Writes of the guest that wait go on. `false`: the guest moves, or has moved.
    pub(in crate::disks) fn cancel(&self) -> bool {
        let mut step = self.lock();
        let is_in_time = *step != Step::Moving;
        if is_in_time {
            *step = Step::Cancelled;
        }
        drop(step);
        self.brake.release();
        is_in_time
    }

    pub(super) fn is_cancelled(&self) -> bool {
        *self.lock() == Step::Cancelled
    }

    /// The guest stays in its image.
    pub(super) fn ends(&self) {
        *self.lock() = Step::Cancelled;
    }

    /// Begins the move of the guest, which no cancel stops then.
    ///
    /// # Errors
    /// The merge was cancelled.
    pub(super) fn begin_move(&self) -> Result<(), String> {
        let mut step = self.lock();
        if *step == Step::Cancelled {
            return Err(CANCELLED.to_owned());
        }
        *step = Step::Moving;
        Ok(())
    }

    fn lock(&self) -> MutexGuard<'_, Step> {
        self.step.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cancel_comes_in_time_or_not_at_all_and_releases_the_brake() {
        let state = MergeState::new(1 << 20);
        state.brake.hold(0);
        assert!(state.cancel() && state.is_cancelled() && !state.brake.is_on());
        assert!(state.cancel(), "again");
        assert_eq!(state.begin_move(), Err(CANCELLED.to_owned()));
        let state = MergeState::new(1 << 20);
        assert_eq!(state.begin_move(), Ok(()));
        assert!(!state.cancel() && !state.is_cancelled());
        state.ends();
        assert!(state.cancel(), "the guest has stayed in its image");
    }
}
