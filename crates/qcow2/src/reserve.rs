// SPDX-License-Identifier: Apache-2.0
//! Reference counts that are raised in the file before imago allocates their clusters, so that most allocations
//! change no count, and need no sync before the table that names the cluster.
//!
//! The file counts a reserved cluster as used, and imago sees it as free: reads of imago get the sectors that it
//! has written. A crash leaks the reserved clusters. They are freed at the next opening ([`crate::in_use`]), so that
//! only an image with a mark has some. [`crate::image::Image::settle_by`] gives them back.

use crate::check::{refcount_of, set_refcount};
use crate::places::Places;
use std::collections::BTreeMap;
use std::ops::Range;

const SECTOR: u64 = 512;
/// Maximum bytes of the clusters that one commit reserves for one sector of counts.
const RESERVED_BYTES_MAX: u64 = 64 << 20;
/// Maximum sectors of counts with reserved clusters.
const SECTORS_MAX: usize = 1024;

/// A sector of a file.
pub(crate) type Sector = [u8; SECTOR as usize];

/// The place of a sector of reference counts.
pub(crate) struct Counts {
    order: u32,
    cluster_bits: u32,
    /// Cluster of the first count.
    first: u64,
}

impl Counts {
    /// The counts of the sector at `at`, which is in this block of the refcount table.
    pub(crate) fn at(places: &Places, block: u64, at: u64) -> Counts {
        let cluster = 1 << places.cluster_bits;
        let first = block * places.counts(cluster) + places.counts(at & (cluster - 1));
        Counts { order: places.refcount_order, cluster_bits: places.cluster_bits, first }
    }

    fn len(&self) -> u64 {
        (SECTOR * 8) >> self.order
    }

    fn count(&self, sector: &Sector, entry: u64) -> u64 {
        refcount_of(sector, entry, self.order)
    }

    /// Adds the clusters whose counts become 0.
    pub(crate) fn freed(&self, old: &Sector, new: &Sector, freed: &mut Vec<Range<u64>>) {
        for entry in 0..self.len() {
            let becomes_free = self.count(new, entry) == 0 && self.count(old, entry) > 0;
            if !becomes_free || self.first + entry == 0 {
                continue;
            }
            let start = (self.first + entry) << self.cluster_bits;
            let end = start + (1 << self.cluster_bits);
            match freed.last_mut() {
                Some(last) if last.end == start => last.end = end,
                _ => freed.push(start..end),
            }
        }
    }
}

/// The writes that change a sector of counts.
pub(crate) struct Change {
    /// No count is lower than before, nor than imago wants it.
    pub(crate) most: Sector,
    pub(crate) last: Sector,
    /// The counts before, as imago has seen them.
    pub(crate) seen: Sector,
    /// End of the clusters that it reserves.
    pub(crate) reserved_end: u64,
}

/// The reserved clusters of an image.
#[derive(Debug, Default)]
pub(crate) struct Reserve {
    /// Clusters may be reserved.
    pub(crate) is_allowed: bool,
    /// Sectors of counts with reserved clusters, as imago sees them.
    seen: BTreeMap<u64, Sector>,
    /// These after the commit that has begun.
    next: Vec<(u64, Option<Sector>)>,
}

impl Reserve {
    /// The sectors in a range that imago sees otherwise than the file has them.
    pub(crate) fn seen(&self, sectors: Range<u64>) -> impl Iterator<Item = (&u64, &Sector)> {
        self.seen.range(sectors)
    }

    /// Replaces whole sectors, which were read from number `first` on, by those that imago sees.
    pub(crate) fn patch(&self, sectors: &mut [u8], first: u64) {
        let end = first + sectors.len() as u64 / SECTOR;
        for (number, sector) in self.seen(first..end) {
            let at = ((number - first) * SECTOR) as usize;
            sectors[at..at + SECTOR as usize].copy_from_slice(sector);
        }
    }

