// SPDX-License-Identifier: Apache-2.0
//! A lane's cache of known extents.
//!
//! An extent of a backing file ends when a write allocates its cluster in the image: the generation of
//! the disk changes then, before the write completes. An extent of the image itself stays true until
//! clusters are unmapped: a new epoch begins then, before the first of them is freed.

use crate::versions::Version;
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
    /// Forgets the extents that have ended by the present version.
    pub(crate) fn refresh(&mut self, now: Version) {
        if self.version == now {
            return;
        }
        match self.version.epoch == now.epoch {
            true => self.by_start.retain(|_, extent| extent.file == 0),
            false => self.by_start.clear(),
        }
        self.version = now;
        self.last = None;
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
        extents.refresh(at(1, 0));
        assert_eq!((extents.find(99), extents.find(100)), (Some(extent(0, 0)), None));
        extents.add(extent(100, 1), at(0, 0));
        assert_eq!(extents.find(100), None, "it was found before the change");
    }

    #[test]
    fn a_new_epoch_ends_all_extents() {
        let mut extents = Extents::default();
        extents.add(extent(0, 0), at(0, 0));
        extents.refresh(at(0, 1));
        assert_eq!(extents.find(99), None);
        extents.add(extent(0, 0), at(0, 0));
        assert_eq!(extents.find(99), None, "it was found before the epoch");
        extents.add(extent(0, 0), at(0, 1));
        assert_eq!(extents.find(99), Some(extent(0, 0)));
    }

    #[test]
    fn the_cache_is_bounded() {
        let mut extents = Extents::default();
        (0..3 * EXTENTS_MAX as u64).for_each(|n| extents.add(extent(n * 100, 0), at(0, 0)));
        assert!(extents.by_start.len() <= EXTENTS_MAX);
    }
}
