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
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

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
    /// Path of the backing file, once it is known.
    target: OnceLock<String>,
    /// Bytes of the disk that were copied once, or that its image does not have.
    done_bytes: AtomicU64,
}

impl MergeState {
    pub(super) fn new(capacity_bytes: u64) -> Self {
        let brake = Arc::new(Brake::new(Arc::new(Written::new(capacity_bytes))));
        let (target, done_bytes) = (OnceLock::new(), AtomicU64::new(0));
        MergeState { step: Mutex::new(Step::Open), brake, target, done_bytes }
    }

    /// Path of the backing file; empty before the first look at the image.
    pub(in crate::disks) fn target(&self) -> &str {
        self.target.get().map_or("", String::as_str)
    }

    pub(super) fn has_target(&self, path: &Path) {
        let _ = self.target.set(path.display().to_string()); // there is one
    }

    /// Bytes of the disk that were copied once, and of all.
    pub(in crate::disks) fn progress(&self) -> (u64, u64) {
        // Only for its user: it orders nothing.
        (self.done_bytes.load(Ordering::Relaxed), self.brake.written().capacity_bytes())
    }

    pub(super) fn copied(&self, up_to: u64) {
        self.done_bytes.store(up_to, Ordering::Relaxed);
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