    /// The writes that give sector `number` of the file, which has `old`, the counts that imago wants.
    pub(crate) fn change(
        &mut self,
        number: u64,
        counts: &Counts,
        old: &Sector,
        new: &Sector,
    ) -> Change {
        let seen = *self.seen.get(&number).unwrap_or(old);
        let mut most = larger(old, new, counts.order);
        let mut reserved_end = 0;
        if self.is_allowed && most != *old && self.seen.len() < SECTORS_MAX {
            reserved_end = reserve(counts, old, &mut most);
        }
        let mut last = *new;
        let is_free =
            |entry: &u64| counts.count(&seen, *entry) == 0 && counts.count(new, *entry) == 0;
        for entry in (0..counts.len()).filter(is_free) {
            if counts.count(&most, entry) > 0 {
                set_refcount(&mut last, entry, counts.order, 1);
            }
        }
        if last != *new {
            // From the first write on: a commit may fail behind it.
            self.seen.insert(number, seen);
        }
        self.next.push((number, (last != *new).then_some(*new)));
        Change { most, last, seen, reserved_end }
    }

    /// Begins a commit: a failed one before leaves nothing.
    pub(crate) fn begin(&mut self) {
        self.next.clear();
    }

    /// Takes the end of a commit: the file has what it wrote.
    pub(crate) fn committed(&mut self) {
        for (number, seen) in self.next.drain(..) {
            match seen {
                Some(seen) => self.seen.insert(number, seen),
                None => self.seen.remove(&number),
            };
        }
    }

    /// Gives all reserved clusters back. Returns the writes of the file that do it.
    pub(crate) fn give_back(&mut self) -> Vec<(u64, Sector)> {
        let seen = std::mem::take(&mut self.seen);
        seen.into_iter().map(|(number, sector)| (number * SECTOR, sector)).collect()
    }
}

/// Raises free counts behind the first one that is raised. Returns the end of their clusters.
fn reserve(counts: &Counts, old: &Sector, most: &mut Sector) -> u64 {
    let raised = |entry: &u64| counts.count(most, *entry) > counts.count(old, *entry);
    let first = (0..counts.len()).find(raised).unwrap_or(counts.len());
    let longest = (RESERVED_BYTES_MAX >> counts.cluster_bits).max(1);
    let mut end = 0;
    for entry in first..counts.len().min(first + longest) {
        if counts.count(most, entry) == 0 {
            set_refcount(most, entry, counts.order, 1);
            end = (counts.first + entry + 1) << counts.cluster_bits;
        }
    }
    end
}

