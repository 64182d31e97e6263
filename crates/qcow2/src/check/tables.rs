// SPDX-License-Identifier: Apache-2.0
//! The L1 and L2 tables: their references, and the flag of exclusive clusters.

use super::refcounts::Refcounts;
use super::tally::Tally;
use super::{Report, entry_bits, read_table};
use crate::entry::{COMPRESSED, EXCLUSIVE, Entry, PLACE};
use crate::fields::Fields;
use std::collections::{BTreeMap, HashSet};
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

/// Flag of a standard L2 entry: the cluster reads as zeroes.
const ZERO: u64 = 1;
const L1_RESERVED: u64 = 0x7f00_0000_0000_01ff;
const L2_RESERVED: u64 = 0x3f00_0000_0000_01fe;
/// Lower half of the bitmap of an extended entry: subclusters with data.
const SUBCLUSTERS: u64 = 0xffff_ffff;

/// Counts references into a tally, and errors into a report.
pub(super) struct Counter<'a> {
    pub(super) file: &'a File,
    pub(super) fields: &'a Fields,
    tally: &'a mut Tally,
    pub(super) report: &'a mut Report,
    /// Places of the L1 tables so far.
    l1_tables: HashSet<u64>,
    /// L2 tables, with their references, and those of the active L1 table.
    l2_tables: BTreeMap<u64, (u32, u32)>,
}

impl<'a> Counter<'a> {
    pub(super) fn new(
        file: &'a File,
        fields: &'a Fields,
        tally: &'a mut Tally,
        report: &'a mut Report,
    ) -> Self {
        let (l1_tables, l2_tables) = Default::default();
        Counter { file, fields, tally, report, l1_tables, l2_tables }
    }

    /// Counts `times` references to a range of the file.
    pub(super) fn count(&mut self, at: u64, bytes: u64, times: u32, what: &str) {
        if self.tally.add(at, bytes, times).is_err() {
            self.report.error(format!("{what} at {at:#x} lies behind the end of the file"));
        }
    }

    /// References to a cluster so far.
    pub(super) fn references(&self, cluster: u64) -> u32 {
        self.tally.of(cluster)
    }

    pub(super) fn file_clusters(&self) -> u64 {
        self.tally.clusters()
    }

    /// Counts the references of the active L1 table.
    pub(super) fn active_table(&mut self) -> io::Result<()> {
        self.l1_table(self.fields.l1_at, self.fields.l1_entries, true)
    }

    /// Counts the references of an L1 table.
    pub(super) fn l1_table(&mut self, at: u64, entries: u32, is_active: bool) -> io::Result<()> {
        if entries > 0 && !self.l1_tables.insert(at) {
            self.report.error(format!("the L1 table at {at:#x} is used twice"));
            return Ok(());
        }
        self.count(at, u64::from(entries) * 8, 1, "the L1 table");
        for (index, entry) in read_table(self.file, at, entries.into())?.into_iter().enumerate() {
            if entry & L1_RESERVED != 0 {
                self.report.error(format!("L1 entry {index} has reserved bits set ({entry:#x})"));
            }
            let l2_at = entry & PLACE;
            if l2_at == 0 {
                continue;
            }
            self.count(l2_at, self.fields.cluster_bytes(), 1, "an L2 table");
            if !l2_at.is_multiple_of(self.fields.cluster_bytes()) {
                let text = format!("L1 entry {index} names no start of a cluster ({l2_at:#x})");
                self.report.error(text);
                continue;
            }
            let (all, active) = self.l2_tables.entry(l2_at).or_default();
            *all = all.saturating_add(1);
            *active += u32::from(is_active);
        }
        Ok(())
    }

    /// Counts the references of all L2 tables of the L1 tables so far; each is read once.
    pub(super) fn l2_tables(&mut self) -> io::Result<()> {
        for (at, (times, active)) in std::mem::take(&mut self.l2_tables) {
            if at >> self.fields.cluster_bits >= self.tally.clusters() {
                continue; // counted as an error
            }
            for (entry, bitmap) in read_l2(self.file, self.fields, at)? {
                self.l2_entry(at, entry, bitmap, times);
                if Entry::of(entry, self.fields.cluster_bits) != Entry::None {
                    self.report.allocated_clusters += u64::from(active);
                }
            }
        }
        Ok(())
    }

