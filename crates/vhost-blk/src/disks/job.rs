// SPDX-License-Identifier: Apache-2.0
//! The work on the image of a disk in the table, a merge, a mirror or a snapshot: one at a time, and the disk
//! stays until its end.

use super::exchange::Source;
use super::merge::MergeState;
use super::mirror::Mirror;
use super::{Disks, Entry, Slot};
use crate::backup;
use crate::events::{Change, DiskEvents, Work};
use crate::failure::Failure;
use crate::pace::{Bandwidth, LOOK};
use crate::stop::Stop;
use std::num::NonZeroU64;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::SystemTime;

/// The refusal of an act that a merge excludes.
const MERGING: &str = "a commit of it is in progress; wait for the end of that, or cancel it (vhost-blk ctl commit --cancel)";
/// The refusal of an act that a mirror excludes.
const MIRRORING: &str = "a mirror of it is in progress; complete that, or cancel it (vhost-blk ctl mirror --complete, --cancel)";

/// The refusal of an act that a snapshot excludes.
const IN_SNAPSHOT: &str = "a snapshot of it is in progress; wait for the end of that, or stop the client that waits for it";

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

impl Entry {
    /// The work on the disk that no other program can continue, with the remedy.
    pub(super) fn work(&self) -> Option<&'static str> {
        match (self.backup.is_taken(), &self.job) {
            (true, _) => Some(backup::BUSY),
            (false, job) => job.as_ref().map(|job| job.refusal()),
        }
    }
}

/// Work in progress.
#[derive(Debug)]
pub(super) struct Job {
    kind: Kind,
    /// Not that of a completion, nor of a snapshot.
    bandwidth: Arc<Bandwidth>,
    since: SystemTime,
    /// Told when the work leaves the table.
    end: Mutex<Option<Change>>,
}

/// Work in progress, for its user.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct JobFacts {
    /// A backup, a commit or a mirror.
    pub work: Work,
    /// The path, or the address, of the storage that it fills.
    pub target: String,
    /// `copying`, the state of a mirror, or that of a backup: `opening`, `verifying` or `completing`.
    pub state: &'static str,
    /// Bytes that were copied at least once, holes included.
    pub done_bytes: u64,
    /// Bytes of all.
    pub total_bytes: u64,
    /// Bytes per second that it copies at most.
    pub bandwidth: Option<NonZeroU64>,
    /// Time of its begin.
    pub since: SystemTime,
}

impl JobFacts {
    /// Bytes that were copied in a second, on average since the begin.
    pub fn bytes_per_s(&self) -> u64 {
        let ms = self.since.elapsed().unwrap_or_default().as_millis().max(1);
        u64::try_from(u128::from(self.done_bytes) * 1000 / ms).unwrap_or(u64::MAX)
    }
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

    /// Sets the change that the end of the work tells.
    pub(super) fn ends_with(&self, change: Change) {
        *self.end.lock().unwrap_or_else(PoisonError::into_inner) = Some(change);
    }

    /// Tells the end of the work, once.
    pub(super) fn tell_end(&self, events: &DiskEvents) {
        let end = self.end.lock().unwrap_or_else(PoisonError::into_inner).take();
        end.into_iter().for_each(|change| events.tell(&change));
    }

