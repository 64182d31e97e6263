// SPDX-License-Identifier: Apache-2.0
//! The place of a disk's only backup.

use backend::wrap::Clusters;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

/// The place of a disk's only backup. Other threads cancel the backup here.
#[derive(Debug, Default)]
pub struct Slot {
    running: Mutex<Option<Running>>,
    ended: Condvar,
}

#[derive(Debug)]
struct Running {
    clusters: Arc<Clusters>,
    /// Incomplete targets.
    parts: Vec<PathBuf>,
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

    /// Takes the slot for a backup of these clusters; `None` if there is another one.
    pub fn take(self: &Arc<Self>, clusters: Clusters) -> Option<Taken> {
        let mut running = self.lock();
        if running.is_some() {
            return None;
        }
        let clusters = Arc::new(clusters);
        *running = Some(Running { clusters: Arc::clone(&clusters), parts: Vec::new() });
        Some(Taken { slot: Arc::clone(self), clusters })
    }

    /// Cancels the backup.
    pub fn cancel(&self) {
        if let Some(running) = &*self.lock() {
            running.clusters.end();
        }
    }

    /// Cancels the backup, and waits until it has removed its target.
    pub fn cancel_and_wait(&self) {
        self.cancel();
        let mut running = self.lock();
        while running.is_some() {
            running = self.ended.wait(running).unwrap_or_else(PoisonError::into_inner);
        }
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
}

impl Drop for Taken {
    fn drop(&mut self) {
        *self.slot.lock() = None;
        self.slot.ended.notify_all();
    }
}
