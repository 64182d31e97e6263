// SPDX-License-Identifier: Apache-2.0
//! Copies parts of an image to its backing file, again and again at the same places.

use super::CANCELLED;
use crate::disks::converge::{self, Exchanged, Rate, TargetUser, Words};
use qcow2::merge::Merge;
use std::io;
use std::ops::Range;
use std::time::Instant;

/// Bytes that one act looks at: a cancel waits for it.
const LOOK_MAX: u64 = 64 << 20;

/// Copies an image.
pub(super) struct Copier {
    merge: Merge,
    rate: Rate,
}

/// The error of a copy.
#[derive(Debug, thiserror::Error)]
#[error(
    "the backing file cannot be written: {0}; check its storage and the free space, and repeat the \
     command"
)]
pub(super) struct CopyError(#[from] io::Error);

impl Copier {
    pub(super) fn new(merge: Merge) -> Self {
        Copier { merge, rate: Rate::default() }
    }

    /// Copies the start of a range, about `max` bytes. Returns the length that is done, and the copied bytes.
    pub(super) fn some(&mut self, range: Range<u64>, max: u64) -> Result<(u64, u64), CopyError> {
        let (mut left, mut copied) = (range.start..range.end.min(range.start + LOOK_MAX), 0);
        while !left.is_empty() && copied < max {
            copied += self.copy_piece(&mut left, max)?;
        }
        Ok((left.start - range.start, copied))
    }

    /// As [`Merge::known`].
    pub(super) fn known(&self) -> Option<Vec<u8>> {
        self.merge.known()
    }

    fn copy_piece(&mut self, range: &mut Range<u64>, max: u64) -> Result<u64, CopyError> {
        let begun = Instant::now();
        let copied = self.merge.copy_piece(range, max)?;
        if self.rate.copied(copied, begun) {
            converge::Copier::sync(self)?;
        }
        Ok(copied)
    }
}

impl TargetUser for Copier {
    const WORDS: Words =
        Words { thread: "merge-target", target: "backing file", cancelled: CANCELLED };
    type Error = CopyError;
}

impl Exchanged for Copier {
    const UNMOVED: &'static str =
        "the disk goes on in its image; check the storage of both, and repeat the command";
}

impl converge::Copier for Copier {
    const SLOW: &'static str = "no part of the copy was done for seconds, and the disk goes on in its image; check \
                                the storage of the image and of its backing file, and repeat the command";

    fn again(&mut self, mut range: Range<u64>) -> Result<(), CopyError> {
        while !range.is_empty() {
            self.copy_piece(&mut range, converge::CHUNK)?;
        }
        Ok(())
    }

    fn sync(&mut self) -> Result<(), CopyError> {
        let begun = Instant::now();
        self.merge.sync()?;
        self.rate.synced(begun);
        Ok(())
    }

    fn rate(&self) -> &Rate {
        &self.rate
    }
}