    /// `None`: it is over, or has no progress.
    fn facts(&self) -> Option<JobFacts> {
        let (since, bandwidth) = (self.since, self.bandwidth.get());
        match &self.kind {
            Kind::Merge(merge) => {
                let (done_bytes, total_bytes) = merge.progress();
                let (work, target) = (Work::Commit, merge.target().to_owned());
                let state = "copying";
                Some(JobFacts { work, target, state, done_bytes, total_bytes, bandwidth, since })
            }
            Kind::Mirror(mirror) => mirror.facts().map(|facts| JobFacts {
                work: Work::Mirror,
                target: facts.target.display().to_string(),
                state: facts.phase.name(),
                done_bytes: facts.copied_bytes,
                total_bytes: facts.total_bytes,
                bandwidth,
                since,
            }),
            Kind::Snapshot(_) => None,
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

impl Owner {
    /// The work.
    pub(super) fn job(&self) -> Arc<Job> {
        Arc::clone(&self.job)
    }
}

impl Drop for Owner {
    fn drop(&mut self) {
        let mut state = self.disks.lock();
        let is_it =
            |entry: &&mut Entry| entry.job.as_ref().is_some_and(|job| Arc::ptr_eq(job, &self.job));
        if let Some(entry) = state.all_served().find(is_it) {
            // Under the lock of the table: a client that has the end event sees no job, and the start event of the next
            // job comes after it.
            self.job.tell_end(&entry.events);
            entry.job = None;
        }
        drop(state);
        self.disks.changed.notify_all();
    }
}

impl Entry {
    /// The work in progress: a backup, or a commit or a mirror.
    pub(super) fn jobs(&self) -> Vec<JobFacts> {
        let job = self.job.as_ref().and_then(|job| job.facts());
        self.backup.facts().into_iter().chain(job).collect()
    }

    /// Cancels a backup, a merge and a mirror.
    pub(super) fn cancel_work(&self) {
        drop(self.backup.cancel(backup::Cause::Disk));
        self.job.iter().for_each(|job| job.cancel());
    }
}

impl Disks {
    /// Notes work on the disk in the table.
    pub(super) fn begin_job(
        self: &Arc<Self>,
        source: &Source,
        kind: Kind,
        bandwidth: &Arc<Bandwidth>,
    ) -> Result<Owner, String> {
        let (bandwidth, since) = (Arc::clone(bandwidth), SystemTime::now());
        let job = Arc::new(Job { kind, bandwidth, since, end: Mutex::default() });
        let mut state = self.lock();
        let gone = "the disk has gone meanwhile; see vhost-blk ctl list";
        let Some(entry) = state.in_table(&source.control) else { return Err(gone.to_owned()) };
        match &mut entry.job {
            Some(present) => return Err(present.refusal().to_owned()),
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

    /// The work in progress on a disk, or on all of them, each with the name of its disk.
    ///
    /// # Errors
    /// [`Failure`] if there is no disk of this name.
    pub fn jobs(&self, name: Option<&str>) -> Result<Vec<(String, JobFacts)>, Failure> {
        let state = self.lock();
        name.map_or(Ok(()), |name| state.entry(name).map(drop))?;
        let of = |(disk, slot): (&String, &Slot)| match slot {
            Slot::Served(entry) if name.is_none_or(|name| name == disk) => {
                let jobs = entry.jobs().into_iter();
                jobs.map(|job| (disk.clone(), job)).collect()
            }
            _ => Vec::new(),
        };
        Ok(state.table.iter().flat_map(of).collect())
    }

    /// Changes the bandwidth of the backup, the commit or the mirror of a disk. Returns whether it had another one.
    ///
    /// # Errors
    /// [`Failure`] if there is no such disk, or none of these is in progress.
    pub fn set_job_bandwidth(
        &self,
        name: &str,
        bandwidth: Option<NonZeroU64>,
    ) -> Result<bool, Failure> {
        let state = self.lock();
        let entry = state.entry(name)?;
        let job = entry.job.as_ref().filter(|job| !matches!(job.kind, Kind::Snapshot(_)));
        let of_job = job.map(|job| Arc::clone(&job.bandwidth));
        let present = entry.backup.bandwidth().or(of_job);
        present.map(|present| present.set(bandwidth)).ok_or_else(|| {
            Failure::run(
                format!("limit the copy of the disk {name}"),
                "it has no backup, no commit and no mirror in progress",
                "see vhost-blk ctl jobs; limit limits the requests of the guest",
            )
        })
    }

    /// Cancels the backup, the commit or the mirror of a disk, or only such `work`. Waits for the end of a backup or a
    /// mirror, as long as `go_on` says so. Returns whether there is one.
    ///
    /// # Errors
    /// [`Failure`] if there is no such disk, or it is too late, or the end has not come.
    pub fn cancel_job(
        &self,
        name: &str,
        work: Option<Work>,
        go_on: impl Fn() -> bool,
    ) -> Result<bool, Failure> {
        let is_wanted = |it: Work| work.is_none_or(|work| work == it);
        let state = self.lock();
        let entry = state.entry(name)?;
        let (backup, job) = (Arc::clone(&entry.backup), entry.job.clone());
        drop(state);
        let cancelled =
            is_wanted(Work::Backup).then(|| backup.cancel(backup::Cause::Command)).flatten();
        if let Some(cancelled) = cancelled {
            return cancel_backup(name, &backup, &cancelled, go_on).map(|()| true);
        }
        match job.as_ref().map(|job| (job, &job.kind)) {
            Some((_, Kind::Merge(merge))) if is_wanted(Work::Commit) => cancel_merge(name, merge)?,
            Some((job, Kind::Mirror(_))) if is_wanted(Work::Mirror) => {
                self.cancel_mirror(name, job, go_on)?;
            }
            _ => return Ok(false),
        }
        Ok(true)
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

/// Waits for the end of a backup that was asked to end.
fn cancel_backup(
    name: &str,
    slot: &backup::Slot,
    cancelled: &backup::Cancelled,
    go_on: impl Fn() -> bool,
) -> Result<(), Failure> {
    let refused = |why, remedy| {
        Err(Failure::run(format!("cancel the backup of the disk {name}"), why, remedy))
    };
    loop {
        match slot.wait_for_end(cancelled, LOOK) {
            Some(false) => return Ok(()),
            Some(true) => {
                let remedy =
                    "keep the copy if the backup has a bitmap: the next one goes on from it";
                return refused("it was complete before", remedy);
            }
            None if go_on() => {}
            None => {
                let remedy = "see vhost-blk ctl jobs: the backup ends within seconds";
                return refused("the client has not waited for the end", remedy);
            }
        }
    }
}

fn cancel_merge(name: &str, merge: &MergeState) -> Result<(), Failure> {
    match merge.cancel() {
        true => Ok(()),
        false => Err(Failure::run(
            format!("cancel the commit of the disk {name}"),
            "its guest goes on in the backing file already",
            "take a snapshot (vhost-blk ctl snapshot) for a new overlay",
        )),
    }
}
