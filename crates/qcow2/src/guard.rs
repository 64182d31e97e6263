// SPDX-License-Identifier: Apache-2.0
//! The guard of an image that is written: no write of a guest reaches a table, and no table gets the place of
//! other data, whatever the entries of a damaged or hostile image name.
//!
//! * The tables themselves lie apart, and each of their clusters is counted, or the image is refused at its
//!   opening ([`crate::chain`]).
//! * An L2 table is looked at when a question first needs it. Each cluster that it names is claimed: it is no
//!   table, and no other entry has claimed it. A table with another entry is read by copies, and no lane learns a
//!   place of it; its clusters do not change.
//! * A new cluster is claimed, too. So the reuse of a cluster that an entry names, and that is counted as free,
//!   is found before the cluster gets a byte. The image takes no change then ([`Guard::damage`]).
//! * A commit that would put a table on claimed data, or would free a table, fails before its first write.
//!
//! An entry of a table that was not looked at may name any cluster. It is found when the table is looked at:
//! the cluster has been claimed by then, or is a table. The opening does not read the L2 tables, which are many
//! in a large image.

use crate::entry::Entry;
use crate::places::Places;
use std::collections::HashMap;
use std::io;
use std::ops::Range;

/// Clusters whose bits are kept together.
const PAGE: u64 = 512;
/// Fields of the header that change while an image is in use: the size of the disk, the L1 table, and the refcount
/// table.
const CHANGING: [Range<usize>; 2] = [24..32, 36..60];

/// A set of clusters.
#[derive(Debug, Default)]
struct Clusters(HashMap<u64, [u64; (PAGE / 64) as usize]>);

impl Clusters {
    fn place(cluster: u64) -> (u64, usize, u64) {
        let bit = cluster % PAGE;
        (cluster / PAGE, (bit / 64) as usize, 1 << (bit % 64))
    }

    fn has(&self, cluster: u64) -> bool {
        let (page, word, bit) = Self::place(cluster);
        self.0.get(&page).is_some_and(|words| words[word] & bit != 0)
    }

    fn add(&mut self, cluster: u64) {
        let (page, word, bit) = Self::place(cluster);
        self.0.entry(page).or_default()[word] |= bit;
    }

    fn remove(&mut self, cluster: u64) {
        let (page, word, bit) = Self::place(cluster);
        if let Some(words) = self.0.get_mut(&page) {
            words[word] &= !bit;
            if *words == [0; _] {
                self.0.remove(&page);
            }
        }
    }
}

/// The clusters of the file with compressed data at a place.
fn clusters_of(at: u64, bytes: u64, cluster_bits: u32) -> Range<u64> {
    at >> cluster_bits..(at + bytes).div_ceil(1 << cluster_bits)
}

/// The places of an image that is written.
#[derive(Debug, Default)]
pub(crate) struct Guard {
    /// The tables since the last commit.
    places: Places,
    /// The fixed part of the header at the opening.
    header: Vec<u8>,
    /// Clusters of data that entries name.
    data: Clusters,
    /// Clusters with compressed data.
    compressed: Clusters,
    /// The L2 tables that were looked at, by their entry in the L1 table, and if they are sound.
    looked: HashMap<u64, bool>,
    /// Clusters that a commit has freed in part.
    half_freed: Vec<Range<u64>>,
    /// The reason why nothing may be written any more.
    damage: Option<String>,
}

impl Guard {
    /// The guard of an image with these tables, and with this header.
    pub(crate) fn new(places: Places, header: Vec<u8>) -> Guard {
        Guard { places, header, ..Guard::default() }
    }

    /// The tables since the last commit.
    pub(crate) fn places(&self) -> &Places {
        &self.places
    }

    /// Remembers why nothing may be written any more, and returns that as an error.
    pub(crate) fn damage(&mut self, what: impl Into<String>) -> io::Error {
        let what = what.into();
        let error = io::Error::other(what.clone());
        self.damage.get_or_insert(what);
        error
    }

    /// Fails if nothing may be written any more.
    pub(crate) fn check(&self) -> io::Result<()> {
        self.damage.as_ref().map_or(Ok(()), |what| Err(io::Error::other(what.clone())))
    }

