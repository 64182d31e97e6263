// SPDX-License-Identifier: Apache-2.0
//! The place of a disk's only backup.

use super::Order;
use crate::disks::JobFacts;
use crate::events::{Change, DiskEvents, Work};
use crate::nbd::Hangup;
use crate::pace::Bandwidth;
use backend::wrap::Clusters;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime};

/// The place of a disk's only backup. Other threads cancel the backup here.
#[derive(Debug, Default)]
pub struct Slot {
    running: Mutex<Option<Running>>,
    ended: Condvar,
}

#[derive(Debug)]
struct Running {
    clusters: Arc<Clusters>,
    /// The path, or the address, of the copy.
    target: String,
    bandwidth: Arc<Bandwidth>,
    since: SystemTime,
    /// Its moment has passed.
    has_begun: bool,
    /// The copy is read again at its end.
    is_verified: bool,
    /// Its result is in place.
    is_complete: Arc<AtomicBool>,
    /// Incomplete targets.
    parts: Vec<PathBuf>,
    /// Ends the connection to an export. Not dropped under the lock: a close may take its time.
    hangup: Option<Hangup>,
    cause: Option<Cause>,
}

/// The cause of a cancel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cause {
    /// The command of a client.
    Command,
    /// The end of the disk.
    Disk,
}

impl Running {
    /// The name of its state in the control protocol.
    fn state(&self) -> &'static str {
        let is_copied = self.clusters.freed_bytes() == self.clusters.total_bytes();
        match (self.has_begun, is_copied) {
            (false, _) => "opening",
            (true, false) => "copying",
            (true, true) if self.is_verified => "verifying",
            (true, true) => "completing",
        }
    }

    /// Asks for the end. A server that says nothing keeps no thread.
    fn end(&self) {
        self.clusters.end();
        self.hangup.iter().for_each(Hangup::hang_up);
    }
}

/// A backup that was asked to end.
#[derive(Debug)]
pub struct Cancelled {
    clusters: Arc<Clusters>,
    is_complete: Arc<AtomicBool>,
}

/// The slot of a backup; free again after the drop.
#[derive(Debug)]
pub struct Taken {
    slot: Arc<Slot>,
    clusters: Arc<Clusters>,
}

/// The incomplete targets of a backup.
#[derive(Clone, Debug)]
pub(super) struct Parts {
    slot: Arc<Slot>,
    clusters: Arc<Clusters>,
}

impl Slot {
    /// Returns whether there is a backup.
    pub fn is_taken(&self) -> bool {
        self.lock().is_some()
    }

    /// The backup.
    pub(crate) fn facts(&self) -> Option<JobFacts> {
        let running = self.lock();
        let running = running.as_ref()?;
        Some(JobFacts {
            work: Work::Backup,
            target: running.target.clone(),
            state: running.state(),
            done_bytes: running.clusters.freed_bytes(),
            total_bytes: running.clusters.total_bytes(),
            bandwidth: running.bandwidth.get(),
            since: running.since,
        })
    }

    /// The bandwidth of the backup.
    pub(crate) fn bandwidth(&self) -> Option<Arc<Bandwidth>> {
        self.lock().as_ref().map(|running| Arc::clone(&running.bandwidth))
    }

    /// Takes the slot for the backup of these clusters; `None` if there is another one.
    pub fn take(self: &Arc<Self>, clusters: Clusters, order: &Order) -> Option<Taken> {
        let mut running = self.lock();
        if running.is_some() {
            return None;
        }
        let clusters = Arc::new(clusters);
        *running = Some(Running {
            clusters: Arc::clone(&clusters),
            target: order.target.to_string(),
            bandwidth: Arc::clone(&order.bandwidth),
            since: SystemTime::now(),
            has_begun: false,
            is_verified: order.verify,
            is_complete: Arc::default(),
            parts: Vec::new(),
            hangup: None,
            cause: None,
        });
        Some(Taken { slot: Arc::clone(self), clusters })
    }

    /// Cancels the backup. Returns it.
    pub fn cancel(&self, cause: Cause) -> Option<Cancelled> {
        let mut running = self.lock();
        let running = running.as_mut()?;
        running.cause.get_or_insert(cause);
        running.end();
        let Running { clusters, is_complete, .. } = running;
        Some(Cancelled { clusters: Arc::clone(clusters), is_complete: Arc::clone(is_complete) })
    }

    /// Waits until the backup has ended and removed its target, at most so long; `None`: not yet. Returns whether it
    /// was complete before the cancel.
    pub fn wait_for_end(&self, of: &Cancelled, patience: Duration) -> Option<bool> {
        let is_present = |running: &mut Option<Running>| {
            running.as_ref().is_some_and(|it| Arc::ptr_eq(&it.clusters, &of.clusters))
        };
        let waited = self.ended.wait_timeout_while(self.lock(), patience, is_present);
        let (_running, timeout) = waited.unwrap_or_else(PoisonError::into_inner);
        (!timeout.timed_out()).then(|| of.is_complete.load(Ordering::Acquire))
    }

    /// Removes the incomplete targets, for an exit without a drain.
    pub fn remove_parts(&self) {
        for part in self.lock().iter().flat_map(|running| &running.parts) {
            let _ = fs::remove_file(part); // it may have gone
        }
    }

