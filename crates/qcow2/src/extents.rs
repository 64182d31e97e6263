// SPDX-License-Identifier: Apache-2.0
//! A lane's cache of known extents.
//!
//! An extent of a backing file ends when a write allocates its cluster in the image: the generation of
//! the disk changes then, before the write completes. An extent of the image itself stays true until
//! some of its clusters are unmapped: a new epoch begins then, before the first of them is freed, and these
//! clusters are cut out of the extent.

use crate::versions::{Ranges, Version, Versions};
use std::collections::BTreeMap;

/// Maximum extents of a lane (about 200 KiB). A full cache starts anew.
const EXTENTS_MAX: usize = 4096;

/// A range of the disk that lies in one piece in a file of the chain.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Extent {
    /// Start on the disk in bytes.
    pub(crate) start: u64,
    /// End on the disk in bytes.
    pub(crate) end: u64,
    /// Number of the file in the chain; 0 is the image itself.
    pub(crate) file: u32,
    /// Position of `start` in the file.
    pub(crate) host: u64,
}

/// The known extents of one lane.
#[derive(Debug, Default)]
pub(crate) struct Extents {
    by_start: BTreeMap<u64, Extent>,
    last: Option<Extent>,
    version: Version,
}

impl Extents {
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
        if self.version.generation != now.generation {
            self.by_start.retain(|_, extent| extent.file == 0);
        }
        if self.version.epoch != now.epoch {
            match versions.left_since(self.version.epoch, now.epoch) {
                Some(left) => left.iter().for_each(|left| self.cut(left)),
                None => self.by_start.clear(),
            }
        }
        self.version = now;
        self.last = None;
    }

    /// Cuts these parts of the disk out of the extents.
    fn cut(&mut self, left: &Ranges) {
        let leaves = |extent: &Extent| left.overlaps(&(extent.start..extent.end));
        let cut: Vec<_> = self.by_start.values().filter(|e| leaves(e)).copied().collect();
        for extent in &cut {
            self.by_start.remove(&extent.start);
        }
        for extent in cut {
            for rest in left.gaps(&(extent.start..extent.end)) {
                let host = extent.host + (rest.start - extent.start);
                let part = Extent { start: rest.start, end: rest.end, host, ..extent };
                self.by_start.entry(rest.start).or_insert(part);
            }
        }
        if self.by_start.len() > EXTENTS_MAX {
            self.by_start.clear();
        }
    }

    /// The extent with the byte at `position`.
    pub(crate) fn find(&mut self, position: u64) -> Option<Extent> {
        let holds = |extent: &Extent| (extent.start..extent.end).contains(&position);
        if let Some(last) = self.last.filter(holds) {
            return Some(last);
        }
        let found = self.by_start.range(..=position).next_back().map(|(_, e)| *e).filter(holds);
        self.last = found.or(self.last);
        found
    }

    /// Adds an extent that was true at a version.
    pub(crate) fn add(&mut self, extent: Extent, at: Version) {
        let has_ended = extent.file != 0 && at.generation != self.version.generation;
        if has_ended || at.epoch != self.version.epoch {
            return;
        }
        if self.by_start.len() >= EXTENTS_MAX {
            self.by_start.clear();
        }
        self.by_start.insert(extent.start, extent);
        self.last = Some(extent);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::ops::Range;

    fn extent(start: u64, file: u32) -> Extent {
        Extent { start, end: start + 100, file, host: 7 }
    }

    fn at(generation: u64, epoch: u64) -> Version {
        Version { generation, epoch }
    }

    #[test]
    fn a_new_generation_ends_the_extents_of_backing_files_only() {
        let mut extents = Extents::default();
        extents.add(extent(0, 0), at(0, 0));
        extents.add(extent(100, 1), at(0, 0));
        assert_eq!(
            (extents.find(99), extents.find(100)),
            (Some(extent(0, 0)), Some(extent(100, 1)))
        );
        let versions = Versions::default();
        versions.hide_backing();
        extents.refresh(&versions);
        assert_eq!((extents.find(99), extents.find(100)), (Some(extent(0, 0)), None));
        extents.add(extent(100, 1), at(0, 0));
        assert_eq!(extents.find(100), None, "it was found before the change");
    }

    fn ranges(all: &[Range<u64>]) -> Ranges {
        all.iter().cloned().collect()
    }

    #[test]
    fn a_new_epoch_cuts_the_leaving_parts_out_of_the_extents() {
        let mut extents = Extents::default();
        for start in [0, 100, 200, 300] {
            extents.add(extent(start, 0), at(0, 0));
        }
        let versions = Versions::default();
        versions.begin_epoch(ranges(&[10..20, 90..100]));
        versions.begin_epoch(ranges(&[30..40, 200..300, 350..1000]));
        assert_eq!(extents.find(95), Some(extent(0, 0)), "it has not looked");
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
            assert_eq!(extents.find(position), found, "{position}");
        }
    }

    #[test]
    fn an_extent_of_an_earlier_epoch_is_not_added_and_an_old_cache_is_forgotten() {
        let mut extents = Extents::default();
        extents.add(extent(0, 0), at(0, 0));
        let versions = Versions::default();
        versions.begin_epoch(Ranges::new());
        extents.refresh(&versions);
        assert_eq!(extents.find(99), Some(extent(0, 0)));
        extents.add(extent(100, 0), at(0, 0));
        assert_eq!(extents.find(199), None, "it was found before the epoch");
        extents.add(extent(100, 0), at(0, 1));
        assert_eq!(extents.find(199), Some(extent(100, 0)));
        (2..100).for_each(|epoch| assert_eq!(versions.begin_epoch(Ranges::new()), epoch));
        extents.refresh(&versions);
        assert_eq!(extents.find(99), None, "some epochs are not remembered");
    }

    #[test]
    fn parts_of_extents_are_bounded() {
        let mut extents = Extents::default();
        extents.add(Extent { end: 1 << 20, ..extent(0, 0) }, at(0, 0));
        let versions = Versions::default();
        let holes = (0..2 * EXTENTS_MAX as u64).map(|n| n * 4..n * 4 + 1);
        versions.begin_epoch(holes.collect());
        extents.refresh(&versions);
        assert!(extents.by_start.len() <= EXTENTS_MAX);
    }

    #[test]
    fn the_cache_is_bounded() {
        let mut extents = Extents::default();
        (0..3 * EXTENTS_MAX as u64).for_each(|n| extents.add(extent(n * 100, 0), at(0, 0)));
        assert!(extents.by_start.len() <= EXTENTS_MAX);
    }
}
