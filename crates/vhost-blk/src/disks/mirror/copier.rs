// SPDX-License-Identifier: Apache-2.0
//! Copies parts of a disk to its new storage, again and again at the same places.

use super::old::Old;
use super::state::CANCELLED;
use super::target::{Named, New};
use crate::disks::converge::{self, Exchanged, Rate, TargetUser, Words};
use qcow2::copy::runs;
use std::io;
use std::ops::Range;
use std::time::Instant;

/// Bytes of a hole that are zeroed at once: a cancel waits for one such act.
const HOLE_MAX: u64 = 64 << 20;

/// The refusal of a completion whose copy hangs.
pub(super) const SLOW: &str = "no part of the copy was done for seconds, and the mirror goes on; check the new storage \
                               and the old one, and repeat the command";

/// Errors of a copy. The texts have the remedy.
#[derive(Debug, thiserror::Error)]
pub(super) enum CopyError {
    /// Another program may write to the image.
    #[error("the guest has moved to another host, which writes the image; repeat it there")]
    HandedOver,
    /// The disk cannot be read at this position.
    #[error("reading at {0}: {1}; check the storage of the disk")]
    Read(u64, io::Error),
    /// The reader was closed.
    #[error("the mirror has ended; begin it again with --to")]
    Closed,
    /// The new storage cannot be written.
    #[error("writing the new storage: {0}; check it and its free space")]
    Write(io::Error),
}

/// Copies a disk.
pub(super) struct Copier {
    old: Old,
    new: New,
    /// Zeroes of this length and alignment take no space.
    unit: u64,
    rate: Rate,
}

impl TargetUser for Copier {
    const WORDS: Words =
        Words { thread: "mirror-target", target: "new storage", cancelled: CANCELLED };
    type Error = CopyError;
}

impl Exchanged for Copier {
    const UNMOVED: &'static str = "the guest goes on in the old one; check both storages, and begin the mirror again with --to";
}

impl converge::Copier for Copier {
    const SLOW: &'static str = SLOW;

    /// A hole of the old storage is not trusted here: some file systems report one where data was written a
    /// moment ago.
    fn again(&mut self, range: Range<u64>) -> Result<(), CopyError> {
        for start in range.clone().step_by(converge::CHUNK as usize) {
            self.copy_piece(start..range.end.min(start + converge::CHUNK), false)?;
        }
        Ok(())
    }

    fn sync(&mut self) -> Result<(), CopyError> {
        let begun = Instant::now();
        self.new.target.sync().map_err(CopyError::Write)?;
        self.rate.synced(begun);
        Ok(())
    }

    fn rate(&self) -> &Rate {
        &self.rate
    }
}

impl Copier {
    pub(super) fn new(old: Old, new: New, unit: u64) -> Self {
        Copier { old, new, unit, rate: Rate::default() }
    }

    /// Copies the start of a range for the first time, at most `max` bytes of data. Returns the length
    /// that is done, and the bytes that were read.
    pub(super) fn first(&mut self, range: Range<u64>, max: u64) -> Result<(u64, u64), CopyError> {
        let start = range.start;
        let data = self.old.skip_hole(range.clone())?;
        if data > start {
            let end = if self.new.is_blank() { data } else { data.min(start + HOLE_MAX) };
            if !self.new.is_blank() {
                self.new.target.zero(start, end - start).map_err(CopyError::Write)?;
            }
            return Ok((end - start, 0));
        }
        let end = range.end.min(start + max);
        self.copy_piece(start..end, self.new.is_blank())?;
        Ok((end - start, end - start))
    }

    fn copy_piece(&mut self, range: Range<u64>, is_blank: bool) -> Result<(), CopyError> {
        let (at, begun) = (range.start, Instant::now());
        let data = self.old.read(range)?;
        let (data, target) = (&data[..], &mut self.new.target);
        let mut done = 0;
        for run in runs(at, data, self.unit) {
            if !is_blank && run.start > done {
                let zeroes = (run.start - done) as u64;
                target.zero(at + done as u64, zeroes).map_err(CopyError::Write)?;
            }
            done = run.end;
            let start = at + run.start as u64;
            target.write(start, &data[run]).map_err(CopyError::Write)?;
        }
        let rest = (data.len() - done) as u64;
        if !is_blank && rest > 0 {
            target.zero(at + done as u64, rest).map_err(CopyError::Write)?;
        }
        let bytes = data.len() as u64;
        if self.rate.copied(bytes, begun) { converge::Copier::sync(self) } else { Ok(()) }
    }

    /// Checks that the new storage still has its path.
    ///
    /// # Errors
    /// Cause and remedy.
    pub(super) fn check_path(&self) -> Result<(), String> {
        self.new.check_path()
    }

    /// As [`Target::known`](qcow2::target::Target::known) of the new storage.
    pub(super) fn known(&self) -> Option<Vec<u8>> {
        self.new.target.known()
    }

    /// Gives the new storage, which is durable, its name.
    ///
    /// # Errors
    /// Cause and remedy.
    pub(super) fn name(self) -> Result<Named, String> {
        self.old.check_handover().map_err(|error| error.to_string())?;
        self.new.name()
    }
}
