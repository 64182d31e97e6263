// SPDX-License-Identifier: Apache-2.0
//! A table of a ring (registered files or buffers) that several disks share: each has a range.

use std::ops::Range;

/// The places of a table that are in use.
#[derive(Debug)]
pub(crate) struct Table {
    used: Vec<bool>,
}

impl Table {
    /// An empty table of `size` places.
    pub(crate) fn new(size: u32) -> Self {
        Table { used: vec![false; size as usize] }
    }

    /// Number of places.
    pub(crate) fn size(&self) -> u32 {
        self.used.len() as u32
    }

    /// Takes the first `count` neighbouring places that are free; `None` if there are not so many.
    pub(crate) fn take(&mut self, count: usize) -> Option<Range<u32>> {
        let mut start = 0;
        while let Some(places) = self.used.get(start..start + count) {
            match places.iter().rposition(|used| *used) {
                Some(last_used) => start += last_used + 1,
                None => {
                    self.used[start..start + count].fill(true);
                    return Some(start as u32..(start + count) as u32);
                }
            }
        }
        None
    }

    /// Returns places to the table.
    pub(crate) fn give(&mut self, places: &Range<u32>) {
        self.used[places.start as usize..places.end as usize].fill(false);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_do_not_overlap_and_are_used_again() {
        let mut table = Table::new(8);
        assert_eq!(table.take(3), Some(0..3));
        assert_eq!(table.take(2), Some(3..5));
        assert_eq!(table.take(4), None);
        assert_eq!(table.take(3), Some(5..8));
        table.give(&(0..3));
        assert_eq!(table.take(4), None);
        table.give(&(5..8));
        assert_eq!(table.take(3), Some(0..3));
        assert_eq!(table.take(3), Some(5..8));
        assert_eq!(table.take(1), None);
    }

    #[test]
    fn a_disk_without_files_needs_no_place() {
        let mut table = Table::new(1);
        assert_eq!(table.take(1), Some(0..1));
        assert_eq!(table.take(0), Some(0..0));
        table.give(&(0..0));
        assert_eq!(table.take(1), None);
    }
}