    fn l2_entry(&mut self, table: u64, entry: u64, bitmap: u64, times: u32) {
        let is_extended = entry_bits(self.fields) == 4;
        let mut error = |what: &str| {
            self.report.error(format!("entry {entry:#x} of the L2 table at {table:#x} {what}"));
        };
        let reserved = if is_extended { L2_RESERVED | ZERO } else { L2_RESERVED };
        if entry & COMPRESSED == 0 && entry & reserved != 0 {
            error("has reserved bits set");
        }
        match Entry::of(entry, self.fields.cluster_bits) {
            Entry::Compressed(at, bytes) => {
                if entry & EXCLUSIVE != 0 {
                    error("is compressed and marked exclusive");
                }
                if bitmap != 0 {
                    error("is compressed and has subclusters");
                } else {
                    self.count(at, bytes, times, "compressed data");
                }
            }
            Entry::Cluster(at) => {
                if (bitmap >> 32) & bitmap != 0 {
                    return error("has subclusters with data that are zero");
                }
                if !at.is_multiple_of(self.fields.cluster_bytes()) {
                    error("names no start of a cluster");
                }
                self.count(at, self.fields.cluster_bytes(), times, "a cluster");
            }
            Entry::None if bitmap & SUBCLUSTERS != 0 => error("has subclusters without a place"),
            Entry::None => {}
        }
    }
}

/// The entries of an L2 table, with the bitmaps of their subclusters.
fn read_l2(file: &File, fields: &Fields, at: u64) -> io::Result<Vec<(u64, u64)>> {
    let words = read_table(file, at, fields.cluster_bytes() / 8)?;
    Ok(match entry_bits(fields) {
        3 => words.into_iter().map(|entry| (entry, 0)).collect(),
        _ => words.chunks_exact(2).map(|pair| (pair[0], pair[1])).collect(),
    })
}

/// An entry whose flag differs from its refcount: its place, its value, and that of its table.
struct Differing {
    at: u64,
    entry: u64,
    cluster_at: u64,
    refcount: u64,
}

/// Calls `found` for each entry of the active tables whose flag differs from its refcount.
fn differing(
    file: &File,
    fields: &Fields,
    refcounts: &mut Refcounts<'_>,
    mut found: impl FnMut(Differing) -> io::Result<()>,
) -> io::Result<()> {
    let mut look =
        |refcounts: &mut Refcounts<'_>, at: u64, entry: u64, cluster_at: u64| match refcounts
            .of(cluster_at >> fields.cluster_bits)?
        {
            Some(refcount) if (refcount == 1) != (entry & EXCLUSIVE != 0) => {
                found(Differing { at, entry, cluster_at, refcount })
            }
            _ => Ok(()),
        };
    let file_bytes = file.metadata()?.len();
    let entry_bytes = 1 << entry_bits(fields);
    let mut seen = HashSet::new();
    for (index, l1) in (0..).zip(read_table(file, fields.l1_at, fields.l1_entries.into())?) {
        let table = l1 & PLACE;
        if table == 0 {
            continue;
        }
        look(refcounts, fields.l1_at + index * 8, l1, table)?;
        let is_readable = table.is_multiple_of(fields.cluster_bytes()) && table < file_bytes;
        // A table that is named twice is an error already.
        if !is_readable || !seen.insert(table) {
            continue;
        }
        for (index, (entry, _)) in (0..).zip(read_l2(file, fields, table)?) {
            if let Entry::Cluster(at) = Entry::of(entry, fields.cluster_bits) {
                look(refcounts, table + index * entry_bytes, entry, at)?;
            }
        }
    }
    Ok(())
}

/// Compares the flag of exclusive clusters with the refcounts.
pub(super) fn check_exclusive(
    file: &File,
    fields: &Fields,
    refcounts: &mut Refcounts<'_>,
    report: &mut Report,
) -> io::Result<()> {
    differing(file, fields, refcounts, |Differing { at, entry, cluster_at, refcount }| {
        let is = if entry & EXCLUSIVE == 0 { "not marked" } else { "marked" };
        report.error(format!(
            "the entry at {at:#x} for {cluster_at:#x} is {is} exclusive, and the refcount is \
             {refcount}"
        ));
        Ok(())
    })
}

/// Sets the flag in entries of clusters that have one reference since a repair.
pub(super) fn mark_exclusive(
    file: &File,
    fields: &Fields,
    refcounts: &mut Refcounts<'_>,
) -> io::Result<()> {
    differing(file, fields, refcounts, |Differing { at, entry, .. }| match entry & EXCLUSIVE {
        0 => file.write_all_at(&(entry | EXCLUSIVE).to_be_bytes(), at),
        _ => Ok(()),
    })?;
    file.sync_data()
}
