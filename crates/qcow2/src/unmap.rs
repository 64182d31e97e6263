// SPDX-License-Identifier: Apache-2.0
//! Frees the clusters of discarded data.
//!
//! A lane punches the data that it discards, and tells this thread the range. Later, in the background,
//! whole clusters become zero clusters, and their places in the file are free for other data. A lane may
//! know a place, and write to it at any time without a question. So a cluster is freed only when
//!
//! 1. an epoch has begun after the discard, which ends the known places of the range, and each use that
//!    began before has ended ([`crate::versions`]): no lane knows the place any more;
//! 2. no question has asked for the place since then; one that does takes it back ([`Discarded::keep`]);
//! 3. the place is a hole of the file: nothing was written to it after the discard. So the content of the
//!    disk does not change, whatever order requests had. Only some file systems tell that without doubt
//!    ([`backend::holes::Holes::exact`]).
//!
//! The place is reused after the commit that frees it, as that of compressed data.

use crate::extents::Extent;
use crate::image::{Found, Image};
use crate::storage::Store;
use crate::tables::Run;
use crate::versions::Ranges;
use std::io;
use std::ops::Range;

/// Maximum discarded ranges that are remembered. The data of further ones keeps its place.
pub(crate) const DISCARDED_MAX: usize = 4096;
/// Maximum clusters that are freed at once, while questions wait.
const UNMAP_MAX: u64 = 256;
/// Free bytes of the file system that the changed tables may need: with less nothing is unmapped.
const ROOM_MIN: u64 = 64 << 20;

/// Discarded ranges of the disk, in whole clusters.
#[derive(Debug, Default)]
pub(crate) struct Discarded {
    /// They wait for the next epoch.
    noted: Ranges,
    /// They wait until no lane knows their places.
    leaving: Ranges,
    /// The epoch that has begun for them.
    epoch: u64,
}

/// The state of discarded ranges.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Progress {
    /// There are none.
    Nothing,
    /// They wait for the next epoch.
    Noted,
    /// They wait for uses of their places, or for this thread.
    Leaving {
        /// No lane knows their places any more.
        are_free: bool,
    },
}

impl Discarded {
    fn note(&mut self, range: Range<u64>) {
        if range.start < range.end && self.noted.len() < DISCARDED_MAX {
            self.noted.insert(range);
        }
    }

    /// Notes again the places of `used`, which a lane knows from now on, in place of freeing them. Returns `extent`,
    /// which begins with them, up to the next place that waits to be freed.
    fn keep(&mut self, extent: Extent, used: Range<u64>) -> Extent {
        if self.leaving.is_empty() {
            return extent;
        }
        let kept: Vec<_> = self.leaving.overlapping(&used).cloned().collect();
        for range in kept {
            let part = range.start.max(used.start)..range.end.min(used.end);
            self.leaving.remove(part.clone());
            self.note(part);
        }
        if self.leaving.len() > 4 * DISCARDED_MAX {
            self.leaving.clear();
        }
        let behind = self.leaving.overlapping(used.end..extent.end.max(used.end)).next();
        Extent { end: behind.map_or(extent.end, |range| range.start), ..extent }
    }

    /// Returns whether a part of the range is about to be freed.
    pub(crate) fn frees(&self, range: &Range<u64>) -> bool {
        self.leaving.overlaps(range)
    }

    /// Takes ranges of at most `bytes` bytes that leave.
    fn take(&mut self, mut bytes: u64) -> Vec<Range<u64>> {
        let mut taken = Vec::new();
        while let Some(first) = self.leaving.first().filter(|_| bytes > 0) {
            let part = first.start..first.end.min(first.start + bytes);
            bytes -= part.end - part.start;
            self.leaving.remove(part.clone());
            taken.push(part);
        }
        taken
    }
}

impl Image {
    /// Returns whether a hole of the file is a hole without doubt. Else nothing may be unmapped.
    pub(crate) fn has_exact_holes(&self) -> bool {
        self.store().is_ok_and(Store::has_exact_holes)
    }

    /// Remembers that the data of a range was punched out of the file.
    pub(crate) fn note_discarded(&mut self, at: u64, len: u64) {
        let range = self.clusters_of(at..at + len);
        self.discarded.note(range);
    }

    /// Forgets what was discarded: its data keeps its place.
    pub(crate) fn forget_discarded(&mut self) {
        self.discarded = Discarded::default();
    }

    /// Keeps the places of a range, at the start of an extent, which are asked for. Returns the extent up to
    /// the next place that is about to be freed.
    pub(crate) fn keep(&mut self, extent: Extent, used: Range<u64>) -> Extent {
        let used = self.clusters_of(used);
        self.discarded.keep(extent, used)
    }

