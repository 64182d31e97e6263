// SPDX-License-Identifier: Apache-2.0
//! The writes of a commit, which another thread may carry out: they change nothing that a read of the image needs.

use crate::image::Image;
use crate::overlay::{PHASES, Phase};
use crate::places::Places;
use crate::storage::{Change, CommitError, Log};
use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{Arc, PoisonError};

/// The file of an image, and its changes that are not durable yet: by the phase of a commit ([`crate::overlay`]). A
/// phase waits until those before it are durable, in whatever commit they were written. Data and lengths that a table
/// may name count as the first phase.
#[derive(Debug)]
pub(crate) struct Out {
    pub(crate) file: File,
    /// A bit for each phase. At the start the file may have changes of an earlier program.
    unsynced: AtomicU8,
    log: Option<Log>,
}

impl Out {
    pub(crate) fn new(file: File, log: Option<Log>) -> Out {
        Out { file, unsynced: AtomicU8::new(u8::MAX), log }
    }

    /// Notes a change of a phase.
    fn changes(&self, phase: usize, change: impl FnOnce() -> Change) {
        self.unsynced.fetch_or(1 << phase, Ordering::Relaxed);
        self.log(change);
    }

    /// Notes a change of the first phase.
    pub(crate) fn changes_data(&self, change: impl FnOnce() -> Change) {
        self.changes(0, change);
    }

    pub(crate) fn log(&self, change: impl FnOnce() -> Change) {
        if let Some(log) = &self.log {
            log.lock().unwrap_or_else(PoisonError::into_inner).push(change());
        }
    }

    pub(crate) fn write(&self, phase: usize, data: &[u8], offset: u64) -> io::Result<()> {
        self.changes(phase, || Change::Write { offset, data: data.to_vec() });
        self.file.write_all_at(data, offset)
    }

    /// Length of the file in bytes.
    pub(crate) fn size_bytes(&self) -> io::Result<u64> {
        Ok(self.file.metadata()?.len())
    }

    /// Bytes of the file system that the file takes; all of a block device.
    pub(crate) fn allocated_bytes(&self) -> io::Result<u64> {
        let found = self.file.metadata()?;
        Ok(if found.is_file() { found.blocks() * 512 } else { u64::MAX })
    }

    /// Makes the file at least as long as this.
    pub(crate) fn extend(&self, wanted: u64) -> io::Result<()> {
        if wanted > self.size_bytes()? {
            self.changes_data(|| Change::SetLen(wanted));
            self.file.set_len(wanted)?;
        }
        Ok(())
    }

    /// Makes the changes durable.
    pub(crate) fn sync(&self) -> io::Result<()> {
        self.sync_if(u8::MAX)
    }

    pub(crate) fn is_synced(&self) -> bool {
        self.unsynced.load(Ordering::Relaxed) == 0
    }

    /// Makes the phases before this one durable.
    fn sync_before(&self, phase: usize) -> io::Result<()> {
        self.sync_if((1 << phase) - 1)
    }

    /// Makes all changes durable if one of these phases is not.
    fn sync_if(&self, phases: u8) -> io::Result<()> {
        if self.unsynced.load(Ordering::Relaxed) & phases != 0 {
            self.file.sync_data()?;
            self.unsynced.store(0, Ordering::Relaxed);
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
    /// The clusters of the tables after it, if they are others than before.
    pub(crate) places: Option<Places>,
    /// The state of the changes that it writes.
    pub(crate) revision: u64,
}

/// The writes of a commit.
#[derive(Debug)]
pub(crate) struct Job {
    out: Arc<Out>,
    /// Length of the file after it, at least.
    end: u64,
    /// End of reserved clusters: a longer file now saves a sync later.
    reserved_end: u64,
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

    pub(crate) fn new(out: &Arc<Out>, end: u64, reserved_end: u64, phases: [Phase; PHASES]) -> Job {
        Job { out: Arc::clone(out), end, reserved_end, phases: Box::new(phases) }
    }

    /// Extends the file, and writes the phases; those before one are durable when it begins.
    ///
    /// # Errors
    /// [`CommitError`].
    pub(crate) fn run(self) -> Result<(), CommitError> {
        self.out.extend(self.end).map_err(CommitError::of_write)?;
        let _ = self.out.extend(self.reserved_end); // a commit that needs more extends the file itself
        for (phase, writes) in
            self.phases.iter().enumerate().filter(|(_, writes)| !writes.is_empty())
        {
            self.out.sync_before(phase)?;
            for (offset, data) in writes {
                self.out.write(phase, data, *offset).map_err(CommitError::of_write)?;
            }
        }
        Ok(())
    }
}
