// SPDX-License-Identifier: Apache-2.0
//! The work on the image of a disk in the table, a merge, a mirror or a snapshot: one at a time, and the disk
//! stays until its end.

use super::exchange::Source;
use super::merge::MergeState;
use super::mirror::Mirror;
use super::{Disks, Entry, Slot};
use crate::failure::Failure;
use crate::stop::Stop;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, PoisonError};

/// The refusal of an act that a merge excludes.
const MERGING: &str = "its image is being merged; wait for the end of that, or cancel it (vhost-blk ctl commit --cancel)";
/// The refusal of an act that a mirror excludes.
const MIRRORING: &str = "it is being mirrored to other storage; complete that, or cancel it (vhost-blk ctl mirror --complete, --cancel)";

/// The refusal of an act that a snapshot excludes.
const IN_SNAPSHOT: &str =
    "it gets a snapshot; wait for the end of that, or stop the client that waits for it";

/// The refusal of the same work.
const IN_PROGRESS: &str = "it is in progress; wait for it, or cancel it with --cancel";

/// The kinds of work.
#[derive(Clone, Debug)]
pub(super) enum Kind {
    /// A merge of the image into its backing file.
    Merge(Arc<MergeState>),
    /// A mirror of the disk to other storage.
    Mirror(Arc<Mirror>),
    /// A snapshot, and its cancel.
    Snapshot(Arc<AtomicBool>),
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
            Kind::Snapshot(_) => IN_SNAPSHOT,
        }
    }

    /// The refusal of work of another kind, or of the same.
    pub(super) fn refuses(&self, kind: &str) -> &'static str {
        match self.kind {
            Kind::Merge(_) | Kind::Mirror(_) if kind == self.name() => IN_PROGRESS,
            _ => self.refusal(),
        }
    }

    /// Name of the kind.
    fn name(&self) -> &'static str {
        match self.kind {
            Kind::Merge(_) => "commit",
            Kind::Mirror(_) => "mirror",
            Kind::Snapshot(_) => "snapshot",
        }
    }

    /// The mirror, if it is one.
    pub(super) fn mirror(&self) -> Option<&Arc<Mirror>> {
        match &self.kind {
            Kind::Mirror(mirror) => Some(mirror),
            Kind::Merge(_) | Kind::Snapshot(_) => None,
        }
    }

    /// Asks for the end, which comes too late for a merge or a mirror whose guest is moving. Writes that wait
    /// for the copy go on at once.
    pub(super) fn cancel(&self) {
        match &self.kind {
            Kind::Merge(merge) => drop(merge.cancel()),
            Kind::Mirror(mirror) => mirror.cancel(),
            Kind::Snapshot(cancelled) => cancelled.store(true, Ordering::Relaxed),
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
            Some(present) => return Err(present.refuses(job.name()).to_owned()),
            present => *present = Some(Arc::clone(&job)),
        }
        drop(state);
        Ok(Owner { disks: Arc::clone(self), job })
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
}
