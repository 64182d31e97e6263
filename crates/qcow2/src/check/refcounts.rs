// SPDX-License-Identifier: Apache-2.0
//! The reference counts of an image: refcount table and blocks.

use super::tables::Counter;
use super::tally::Tally;
use super::{Report, read_table};
use crate::fields::{self, Fields};
use crate::storage::punch;
use std::collections::{HashMap, HashSet};
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

/// Maximum bytes of refcount blocks in memory.
const CACHE_MAX: u64 = 64 << 20;

/// The reference counts.
pub(super) struct Refcounts<'a> {
    file: &'a File,
    cluster_bits: u32,
    order: u32,
    file_clusters: u64,
    /// The table, with its place and length in bytes.
    table: Vec<u64>,
    place: (u64, u64),
    cache: HashMap<u64, Vec<u8>>,
}

impl<'a> Refcounts<'a> {
    pub(super) fn open(file: &'a File, fields: &Fields) -> io::Result<Self> {
        let bytes = u64::from(fields.refcount_clusters) << fields.cluster_bits;
        Ok(Refcounts {
            file,
            cluster_bits: fields.cluster_bits,
            order: fields.refcount_order,
            file_clusters: file.metadata()?.len().div_ceil(fields.cluster_bytes()),
            table: read_table(file, fields.refcounts_at, bytes / 8)?,
            place: (fields.refcounts_at, bytes),
            cache: HashMap::new(),
        })
    }

    fn cluster_bytes(&self) -> u64 {
        1 << self.cluster_bits
    }

    /// Counters of a block.
    fn block_entries(&self) -> u64 {
        (self.cluster_bytes() * 8) >> self.order
    }

    /// Counts the references to the table and its blocks, which come last.
    pub(super) fn count_own(&self, counter: &mut Counter<'_>) {
        counter.count(self.place.0, self.place.1, 1, "the refcount table");
        for (index, &block) in self.table.iter().enumerate().filter(|(_, block)| **block != 0) {
            let cluster = block >> self.cluster_bits;
            if !block.is_multiple_of(self.cluster_bytes()) {
                let text = format!(
                    "entry {index} of the refcount table names no start of a \
                                    cluster ({block:#x})"
                );
                counter.report.error(text);
            } else if cluster >= counter.file_clusters() {
                let text = format!(
                    "refcount block {index} at {block:#x} lies behind the end of \
                                    the file"
                );
                counter.report.error(text);
            } else {
                counter.count(block, self.cluster_bytes(), 1, "a refcount block");
                if counter.references(cluster) != 1 {
                    let text = format!(
                        "refcount block {index} at {block:#x} is also used \
                                        otherwise"
                    );
                    counter.report.error(text);
                }
            }
        }
    }

    /// Place of block `index`; `None`: it cannot be read.
    fn block_at(&self, index: u64) -> Option<u64> {
        let at = self.table.get(index as usize).copied().unwrap_or(0);
        let is_good =
            at.is_multiple_of(self.cluster_bytes()) && at >> self.cluster_bits < self.file_clusters;
        is_good.then_some(at)
    }

    /// The count of a cluster; `None`: its block cannot be read.
    pub(super) fn of(&mut self, cluster: u64) -> io::Result<Option<u64>> {
        let (index, entry) = (cluster / self.block_entries(), cluster % self.block_entries());
        match self.block_at(index) {
            None => Ok(None),
            Some(0) => Ok(Some(0)),
            Some(at) => {
                if !self.cache.contains_key(&at) {
                    if self.cache.len() as u64 >= (CACHE_MAX >> self.cluster_bits).max(1) {
                        self.cache.clear();
                    }
                    self.cache.insert(at, self.read_block(at)?);
                }
                Ok(Some(get(&self.cache[&at], entry, self.order)))
            }
        }
    }

    fn read_block(&self, at: u64) -> io::Result<Vec<u8>> {
        fields::read_padded(self.file, self.cluster_bytes() as usize, at)
    }

