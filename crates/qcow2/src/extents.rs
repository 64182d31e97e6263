// SPDX-License-Identifier: Apache-2.0
//! A lane's cache of known extents. Short ones of whole clusters are in [`Pages`], the others in a tree.
//!
//! An extent of a backing file, or of zeroes, ends where the disk gets content of its own: the generation of the
//! disk changes then, before the write completes, and the changed part is cut out of the extent. An extent of
//! the image itself stays true until some of its clusters are unmapped: a new epoch begins then, before the first
//! of them is freed, and these clusters are cut out of the extent.

use crate::pages::Pages;
use crate::versions::{Ranges, Version, Versions};
use std::collections::BTreeMap;
use std::ops::Range;

/// Maximum extents in the tree of a lane (about 8 MiB).
const EXTENTS_MAX: usize = 128 << 10;
/// Extents that a full tree forgets at once.
const FORGOTTEN: usize = 64;
/// The file of an extent that has no place, and reads as zeroes.
pub(crate) const ZEROES: u32 = u32::MAX;

/// A range of the disk that lies in one piece in a file of the chain, or is zero.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Extent {
    /// Start on the disk in bytes.
    pub(crate) start: u64,
    /// End on the disk in bytes.
    pub(crate) end: u64,
    /// Number of the file in the chain; 0 is the image itself. Or [`ZEROES`].
    pub(crate) file: u32,
    /// Position of `start` in the file.
    pub(crate) host: u64,
}

impl Extent {
    /// A range of zeroes.
    pub(crate) fn zeroes(range: Range<u64>) -> Extent {
        Extent { start: range.start, end: range.end, file: ZEROES, host: 0 }
    }

    /// The part between two positions within it.
    pub(crate) fn part(self, range: Range<u64>) -> Extent {
        let skipped = if self.file == ZEROES { 0 } else { range.start - self.start };
        Extent { start: range.start, end: range.end, host: self.host + skipped, ..self }
    }
}

/// The known extents of one lane.
#[derive(Debug)]
pub(crate) struct Extents {
    /// No two overlap, nor does one have a known cluster of the pages.
    by_start: BTreeMap<u64, Extent>,
    pages: Pages,
    last: Option<Extent>,
    version: Version,
    /// A full tree forgets the extents from here on.
    hand: u64,
}

impl Extents {
    /// The extents of a disk with clusters of this size.
    pub(crate) fn new(cluster_bytes: u64) -> Extents {
        Extents {
            by_start: BTreeMap::new(),
            pages: Pages::new(cluster_bytes),
            last: None,
            version: Version::default(),
            hand: 0,
        }
    }

    /// Forgets what has ended by the present version.
    #[inline]
    pub(crate) fn refresh(&mut self, versions: &Versions) {
        let now = versions.now();
        if self.version != now {
            self.catch_up(versions, now);
        }
    }

    #[cold]
    fn catch_up(&mut self, versions: &Versions, now: Version) {
        let Version { generation, epoch } = self.version;
        if generation != now.generation {
            match versions.changed_since(generation, now.generation) {
                Some(changed) => {
                    changed.into_iter().for_each(|range| self.cut(range, |file| file != 0))
                }
                None => {
                    self.by_start.retain(|_, extent| extent.file == 0);
                    self.pages.cut_others();
                }
            }
        }
        if epoch != now.epoch {
            match versions.left_since(epoch, now.epoch) {
                Some(left) => left.iter().for_each(|left| self.cut_all(left)),
                None => {
                    self.by_start.clear();
                    self.pages.clear();
                }
            }
        }
        self.version = now;
        self.last = None;
        self.forget();
    }

    fn cut_all(&mut self, left: &Ranges) {
        left.iter().for_each(|range| self.cut(range.clone(), |_| true));
    }

