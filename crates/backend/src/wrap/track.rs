// SPDX-License-Identifier: Apache-2.0
//! Notes the parts of a disk that I/Os change: for a copy that goes on meanwhile, and for the next one.

use super::wrapped_info;
use crate::{Disk, Engine, Info, Io, Lane, ResizeError, Slot, Step, Token};
use std::io;
use std::ops::Range;
use std::os::fd::{BorrowedFd, RawFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Smallest part in bytes.
const PART_BYTES_MIN: u64 = 64 << 10;
/// Most parts: 16 MiB of memory.
pub(super) const PARTS_MAX: u64 = 1 << 27;

/// Size of the parts of a disk, at least `min_bytes`, of which there are [`PARTS_MAX`] at most.
pub(super) fn part_bytes_of(capacity_bytes: u64, min_bytes: u64) -> u64 {
    capacity_bytes.div_ceil(PARTS_MAX).next_power_of_two().max(min_bytes)
}

/// The parts of a disk that were changed. A part is noted after the change and before the completion
/// of the I/O, so that a copy that begins after [`Written::take`] has the changes before that.
#[derive(Debug)]
pub struct Written {
    part_bytes: u64,
    capacity_bytes: u64,
    /// A bit for each part.
    words: Vec<AtomicU64>,
    /// Number of the noted parts. A part is counted before its bit is visible, and a taken one after it.
    count: AtomicU64,
}

impl Written {
    /// No part of a disk of this capacity is noted.
    pub fn new(capacity_bytes: u64) -> Self {
        let part_bytes = part_bytes_of(capacity_bytes, PART_BYTES_MIN);
        let words = capacity_bytes.div_ceil(part_bytes).div_ceil(64);
        let words = (0..words).map(|_| AtomicU64::new(0)).collect();
        Written { part_bytes, capacity_bytes, words, count: AtomicU64::new(0) }
    }

    /// The notes of another program for a disk of this capacity: a bit for each part, as
    /// [`Written::words`] told. `None`: they have another form than those of this program.
    pub fn of_words(capacity_bytes: u64, part_bytes: u64, words: &[u64]) -> Option<Self> {
        let written = Written::new(capacity_bytes);
        if (written.part_bytes, written.words.len()) != (part_bytes, words.len()) {
            return None;
        }
        written.words.iter().zip(words).for_each(|(to, from)| to.store(*from, Ordering::Relaxed));
        let end = capacity_bytes.div_ceil(part_bytes) % 64;
        let count = words.iter().map(|word| u64::from(word.count_ones())).sum();
        written.count.store(count, Ordering::Relaxed);
        let has_more = end != 0 && words.last().is_some_and(|last| last >> end != 0);
        (!has_more).then_some(written)
    }

    /// A bit for each part, the first part in the lowest bit of the first word.
    pub fn words(&self) -> impl ExactSizeIterator<Item = u64> {
        self.words.iter().map(|word| word.load(Ordering::Acquire))
    }

    /// Capacity of the disk at the begin of the notes.
    pub fn capacity_bytes(&self) -> u64 {
        self.capacity_bytes
    }

    /// Size of a part in bytes.
    pub fn part_bytes(&self) -> u64 {
        self.part_bytes
    }

    fn note(&self, offset_bytes: u64, len_bytes: u64) {
        let end = offset_bytes.saturating_add(len_bytes).min(self.capacity_bytes);
        for part in offset_bytes / self.part_bytes..end.div_ceil(self.part_bytes) {
            let bit = 1 << (part % 64);
            self.count.fetch_add(1, Ordering::Relaxed);
            // Pairs with the `fetch_and` of `take_part`, which comes before the read of the changed data.
            if self.words[(part / 64) as usize].fetch_or(bit, Ordering::AcqRel) & bit != 0 {
                self.count.fetch_sub(1, Ordering::Relaxed);
            }
        }
    }

    /// Notes the parts that `other` has noted, and the capacity that the disk has gained since then.
    pub fn note_all(&self, other: &Written) {
        other.each(self.capacity_bytes, |range| self.note(range.start, range.end - range.start));
    }

    /// Bytes of the noted parts.
    pub fn bytes(&self) -> u64 {
        (self.count.load(Ordering::Relaxed) * self.part_bytes).min(self.capacity_bytes)
    }

    /// Calls `act` with each noted part as a range of the disk in bytes, and with the range from the
    /// capacity of these notes to `capacity_bytes`, which the disk has gained.
    pub fn each(&self, capacity_bytes: u64, mut act: impl FnMut(Range<u64>)) {
        for (at, word) in (0..).zip(&self.words) {
            self.each_of(at, word.load(Ordering::Acquire), &mut act);
        }
        if self.capacity_bytes < capacity_bytes {
            act(self.capacity_bytes..capacity_bytes);
        }
    }

    /// Takes the noted parts from the start of the disk to its end, as ranges of at most `max_bytes`, but
    /// of one part at least. A part is noted no more when its range is returned: the caller copies it, or
    /// gives the copy up. The others stay noted, also if the rest of the ranges is dropped.
    #[must_use = "nothing is taken before the next range is asked for"]
    pub fn take(&self, max_bytes: u64) -> Taken<'_> {
        self.take_from(0, max_bytes)
    }

    /// As [`Written::take`], from the first part on that begins at a position of the disk or behind it.
    #[must_use = "nothing is taken before the next range is asked for"]
    pub fn take_from(&self, start_bytes: u64, max_bytes: u64) -> Taken<'_> {
        let parts_max = (max_bytes / self.part_bytes).max(1);
        Taken { written: self, next: start_bytes.div_ceil(self.part_bytes), parts_max }
    }

    /// The first noted part from a part on.
    fn first(&self, from: u64) -> Option<u64> {
        let mut mask = u64::MAX << (from % 64);
        (from / 64..self.words.len() as u64).find_map(|at| {
            let bits = self.words[at as usize].load(Ordering::Relaxed) & mask;
            mask = u64::MAX;
            (bits != 0).then(|| at * 64 + u64::from(bits.trailing_zeros()))
        })
    }

    /// Takes a part. `false`: it is not noted.
    fn take_part(&self, part: u64) -> bool {
        let Some(word) = self.words.get((part / 64) as usize) else { return false };
        let bit = 1 << (part % 64);
        // Pairs with the `fetch_or` of `note`, which comes after the change of the data.
        let was_noted = word.fetch_and(!bit, Ordering::AcqRel) & bit != 0;
        self.count.fetch_sub(u64::from(was_noted), Ordering::Relaxed);
        was_noted
    }

    /// The parts of the word at an index.
    fn each_of(&self, at: u64, mut bits: u64, act: &mut impl FnMut(Range<u64>)) {
        while bits != 0 {
            let start = (at * 64 + u64::from(bits.trailing_zeros())) * self.part_bytes;
            act(start..(start + self.part_bytes).min(self.capacity_bytes));
            bits &= bits - 1;
        }
    }
}

