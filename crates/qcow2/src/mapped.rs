// SPDX-License-Identifier: Apache-2.0
//! The table entries of new clusters of data.
//!
//! A flush of imago writes whole tables, of which an allocation has changed one entry and one reference count. So a
//! commit of nothing else writes these alone, as the flush would. imago keeps its tables as changed, and a later flush
//! finds the same content in the file.

use crate::check::set_refcount;
use crate::entry::{EXCLUSIVE, Entry, PLACE};
use crate::fields::u64_at;
use crate::overlay::SECTOR;
use crate::places::{ENTRY_BYTES, Places};
use crate::storage::Store;
use std::io;

/// Clusters of the disk in a row, with their new places in a row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Mapped {
    /// First cluster of the disk.
    pub(crate) disk: u64,
    /// First cluster of the file.
    pub(crate) file: u64,
    pub(crate) clusters: u64,
}

impl Mapped {
    /// The clusters of a range of the disk, with the place of its first byte.
    pub(crate) fn of(at: u64, len: u64, place: u64, cluster_bytes: u64) -> Mapped {
        let (disk, file) = (at / cluster_bytes, place / cluster_bytes);
        Mapped { disk, file, clusters: (at + len).div_ceil(cluster_bytes) - disk }
    }

    /// The first clusters, at most so many, and the others.
    fn split(self, most: u64) -> (Mapped, Mapped) {
        let clusters = self.clusters.min(most);
        let (disk, file) = (self.disk + clusters, self.file + clusters);
        (Mapped { clusters, ..self }, Mapped { disk, file, clusters: self.clusters - clusters })
    }
}

impl Store {
    /// Keeps the entries and the reference counts of new places for the next commit. Returns whether that has all
    /// changes then: a new table needs a flush of imago.
    ///
    /// # Errors
    /// The error of a read.
    pub(crate) fn map(&self, mapped: &[Mapped]) -> io::Result<bool> {
        let Some(guard) = self.guard() else { return Ok(false) };
        let places = guard.places();
        if !self.overlay().keeps(places) {
            return Ok(false);
        }
        let entries = (1 << places.cluster_bits) / ENTRY_BYTES;
        let counts = places.counts(1 << places.cluster_bits);
        for mut rest in mapped.iter().copied() {
            while rest.clusters > 0 {
                let in_table = entries - rest.disk % entries;
                let part;
                (part, rest) = rest.split(in_table.min(counts - rest.file % counts));
                let is_known = self.set_entries(places, part)?
                    && self.set_counts(places, part, part.file % counts)?;
                if !is_known {
                    return Ok(false);
                }
            }
        }
        Ok(true)
    }

    /// Sets the entries of one L2 table. Returns `false` if the table is new, or has other places there.
    fn set_entries(&self, places: &Places, part: Mapped) -> io::Result<bool> {
        let bits = places.cluster_bits;
        let Some((table, first)) = places.l2_entry(part.disk) else { return Ok(false) };
        let (at, len) = (table + first * ENTRY_BYTES, part.clusters * ENTRY_BYTES);
        self.change_sectors(at, len, |sectors, at| {
            let entries = &mut sectors[at as usize..(at + len) as usize];
            let mut entries = entries.as_chunks_mut().0.iter_mut().zip(part.file..);
            entries.all(|(entry, cluster)| {
                let old = Entry::of(u64::from_be_bytes(*entry), bits);
                *entry = (cluster << bits | EXCLUSIVE).to_be_bytes();
                old == Entry::None || old == Entry::Cluster(cluster << bits)
            })
        })
    }

    /// Sets the counts of one refcount block to 1, from number `first` on. Returns `false` if the block is new.
    fn set_counts(&self, places: &Places, part: Mapped, first: u64) -> io::Result<bool> {
        let (bits, order) = (places.cluster_bits, places.refcount_order);
        let index = part.file / places.counts(1 << bits);
        let table = (places.refcount_table.start << bits) + index * ENTRY_BYTES;
        let block = u64_at(&self.read(ENTRY_BYTES as usize, table)?, 0) & PLACE;
        if places.refcount_blocks.get(&(block >> bits)) != Some(&index) {
            return Ok(false);
        }
        let (start, end) = (first << order, (first + part.clusters) << order);
        let (at, len) = (block + start / 8, end.div_ceil(8) - start / 8);
        self.change_sectors(at, len, |sectors, at| {
            let first = (at * 8 + start % 8) >> order;
            (first..first + part.clusters).for_each(|count| set_refcount(sectors, count, order, 1));
            true
        })
    }

    /// Changes the whole sectors of a range, which are kept unless `change` returns `false`. It gets the position of
    /// the range in them.
    fn change_sectors(
        &self,
        at: u64,
        len: u64,
        change: impl FnOnce(&mut [u8], u64) -> bool,
    ) -> io::Result<bool> {
        let start = at - at % SECTOR;
        let mut sectors =
            self.read(((at + len).next_multiple_of(SECTOR) - start) as usize, start)?;
        let is_good = change(&mut sectors, at - start);
        if is_good {
            self.keep(&sectors, start)?;
        }
        Ok(is_good)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::crash_tests::{First, make, writer};
    use crate::image::{Answer, Question};

    const DISK: u64 = 32 << 20;

    /// The content of a place that imago has written there waits for the commit, too, if there is a backing file.
    #[test]
    fn a_commit_leaves_nothing_that_a_flush_of_imago_would_write() {
        for (options, first) in [
            ("cluster_size=64k", First::Nowhere),
            ("cluster_size=64k", First::Backing),
            ("cluster_size=4k", First::Nowhere),
            ("cluster_size=4k,refcount_bits=1", First::Backing),
            ("cluster_size=4k,refcount_bits=2", First::Nowhere),
            ("cluster_size=8k,refcount_bits=64", First::Nowhere),
        ] {
            let directory = tempfile::TempDir::new().expect("a directory");
            let mut image = writer(&make(directory.path(), options, first, DISK)).image;
            let mut random = fastrand::Rng::with_seed(3);
            let (mut short, mut allocations) = (0, 0);
            for round in 0..300 {
                for _ in 0..random.u32(1..4) {
                    let at = random.u64(..DISK / SECTOR - 64) * SECTOR;
                    let data = vec![7; random.usize(1..64) * SECTOR as usize];
                    let question = match random.u32(..12) {
                        0 => Question::Discard(at, 3 << 16),
                        1..4 => Question::Write(at, data),
                        _ => Question::Place(at, data.len() as u64),
                    };
                    let answer = image.answer(question);
                    assert!(!matches!(answer, Answer::Failed(_)), "{options} {round}: {answer:?}");
                }
                let changed = image.is_changed();
                allocations += u32::from(changed);
                short += u32::from(changed && image.keep_mapped().expect("a good file"));
                image.commit().expect("a good file");
                // Not after each commit: imago has most changes to itself for a while.
                if round % 5 == 4 {
                    image.access.flush().expect("a good file");
                    let store = image.store().expect("the image");
                    assert!(store.overlay().is_empty(), "{options} {round}: {:?}", store.overlay());
                }
            }
            assert!(short * 2 > allocations, "{options}: {short} of {allocations}");
        }
    }
}