    /// Cuts a part of the disk out of the extents that end there.
    fn cut(&mut self, range: Range<u64>, ends: impl Fn(u32) -> bool) {
        self.pages.cut(range.clone(), &ends);
        let before = self.by_start.range(..range.start).next_back();
        let from = before.filter(|(_, extent)| extent.end > range.start).map(|(start, _)| *start);
        let from = from.unwrap_or(range.start);
        if from >= range.end {
            return;
        }
        let cut = self.by_start.range(from..range.end).map(|(_, extent)| *extent);
        let cut: Vec<Extent> = cut.filter(|extent| ends(extent.file)).collect();
        for extent in cut {
            self.by_start.remove(&extent.start);
            if extent.start < range.start {
                self.by_start.insert(extent.start, extent.part(extent.start..range.start));
            }
            if extent.end > range.end {
                self.by_start.insert(range.end, extent.part(range.end..extent.end));
            }
        }
    }

    /// Forgets a few extents of a full cache, those of another part of the disk each time.
    fn forget(&mut self) {
        while self.by_start.len() > EXTENTS_MAX {
            let from = self.by_start.range(self.hand..).map(|(start, _)| *start);
            let starts: Vec<u64> = from.take(FORGOTTEN).collect();
            self.hand = starts.last().map_or(0, |last| last + 1);
            for start in starts {
                self.by_start.remove(&start);
            }
        }
    }

    /// The extent with the byte at `position`, as far as `len` bytes from there need it.
    pub(crate) fn find(&mut self, position: u64, len: u64) -> Option<Extent> {
        let holds = |extent: &Extent| (extent.start..extent.end).contains(&position);
        let last = self.last.filter(|last| holds(last) && last.end - position >= len);
        if last.is_some() {
            return last;
        }
        let in_tree = self.by_start.range(..=position).next_back().map(|(_, extent)| *extent);
        let found = in_tree.filter(holds).or_else(|| self.pages.find(position, len));
        self.last = found.or(self.last);
        found
    }

    /// The pages of single clusters.
    pub(crate) fn pages(&mut self) -> &mut Pages {
        &mut self.pages
    }