/// The noted parts of [`Written::take`], one range after another.
#[derive(Debug)]
pub struct Taken<'a> {
    written: &'a Written,
    /// The first part that has not been looked at.
    next: u64,
    parts_max: u64,
}

impl Iterator for Taken<'_> {
    type Item = Range<u64>;

    fn next(&mut self) -> Option<Range<u64>> {
        let written = self.written;
        while let Some(first) = written.first(self.next) {
            let mut end = first;
            while end - first < self.parts_max && written.take_part(end) {
                end += 1;
            }
            // Another thread may have taken the first part meanwhile.
            self.next = end.max(first + 1);
            if end > first {
                let end = (end * written.part_bytes).min(written.capacity_bytes);
                return Some(first * written.part_bytes..end);
            }
        }
        self.next = written.words.len() as u64 * 64;
        None
    }
}

/// The capacity of a disk whose changes are noted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Growth {
    /// It may grow. Notes begin with the capacity of their time.
    Allowed,
    /// A merge that copies the disk does not let it grow.
    Merging,
    /// Nor does a mirror.
    Mirroring,
}

/// Notes the changed parts of the disk `inner`.
pub struct Track {
    inner: Arc<dyn Disk>,
    noted: Arc<[Arc<Written>]>,
    growth: Growth,
}

