// SPDX-License-Identifier: Apache-2.0
//! The clusters of the tables of an image, by its header.

use crate::entry::PLACE;
use crate::fields::{entries, u32_at, u64_at};
use std::collections::{BTreeMap, HashMap, HashSet};
use std::io;
use std::ops::Range;

/// Largest L1 or refcount table in bytes.
const TABLE_MAX: u64 = 32 << 20;
/// Bytes of an entry of an L1, an L2 or a refcount table.
pub(crate) const ENTRY_BYTES: u64 = 8;
/// Bytes of the fixed header.
pub(crate) const HEADER_BYTES: usize = 104;

/// Reads bytes at a position; zeroes behind the end.
pub(crate) type Read<'a> = &'a dyn Fn(usize, u64) -> io::Result<Vec<u8>>;

/// The clusters of the tables.
#[derive(Debug, Default)]
pub(crate) struct Places {
    pub(crate) cluster_bits: u32,
    pub(crate) refcount_order: u32,
    pub(crate) refcount_table: Range<u64>,
    pub(crate) l1_table: Range<u64>,
    /// The cluster of the L2 table of each entry of the L1 table; 0: it has none.
    pub(crate) l1: Vec<u64>,
    /// The index of each block in the refcount table.
    pub(crate) refcount_blocks: HashMap<u64, u64>,
    pub(crate) l2_tables: HashSet<u64>,
    /// A cluster that two entries name.
    pub(crate) twice: Option<u64>,
}

impl Places {
    /// The tables that the header names.
    ///
    /// # Errors
    /// The error of the system call, or a table of an impossible size.
    pub(crate) fn read(cluster_bytes: u64, read: Read<'_>) -> io::Result<Self> {
        let header = read(HEADER_BYTES, 0)?;
        let bits = cluster_bytes.trailing_zeros();
        let table = |at: u64, bytes: u64| -> io::Result<Vec<u64>> {
            let found = read(bytes as usize, at)?;
            Ok(entries(&found).map(|entry| (entry & PLACE) >> bits).collect())
        };
        let (l1, l1_entries) = (u64_at(&header, 40), u64::from(u32_at(&header, 36)));
        let (refcounts, refcount_bytes) =
            (u64_at(&header, 48), u64::from(u32_at(&header, 56)) << bits);
        let refcount_order = u32_at(&header, 96);
        let is_sane = |at: u64, bytes: u64| at < 1 << 56 && bytes <= TABLE_MAX;
        if !is_sane(l1, l1_entries * 8) || !is_sane(refcounts, refcount_bytes) || refcount_order > 6
        {
            return Err(io::Error::other("the header has been damaged"));
        }
        let mut places = Places {
            cluster_bits: bits,
            refcount_order,
            refcount_table: refcounts >> bits..(refcounts + refcount_bytes) >> bits,
            l1_table: l1 >> bits..(l1 + l1_entries * 8).div_ceil(1 << bits),
            l1: table(l1, l1_entries * 8)?,
            ..Places::default()
        };
        for (cluster, index) in table(refcounts, refcount_bytes)?.into_iter().zip(0..) {
            if cluster != 0 && places.refcount_blocks.insert(cluster, index).is_some() {
                places.twice = Some(cluster);
            }
        }
        for cluster in places.l1.iter().copied().filter(|cluster| *cluster != 0) {
            if !places.l2_tables.insert(cluster) {
                places.twice = Some(cluster);
            }
        }
        Ok(places)
    }

    /// A cluster that has two tables, or the header and a table.
    pub(crate) fn overlap(&self) -> Option<u64> {
        let is_in_range = |cluster: &u64| {
            *cluster == 0
                || self.refcount_table.contains(cluster)
                || self.l1_table.contains(cluster)
        };
        let (first, second) = (&self.refcount_table, &self.l1_table);
        let ranges = first.start.max(second.start)..first.end.min(second.end);
        let header = [first, second].into_iter().any(|range| range.contains(&0)).then_some(0);
        let blocks = || self.refcount_blocks.keys().copied();
        self.twice
            .or(header)
            .or((!ranges.is_empty()).then_some(ranges.start))
            .or_else(|| blocks().find(|block| self.l2_tables.contains(block)))
            .or_else(|| blocks().chain(self.l2_tables.iter().copied()).find(is_in_range))
    }

    /// Returns whether the cluster has the header or a table.
    pub(crate) fn has(&self, cluster: u64) -> bool {
        cluster == 0
            || self.refcount_table.contains(&cluster)
            || self.l1_table.contains(&cluster)
            || self.l2_tables.contains(&cluster)
            || self.refcount_blocks.contains_key(&cluster)
    }

    /// All clusters of the header and of the tables.
    pub(crate) fn all(&self) -> impl Iterator<Item = u64> + '_ {
        let ranges = self.refcount_table.clone().chain(self.l1_table.clone());
        let tables = self.refcount_blocks.keys().chain(&self.l2_tables).copied();
        std::iter::once(0).chain(ranges).chain(tables)
    }

    /// Place of the L2 table with the entry of a cluster of the disk, and the number of the entry there; `None`: it
    /// has no table.
    pub(crate) fn l2_entry(&self, cluster: u64) -> Option<(u64, u64)> {
        let entries = (1 << self.cluster_bits) / ENTRY_BYTES;
        let table = *self.l1.get((cluster / entries) as usize)?;
        (table != 0).then_some((table << self.cluster_bits, cluster % entries))
    }

    /// Reference counts in a block.
    pub(crate) fn counts(&self, bytes: u64) -> u64 {
        (bytes * 8) >> self.refcount_order
    }

    /// A cluster of a table whose reference count is 0. Reads each block once that has the count of one, from
    /// its first count of a table to its last.
    ///
    /// # Errors
    /// The error of the system call.
    pub(crate) fn uncounted(&self, read: Read<'_>) -> io::Result<Option<u64>> {
        const SECTOR: u64 = 512;
        let in_block = self.counts(1 << self.cluster_bits);
        let mut by_block: BTreeMap<u64, Vec<u64>> = BTreeMap::new();
        for cluster in self.all() {
            by_block.entry(cluster / in_block).or_default().push(cluster);
        }
        let blocks: HashMap<u64, u64> =
            self.refcount_blocks.iter().map(|(cluster, index)| (*index, *cluster)).collect();
        for (index, mut clusters) in by_block {
            clusters.sort_unstable();
            let (first, last) = (clusters[0], clusters[clusters.len() - 1]);
            let Some(block) = blocks.get(&index) else { return Ok(Some(first)) };
            let sector = |cluster: u64| (cluster % in_block) / self.counts(SECTOR);
            let start = sector(first) * SECTOR;
            let bytes = (sector(last) + 1) * SECTOR - start;
            let counts = read(bytes as usize, (block << self.cluster_bits) + start)?;
            let skipped = self.counts(start);
            let is_free = |cluster: &u64| {
                let entry = cluster % in_block - skipped;
                crate::check::refcount_of(&counts, entry, self.refcount_order) == 0
            };
            if let Some(cluster) = clusters.into_iter().find(is_free) {
                return Ok(Some(cluster));
            }
        }
        Ok(None)
    }
}
