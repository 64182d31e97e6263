// SPDX-License-Identifier: Apache-2.0
//! The growth of a disk. Content of a larger backing file behind the old end becomes zero, and so does the rest of the
//! last cluster.
//!
//! imago moves the L1 table at each growth, and frees its old place at once. Nothing may get that place before a
//! commit: the file still names it. So the table moves first, while the header keeps the old size, which imago cannot
//! change (`Store::with_size`). Then come the zeroes, in steps of small tables, each with the size that it reaches.

use crate::fields::SIZE_AT;
use crate::image::{Answer, Image};
use imago::format::PreallocateMode;
use std::io;
use std::ops::Range;

/// Maximum clusters that become zero with one commit, when the disk grows: their tables have 8 MiB.
const GROW_CLUSTERS: u64 = 1 << 20;

impl Image {
    /// Enlarges the disk, durably. After an error the disk in the image may have grown by some of the steps.
    pub(crate) fn grow(&mut self, bytes: u64) -> io::Result<()> {
        self.may_change()?;
        self.make_room()?;
        // A range may end with the disk, within a cluster.
        self.forget_discarded();
        let (old, cluster) = (self.size_bytes, self.cluster_bytes());
        if bytes <= old {
            return Ok(());
        }
        // The last cluster may have old bytes behind the end: a shrink leaves them.
        let zeroed = self.backing_bytes.max(old).next_multiple_of(cluster).min(bytes);
        self.change(old..bytes);
        let moved = match bytes > self.access.size() {
            true => self.access.resize_grow(bytes, PreallocateMode::None),
            false => Ok(()), // an earlier growth got so far
        };
        self.end_growth(if old < zeroed { old } else { bytes }, moved)?;
        while self.size_bytes < zeroed {
            let at = self.size_bytes;
            let end = zeroed.min(at.saturating_add(GROW_CLUSTERS * cluster));
            let reached = if end == zeroed { bytes } else { end };
            let is_zero = self.zero_behind(at..end);
            self.end_growth(reached, is_zero)?;
        }
        self.sync()
    }

    /// Ends a step of a growth: the disk in the file has this size.
    fn end_growth(&mut self, bytes: u64, done: io::Result<()>) -> io::Result<()> {
        let size = if done.is_ok() { bytes } else { self.size_bytes };
        let noted = self.store()?.keep(&size.to_be_bytes(), SIZE_AT as u64);
        // A commit writes the header also if no table has changed since the last one.
        self.change(self.size_bytes - 1..self.size_bytes);
        // Also after an error: no other change follows that one.
        let committed = self.committed();
        done.and(noted).and(committed)?;
        self.size_bytes = size;
        Ok(())
    }

    /// Makes a range behind the end of the disk zero.
    fn zero_behind(&mut self, range: Range<u64>) -> io::Result<()> {
        let mut at = range.start;
        while at < range.end {
            let len = range.end - at;
            at += match self.zero(at, len)? {
                Answer::Done(done) => done,
                Answer::Extent(extent, _) => {
                    let (len, place) =
                        (len.min(extent.end - at), extent.host + (at - extent.start));
                    self.store()?.zero_data(place, len)?;
                    len
                }
                _ => return Err(io::Error::other(format!("no place for zeroes at {at}"))),
            };
        }
        Ok(())
    }
}
