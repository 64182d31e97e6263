// SPDX-License-Identifier: Apache-2.0
//! The disks as sources of backups.

use super::Disks;
use crate::backup::{self, Order, Source};
use crate::failure::Failure;
use backend::wrap::Clusters;
use std::sync::Arc;
use std::sync::mpsc::channel;
use std::thread;
use std::time::Duration;

/// Wait for the removal of incomplete targets at an exit without a drain.
const REMOVE_MAX: Duration = Duration::from_secs(1);

impl Disks {
    /// A disk, with its only place for a backup.
    ///
    /// # Errors
    /// [`Failure`] if there is no such disk, or it cannot be backed up now.
    pub fn source_of_backup(&self, what: &str, order: &Order) -> Result<Source, Failure> {
        let name = &*order.disk;
        // Memory is filled without the lock. A size that changes meanwhile is refused at the moment of the copy.
        let opened = self.lock().entry(name)?.image.clone();
        let size_bytes = opened.map(|opened| opened.served().info().capacity_sectors * 512);
        let clusters = size_bytes.map(Clusters::new).transpose();
        let clusters = clusters.map_err(|why| Failure::told(what, why))?;
        let state = self.lock();
        let entry = state.entry(name)?;
        state.check_free(what)?;
        if entry.stop.asked() {
            return Err(Failure::run(what, "it is being removed", "see vhost-blk ctl list"));
        }
        let (Some(opened), Some(clusters)) = (&entry.image, clusters) else {
            return Err(Failure::run(what, "it has no image", "serve a disk of kind file"));
        };
        if let Some(job) = &entry.job {
            return Err(Failure::told(what, job.refusal()));
        }
        let image = opened.served();
        let taken = entry.backup.take(clusters, order);
        let taken = taken.ok_or_else(|| Failure::told(what, backup::ANOTHER))?;
        let (control, layers) = (Arc::clone(&entry.control), Arc::clone(&entry.layers));
        let events = Arc::clone(&entry.events);
        Ok(Source { image, control, layers, events, taken })
    }

    /// Refuses an act while a disk is being backed up.
    pub(super) fn check_no_backup(&self, name: &str) -> Result<(), String> {
        let is_backed_up = self.lock().entry(name).is_ok_and(|entry| entry.backup.is_taken());
        if is_backed_up { Err(backup::BUSY.to_owned()) } else { Ok(()) }
    }

    /// Removes the incomplete targets of all backups and mirrors, for an exit without a drain. Does not wait
    /// for a storage that hangs: its file stays.
    pub fn remove_parts(self: &Arc<Self>) {
        let (disks, (reply, done)) = (Arc::clone(self), channel::<()>());
        let remove = move || {
            let _reply = reply;
            for entry in disks.lock().all_served() {
                entry.backup.remove_parts();
                let mirror = entry.job.as_ref().and_then(|job| job.mirror());
                mirror.into_iter().for_each(|mirror| mirror.remove_part());
            }
        };
        match thread::Builder::new().name("parts".into()).spawn(remove) {
            // The thread has ended, or it waits for a storage.
            Ok(_) => drop(done.recv_timeout(REMOVE_MAX)),
            Err(why) => tracing::warn!(%why, "incomplete targets stay"),
        }
    }
}
