// SPDX-License-Identifier: Apache-2.0
//! The answers to questions that change the image.

use crate::extents::Extent;
use crate::image::{Answer, Found, Image};
use crate::mapped::Mapped;
use crate::storage::Store;
use imago::Mapping;
use std::io;
use std::ops::Range;
use std::sync::atomic::Ordering;

impl Image {
    /// Makes zero clusters of whole clusters, and frees their places. A commit follows.
    pub(crate) fn free(&mut self, range: Range<u64>) -> io::Result<()> {
        self.may_change()?;
        self.make_room()?;
        self.change(range.clone());
        let len = range.end - range.start;
        self.access.discard_to_zero(range.start, len)?;
        self.unmapped_bytes().fetch_add(len, Ordering::Relaxed);
        Ok(())
    }

    /// The answer to a change in an extent that may be written. In an image without room it has the committed
    /// part, or fails with the commit of this batch.
    fn writable(&mut self, extent: Extent, at: u64, len: u64) -> Answer {
        let part = self.tables.committed(extent, at).unwrap_or(extent);
        self.extent(part, at, len)
    }

    /// Answers `Question::Write`, and `Question::Place` without `data`.
    pub(crate) fn write(&mut self, at: u64, len: u64, data: Option<&[u8]>) -> io::Result<Answer> {
        // A long range of zeroes is of no use: this looks no further than the request.
        let mut found = self.find_within(at, len, len)?;
        if let Found::Extent { writable: true, .. } = found {
            found = self.find(at, len)?;
        }
        let (len, frees) = match found {
            Found::Extent { extent, writable: true } => return Ok(self.writable(extent, at, len)),
            Found::Zero(len, _) if !self.hides(at, len)? => return self.place(at, len),
            Found::Extent { extent, .. } => ((extent.end - at).min(len), false),
            Found::Zero(len, _) => (len, false),
            Found::Copy(len) => (self.in_cluster(at, len), true),
        };
        let Some(data) = data else { return Ok(Answer::NeedsData) };
        let cluster = self.cluster_bytes();
        let fill = |store: &Store, place: u64, done: u64| {
            store.write_data(&data[..done as usize], place).inspect_err(|_| {
                // The clusters become free again. The old content that imago has copied there needs no room.
                store.forget(place - place % cluster..(place + done).next_multiple_of(cluster));
            })
        };
        Ok(Answer::Done(self.allocate(at..at + len, frees, fill)?))
    }

    /// Gives a place to the start of a range, whose content `fill` prepares: it gets the place and the length. Returns
    /// the length. The change `frees` a cluster.
    fn allocate(
        &mut self,
        Range { start, end }: Range<u64>,
        frees: bool,
        fill: impl FnOnce(&Store, u64, u64) -> io::Result<()>,
    ) -> io::Result<u64> {
        self.make_room()?;
        let cluster = self.cluster_bytes();
        let clusters = start / cluster..end.div_ceil(cluster);
        let (last, frees_kept) = self.store()?.allocates_to(clusters)?;
        let end = end.min(last * cluster);
        let others = self.tables.others();
        self.change(start..end);
        let prepared = self.access.prepare_data_mapping(start, end - start, true)?;
        let done = prepared.length().min(end - start);
        let (place, store) = (prepared.offset(), prepared.storage());
        let mapped = Mapped::of(start, done, place, cluster);
        let claimed = self.claim(mapped)?;
        let filled = fill(store, place, done);
        if let Err(why) = filled.and_then(|()| self.access.commit_data_mapping(prepared)) {
            self.unclaim(claimed)?;
            return Err(why);
        }
        self.tables.map(mapped, others);
        self.changed(frees || frees_kept)?;
        Ok(done)
    }

    /// Gives a place to the clusters of a range, which read as zeroes as a whole. The lane writes the data: until then
    /// the place reads as zeroes, too.
    fn place(&mut self, at: u64, len: u64) -> io::Result<Answer> {
        self.allocate(self.clusters_of(at..at + len), false, Store::make_zero)?;
        match self.find(at, len)? {
            Found::Extent { extent, writable: true } => Ok(self.writable(extent, at, len)),
            _ => Err(io::Error::other(format!("no place at {at}"))),
        }
    }

    /// Answers `Question::Zero`.
    pub(crate) fn zero(&mut self, at: u64, len: u64) -> io::Result<Answer> {
        let (found, frees) = match self.find(at, len)? {
            Found::Extent { extent, writable: true } => return Ok(self.writable(extent, at, len)),
            Found::Zero(len, _) => return Ok(Answer::Done(len)),
            Found::Extent { extent, .. } => ((extent.end - at).min(len), false),
            Found::Copy(found) => (self.in_cluster(at, found), true),
        };
        match self.whole_clusters(at, found, len) {
            0 => self.zero_part(at, self.in_cluster(at, found), frees),
            whole => {
                self.make_zero(at, whole, frees)?;
                Ok(Answer::Done(whole))
            }
        }
    }

