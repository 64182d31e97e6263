// SPDX-License-Identifier: Apache-2.0
//! The targets of mirrors, backups and snapshots that threads use, even after the end of that work: a storage that
//! hangs keeps its thread. No other work of the same kind on a disk of this name begins meanwhile, so that such
//! threads are few, and no upgrade, whose exchange of the program would wait for the thread.
//!
//! Also the threads of the control plane that wait for the storage of a served disk itself.

use super::Disks;
use crate::backup::{ANOTHER, BUSY};
use crate::failure::Failure;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Weak};

/// Uses, each with a sign that is alive as long as a thread has it.
#[derive(Debug)]
struct Uses<T>(Vec<(T, Weak<()>)>);

impl<T> Default for Uses<T> {
    fn default() -> Self {
        Uses(Vec::new())
    }
}

impl<T> Uses<T> {
    /// The uses that threads have.
    fn present(&self) -> impl Iterator<Item = &T> {
        self.0.iter().filter(|(_, sign)| sign.strong_count() > 0).map(|(used, _)| used)
    }

    /// Notes one until the drop of the result.
    fn begin(&mut self, used: T) -> Arc<()> {
        self.0.retain(|(_, sign)| sign.strong_count() > 0);
        let sign = Arc::new(());
        self.0.push((used, Arc::downgrade(&sign)));
        sign
    }
}

/// The targets in use.
#[derive(Debug, Default)]
pub(super) struct Targets(Uses<Target>);

#[derive(Debug)]
struct Target {
    /// Name of the disk, which may have gone.
    disk: String,
    path: PathBuf,
    /// The kind of the work.
    act: &'static str,
}

impl Targets {
    /// Returns whether work of this kind has a target in use for a disk.
    fn is_used_for(&self, disk: &str, act: &str) -> bool {
        self.0.present().any(|target| target.disk == disk && target.act == act)
    }

    /// A target in use, with its work.
    pub(super) fn first(&self) -> Option<(&Path, &'static str)> {
        self.0.present().next().map(|target| (&*target.path, target.act))
    }
}

/// The disks whose storage threads wait for.
#[derive(Debug, Default)]
pub(super) struct StorageWaits(Uses<String>);

impl StorageWaits {
    /// Notes that a thread waits for the storage of a disk, until the drop of the result.
    pub(super) fn begin(&mut self, name: &str) -> Arc<()> {
        self.0.begin(name.to_owned())
    }

    /// One of these disks.
    pub(super) fn first(&self) -> Option<&str> {
        self.0.present().next().map(String::as_str)
    }
}

impl Disks {
    /// Notes that this thread waits for the storage of a disk, until the drop of the result. No upgrade begins
    /// meanwhile. `what`: the command, for an error.
    ///
    /// # Errors
    /// [`Failure`] if there is no such disk, or an upgrade is in progress.
    pub(super) fn wait_for_storage(&self, name: &str, what: &str) -> Result<Arc<()>, Failure> {
        let mut state = self.lock();
        state.check_free(what)?;
        state.entry(name)?;
        Ok(state.storage_waits.begin(name))
    }

    /// Notes that this thread, or that with the result, uses a target for a disk. `what`: the command, for an
    /// error. `act`: the kind of the work.
    ///
    /// # Errors
    /// [`Failure`] if there is no such disk, or it has other work.
    pub(crate) fn use_target(
        &self,
        name: &str,
        what: &str,
        act: &'static str,
        path: &Path,
    ) -> Result<Arc<()>, Failure> {
        let mut state = self.lock();
        state.check_free(what)?;
        let entry = state.entry(name)?;
        if let Some(job) = &entry.job {
            return Err(Failure::told(what, job.refusal()));
        }
        if entry.backup.is_taken() {
            return Err(Failure::told(what, if act == "backup" { ANOTHER } else { BUSY }));
        }
        if state.targets.is_used_for(name, act) {
            let why = format!(
                "another {act} of it begins, or a storage of its last {act} does not answer"
            );
            return Err(Failure::run(what, why, "repeat the command, or check that storage"));
        }
        let target = Target { disk: name.to_owned(), path: path.to_owned(), act };
        Ok(state.targets.0.begin(target))
    }
}