    /// Frees clusters that no lane knows, as many as one commit shall have. A new epoch begins only if it
    /// `may_begin`. `run` is that of [`Image::commit_by`].
    ///
    /// # Errors
    /// errno of a failed commit, also of an earlier one.
    pub(crate) fn unmap_discarded(
        &mut self,
        may_begin: bool,
        run: Run<'_>,
    ) -> Result<Progress, i32> {
        self.check_committed()?;
        if self.discarded.leaving.is_empty() && may_begin && !self.discarded.noted.is_empty() {
            self.discarded.leaving = std::mem::take(&mut self.discarded.noted);
            let leaving = self.discarded.leaving.clone();
            self.discarded.epoch = self.versions().begin_epoch(leaving);
        }
        if let Progress::Leaving { are_free: true } = self.discarding() {
            // A commit that finds no space fails the writes of the guest.
            if !self.store().and_then(Store::free_bytes).is_ok_and(|free| free >= ROOM_MIN) {
                self.forget_discarded();
                return Ok(Progress::Nothing);
            }
            let ranges = self.discarded.take(UNMAP_MAX * self.cluster_bytes());
            if let Err(why) = self.unmap(ranges) {
                self.complain(&why);
            }
            self.commit_by(run)?;
        }
        Ok(self.discarding())
    }

    fn discarding(&self) -> Progress {
        let Discarded { noted, leaving, epoch } = &self.discarded;
        match (noted.is_empty(), leaving.is_empty()) {
            (_, false) => Progress::Leaving { are_free: self.versions().have_left(*epoch) },
            (false, true) => Progress::Noted,
            (true, true) => Progress::Nothing,
        }
    }

    /// Makes zero clusters of the clusters of ranges whose places are holes.
    fn unmap(&mut self, ranges: Vec<Range<u64>>) -> io::Result<()> {
        let mut holes = Vec::new();
        for range in ranges {
            self.find_holes(range, &mut holes)?;
        }
        holes.into_iter().try_for_each(|hole| self.free(hole))
    }

    /// Adds the clusters of a range that the image has itself, and whose places are holes.
    fn find_holes(&self, range: Range<u64>, holes: &mut Vec<Range<u64>>) -> io::Result<()> {
        let mut at = range.start;
        while at < range.end {
            at += match self.find(at, range.end - at)? {
                Found::Extent { extent, writable } => {
                    let part = at..extent.end.min(range.end);
                    if writable {
                        self.holes(&extent, part.clone(), holes)?;
                    }
                    part.end - part.start
                }
                Found::Zero(len, _) | Found::Copy(len) => len,
            };
        }
        Ok(())
    }

    /// Adds the whole clusters of a part of an extent, which starts with one, that are holes of the file.
    fn holes(
        &self,
        extent: &Extent,
        part: Range<u64>,
        holes: &mut Vec<Range<u64>>,
    ) -> io::Result<()> {
        let cluster = self.cluster_bytes();
        let host = |at: u64| extent.host + (at - extent.start);
        let end = host(part.end).next_multiple_of(cluster);
        let mut start = host(part.start);
        while start < end {
            let data = self.store()?.first_data(start..end)?;
            let len = (data.start / cluster * cluster).saturating_sub(start);
            if len > 0 {
                let at = part.start + (start - host(part.start));
                holes.push(at..(at + len).min(part.end));
            }
            if data.is_empty() {
                break;
            }
            start = data.end.next_multiple_of(cluster);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ALL: Extent = Extent { start: 4, end: 40, file: 0, host: 100 };

    fn discarded(noted: &[Range<u64>], leaving: &[Range<u64>]) -> Discarded {
        let set = |ranges: &[Range<u64>]| ranges.iter().cloned().collect();
        Discarded { noted: set(noted), leaving: set(leaving), epoch: 1 }
    }

    #[test]
    fn a_known_place_waits_for_the_next_epoch_and_an_extent_ends_before_others_that_leave() {
        let mut of = discarded(&[], &[0..8, 10..12, 20..30]);
        assert_eq!(of.keep(ALL, 4..6), Extent { end: 6, ..ALL });
        assert_eq!(of.keep(ALL, 4..11), Extent { end: 11, ..ALL });
        assert_eq!(of.keep(ALL, 4..12), Extent { end: 20, ..ALL });
        assert_eq!(of.keep(ALL, 4..40), ALL);
        assert_eq!(of.noted, discarded(&[4..8, 10..12, 20..30], &[]).noted);
        let left = std::iter::once(0..4).collect::<Ranges>();
        assert_eq!(of.leaving, left);
    }

    #[test]
    fn ranges_leave_in_parts_of_a_bounded_size() {
        let mut of = discarded(&[], &[0..8, 10..12, 20..30]);
        assert_eq!(of.take(9), [0..8, 10..11]);
        assert_eq!(of.take(100), [11..12, 20..30]);
        assert_eq!(of.take(100), []);
    }

    #[test]
    fn the_number_of_discarded_ranges_is_bounded() {
        let mut of = Discarded::default();
        (0..2 * DISCARDED_MAX as u64).for_each(|n| of.note(n * 4..n * 4 + 2));
        assert_eq!(of.noted.len(), DISCARDED_MAX);
    }
}