/// The larger of two counts, for each of a sector of them.
pub(crate) fn larger(old: &Sector, new: &Sector, order: u32) -> Sector {
    let mut found = *new;
    if order >= 3 {
        let bytes = 1 << (order - 3);
        for (found, old) in found.chunks_mut(bytes).zip(old.chunks(bytes)) {
            // Big-endian: the order of the bytes.
            if *old > *found {
                found.copy_from_slice(old);
            }
        }
        return found;
    }
    let (width, mask) = (1 << order, (1u16 << (1 << order)) - 1);
    for (found, old) in found.iter_mut().zip(old) {
        let new = *found;
        let field = |shift: u32| {
            let part = |byte: u8| (u16::from(byte) >> shift) & mask;
            part(*old).max(part(new)) << shift
        };
        *found = (0..8).step_by(width).map(|shift| field(shift as u32)).sum::<u16>() as u8;
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;
    const ORDER: u32 = 4;
    /// Number of the sector of counts.
    const NUMBER: u64 = 7;

    /// Counts of 16 bits of clusters of 64 KiB, from cluster 256 on.
    const COUNTS: Counts = Counts { order: ORDER, cluster_bits: 16, first: 256 };

    fn reserve() -> Reserve {
        Reserve { is_allowed: true, ..Reserve::default() }
    }

    fn counts(used: Range<u64>) -> Sector {
        let mut sector = [0; SECTOR as usize];
        used.for_each(|entry| set_refcount(&mut sector, entry, ORDER, 1));
        sector
    }

    /// The sector as imago reads it, if the file has `in_file`.
    fn seen(reserve: &Reserve, mut in_file: Sector) -> Sector {
        reserve.patch(&mut in_file, NUMBER);
        in_file
    }

    #[test]
    fn a_raised_count_reserves_the_free_clusters_behind_it() {
        let mut reserve = reserve();
        let (old, new) = (counts(0..10), counts(0..11));
        let change = reserve.change(NUMBER, &COUNTS, &old, &new);
        assert!(change.most == counts(0..256) && change.last == change.most && change.seen == old);
        assert_eq!(change.reserved_end, 512 << 16);
        assert!(seen(&reserve, change.most) == old, "the commit may fail");
        reserve.committed();
        assert!(seen(&reserve, change.last) == new);
        // The next clusters need no write.
        let next = reserve.change(NUMBER, &COUNTS, &counts(0..256), &counts(0..200));
        assert!(next.most == counts(0..256) && next.last == next.most && next.seen == new);
        reserve.committed();
        // The last ones end the reserve.
        let last = reserve.change(NUMBER, &COUNTS, &counts(0..256), &counts(0..256));
        assert!(last.most == counts(0..256) && last.last == last.most);
        reserve.committed();
        assert!(reserve.seen.is_empty() && reserve.give_back().is_empty());
    }

    #[test]
    fn only_used_clusters_are_freed_and_reserved_ones_are_given_back() {
        let mut reserve = reserve();
        reserve.change(NUMBER, &COUNTS, &counts(0..10), &counts(0..11));
        reserve.committed();
        let change = reserve.change(NUMBER, &COUNTS, &counts(0..256), &counts(0..9));
        let mut freed = Vec::new();
        COUNTS.freed(&change.seen, &counts(0..9), &mut freed);
        let of_used = (256 + 9) << 16..(256 + 11) << 16;
        assert!(freed.len() == 1 && freed[0] == of_used, "{freed:?}");
        let mut kept = counts(0..256);
        (9..11).for_each(|entry| set_refcount(&mut kept, entry, ORDER, 0));
        assert!(change.most == counts(0..256) && change.last == kept);
        reserve.committed();
        assert!(seen(&reserve, kept) == counts(0..9));
        assert!(reserve.give_back() == [(NUMBER * SECTOR, counts(0..9))]);
        assert!(seen(&reserve, counts(0..9)) == counts(0..9));
    }

    #[test]
    fn a_failed_commit_changes_nothing_that_imago_sees() {
        let mut reserve = reserve();
        let (old, new) = (counts(0..10), counts(0..11));
        let failed = reserve.change(NUMBER, &COUNTS, &old, &new);
        reserve.begin();
        for in_file in [old, failed.most] {
            let again = reserve.change(NUMBER, &COUNTS, &in_file, &new);
            assert!(again.most == failed.most && again.last == again.most && again.seen == old);
            reserve.begin();
        }
    }

    #[test]
    fn the_reserve_is_bounded() {
        let end = |is_allowed, cluster_bits| {
            let counts_of = Counts { cluster_bits, first: 256, order: ORDER };
            let mut reserve = Reserve { is_allowed, ..Reserve::default() };
            let change = reserve.change(NUMBER, &counts_of, &counts(0..10), &counts(0..11));
            change.reserved_end >> cluster_bits
        };
        assert_eq!(end(false, 16), 0);
        assert_eq!(end(true, 16), 512);
        assert_eq!(end(true, 21), 256 + 10 + 64 * MIB / (2 * MIB));
        let mut full = reserve();
        full.seen = (1000..1000 + SECTORS_MAX as u64).map(|at| (at, counts(0..1))).collect();
        let change = full.change(NUMBER, &COUNTS, &counts(0..10), &counts(0..11));
        assert!(change.most == counts(0..11) && change.reserved_end == 0);
    }

    #[test]
    fn the_larger_count_is_taken_at_each_width() {
        for order in 0..=6 {
            let mut sectors = [[0; SECTOR as usize]; 3];
            for (entry, (old, new)) in [(0, 1), (1, 0), (1, 1), (0, 0)].into_iter().enumerate() {
                for (sector, count) in sectors.iter_mut().zip([old, new, old.max(new)]) {
                    set_refcount(sector, entry as u64, order, count);
                }
            }
            let [old, new, both] = sectors;
            assert!(larger(&old, &new, order) == both, "{order}");
        }
    }
}
