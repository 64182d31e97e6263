// SPDX-License-Identifier: Apache-2.0
//! The guard of an image that is written: no write of a guest reaches a table, and no table gets the place of
//! other data, whatever the entries of a damaged or hostile image name.
//!
//! * The tables themselves lie apart, and each of their clusters is counted, or the image is refused at its
//!   opening ([`crate::chain`]).
//! * All L2 tables are looked at before the first change ([`Guard::look`]). Each cluster that they name is claimed:
//!   it is no table, and no other entry has claimed it. Until then reads are copies, and no lane learns a place. An
//!   image with another entry is read by copies for ever, and takes no change.
//! * A new cluster is claimed, too. So the reuse of a cluster that an entry names, and that is counted as free,
//!   is found before the cluster gets a byte. The image takes no change then ([`Guard::damage`]).
//! * A commit that would put a table on claimed data, or would free a table, fails before its first write.
//!
//! The opening does not wait for the L2 tables, which are many in a large image: the thread of the disk reads them
//! in parts, between questions ([`crate::disk_thread`]).

use crate::clusters::Clusters;
use crate::entry::Entry;
use crate::places::Places;
use std::collections::{BTreeSet, VecDeque};
use std::io;
use std::ops::Range;

/// Bytes of L2 tables that are looked at between two batches of questions.
const LOOK_BYTES: u64 = 4 << 20;
/// Pages of clusters that a scattered image may name: they take some 150 MiB of memory.
const SCATTERED_PAGES_MAX: usize = 1 << 20;
/// Clusters of a page, of 512, below which an image is scattered: those that are named, and those that the file system
/// has. A file without holes has more, and so has an image whose tables were made before its data.
const SCATTERED_CLUSTERS: usize = 8;
/// First bytes of [`Guard::known`]: another form gets another number.
const KNOWN: &[u8] = b"vhost-blk clusters 1\n";
/// Fields of the header that change while an image is in use: the size of the disk, the L1 table, and the refcount
/// table.
const CHANGING: [Range<usize>; 2] = [24..32, 36..60];

/// The look at the L2 tables, before the first change of the image.
#[derive(Debug, Default)]
struct Look {
    /// Clusters of the L2 tables that are left, in the order of the file.
    left: VecDeque<u64>,
    /// Clusters of all tables.
    tables: Clusters,
    file: FileClusters,
}

/// Clusters of the file at its opening.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct FileClusters {
    pub(crate) all: u64,
    /// Those for which the file system has space.
    pub(crate) allocated: u64,
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
    /// Until all L2 tables were looked at.
    look: Option<Look>,
    /// An L2 table has a wrong entry.
    is_unsound: bool,
    /// Clusters that the looked-at entries name.
    named: usize,
    /// Clusters that a commit has freed in part.
    half_freed: BTreeSet<(u64, u64)>,
    /// The reason why nothing may be written any more.
    damage: Option<String>,
}

