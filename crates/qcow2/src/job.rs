// SPDX-License-Identifier: Apache-2.0
//! The writes of a commit, which another thread may carry out: they change nothing that a read of the image needs.

use crate::image::Image;
use crate::overlay::{PHASES, Phase};
use crate::places::Places;
use crate::storage::{Change, CommitError, Log};
use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, PoisonError};

/// The file of an image, and the need of a sync.
#[derive(Debug)]
pub(crate) struct Out {
    pub(crate) file: File,
    has_unsynced_data: AtomicBool,
    log: Option<Log>,
}

impl Out {
    pub(crate) fn new(file: File, log: Option<Log>) -> Out {
        Out { file, has_unsynced_data: AtomicBool::new(false), log }
    }

    /// Notes a change that a sync makes durable.
    pub(crate) fn changes(&self, change: impl FnOnce() -> Change) {
        self.has_unsynced_data.store(true, Ordering::Relaxed);
        self.log(change);
    }

    pub(crate) fn log(&self, change: impl FnOnce() -> Change) {
        if let Some(log) = &self.log {
            log.lock().unwrap_or_else(PoisonError::into_inner).push(change());
        }
    }

    pub(crate) fn write(&self, data: &[u8], offset: u64) -> io::Result<()> {
        self.changes(|| Change::Write { offset, data: data.to_vec() });
        self.file.write_all_at(data, offset)
    }

    /// Length of the file in bytes.
    pub(crate) fn size_bytes(&self) -> io::Result<u64> {
        Ok(self.file.metadata()?.len())
    }

    /// Makes the file at least as long as this.
    pub(crate) fn extend(&self, wanted: u64) -> io::Result<()> {
        if wanted > self.size_bytes()? {
            self.changes(|| Change::SetLen(wanted));
            self.file.set_len(wanted)?;
        }
        Ok(())
    }

    /// Makes the changes durable.
    pub(crate) fn sync(&self) -> io::Result<()> {
        if self.has_unsynced_data.swap(false, Ordering::Relaxed) {
            self.file.sync_data()?;
            self.log(|| Change::Sync);
        }
        Ok(())
    }
}

/// A commit that has begun.
#[derive(Debug)]
pub(crate) struct Begun {
    pub(crate) job: Job,
    pub(crate) rest: Rest,
}

/// The part of a commit that follows its writes.
#[derive(Debug)]
pub(crate) struct Rest {
    /// The clusters that are free after it, and were not before.
    pub(crate) freed: Vec<Range<u64>>,
    /// The clusters of the tables after it.
    pub(crate) places: Places,
    /// The state of the changes that it writes.
    pub(crate) revision: u64,
}

/// The writes of a commit.
#[derive(Debug)]
pub(crate) struct Job {
    out: Arc<Out>,
    /// Length of the file after it, at least.
    end: u64,
    phases: Box<[Phase; PHASES]>,
}

impl Job {
    /// Carries the writes out in place: the usual `run` of [`crate::image::Image::commit_by`].
    ///
    /// # Errors
    /// As [`Job::run`].
    pub(crate) fn in_place(_: &mut Image, job: Job) -> Result<(), CommitError> {
        job.run()
    }

    pub(crate) fn new(out: &Arc<Out>, end: u64, phases: [Phase; PHASES]) -> Job {
        Job { out: Arc::clone(out), end, phases: Box::new(phases) }
    }

    /// Extends the file, and writes the phases; each is durable before the next.
    ///
    /// # Errors
    /// [`CommitError`].
    pub(crate) fn run(self) -> Result<(), CommitError> {
        self.out.extend(self.end).map_err(CommitError::of_write)?;
        for phase in &*self.phases {
            for (offset, data) in phase {
                self.out.write(data, *offset).map_err(CommitError::of_write)?;
            }
            self.out.sync()?;
        }
        Ok(())
    }
}
