// SPDX-License-Identifier: Apache-2.0
//! The disks as sources of backups.

use super::{Disks, Entry, Slot, State};
use crate::backup::Source;
use crate::failure::Failure;
use crate::upgrade::Storage;
use backend::Disk;
use backend::wrap::Clusters;
use std::sync::Arc;

impl Disks {
    /// A disk, with its only place for a backup.
    ///
    /// # Errors
    /// [`Failure`] if there is no such disk, or it cannot be backed up now.
    pub fn source_of_backup(&self, name: &str, what: &str) -> Result<Source, Failure> {
        let state = self.lock();
        let entry = state.entry(name)?;
        state.check_free(what)?;
        if entry.stop.asked() {
            return Err(Failure::run(what, "it is being removed", "see vhost-blk ctl list"));
        }
        let Storage::Image(image) = &entry.parts.storage else {
            return Err(Failure::run(
                what,
                "only a raw image or block device can be copied while it is in use",
                "stop the VMM, and copy a qcow2 image with vhost-blk convert",
            ));
        };
        let image = Arc::clone(image.file());
        let clusters = Clusters::new(image.info().capacity_sectors * 512);
        let taken = entry.backup.take(clusters).ok_or_else(|| {
            let remedy = "wait for its end, or stop the client that waits for it";
            Failure::run(what, "another backup of it is in progress", remedy)
        })?;
        Ok(Source { image, control: Arc::clone(&entry.control), taken })
    }

    /// Returns whether a disk has a backup in progress.
    pub(super) fn is_backed_up(&self, name: &str) -> bool {
        self.lock().entry(name).is_ok_and(|entry| entry.backup.is_taken())
    }

    /// Removes the incomplete targets of all backups, for an exit without a drain.
    pub fn remove_backup_parts(&self) {
        let state = self.lock();
        state.served().for_each(|entry| entry.backup.remove_part());
    }
}

impl State {
    fn served(&self) -> impl Iterator<Item = &Entry> {
        self.table.values().filter_map(|slot| match slot {
            Slot::Served(entry) => Some(&**entry),
            Slot::Starting => None,
        })
    }
}
