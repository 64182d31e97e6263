// SPDX-License-Identifier: Apache-2.0
//! The state of a merge, which its threads and the clients share.
//!
//! | State | Begins | Next |
//! |---|---|---|
//! | open | with the merge | cancelled; moving |
//! | cancelled | [`MergeState::cancel`], or the move has failed | |
//! | moving | [`MergeState::begin_move`]: the drained disk has its whole content in the backing file | cancelled |

use super::CANCELLED;
use backend::wrap::{Brake, Written};
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};

const OPEN: u8 = 0;
const IS_CANCELLED: u8 = 1;
const MOVING: u8 = 2;

/// A merge in progress.
#[derive(Debug)]
pub(in crate::disks) struct MergeState {
    step: AtomicU8,
    /// The brake of the disk, with the notes of its changes.
    pub(super) brake: Arc<Brake>,
}

impl MergeState {
    pub(super) fn new(capacity_bytes: u64) -> Self {
        let brake = Arc::new(Brake::new(Arc::new(Written::new(capacity_bytes))));
        MergeState { step: AtomicU8::new(OPEN), brake }
    }

    /// Asks for the end. Writes of the guest that wait go on. `false`: the guest moves, or has moved.
    pub(in crate::disks) fn cancel(&self) -> bool {
        let was =
            self.step.compare_exchange(OPEN, IS_CANCELLED, Ordering::AcqRel, Ordering::Acquire);
        self.brake.release();
        was != Err(MOVING)
    }

    pub(super) fn is_cancelled(&self) -> bool {
        self.step.load(Ordering::Acquire) == IS_CANCELLED
    }

    /// The guest stays in its image.
    pub(super) fn ends(&self) {
        self.step.store(IS_CANCELLED, Ordering::Release);
    }

    /// Begins the move of the guest, which no cancel stops then.
    pub(super) fn begin_move(&self) -> Result<(), String> {
        let was = self.step.compare_exchange(OPEN, MOVING, Ordering::AcqRel, Ordering::Acquire);
        was.map(drop).map_err(|_| CANCELLED.to_owned())
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