    /// Zeroes a part of a cluster: all of it if the rest reads as zeroes.
    fn zero_part(&mut self, at: u64, len: u64, frees: bool) -> io::Result<Answer> {
        let Range { start, end } = self.clusters_of(at..at + len);
        if self.reads_as_zeroes(start..at)? && self.reads_as_zeroes(at + len..end)? {
            self.make_zero(start, end - start, frees)?;
            return Ok(Answer::Done(len));
        }
        Ok(Answer::Done(self.allocate(at..at + len, frees, Store::make_zero)?))
    }

    /// Makes zero clusters of whole clusters. imago must never get a part of one: its sizes overflow in a disk that is
    /// smaller than a cluster.
    fn make_zero(&mut self, at: u64, len: u64, frees: bool) -> io::Result<()> {
        debug_assert_eq!(self.in_whole_clusters(at, len), len);
        self.make_room()?;
        self.change(at..at + len);
        let zeroed = self.access.write_zeroes(at, len);
        // Also those of clusters before an error.
        self.claim_changed(at..at + len)?;
        let told = self.changed(frees);
        zeroed?;
        told
    }

    /// Bytes of a range in its first cluster.
    fn in_cluster(&self, at: u64, len: u64) -> u64 {
        len.min(self.cluster_bytes() - at % self.cluster_bytes())
    }

    /// The clusters of a range. The last one may be a part, up to the size that imago knows: a growth zeroes what is
    /// behind the end of the disk.
    pub(crate) fn clusters_of(&self, range: Range<u64>) -> Range<u64> {
        let cluster = self.cluster_bytes();
        let end = range.end.next_multiple_of(cluster).min(self.access.size());
        range.start - range.start % cluster..end
    }

    /// Returns whether the clusters of a range have content of a backing file, also outside of the range:
    /// a change gives whole clusters a place in the image.
    fn hides(&self, at: u64, len: u64) -> io::Result<bool> {
        Ok(self.has_backing() && !self.reads_as_zeroes(self.clusters_of(at..at + len))?)
    }

    fn reads_as_zeroes(&self, Range { mut start, end }: Range<u64>) -> io::Result<bool> {
        while start < end {
            match self.access.get_mapping(start, end - start)? {
                (Mapping::Zero { .. }, found @ 1..) => start += found,
                _ => return Ok(false),
            }
        }
        Ok(true)
    }

    /// A change that may have freed a cluster (of compressed data, or of an old L1 or refcount table) is
    /// committed before the cluster is reused. No L2 table moves: an image in which one could is refused
    /// ([`crate::chain`]).
    fn changed(&mut self, frees: bool) -> io::Result<()> {
        if frees {
            self.tables.add_others();
        }
        if frees || self.store()?.must_commit() {
            self.write_tables().map_err(io::Error::from_raw_os_error)?;
        }
        Ok(())
    }

    /// Answers `Question::Discard`. Clusters of data in a backing file, and of compressed data, become zero clusters:
    /// whole ones only, because DISCARD promises nothing.
    pub(crate) fn discard(&mut self, at: u64, len: u64) -> io::Result<Answer> {
        let (found, frees) = match self.find(at, len)? {
            Found::Extent { extent, writable: true } => return Ok(self.writable(extent, at, len)),
            Found::Extent { extent, .. } => ((extent.end - at).min(len), false),
            Found::Zero(found, _) if self.in_whole_clusters(at, found) > 0 => {
                return Ok(Answer::Done(self.in_whole_clusters(at, found)));
            }
            Found::Zero(found, _) => (found, false),
            Found::Copy(found) => (self.in_cluster(at, found), true),
        };
        let whole = self.whole_clusters(at, found, len);
        if whole == 0 {
            return Ok(Answer::Done(self.in_cluster(at, len)));
        }
        if self.hides(at, whole)? || frees {
            self.make_zero(at, whole, frees)?;
        }
        Ok(Answer::Done(whole))
    }

    /// Bytes of whole clusters at the start of a range, 0 if it starts within one. The last cluster may be a part, as
    /// in [`Image::clusters_of`].
    fn in_whole_clusters(&self, at: u64, len: u64) -> u64 {
        match (at.is_multiple_of(self.cluster_bytes()), at + len == self.access.size()) {
            (false, _) => 0,
            (true, true) => len,
            (true, false) => len / self.cluster_bytes() * self.cluster_bytes(),
        }
    }

    /// The same for a piece of `found` bytes without a place in the image, at the start of a range: a cluster has none
    /// also where the piece ends within it.
    fn whole_clusters(&self, at: u64, found: u64, len: u64) -> u64 {
        found.next_multiple_of(self.cluster_bytes()).min(self.in_whole_clusters(at, len))
    }
}