    /// Adds an extent that was true at a version.
    pub(crate) fn add(&mut self, extent: Extent, at: Version, versions: &Versions) {
        self.refresh(versions);
        let known = self.version.generation;
        let overlaps = |range: &Range<u64>| range.start < extent.end && extent.start < range.end;
        let has_ended = extent.file != 0
            && at.generation != known
            && versions
                .changed_since(at.generation, known)
                .is_none_or(|changed| changed.iter().any(overlaps));
        if has_ended || at.epoch != self.version.epoch {
            return;
        }
        // Older extents of the range may be wrong.
        self.cut(extent.start..extent.end, |_| true);
        match self.pages.suits(&extent) {
            true => self.pages.add(extent),
            false => {
                self.by_start.insert(extent.start, extent);
                self.forget();
            }
        }
        self.last = Some(extent);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Larger than the extents of the tree's tests, whose places are within a sector, too.
    const CLUSTER: u64 = 4096;

    fn find(extents: &mut Extents, position: u64) -> Option<Extent> {
        extents.find(position, 1)
    }

    fn extent(start: u64, file: u32) -> Extent {
        Extent { start, end: start + 100, file, host: 7 }
    }

    fn at(generation: u64, epoch: u64) -> Version {
        Version { generation, epoch }
    }

    #[test]
    fn a_change_ends_the_extents_of_backing_files_and_zeroes_where_it_is() {
        let versions = Versions::default();
        let mut extents = Extents::new(CLUSTER);
        extents.add(extent(0, 0), at(0, 0), &versions);
        extents.add(extent(100, 1), at(0, 0), &versions);
        extents.add(Extent::zeroes(200..300), at(0, 0), &versions);
        versions.change(90..110);
        versions.change(250..251);
        extents.refresh(&versions);
        let below = Extent { start: 110, end: 200, file: 1, host: 17 };
        for (position, found) in [
            (99, Some(extent(0, 0))),
            (109, None),
            (110, Some(below)),
            (249, Some(Extent::zeroes(200..250))),
            (250, None),
            (251, Some(Extent::zeroes(251..300))),
        ] {
            assert_eq!(find(&mut extents, position), found, "{position}");
        }
        extents.add(extent(90, 1), at(0, 0), &versions);
        assert_eq!(find(&mut extents, 101), None, "it was found before the change");
        extents.add(extent(300, 1), at(0, 0), &versions);
        assert_eq!(find(&mut extents, 300), Some(extent(300, 1)), "no change since then is there");
    }

    #[test]
    fn too_many_changes_end_all_extents_of_backing_files_and_no_other() {
        let versions = Versions::default();
        let mut extents = Extents::new(CLUSTER);
        extents.add(extent(0, 0), at(0, 0), &versions);
        extents.add(extent(100, 1), at(0, 0), &versions);
        (0..5000).for_each(|_| versions.change(900..901));
        extents.refresh(&versions);
        assert_eq!((find(&mut extents, 0), find(&mut extents, 100)), (Some(extent(0, 0)), None));
    }

    #[test]
    fn a_new_extent_replaces_what_it_overlaps() {
        let versions = Versions::default();
        let mut extents = Extents::new(CLUSTER);
        extents.add(extent(0, 0), at(0, 0), &versions);
        extents.add(Extent { start: 20, end: 30, file: 1, host: 5 }, at(0, 0), &versions);
        let rest = |start, end| Some(Extent { start, end, file: 0, host: 7 + start });
        assert_eq!((find(&mut extents, 19), find(&mut extents, 30)), (rest(0, 20), rest(30, 100)));
        assert_eq!(find(&mut extents, 20).map(|extent| extent.file), Some(1));
    }

    fn ranges(all: &[Range<u64>]) -> Ranges {
        all.iter().cloned().collect()
    }

    #[test]
    fn a_new_epoch_cuts_the_leaving_parts_out_of_the_extents() {
        let (mut extents, versions) = (Extents::new(CLUSTER), Versions::default());
        for start in [0, 100, 200, 300] {
            extents.add(extent(start, 0), at(0, 0), &versions);
        }
        versions.begin_epoch(ranges(&[10..20, 90..100]));
        versions.begin_epoch(ranges(&[30..40, 200..300, 350..1000]));
        assert_eq!(find(&mut extents, 95), Some(extent(0, 0)), "it has not looked");
        extents.refresh(&versions);
        let part = |start, end| Some(Extent { start, end, file: 0, host: 7 + start % 100 });
        for (position, found) in [
            (0, part(0, 10)),
            (10, None),
            (29, part(20, 30)),
            (39, None),
            (40, part(40, 90)),
            (95, None),
            (150, Some(extent(100, 0))),
            (250, None),
            (349, part(300, 350)),
            (350, None),
        ] {
            assert_eq!(find(&mut extents, position), found, "{position}");
        }
    }

    #[test]
    fn an_extent_of_an_earlier_epoch_is_not_added_and_an_old_cache_is_forgotten() {
        let (mut extents, versions) = (Extents::new(CLUSTER), Versions::default());
        extents.add(extent(0, 0), at(0, 0), &versions);
        versions.begin_epoch(Ranges::new());
        extents.refresh(&versions);
        assert_eq!(find(&mut extents, 99), Some(extent(0, 0)));
        extents.add(extent(100, 0), at(0, 0), &versions);
        assert_eq!(find(&mut extents, 199), None, "it was found before the epoch");
        extents.add(extent(100, 0), at(0, 1), &versions);
        assert_eq!(find(&mut extents, 199), Some(extent(100, 0)));
        (2..100).for_each(|epoch| assert_eq!(versions.begin_epoch(Ranges::new()), epoch));
        extents.refresh(&versions);
        assert_eq!(find(&mut extents, 99), None, "some epochs are not remembered");
    }

    #[test]
    fn parts_of_extents_are_bounded() {
        let (mut extents, versions) = (Extents::new(CLUSTER), Versions::default());
        extents.add(Extent { end: 1 << 20, ..extent(0, 0) }, at(0, 0), &versions);
        let holes = (0..2 * EXTENTS_MAX as u64).map(|n| n * 4..n * 4 + 1);
        versions.begin_epoch(holes.collect());
        extents.refresh(&versions);
        assert!(extents.by_start.len() <= EXTENTS_MAX);
    }

    #[test]
    fn a_full_cache_forgets_a_few_extents_at_a_time() {
        let (mut extents, versions) = (Extents::new(CLUSTER), Versions::default());
        for n in 0..3 * EXTENTS_MAX as u64 {
            // Not in the order of the disk.
            let new = extent((n * 7919) % (3 * EXTENTS_MAX as u64) * 100, 0);
            extents.add(new, at(0, 0), &versions);
            let least = (n as usize + 1).min(EXTENTS_MAX - FORGOTTEN);
            assert!((least..=EXTENTS_MAX).contains(&extents.by_start.len()), "{n}");
        }
    }

    /// Sectors of the model's disk: three pages of clusters of two sectors, and a part of a cluster.
    const SECTORS: u64 = 3 * 1024 + 1;

    /// Compares all that the cache tells with a model, which has the file and the place of each sector. Returns the
    /// sectors that the cache knows.
    fn check(extents: &mut Extents, model: &[Option<(u32, u64)>], step: u32) -> usize {
        let mut known = 0;
        for start in 0..SECTORS {
            let Some(found) = extents.find(start * 512, 4096) else { continue };
            known += 1;
            assert!((found.start..found.end).contains(&(start * 512)), "{step}: {found:?}");
            for sector in found.start / 512..(found.end / 512).min(SECTORS) {
                let Extent { file, host, .. } = found.part(sector * 512..found.end);
                assert_eq!(Some((file, host)), model[sector as usize], "{step}: {found:?}");
            }
        }
        known
    }

    #[test]
    fn tree_and_pages_tell_what_was_added_last_and_has_not_ended() {
        let (mut extents, versions) = (Extents::new(1024), Versions::default());
        let mut random = fastrand::Rng::with_seed(11);
        let mut model = vec![None; SECTORS as usize];
        let (mut known, mut knowable) = (0, 0);
        for step in 0..2000 {
            let most = [4, 40, 2000][random.usize(..3)];
            let mut start = random.u64(..SECTORS);
            let mut end = (start + random.u64(1..most)).min(SECTORS);
            if random.u32(..8) > 0 {
                (start, end) = (start & !1, end.next_multiple_of(2).min(SECTORS)); // whole clusters
            }
            let sectors = start as usize..end as usize;
            let range = start * 512..end * 512;
            match random.u32(..8) {
                0 => {
                    versions.change(range);
                    extents.refresh(&versions);
                    let ended = |place: &&mut Option<(u32, u64)>| place.is_some_and(|p| p.0 != 0);
                    model[sectors].iter_mut().filter(ended).for_each(|place| *place = None);
                }
                1 => {
                    versions.begin_epoch(std::iter::once(range).collect());
                    extents.refresh(&versions);
                    model[sectors].fill(None);
                }
                _ => {
                    let file = [0, 0, 1, 31, ZEROES][random.usize(..5)];
                    let host = if file == ZEROES { 0 } else { random.u64(..1 << 40) * 512 };
                    let new = Extent { host, file, start: range.start, end: range.end };
                    extents.add(new, versions.now(), &versions);
                    assert_eq!(extents.find(range.start, 1).map(|found| found.file), Some(file));
                    for sector in sectors {
                        let Extent { file, host, .. } = new.part(sector as u64 * 512..range.end);
                        model[sector] = Some((file, host));
                    }
                }
            }
            if step % 10 == 0 {
                known += check(&mut extents, &model, step);
                knowable += model.iter().flatten().count();
            }
        }
        // A cut within a cluster ends all of it.
        assert!(known * 10 > knowable * 9, "{known} of {knowable}");
        assert!(!extents.by_start.is_empty() && extents.pages.known(0) > 0);
    }
}
