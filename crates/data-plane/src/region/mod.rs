// SPDX-License-Identifier: Apache-2.0
//! The in-flight region (vhost-user, "Inflight I/O tracking"): shared memory in which the data
//! plane records the chains in flight of every queue, so that a later daemon can complete them. It
//! is valid from the first request on.
//!
//! The front-end can write to the region, too. The data plane reads it once, when a queue starts,
//! and checks it like a ring. While a queue runs, the data plane only writes it and uses its own
//! copy of the state.
//!
//! The release fences order the stores for one reader: the daemon that follows this one. Its loads
//! need no fence, because it maps the region after this one has ended.

mod packed;
mod part;
mod split;
#[cfg(test)]
mod tests;

use part::Part;
use std::fs::File;
use std::io;
use std::sync::Arc;
use virtio_spec::split::QUEUE_SIZE_MAX;
use virtqueue::{Chain, ChainHead, InflightChain, Layout, SharedMapping, VirtQueue};

/// Version of the layout.
const VERSION: u16 = 1;
/// Alignment of the size of a queue's part; other back-ends use the same layout.
const PART_ALIGN_BYTES: usize = 64;

/// Size of one queue's part of the region in bytes.
pub fn queue_region_bytes(layout: Layout, queue_size: u16) -> usize {
    let bytes = match layout {
        Layout::Split => split::bytes(queue_size),
        Layout::Packed => packed::bytes(queue_size),
    };
    bytes.next_multiple_of(PART_ALIGN_BYTES)
}

/// A mapped region for all queues.
#[derive(Debug)]
pub struct InflightRegion {
    mapping: SharedMapping,
    /// Bytes of one queue's part.
    part_bytes: usize,
    num_queues: u16,
}

impl InflightRegion {
    /// Maps `len` bytes of `file` from byte `offset` on as the region of `num_queues` queues of at
    /// least `queue_size` descriptors. The queues share the region in equal parts, so a region with
    /// more room than the front-end asked for keeps larger queues, too.
    ///
    /// # Errors
    /// An error if the length is too small for the queues or larger than any queues need, the offset
    /// is not a multiple of 8, or the file cannot be mapped.
    pub fn map(
        file: File,
        offset: u64,
        len: u64,
        num_queues: u16,
        queue_size: u16,
    ) -> io::Result<Arc<Self>> {
        let bad = |text: &str| io::Error::new(io::ErrorKind::InvalidInput, text.to_string());
        if !offset.is_multiple_of(8) {
            return Err(bad("the in-flight region's offset is not a multiple of 8"));
        }
        let needed = queue_region_bytes(Layout::Split, queue_size) * usize::from(num_queues);
        if len < needed as u64 {
            return Err(bad("the in-flight region is too small for its queues"));
        }
        let most = queue_region_bytes(Layout::Packed, QUEUE_SIZE_MAX) * usize::from(num_queues);
        if len > most as u64 {
            return Err(bad("the in-flight region is larger than its queues can be"));
        }
        let mapping = SharedMapping::map(file, offset, len).map_err(|cause| bad(&cause))?;
        let part_bytes = len as usize / usize::from(num_queues.max(1));
        let part_bytes = part_bytes - part_bytes % PART_ALIGN_BYTES;
        Ok(Arc::new(InflightRegion { mapping, part_bytes, num_queues }))
    }
}

impl InflightRegion {
    /// The mapped file, and the offset and the length of the region in it, in bytes.
    pub fn file(&self) -> (&File, u64, u64) {
        let (file, offset) = self.mapping.file();
        (file, offset, self.mapping.size() as u64)
    }

    /// Number of queues that share the region.
    pub fn num_queues(&self) -> u16 {
        self.num_queues
    }

    /// Address in this process of the part of split queue `index`; `None` if it has no room for
    /// `size` descriptors.
    pub(crate) fn split_part(&self, index: u16, size: u16) -> Option<u64> {
        let start = self.part_start(index, Layout::Split, size)?;
        Some(self.mapping.as_ptr() as u64 + start as u64)
    }

    /// Bytes before the part of queue `index`, where it has room for `size` descriptors.
    fn part_start(&self, index: u16, layout: Layout, size: u16) -> Option<usize> {
        let fits = index < self.num_queues && queue_region_bytes(layout, size) <= self.part_bytes;
        // All parts lie in the mapping, as `part_bytes` is rounded down.
        fits.then(|| usize::from(index) * self.part_bytes)
    }
}

/// Logs that the requests of a queue are not tracked. A front-end can start queues in a loop.
#[cold]
pub(crate) fn log_no_room(queue: u16) {
    crate::log_once_per_second!(
        warn,
        queue,
        "the in-flight region has no room for this queue: its requests are not tracked"
    );
}