    /// Checks a write of a library into the header, whose start would be `new`.
    pub(crate) fn check_header(&mut self, new: &[u8]) -> io::Result<()> {
        let mut known = self.header.clone();
        for field in CHANGING {
            known[field.clone()].copy_from_slice(&new[field]);
        }
        match known == new {
            true => Ok(()),
            false => Err(self.damage("a table would get the place of the header")),
        }
    }

    /// True if the L2 table of an L1 entry is sound; `None`: it was not looked at.
    pub(crate) fn looked(&self, l1_entry: u64) -> Option<bool> {
        self.looked.get(&l1_entry).copied()
    }

    /// Looks at the entries of an L2 table, in a file of so many clusters. Returns whether it is sound, and
    /// claims its clusters then.
    pub(crate) fn look(&mut self, l1_entry: u64, entries: &[u64], file_clusters: u64) -> bool {
        let bits = self.places.cluster_bits;
        let entries: Vec<_> = entries.iter().map(|entry| Entry::of(*entry, bits)).collect();
        // Compressed data first: many entries may share one of its clusters.
        let are_apart = entries.iter().all(|entry| match *entry {
            Entry::None => true,
            Entry::Cluster(at) => {
                let cluster = at >> bits;
                cluster << bits == at && cluster < file_clusters && !self.places.has(cluster)
            }
            Entry::Compressed(at, bytes) => {
                let mut clusters = clusters_of(at, bytes, bits);
                clusters.end <= file_clusters
                    && clusters.all(|cluster| !self.places.has(cluster) && !self.data.has(cluster))
            }
        });
        let mut shared = Clusters::default();
        for entry in &entries {
            if let Entry::Compressed(at, bytes) = *entry {
                clusters_of(at, bytes, bits).for_each(|cluster| shared.add(cluster));
            }
        }
        let mut claimed = Vec::new();
        let is_sound = are_apart
            && entries.iter().all(|entry| {
                let Entry::Cluster(at) = *entry else { return true };
                let cluster = at >> bits;
                let is_free = self.is_free(cluster) && !shared.has(cluster);
                if is_free {
                    self.data.add(cluster);
                    claimed.push(cluster);
                }
                is_free
            });
        match is_sound {
            true => shared.0.into_iter().for_each(|(page, words)| {
                let own = self.compressed.0.entry(page).or_default();
                own.iter_mut().zip(words).for_each(|(own, word)| *own |= word);
            }),
            false => claimed.into_iter().for_each(|cluster| self.data.remove(cluster)),
        }
        self.looked.insert(l1_entry, is_sound);
        is_sound
    }

    /// Returns whether a cluster is no table, and nobody has claimed it.
    pub(crate) fn is_free(&self, cluster: u64) -> bool {
        !self.places.has(cluster) && !self.data.has(cluster) && !self.compressed.has(cluster)
    }

    /// Claims a new cluster of data.
    pub(crate) fn claim(&mut self, cluster: u64) {
        self.data.add(cluster);
    }

    /// Gives a claimed cluster back, which no entry names.
    pub(crate) fn unclaim(&mut self, cluster: u64) {
        self.data.remove(cluster);
    }

    /// Checks a commit, before its first write: the tables after it, and the clusters that it frees.
    pub(crate) fn check_commit(&mut self, new: &Places, freed: &[Range<u64>]) -> io::Result<()> {
        self.check()?;
        if let Some(cluster) = new.overlap() {
            return Err(self.damage(format!("two tables would get the cluster {cluster}")));
        }
        let is_used = |cluster: &u64| {
            !self.places.has(*cluster) && (self.data.has(*cluster) || self.compressed.has(*cluster))
        };
        if let Some(cluster) = new.all().find(is_used) {
            let what = format!("a table would get the cluster {cluster}, which has data");
            return Err(self.damage(what));
        }
        let bits = self.places.cluster_bits;
        let mut all = freed.iter().flat_map(|range| range.start >> bits..range.end >> bits);
        match all.find(|cluster| new.has(*cluster)) {
            None => Ok(()),
            Some(cluster) => Err(self.damage(format!("the table in cluster {cluster} was freed"))),
        }
    }

    /// A commit that has checked these clusters has failed before its end: it may be repeated.
    pub(crate) fn half_free(&mut self, freed: Vec<Range<u64>>) {
        self.half_freed.extend(freed);
    }