    /// Compares all counts with `tally`. With `repair`, counts that are too high are lowered in the
    /// file, and the space of clusters that are free then is given back to the host.
    pub(super) fn compare(
        &mut self,
        tally: &Tally,
        repair: bool,
        report: &mut Report,
    ) -> io::Result<()> {
        let entries = self.block_entries();
        let (mut seen, mut freed) = (HashSet::new(), Vec::new());
        let blocks = self.table.len() as u64;
        for index in 0..blocks.min(tally.compared().div_ceil(entries)) {
            let range = index * entries..((index + 1) * entries).min(tally.compared());
            match self.block_at(index) {
                Some(0) => missing(tally, range, report),
                Some(at) if seen.insert(at) => {
                    let mut block = self.read_block(at)?;
                    let freed = &mut freed;
                    if compare_block(&mut block, self.order, range, tally, report, freed) && repair
                    {
                        self.file.write_all_at(&block, at)?;
                    }
                }
                // An error already: no block, or a block that is named twice.
                _ => {}
            }
        }
        missing(tally, blocks * entries..tally.compared(), report);
        if repair {
            self.cache.clear();
            self.file.sync_data()?;
            for cluster in freed {
                // A file system without holes keeps the space until the image uses it again.
                let _ = punch(self.file, cluster << self.cluster_bits, self.cluster_bytes());
            }
        }
        Ok(())
    }
}

/// Reports the clusters of a range without counts.
fn missing(tally: &Tally, range: std::ops::Range<u64>, report: &mut Report) {
    if range.is_empty() {
        return;
    }
    for (cluster, references) in tally.within(range) {
        report.error(format!("cluster {cluster} has the refcount 0 and {references} references"));
    }
}

/// Compares a block, and lowers the counts in it that are too high. Returns whether there are some, and
/// adds the clusters that are free then to `freed`.
fn compare_block(
    block: &mut [u8],
    order: u32,
    range: std::ops::Range<u64>,
    tally: &Tally,
    report: &mut Report,
    freed: &mut Vec<u64>,
) -> bool {
    let mut has_leaks = false;
    for (entry, cluster) in (0..).zip(range) {
        let (count, references) = (get(block, entry, order), u64::from(tally.of(cluster)));
        let text =
            || format!("cluster {cluster} has the refcount {count} and {references} references");
        if count < references {
            report.error(text());
        } else if count > references {
            report.leak(text());
            set(block, entry, order, references);
            has_leaks = true;
            if references == 0 {
                freed.push(cluster);
            }
        }
    }
    has_leaks
}

/// Counter `entry` of a block; counters have 2^`order` bits.
pub(crate) fn get(block: &[u8], entry: u64, order: u32) -> u64 {
    let entry = entry as usize;
    match order {
        0..3 => {
            let bit = entry << order;
            let mask = (1u64 << (1 << order)) - 1;
            u64::from(block[bit / 8]) >> (bit % 8) & mask
        }
        _ => {
            let bytes = 1 << (order - 3);
            let found = &block[entry * bytes..(entry + 1) * bytes];
            found.iter().fold(0, |number, byte| number << 8 | u64::from(*byte))
        }
    }
}

/// Sets such a counter.
pub(crate) fn set(block: &mut [u8], entry: u64, order: u32, count: u64) {
    let entry = entry as usize;
    match order {
        0..3 => {
            let bit = entry << order;
            let mask = ((1u32 << (1 << order)) - 1) as u8;
            let byte = &mut block[bit / 8];
            *byte = *byte & !(mask << (bit % 8)) | (count as u8) << (bit % 8);
        }
        _ => {
            let bytes = 1 << (order - 3);
            let number = count.to_be_bytes();
            block[entry * bytes..(entry + 1) * bytes].copy_from_slice(&number[8 - bytes..]);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counters_of_every_width_are_set_alone() {
        for order in 0..=6 {
            let mut block = vec![0; 64];
            for entry in 0..8 {
                set(&mut block, entry, order, 1);
            }
            set(&mut block, 3, order, 0);
            for entry in 0..8 {
                assert_eq!(get(&block, entry, order), u64::from(entry != 3), "{order} {entry}");
            }
        }
    }
}
