// SPDX-License-Identifier: Apache-2.0
//! The long work on the image of a disk in the table, a merge or a mirror: one at a time, and the disk
//! stays until its end.

use super::exchange::Source;
use super::merge::MergeState;
use super::mirror::Mirror;
use super::reload::NoReload;
use super::{Disks, Entry, Slot, State};
use crate::failure::Failure;
use crate::stop::Stop;
use std::sync::{Arc, PoisonError, TryLockError};

/// The refusal of an act that a merge excludes.
const MERGING: &str = "its image is being merged; wait for the end of that, or cancel it (vhost-blk ctl commit --cancel)";
/// The refusal of an act that a mirror excludes.
const MIRRORING: &str = "it is being mirrored to other storage; complete that, or cancel it (vhost-blk ctl mirror --complete, --cancel)";

/// The refusal of the same work.
const IN_PROGRESS: &str = "it is in progress; wait for it, or cancel it with --cancel";

/// The kinds of work.
#[derive(Clone, Debug)]
pub(super) enum Kind {
    /// A merge of the image into its backing file.
    Merge(Arc<MergeState>),
    /// A mirror of the disk to other storage.
    Mirror(Arc<Mirror>),
}

/// Work in progress.
#[derive(Debug)]
pub(super) struct Job {
    kind: Kind,
}

impl Job {
    /// The refusal of an act that this excludes.
    pub(super) fn refusal(&self) -> &'static str {
        match self.kind {
            Kind::Merge(_) => MERGING,
            Kind::Mirror(_) => MIRRORING,
        }
    }

    /// The refusal of a mirror, or of a merge.
    pub(super) fn refuses(&self, is_mirror: bool) -> &'static str {
        if self.mirror().is_some() == is_mirror { IN_PROGRESS } else { self.refusal() }
    }

    /// The mirror, if it is one.
    pub(super) fn mirror(&self) -> Option<&Arc<Mirror>> {
        match &self.kind {
            Kind::Mirror(mirror) => Some(mirror),
            Kind::Merge(_) => None,
        }
    }

    /// Asks for the end, which comes too late for a merge or a mirror whose guest is moving. Writes that wait
    /// for the copy go on at once.
    pub(super) fn cancel(&self) {
        match &self.kind {
            Kind::Merge(merge) => drop(merge.cancel()),
            Kind::Mirror(mirror) => mirror.cancel(),
        }
    }
}

/// The owner of work in progress; its end when dropped.
pub(super) struct Owner {
    disks: Arc<Disks>,
    job: Arc<Job>,
}

impl Drop for Owner {
    fn drop(&mut self) {
        let mut state = self.disks.lock();
        let is_it =
            |entry: &&mut Entry| entry.job.as_ref().is_some_and(|job| Arc::ptr_eq(job, &self.job));
        if let Some(entry) = state.all_served().find(is_it) {
            entry.job = None;
        }
        drop(state);
        self.disks.changed.notify_all();
    }
}

impl Entry {
    /// Cancels a backup, a merge and a mirror.
    pub(super) fn cancel_work(&self) {
        self.backup.cancel();
        self.job.iter().for_each(|job| job.cancel());
    }
}

impl State {
    fn job_of(&mut self, name: &str) -> Option<&mut Option<Arc<Job>>> {
        match self.table.get_mut(name) {
            Some(Slot::Served(entry)) => Some(&mut entry.job),
            _ => None,
        }
    }
}

impl Disks {
    /// Notes work on the disk in the table.
    pub(super) fn begin_job(
        self: &Arc<Self>,
        source: &Source,
        kind: Kind,
    ) -> Result<Owner, String> {
        let job = Arc::new(Job { kind });
        let mut state = self.lock();
        let gone = "the disk has gone meanwhile; see vhost-blk ctl list";
        let entry = match state.table.get_mut(&source.name) {
            // Another disk may have the name by now.
            Some(Slot::Served(it)) if Arc::ptr_eq(&it.control, &source.control) => it,
            _ => return Err(gone.to_owned()),
        };
        match &mut entry.job {
            Some(present) => return Err(present.refuses(job.mirror().is_some()).to_owned()),
            present => *present = Some(Arc::clone(&job)),
        }
        drop(state);
        Ok(Owner { disks: Arc::clone(self), job })
    }

    /// Refuses an act during a merge or a mirror of a disk.
    pub(super) fn check_no_job(&self, name: &str) -> Result<(), String> {
        match self.lock().job_of(name) {
            Some(Some(job)) => Err(job.refusal().to_owned()),
            _ => Ok(()),
        }
    }

    /// The work on a disk.
    ///
    /// # Errors
    /// [`Failure`] if there is no such disk.
    pub(super) fn job(&self, name: &str) -> Result<Option<Arc<Job>>, Failure> {
        Ok(self.lock().entry(name)?.job.clone())
    }

    /// Cancels the merge of a disk. Returns whether there is one.
    ///
    /// # Errors
    /// [`Failure`] if there is no such disk, or the guest goes on in the backing file.
    pub fn cancel_merge(&self, name: &str) -> Result<bool, Failure> {
        let job = self.job(name)?;
        let Some(Kind::Merge(merge)) = job.as_ref().map(|job| &job.kind) else { return Ok(false) };
        match merge.cancel() {
            true => Ok(true),
            false => Err(Failure::run(
                format!("cancel the commit of the disk {name}"),
                "its guest goes on in the backing file already",
                "take a snapshot (vhost-blk ctl snapshot) for a new overlay",
            )),
        }
    }

    /// Cancels the work on the disk of this stop, and waits for its end.
    pub(super) fn end_job(&self, stop: &Stop) {
        let mut state = self.lock();
        while let Some(job) = state.served_with(stop).and_then(|entry| entry.job.clone()) {
            job.cancel();
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// As [`Disks::no_reload`], unless a reload or an upgrade is in progress.
    pub(super) fn try_no_reload(&self) -> Option<NoReload<'_>> {
        match self.reloading.try_lock() {
            Ok(guard) => Some(NoReload { _guard: guard }),
            Err(TryLockError::Poisoned(error)) => Some(NoReload { _guard: error.into_inner() }),
            Err(TryLockError::WouldBlock) => None,
        }
    }
}