    fn lock(&self) -> MutexGuard<'_, Option<Running>> {
        self.running.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Taken {
    pub(super) fn clusters(&self) -> &Arc<Clusters> {
        &self.clusters
    }

    /// The list of incomplete targets, for the thread that makes them.
    pub(super) fn parts(&self) -> Parts {
        Parts { slot: Arc::clone(&self.slot), clusters: Arc::clone(&self.clusters) }
    }

    /// Ends a backup that has failed, and its connection, for which the thread of the target may wait.
    pub(super) fn fail(&self) {
        let running = self.slot.lock();
        running.iter().for_each(Running::end);
    }

    /// Notes that the moment of the copy has passed, and tells it.
    pub(super) fn begin(&self, events: &DiskEvents) {
        if let Some(running) = &mut *self.slot.lock() {
            running.has_begun = true;
            events.tell(&Change::WorkBegun(Work::Backup, running.target.clone()));
        }
    }

    /// Ends a backup, and tells the end of one that has begun: a client that hears it can begin the next one, also
    /// before the drop.
    pub(super) fn end(&self, events: &DiskEvents, outcome: Result<(), (String, bool)>) {
        let mut running = self.slot.lock();
        let ended = running.take();
        if let Some(ended) = ended.as_ref().filter(|ended| ended.has_begun) {
            ended.is_complete.store(outcome.is_ok(), Ordering::Release); // wait_for_end
            events.tell(&Change::of_end(Work::Backup, ended.target.clone(), outcome));
        }
        // Before the connection is closed.
        drop(running);
    }

    /// The cause of a cancel by another than the client.
    pub(super) fn cause(&self) -> Option<Cause> {
        self.slot.lock().as_ref()?.cause
    }
}

impl Parts {
    /// Notes the path of an incomplete target, unless the backup has ended.
    pub(super) fn add(&self, path: &Path) {
        if let Some(running) = &mut *self.slot.lock()
            && Arc::ptr_eq(&running.clusters, &self.clusters)
        {
            running.parts.push(path.to_owned());
        }
    }

    /// Notes the connection to an export. Ends it if the backup has ended.
    pub(super) fn is_connected(&self, hangup: Hangup) {
        match &mut *self.slot.lock() {
            Some(running)
                if Arc::ptr_eq(&running.clusters, &self.clusters) && !self.clusters.has_ended() =>
            {
                running.hangup = Some(hangup);
            }
            _ => hangup.hang_up(),
        }
    }
}

impl Drop for Taken {
    fn drop(&mut self) {
        let mut running = self.slot.lock();
        // The next backup may have the slot already: its client has seen the end of this one.
        let own = running.take_if(|it| Arc::ptr_eq(&it.clusters, &self.clusters));
        drop(running);
        own.and_then(|own| own.hangup).into_iter().for_each(|hangup| hangup.hang_up());
        self.slot.ended.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backup::{Destination, Extent};
    use crate::events::Events;
    use crate::values::{Format, Reflink};

    fn order() -> Order {
        Order {
            disk: "a".to_owned(),
            target: Destination::File { path: "b".into(), format: Format::Raw },
            extent: Extent::Full(None),
            bandwidth: Arc::default(),
            verify: false,
            reflink: Reflink::Never,
        }
    }

    fn taken(slot: &Arc<Slot>) -> Option<Taken> {
        slot.take(Clusters::new(1 << 20).unwrap(), &order())
    }

    fn told() -> DiskEvents {
        DiskEvents::new(Arc::new(Events::default()), "a")
    }

    #[test]
    fn the_drop_of_an_ended_backup_leaves_the_next_one() {
        let slot = Arc::new(Slot::default());
        // As the thread of the first one, whose client has seen its end and begins the next one.
        let events = told();
        let first = taken(&slot).unwrap();
        first.begin(&events);
        first.end(&events, Ok(()));
        let next = taken(&slot).unwrap();
        drop(first);
        assert!(slot.is_taken() && taken(&slot).is_none());
        drop(next);
        assert!(!slot.is_taken());
    }

    #[test]
    fn the_state_follows_the_copy() {
        for (verify, last) in [(false, "completing"), (true, "verifying")] {
            let slot = Arc::new(Slot::default());
            let clusters = Clusters::new(1 << 20).unwrap();
            let backup = slot.take(clusters, &Order { verify, ..order() }).unwrap();
            let state = || slot.facts().unwrap().state;
            assert_eq!(state(), "opening");
            backup.begin(&told());
            assert_eq!(state(), "copying");
            backup.clusters().free(0..backup.clusters().len());
            assert_eq!(state(), last);
        }
    }

    #[test]
    fn a_cancel_waits_for_the_end_and_learns_of_a_complete_copy() {
        let slot = Arc::new(Slot::default());
        let cancel = || slot.cancel(Cause::Command);
        assert!(cancel().is_none());
        for outcome in [Ok(()), Err(("full".to_owned(), false))] {
            let (events, backup) = (told(), taken(&slot).unwrap());
            backup.begin(&events);
            let cancelled = cancel().unwrap();
            assert_eq!(slot.wait_for_end(&cancelled, Duration::from_millis(1)), None);
            let is_complete = outcome.is_ok();
            backup.end(&events, outcome);
            assert_eq!(slot.wait_for_end(&cancelled, Duration::ZERO), Some(is_complete));
        }
        // Before its moment.
        let backup = taken(&slot).unwrap();
        let cancelled = cancel().unwrap();
        drop(backup);
        assert_eq!(slot.wait_for_end(&cancelled, Duration::ZERO), Some(false));
    }
}
