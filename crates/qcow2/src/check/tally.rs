// SPDX-License-Identifier: Apache-2.0
//! The references that the tables of an image make, counted for each cluster of its file.

use std::collections::BTreeMap;

/// Counters of a page.
const PAGE: u64 = 1024;

/// References by cluster. Memory is proportional to the referenced clusters.
pub(super) struct Tally {
    cluster_bits: u32,
    file_bytes: u64,
    pages: BTreeMap<u64, Box<[u32; PAGE as usize]>>,
}

/// A reference to a place behind the end of the file.
pub(super) struct BehindEnd;

impl Tally {
    pub(super) fn new(cluster_bits: u32, file_bytes: u64) -> Self {
        Tally { cluster_bits, file_bytes, pages: BTreeMap::new() }
    }

    /// Clusters of the file; the last may be a part.
    pub(super) fn clusters(&self) -> u64 {
        self.file_bytes.div_ceil(1 << self.cluster_bits)
    }

    /// Clusters whose counts are compared: those of the file, and one behind its end with references.
    pub(super) fn compared(&self) -> u64 {
        let clusters = self.clusters();
        clusters + u64::from(self.of(clusters) > 0)
    }

    /// Counts `times` references to each cluster of a range. The last cluster may end behind the
    /// end of the file.
    pub(super) fn add(&mut self, at: u64, bytes: u64, times: u32) -> Result<(), BehindEnd> {
        let end = at.checked_add(bytes).ok_or(BehindEnd)?;
        if bytes == 0 {
            return Ok(());
        }
        if end.saturating_sub(self.file_bytes) >= 1 << self.cluster_bits {
            return Err(BehindEnd);
        }
        for cluster in at >> self.cluster_bits..=(end - 1) >> self.cluster_bits {
            let page = self.pages.entry(cluster / PAGE);
            let counter = &mut page.or_insert_with(|| Box::new([0; PAGE as usize]))
                [(cluster % PAGE) as usize];
            *counter = counter.saturating_add(times);
        }
        Ok(())
    }

    pub(super) fn of(&self, cluster: u64) -> u32 {
        self.pages.get(&(cluster / PAGE)).map_or(0, |page| page[(cluster % PAGE) as usize])
    }

    /// The referenced clusters of a range, with their counters.
    pub(super) fn within(
        &self,
        range: std::ops::Range<u64>,
    ) -> impl Iterator<Item = (u64, u32)> + '_ {
        let pages = self.pages.range(range.start / PAGE..range.end.div_ceil(PAGE));
        let all = pages.flat_map(|(page, counters)| (page * PAGE..).zip(counters.iter().copied()));
        all.filter(move |(cluster, count)| *count > 0 && range.contains(cluster))
    }

    /// End of the last referenced cluster in bytes.
    pub(super) fn end_bytes(&self) -> u64 {
        let last = self.within(0..self.clusters()).last();
        last.map_or(0, |(cluster, _)| (cluster + 1) << self.cluster_bits)
    }
}
