// SPDX-License-Identifier: Apache-2.0
//! The merge of a disk in the table: one at a time, and the disk stays until its end.

use crate::disks::exchange::Source;
use crate::disks::reload::NoReload;
use crate::disks::{Disks, Slot, State};
use crate::failure::Failure;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, MutexGuard, PoisonError, TryLockError};
use std::time::Duration;

/// Interval of the look at a reload that is in progress.
const LOOK: Duration = Duration::from_millis(20);

/// The refusal of an act that a merge excludes.
pub(in crate::disks) const MERGING: &str = "its image is being merged; wait for the end of that, or cancel it (vhost-blk ctl commit --cancel)";

/// A merge in progress.
#[derive(Debug, Default)]
pub(in crate::disks) struct MergeJob {
    is_cancelled: AtomicBool,
}

/// The owner of a merge in progress; its end when dropped.
pub(super) struct Job<'a> {
    disks: &'a Disks,
    name: String,
    job: Arc<MergeJob>,
}

impl Job<'_> {
    pub(super) fn is_cancelled(&self) -> bool {
        self.job.is_cancelled.load(Ordering::Relaxed)
    }
}

impl Drop for Job<'_> {
    fn drop(&mut self) {
        let mut state = self.disks.lock();
        if let Some(merge) = state.merge_of(&self.name)
            && merge.as_ref().is_some_and(|job| Arc::ptr_eq(job, &self.job))
        {
            *merge = None;
        }
        drop(state);
        self.disks.changed.notify_all();
    }
}

impl State {
    fn merge_of(&mut self, name: &str) -> Option<&mut Option<Arc<MergeJob>>> {
        match self.table.get_mut(name) {
            Some(Slot::Served(entry)) => Some(&mut entry.merge),
            _ => None,
        }
    }
}

impl Disks {
    /// Notes a merge of the disk in the table.
    pub(super) fn begin_merge(&self, source: &Source) -> Result<Job<'_>, String> {
        let job = Arc::new(MergeJob::default());
        let mut state = self.lock();
        let gone = "the disk has gone meanwhile; see vhost-blk ctl list";
        match state.merge_of(&source.name).ok_or(gone)? {
            Some(_) => {
                return Err("it is in progress; wait for it, or cancel it with --cancel".to_owned());
            }
            merge => *merge = Some(Arc::clone(&job)),
        }
        drop(state);
        Ok(Job { disks: self, name: source.name.clone(), job })
    }

    /// Refuses an act while the image of a disk is being merged.
    pub(in crate::disks) fn check_no_merge(&self, name: &str) -> Result<(), String> {
        let is_merging = self.lock().merge_of(name).is_some_and(|merge| merge.is_some());
        if is_merging { Err(MERGING.to_owned()) } else { Ok(()) }
    }

    /// Cancels the merge of a disk. Returns whether there is one.
    ///
    /// # Errors
    /// [`Failure`] if there is no such disk.
    pub fn cancel_merge(&self, name: &str) -> Result<bool, Failure> {
        let merge = self.lock().entry(name)?.merge.clone();
        if let Some(job) = &merge {
            job.is_cancelled.store(true, Ordering::Relaxed);
        }
        Ok(merge.is_some())
    }

    /// Cancels the merge of a disk and waits for its end.
    pub(in crate::disks) fn end_merge(&self, name: &str) -> MutexGuard<'_, State> {
        let mut state = self.lock();
        while let Some(job) = state.merge_of(name).and_then(|merge| merge.clone()) {
            job.is_cancelled.store(true, Ordering::Relaxed);
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        state
    }

    /// As [`Disks::no_reload`], as long as `go_on` says so: a reload may wait for the end of the merge.
    pub(super) fn no_reload_while(&self, go_on: &impl Fn() -> bool) -> Option<NoReload<'_>> {
        while go_on() {
            match self.reloading.try_lock() {
                Ok(guard) => return Some(NoReload { _guard: guard }),
                Err(TryLockError::Poisoned(error)) => {
                    return Some(NoReload { _guard: error.into_inner() });
                }
                Err(TryLockError::WouldBlock) => std::thread::sleep(LOOK),
            }
        }
        None
    }
}