impl Guard {
    /// The guard of an image with these tables, and with this header, in a file of so many clusters.
    pub(crate) fn new(places: Places, header: Vec<u8>, file: FileClusters) -> Guard {
        let mut left: Vec<_> = places.l2_tables.iter().copied().collect();
        left.sort_unstable();
        let mut tables = Clusters::default();
        places.all().for_each(|cluster| tables.add(cluster));
        let look = Look { left: left.into(), tables, file };
        let look = (!look.left.is_empty()).then_some(look);
        Guard { places, header, look, ..Guard::default() }
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

    /// Returns whether L2 tables are left to look at. No change may be made before.
    pub(crate) fn is_looking(&self) -> bool {
        self.look.is_some()
    }

    /// Returns whether all L2 tables were looked at, and are sound.
    pub(crate) fn is_sound(&self) -> bool {
        self.look.is_none() && !self.is_unsound
    }

    /// The clusters of the L2 tables that [`Guard::look`] takes next.
    pub(crate) fn next_tables(&self) -> Vec<u64> {
        let tables = (LOOK_BYTES >> self.places.cluster_bits).max(1) as usize;
        self.look.iter().flat_map(|look| look.left.iter().take(tables).copied()).collect()
    }

    /// Looks at the entries of the next L2 table, and claims the clusters that they name. The first wrong entry
    /// ends the look: the image takes no change.
    pub(crate) fn look(&mut self, entries: impl Iterator<Item = u64>) {
        let Some(mut look) = self.look.take() else { return };
        let table = look.left.pop_front().unwrap_or_default();
        let flaw = match self.claim_all(&look, entries) {
            Err(cluster) => format!(
                "the L2 table in cluster {table} names the cluster {cluster}, which is a table, used by another \
                 entry, or outside of the file"
            ),
            Ok(()) if self.is_scattered(look.file.allocated) => format!(
                "the L2 tables up to cluster {table} would need too much memory: they name few clusters in each \
                 part of a large file; copy it with `vhost-blk convert`"
            ),
            Ok(()) => {
                self.look = (!look.left.is_empty()).then_some(look);
                return;
            }
        };
        self.is_unsound = true;
        self.damage(flaw);
    }

    /// Returns whether the named clusters need much more memory than a bit for each cluster of the file. A hostile
    /// image could name one in each page.
    fn is_scattered(&self, allocated: u64) -> bool {
        let pages = self.data.page_count() + self.compressed.page_count();
        let least = pages * SCATTERED_CLUSTERS;
        pages > SCATTERED_PAGES_MAX && self.named < least && allocated < least as u64
    }

    /// Claims the clusters of an L2 table.
    ///
    /// # Errors
    /// A cluster that is not free. Others may have been claimed.
    fn claim_all(&mut self, look: &Look, entries: impl Iterator<Item = u64>) -> Result<(), u64> {
        let bits = self.places.cluster_bits;
        let (mut data, mut compressed) = (Vec::new(), Vec::new());
        for entry in entries {
            match Entry::of(entry, bits) {
                Entry::None => {}
                Entry::Cluster(at) if at.is_multiple_of(1 << bits) => data.push(at >> bits),
                Entry::Cluster(at) => return Err(at >> bits),
                Entry::Compressed(at, bytes) => compressed.extend(clusters_of(at, bytes, bits)),
            }
        }
        data.sort_unstable();
        // Many entries may share a cluster of compressed data.
        compressed.sort_unstable();
        compressed.dedup();
        let last = data.last().max(compressed.last()).copied();
        if let Some(last) = last.filter(|last| *last >= look.file.all) {
            return Err(last);
        }
        if let Some(twice) = data.windows(2).find(|pair| pair[0] == pair[1]) {
            return Err(twice[0]);
        }
        self.named += data.len() + compressed.len();
        for (page, bits) in Clusters::pages(&data) {
            let sets = [&look.tables, &self.data, &self.compressed];
            sets.iter().find_map(|set| set.first_of(page, &bits)).map_or(Ok(()), Err)?;
            self.data.add_page(page, &bits);
        }
        for (page, bits) in Clusters::pages(&compressed) {
            let sets = [&look.tables, &self.data];
            sets.iter().find_map(|set| set.first_of(page, &bits)).map_or(Ok(()), Err)?;
            self.compressed.add_page(page, &bits);
        }
        Ok(())
    }

    /// The claimed clusters, for [`Guard::trust`]; `None`: some are not known.
    pub(crate) fn known(&self) -> Option<Vec<u8>> {
        let is_good = self.is_sound() && self.damage.is_none() && self.half_freed.is_empty();
        is_good.then(|| {
            let mut bytes = KNOWN.to_vec();
            bytes.extend(self.places.cluster_bits.to_le_bytes());
            self.data.write(&mut bytes);
            self.compressed.write(&mut bytes);
            bytes
        })
    }

    /// Takes the claimed clusters that an earlier guard of this image has known, in place of the look. Other bytes
    /// change nothing.
    pub(crate) fn trust(&mut self, known: &[u8]) {
        let bits = self.places.cluster_bits.to_le_bytes();
        let rest = known.strip_prefix(KNOWN).and_then(|rest| rest.strip_prefix(&bits));
        if let Some((data, compressed)) = rest.and_then(Clusters::read_two) {
            (self.data, self.compressed, self.look) = (data, compressed, None);
        }
    }

    /// Returns whether a cluster is no table, and has no claim.
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

    /// Checks a commit, before its first write: the tables after it, if they are others, and the clusters that it
    /// frees.
    pub(crate) fn check_commit(
        &mut self,
        new: Option<&Places>,
        freed: &[Range<u64>],
    ) -> io::Result<()> {
        self.check()?;
        new.map_or(Ok(()), |new| self.check_places(new))?;
        let bits = self.places.cluster_bits;
        let mut all = freed.iter().flat_map(|range| range.start >> bits..range.end >> bits);
        let tables = new.unwrap_or(&self.places);
        match all.find(|cluster| tables.has(*cluster)) {
            None => Ok(()),
            Some(cluster) => Err(self.damage(format!("the table in cluster {cluster} was freed"))),
        }
    }

    /// Checks the tables after a commit.
    fn check_places(&mut self, new: &Places) -> io::Result<()> {
        if let Some(cluster) = new.overlap() {
            return Err(self.damage(format!("two tables would get the cluster {cluster}")));
        }
        let is_used = |cluster: &u64| {
            !self.places.has(*cluster) && (self.data.has(*cluster) || self.compressed.has(*cluster))
        };
        match new.all().find(is_used) {
            None => Ok(()),
            Some(cluster) => {
                let what = format!("a table would get the cluster {cluster}, which has data");
                Err(self.damage(what))
            }
        }
    }

    /// A commit that has checked these clusters has failed before its end: it may be repeated, and the file may have
    /// their lower counts by then.
    pub(crate) fn half_free(&mut self, freed: Vec<Range<u64>>) {
        self.half_freed.extend(freed.into_iter().map(|range| (range.start, range.end)));
    }

    /// Takes a commit that has succeeded: its tables, if they are others, and the clusters that are free. Returns
    /// these, and those that failed commits before it may have freed.
    pub(crate) fn committed(
        &mut self,
        new: Option<Places>,
        freed: Vec<Range<u64>>,
    ) -> Vec<Range<u64>> {
        self.half_free(freed);
        let bits = self.places.cluster_bits;
        if let Some(new) = new {
            self.places = new;
        }
        let all = std::mem::take(&mut self.half_freed).into_iter();
        let all: Vec<_> = all.map(|(start, end)| start..end).collect();
        for range in &all {
            for cluster in range.start >> bits..range.end >> bits {
                self.data.remove(cluster);
                self.compressed.remove(cluster);
            }
        }
        all
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::entry::{COMPRESSED, EXCLUSIVE};
    use crate::places::HEADER_BYTES;

    const FILE: u64 = 1000;
    const FILE_CLUSTERS: FileClusters = FileClusters { all: FILE, allocated: FILE };

    fn guard() -> Guard {
        let places = Places {
            cluster_bits: 16,
            refcount_table: 1..2,
            l1_table: 3..4,
            refcount_blocks: [(2, 0)].into(),
            l2_tables: [4, 5].into(),
            ..Places::default()
        };
        Guard::new(places, vec![0; HEADER_BYTES], FILE_CLUSTERS)
    }

    /// Looks at both L2 tables. Returns whether the image is sound.
    fn look(guard: &mut Guard, first: &[u64], second: &[u64]) -> bool {
        for (cluster, table) in [(4, first), (5, second)] {
            if !guard.is_unsound {
                assert_eq!(guard.next_tables()[0], cluster);
                assert!(guard.is_looking() && !guard.is_sound());
                guard.look(table.iter().copied());
            }
        }
        assert!(!guard.is_looking());
        assert_eq!(guard.is_sound(), guard.check().is_ok());
        guard.is_sound()
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
    fn an_entry_that_names_a_table_or_a_cluster_of_another_one_ends_all_changes() {
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
            let own = [0, cluster(7), cluster(8), compressed(10 << 16)];
            assert!(!look(&mut guard(), &own, &[cluster(9), wrong]), "{wrong:#x}");
            assert!(!look(&mut guard(), &[cluster(9), wrong], &own), "{wrong:#x}");
        }
        let twice = [
            [cluster(7), cluster(7)],
            [cluster(7), compressed(7 << 16)],
            [compressed(7 << 16), cluster(7)],
            [cluster(700), cluster(700)],
        ];
        for [one, other] in twice {
            assert!(!look(&mut guard(), &[one, other], &[]));
            assert!(!look(&mut guard(), &[one], &[other]));
        }
    }

    #[test]
    fn all_clusters_of_sound_tables_are_claimed_in_any_order() {
        let mut guard = guard();
        let first = [cluster(900), 0, cluster(6), cluster(511), compressed((512 << 16) - 512)];
        assert!(!look(&mut guard, &first, &[]), "the compressed data ends in the cluster 511");
        let mut guard = self::guard();
        let first = [cluster(900), 0, cluster(6), cluster(512), compressed(511 << 16)];
        assert!(look(&mut guard, &first, &[compressed((511 << 16) + 1024), cluster(FILE - 1)]));
        let claimed: Vec<_> = (6..FILE).filter(|cluster| !guard.is_free(*cluster)).collect();
        assert_eq!(claimed, [6, 511, 512, 900, FILE - 1]);
    }

    #[test]
    fn a_sparse_image_with_few_clusters_in_many_pages_takes_no_change() {
        let pages = SCATTERED_PAGES_MAX as u64;
        let sparse = pages * SCATTERED_CLUSTERS as u64;
        for (last, allocated, is_sound) in
            [(pages, 0, true), (pages + 1, sparse, false), (pages + 1, 2 * sparse, true)]
        {
            let places = Places { cluster_bits: 16, l2_tables: [4].into(), ..Places::default() };
            let file = FileClusters { all: u64::MAX, allocated };
            let mut guard = Guard::new(places, vec![0; HEADER_BYTES], file);
            guard.look((1..=last).map(|page| cluster(page * 512)));
            assert_eq!(guard.is_sound(), is_sound);
            let told = guard.check().map_err(|why| why.to_string());
            assert_eq!(told.is_err_and(|told| told.contains("vhost-blk convert")), !is_sound);
        }
    }

    #[test]
    fn a_later_guard_trusts_what_an_earlier_one_has_known_and_no_other_bytes() {
        let mut guard = guard();
        assert_eq!(guard.known(), None, "it has not looked");
        assert!(look(&mut guard, &[cluster(900), cluster(6)], &[compressed(700 << 16)]));
        let known = guard.known().expect("it has looked");
        let mut later = self::guard();
        later.trust(&known);
        assert!(later.is_sound());
        assert!((6..FILE).all(|cluster| later.is_free(cluster) == guard.is_free(cluster)));
        assert_eq!(later.known(), Some(known.clone()));
        let other = Places { cluster_bits: 12, ..Places::default() };
        let mut wrong = vec![known[1..].to_vec(), known[..known.len() - 1].to_vec()];
        wrong.extend([[&known[..], &[0]].concat(), b"no clusters".to_vec(), Vec::new()]);
        for wrong in wrong {
            let mut later = self::guard();
            later.trust(&wrong);
            assert!(later.is_looking());
        }
        let places = Places { l2_tables: [4].into(), ..other };
        let mut small = Guard::new(places, Vec::new(), FILE_CLUSTERS);
        small.trust(&known);
        assert!(small.is_looking(), "its clusters have another size");
        guard.damage("a test");
        assert_eq!(guard.known(), None);
    }

    #[test]
    fn compressed_data_shares_clusters_and_a_commit_gives_them_back() {
        let mut guard = guard();
        let first = [compressed(7 << 16), compressed((7 << 16) + 1024)];
        assert!(look(&mut guard, &first, &[compressed((8 << 16) - 512)]));
        assert!([7, 8].into_iter().all(|cluster| !guard.is_free(cluster)));
        guard.places = Places { cluster_bits: 16, ..Places::default() };
        guard.half_free(one(8));
        guard.half_free(one(8));
        assert_eq!(guard.committed(None, one(7)), [7 << 16..8 << 16, 8 << 16..9 << 16]);
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
            assert!(look(&mut guard, &[cluster(7), compressed(8 << 16)], &[]));
            let checked = guard.check_commit(Some(&new(table)), &one(freed));
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