/// Logs the recovery of a queue. A front-end can forge requests in flight before each start.
#[cold]
pub(crate) fn log_resubmits(queue: u16, chains: usize) {
    crate::log_once_per_second!(info, queue, chains, "resubmits the requests of a previous daemon");
}

/// The marked entries with the counters of their chains, in the order of these. Reads each counter once:
/// the front-end may change it meanwhile, and a sort whose keys change may panic.
fn in_order(marked: impl Iterator<Item = u16>, counter: impl Fn(u16) -> u64) -> Vec<(u64, u16)> {
    let mut heads: Vec<_> = marked.map(|head| (counter(head), head)).collect();
    heads.sort_unstable();
    heads
}

/// One queue's part of the region, owned by the thread of the queue.
#[derive(Debug)]
pub(crate) enum QueueRegion {
    Split(split::SplitPart),
    Packed(packed::PackedPart),
}

impl QueueRegion {
    /// Opens the part of queue `index`. Returns it with the chains that a previous daemon left in
    /// flight, and moves `virtqueue` behind them: the caller must take these chains again first.
    /// Returns `None` if the region has no room for the queue.
    pub(crate) fn open(
        region: &Arc<InflightRegion>,
        layout: Layout,
        index: u16,
        virtqueue: &mut VirtQueue,
    ) -> Option<(Self, Vec<InflightChain>)> {
        let size = virtqueue.size();
        let start = region.part_start(index, layout, size)?;
        let part = Part::new(region, start, region.part_bytes)?;
        // The record of a previous daemon overrides the front-end's base, which may be outdated.
        let (opened, left) = match layout {
            Layout::Split => {
                let (part, heads) = split::SplitPart::open(part, size, virtqueue.used_index());
                let resubmit = |heads: Vec<u16>| -> Vec<_> {
                    heads.into_iter().map(|head| InflightChain::Split { head }).collect()
                };
                let left = heads.map(resubmit);
                if let Some(left) = &left {
                    virtqueue.resume(virtqueue.used_index(), left);
                }
                (QueueRegion::Split(part), left)
            }
            Layout::Packed => {
                let left = packed::left(&part, size, |position| virtqueue.was_used_at(position));
                let used_index =
                    left.as_ref().map_or(virtqueue.used_index(), |left| left.used_index);
                let chains = left.as_ref().map_or(&[][..], |left| &left.chains);
                let part = packed::PackedPart::open(part, size, used_index, chains);
                let resubmit = |left: packed::Left| -> Vec<_> {
                    let descs = left.chains.into_iter().map(|chain| chain.descs);
                    descs.map(|descs| InflightChain::Packed { descs }).collect()
                };
                let left = left.map(resubmit);
                if let Some(left) = &left {
                    virtqueue.resume(used_index, left);
                }
                (QueueRegion::Packed(part), left)
            }
        };
        let left = left.unwrap_or_default();
        Some((opened, left))
    }

    /// Records a chain that was taken again. A packed part already contains it.
    pub(crate) fn taken_resubmitted(&mut self, head: &ChainHead) {
        if let QueueRegion::Split(part) = self {
            part.taken(head.id());
        }
    }

    /// Returns whether an access found that the front-end has truncated a part of the region.
    #[inline]
    pub(crate) fn is_lost(&self) -> bool {
        match self {
            QueueRegion::Split(part) => part.is_lost(),
            QueueRegion::Packed(part) => part.is_lost(),
        }
    }

    /// Records a taken chain: it is in flight from now on.
    #[inline]
    pub(crate) fn taken(&mut self, head: &ChainHead, chain: &Chain) {
        match self {
            QueueRegion::Split(part) => part.taken(head.id()),
            QueueRegion::Packed(part) => part.taken(head.id(), chain.ring_descriptors()),
        }
    }

    /// Records a chain before it is pushed to the used virtqueue.
    #[inline]
    pub(crate) fn pushing(&mut self, head: &ChainHead) {
        match self {
            QueueRegion::Split(part) => part.pushing(head.id()),
            QueueRegion::Packed(part) => part.pushing(head.id()),
        }
    }

    /// Prepares the publication of the pushed chains, after which the used index is `used_index`.
    #[inline]
    pub(crate) fn publishing(&mut self, used_index: u16) {
        if let QueueRegion::Packed(part) = self {
            part.publishing(used_index);
        }
    }

    /// Clears the pushed chains after their publication; the used index is `used_index`.
    #[inline]
    pub(crate) fn published(&mut self, used_index: u16) {
        match self {
            QueueRegion::Split(part) => part.published(used_index),
            QueueRegion::Packed(part) => part.published(used_index),
        }
    }
}