impl Track {
    /// A disk around `inner` that notes changes in each of `noted`.
    pub fn new(inner: Arc<dyn Disk>, noted: Vec<Arc<Written>>, growth: Growth) -> Self {
        Track { inner, noted: noted.into(), growth }
    }
}

impl Disk for Track {
    fn info(&self) -> Info {
        let wrapper = match self.growth {
            Growth::Allowed => "changes are noted",
            Growth::Merging => "being merged",
            Growth::Mirroring => "being mirrored",
        };
        wrapped_info(&*self.inner, wrapper)
    }

    fn resize(&self, bytes: Option<u64>) -> Result<(), ResizeError> {
        let capacity_bytes = self.inner.info().capacity_sectors * 512;
        match (self.growth, bytes) {
            (Growth::Allowed, bytes) => self.inner.resize(bytes),
            (Growth::Merging, Some(bytes)) if bytes != capacity_bytes => Err(ResizeError::Merging),
            (Growth::Mirroring, Some(bytes)) if bytes != capacity_bytes => {
                Err(ResizeError::Mirroring)
            }
            (Growth::Merging | Growth::Mirroring, _) => Ok(()),
        }
    }

    fn sync(&self) -> io::Result<()> {
        self.inner.sync()
    }

    fn open_lane(&self) -> io::Result<Box<dyn Lane>> {
        let (inner, noted) = (self.inner.open_lane()?, Arc::clone(&self.noted));
        Ok(Box::new(TrackLane { inner, noted }))
    }

    fn layers(&self) -> u8 {
        self.inner.layers()
    }

    fn kernel_file(&self) -> Result<BorrowedFd<'_>, &'static str> {
        Err(match self.growth {
            Growth::Allowed => {
                "only the uring data plane notes the changes for incremental backups; remove the \
                 bitmaps of the disk first (vhost-blk ctl bitmaps --remove)"
            }
            Growth::Merging => {
                "only the uring data plane serves a disk while its image is merged; wait for the \
                 end of that (a disk with --data-plane kernel needs auto for it)"
            }
            Growth::Mirroring => {
                "only the uring data plane serves a disk while it is mirrored; wait for the end of \
                 that (a disk with --data-plane kernel needs auto for it)"
            }
        })
    }

    fn sync_failed(&self, errno: i32) {
        self.inner.sync_failed(errno);
    }
}

struct TrackLane {
    inner: Box<dyn Lane>,
    noted: Arc<[Arc<Written>]>,
}

impl TrackLane {
    fn note(&self, io: &Io, step: Step) -> Step {
        // Also a failed I/O may have changed a part of its range.
        if matches!(step, Step::Done(_)) && io.writes() {
            self.noted.iter().for_each(|written| written.note(io.offset_bytes, io.len_bytes));
        }
        step
    }
}

impl Lane for TrackLane {
    fn files(&self) -> Vec<RawFd> {
        self.inner.files()
    }

    fn moves_data_itself(&self) -> bool {
        self.inner.moves_data_itself()
    }

    fn start(&mut self, io: &mut Io, slot: Slot, engine: &mut dyn Engine) -> Step {
        let step = self.inner.start(io, slot, engine);
        self.note(io, step)
    }