    /// Takes a commit that has succeeded: its tables, and the clusters that are free.
    pub(crate) fn committed(&mut self, new: Places, freed: &[Range<u64>]) {
        let bits = self.places.cluster_bits;
        self.places = new;
        for range in std::mem::take(&mut self.half_freed).iter().chain(freed) {
            for cluster in range.start >> bits..range.end >> bits {
                self.data.remove(cluster);
                self.compressed.remove(cluster);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::entry::{COMPRESSED, EXCLUSIVE};
    use crate::places::HEADER_BYTES;

    const FILE: u64 = 1000;

    fn guard() -> Guard {
        let places = Places {
            cluster_bits: 16,
            refcount_table: 1..2,
            l1_table: 3..4,
            refcount_blocks: [(2, 0)].into(),
            l2_tables: [4, 5].into(),
            ..Places::default()
        };
        Guard::new(places, vec![0; HEADER_BYTES])
    }

    /// The place of one cluster.
    fn one(number: u64) -> Vec<Range<u64>> {
        std::iter::once(number << 16..(number + 1) << 16).collect()
    }

    fn cluster(number: u64) -> u64 {
        number << 16 | EXCLUSIVE
    }

    /// 1 KiB of compressed data.
    fn compressed(at: u64) -> u64 {
        COMPRESSED | 1 << 54 | at
    }

    #[test]
    fn an_entry_that_names_a_table_or_a_cluster_of_another_one_makes_its_table_unsound() {
        for wrong in [
            cluster(1),
            cluster(2),
            cluster(3),
            cluster(5),
            cluster(7),
            cluster(FILE),
            cluster(9) + 512,
            compressed(5 << 16),
            compressed((5 << 16) - 512),
            compressed(7 << 16),
        ] {
            let mut guard = guard();
            assert!(guard.look(0, &[0, cluster(7), cluster(8), compressed(10 << 16)], FILE));
            assert!(!guard.look(1, &[cluster(9), wrong], FILE), "{wrong:#x}");
            assert_eq!((guard.looked(0), guard.looked(1)), (Some(true), Some(false)));
            assert!(guard.is_free(9), "{wrong:#x}: an unsound table claims nothing");
        }
        assert!(!guard().look(0, &[cluster(7), cluster(7)], FILE));
        assert!(!guard().look(0, &[cluster(7), compressed(7 << 16)], FILE));
        assert!(!guard().look(0, &[compressed(7 << 16), cluster(7)], FILE));
    }

    #[test]
    fn compressed_data_shares_clusters_and_a_commit_gives_them_back() {
        let mut guard = guard();
        assert!(guard.look(0, &[compressed(7 << 16), compressed((7 << 16) + 1024)], FILE));
        assert!(guard.look(1, &[compressed((8 << 16) - 512)], FILE));
        assert!([7, 8].into_iter().all(|cluster| !guard.is_free(cluster)));
        let places = std::mem::take(&mut guard.places);
        guard.places = Places { cluster_bits: 16, ..Places::default() };
        guard.half_free(one(8));
        guard.committed(places, &one(7));
        assert!([7, 8].into_iter().all(|cluster| guard.is_free(cluster)));
    }

    #[test]
    fn a_commit_that_moves_a_table_onto_data_or_frees_one_is_refused() {
        let new = |l2_table: u64| Places {
            cluster_bits: 16,
            l2_tables: [4, 5, l2_table].into(),
            ..Places::default()
        };
        for (table, freed, is_good) in
            [(9, 10, true), (7, 10, false), (8, 10, false), (9, 4, false), (9, 9, false)]
        {
            let mut guard = guard();
            assert!(guard.look(0, &[cluster(7), compressed(8 << 16)], FILE));
            let checked = guard.check_commit(&new(table), &one(freed));
            assert_eq!(checked.is_ok(), is_good, "{table} {freed}");
            assert_eq!(guard.check().is_ok(), is_good, "it stays so");
        }
    }

    #[test]
    fn the_header_keeps_all_but_the_fields_that_change() {
        for (at, is_good) in [(0, false), (23, false), (24, true), (31, true), (32, false)] {
            let mut new = vec![0; HEADER_BYTES];
            new[at] = 1;
            let mut guard = guard();
            assert_eq!(guard.check_header(&new).is_ok(), is_good, "{at}");
            assert_eq!(guard.check().is_ok(), is_good, "{at}");
        }
    }
}