    fn event(&mut self, io: &mut Io, token: Token, result: i32, engine: &mut dyn Engine) -> Step {
        let step = self.inner.event(io, token, result, engine);
        self.note(io, step)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_are_taken_once_and_neighbours_are_joined() {
        let all = |written: &Written| Vec::from_iter(written.take(u64::MAX));
        let part = PART_BYTES_MIN;
        let written = Written::new(200 * part + 512);
        for (at, len) in [(0, 1), (part, 512), (63 * part, 2 * part), (200 * part, 512)] {
            written.note(at, len);
        }
        assert_eq!(written.bytes(), 5 * part);
        let ranges = [0..2 * part, 63 * part..65 * part, 200 * part..200 * part + 512];
        assert_eq!(all(&written), ranges);
        assert_eq!((all(&written), written.bytes()), (vec![], 0));
        written.note(5 * part - 1, 2);
        let taken = all(&written);
        assert_eq!((taken.len(), &taken[0]), (1, &(4 * part..6 * part)));
        written.note(u64::MAX, u64::MAX);
        assert_eq!(all(&written), []);
    }

    #[test]
    fn parts_are_taken_in_ranges_of_a_bounded_size_and_the_others_stay_noted() {
        let part = PART_BYTES_MIN;
        let written = Written::new(200 * part);
        written.note(0, 200 * part);
        let mut taken = written.take(3 * part);
        assert_eq!(taken.next(), Some(0..3 * part));
        assert_eq!((taken.next(), written.bytes()), (Some(3 * part..6 * part), 194 * part));
        // A part behind waits for the next pass, and one ahead is taken in this pass.
        written.note(0, 1);
        assert!(taken.by_ref().all(|range| range.end - range.start <= 3 * part));
        assert_eq!((taken.next(), written.bytes()), (None, part));
        written.note(199 * part, 1);
        assert_eq!(written.take_from(part, part).next(), Some(199 * part..200 * part));
        written.note(199 * part, 1);
        let smallest = Vec::from_iter(written.take(1));
        assert_eq!(smallest, [0..part, 199 * part..200 * part]);
        assert_eq!(written.bytes(), 0);
    }

    #[test]
    fn notes_are_made_of_their_words_again_and_of_no_others() {
        let part = PART_BYTES_MIN;
        let written = Written::new(65 * part + 512);
        written.note(3 * part, 1);
        written.note(65 * part, 1);
        let (capacity, words) = (written.capacity_bytes(), Vec::from_iter(written.words()));
        let again = Written::of_words(capacity, part, &words).expect("it is the same form");
        assert_eq!(
            Vec::from_iter(again.take(u64::MAX)),
            [3 * part..4 * part, 65 * part..65 * part + 512]
        );
        assert!(Written::of_words(capacity, 2 * part, &words).is_none());
        assert!(Written::of_words(capacity, part, &words[1..]).is_none());
        assert!(Written::of_words(capacity, part, &[0, 1 << 2]).is_none(), "behind the end");
    }

    #[test]
    fn the_parts_of_a_huge_disk_take_little_memory() {
        let written = Written::new(1 << 60);
        assert!(written.words.len() * 8 <= 16 << 20);
        written.note((1 << 60) - 512, 512);
        assert_eq!(written.take(u64::MAX).last().unwrap().end, 1 << 60);
    }

    #[test]
    fn notes_are_added_to_later_ones_with_the_part_that_the_disk_has_gained() {
        let part = PART_BYTES_MIN;
        let (before, after) = (Written::new(2 * part + 512), Written::new(5 * part));
        before.note(0, 1);
        after.note(part, 1);
        after.note_all(&before);
        assert_eq!(
            Vec::from_iter(after.take(u64::MAX)),
            Vec::from_iter(std::iter::once(0..5 * part))
        );
        assert_eq!(before.bytes(), part, "they stay");
        let same = Written::new(2 * part + 512);
        same.note_all(&before);
        assert_eq!(Vec::from_iter(same.take(u64::MAX)), Vec::from_iter(std::iter::once(0..part)));
    }
}
