// SPDX-License-Identifier: Apache-2.0
//! The in-flight region (vhost-user, "Inflight I/O tracking"): shared memory in which the data
//! plane keeps, for every queue, which chains it has taken and not given back, so that a later
//! daemon can finish them. Kept true from the first request on.
//!
//! The front-end can write here too: what is read back, once, when a queue is opened, is checked
//! like a ring is. While a queue runs nothing is read; what the data plane needs to know of its
//! own doings, it keeps for itself.
//!
//! The release fences order the stores for one reader: the daemon that comes after this one died.
//! Its loads need no fence, as it maps the region only after that.

mod packed;
mod part;
mod split;

use part::Part;
use std::fs::File;
use std::io;
use std::sync::Arc;
use virtqueue::{Chain, ChainHead, Layout, Resubmit, VirtQueue};
use vm_memory::{FileOffset, MmapRegion};

/// Version of the layout.
const VERSION: u16 = 1;
/// A queue's part is a multiple of this, as other back-ends lay it out.
const PART_ALIGN_BYTES: usize = 64;

/// Bytes that one queue needs in the region.
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
    mapping: MmapRegion,
    offset: usize,
    queue_size: u16,
    num_queues: u16,
}

impl InflightRegion {
    /// Maps `len` bytes of `file` from `offset` on as the region of `num_queues` queues of at most
    /// `queue_size` descriptors.
    ///
    /// # Errors
    /// A length too small for the queues, an offset that is not a multiple of 8, or a failed
    /// `mmap`.
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
        let end = offset.checked_add(len).and_then(|end| usize::try_from(end).ok());
        let mapping = MmapRegion::build(
            Some(FileOffset::new(file, 0)),
            end.ok_or_else(|| bad("the in-flight region is too large"))?,
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_SHARED,
        )
        .map_err(|e| io::Error::other(e.to_string()))?;
        let offset = offset as usize; // `end` fits, so this does
        Ok(Arc::new(InflightRegion { mapping, offset, queue_size, num_queues }))
    }
}

impl InflightRegion {
    /// This process's address of the part of split queue `index`, where it has room for `size`
    /// descriptors.
    pub(crate) fn split_part(&self, index: u16, size: u16) -> Option<u64> {
        let fits = index < self.num_queues && size <= self.queue_size;
        let start = usize::from(index) * queue_region_bytes(Layout::Split, self.queue_size);
        // `map` made sure that there is room for all queues.
        fits.then(|| self.mapping.as_ptr() as u64 + (self.offset + start) as u64)
    }
}

/// One queue's part of the region, as its data-plane thread keeps it.
#[derive(Debug)]
pub(crate) enum QueueRegion {
    Split(split::SplitPart),
    Packed(packed::PackedPart),
}

impl QueueRegion {
    /// The part of queue `index`, made ready for `ring`, and the chains that an earlier daemon
    /// left in flight in it, which are to be taken again first; `ring` is moved behind them.
    /// `None` when the region has no room for the queue.
    pub(crate) fn open(
        region: &Arc<InflightRegion>,
        layout: Layout,
        index: u16,
        ring: &mut VirtQueue,
    ) -> Option<(Self, Vec<Resubmit>)> {
        let size = ring.size();
        if index >= region.num_queues || size > region.queue_size {
            return None;
        }
        let len = queue_region_bytes(layout, region.queue_size);
        let part = Part::new(region, usize::from(index) * len, len)?;
        // The earlier daemon's word counts, where there was one: the front-end's base does not
        // know how far it came.
        let (opened, left) = match layout {
            Layout::Split => {
                let (part, heads) = split::SplitPart::open(part, size, ring.used_index());
                let resubmit = |heads: Vec<u16>| -> Vec<_> {
                    heads.into_iter().map(|head| Resubmit::Split { head }).collect()
                };
                let left = heads.map(resubmit);
                if let Some(left) = &left {
                    ring.resume(ring.used_index(), left);
                }
                (QueueRegion::Split(part), left)
            }
            Layout::Packed => {
                let left = packed::left(&part, size, |position| ring.was_used_at(position));
                let used_index = left.as_ref().map_or(ring.used_index(), |left| left.used_index);
                let chains = left.as_ref().map_or(&[][..], |left| &left.chains);
                let part = packed::PackedPart::open(part, size, used_index, chains);
                let resubmit = |left: packed::Left| -> Vec<_> {
                    let descs = left.chains.into_iter().map(|chain| chain.descs);
                    descs.map(|descs| Resubmit::Packed { descs }).collect()
                };
                let left = left.map(resubmit);
                if let Some(left) = &left {
                    ring.resume(used_index, left);
                }
                (QueueRegion::Packed(part), left)
            }
        };
        let left = left.unwrap_or_default();
        Some((opened, left))
    }

    /// A chain was taken again: as [`QueueRegion::taken`], where the part does not hold it yet.
    pub(crate) fn taken_again(&mut self, head: &ChainHead) {
        if let QueueRegion::Split(part) = self {
            part.taken(head.id());
        }
    }

    /// A chain was taken: it is in flight from now on.
    #[inline]
    pub(crate) fn taken(&mut self, head: &ChainHead, chain: &Chain) {
        match self {
            QueueRegion::Split(part) => part.taken(head.id()),
            QueueRegion::Packed(part) => part.taken(head.id(), chain.ring_descriptors()),
        }
    }

    /// A chain is about to be pushed to the used ring.
    #[inline]
    pub(crate) fn pushing(&mut self, head: &ChainHead) {
        match self {
            QueueRegion::Split(part) => part.pushing(head.id()),
            QueueRegion::Packed(part) => part.pushing(head.id()),
        }
    }

    /// The pushed chains are about to be published; the used index will be `used_index`.
    #[inline]
    pub(crate) fn publishing(&mut self, used_index: u16) {
        if let QueueRegion::Packed(part) = self {
            part.publishing(used_index);
        }
    }

    /// The pushed chains were published; the used index is `used_index`.
    #[inline]
    pub(crate) fn published(&mut self, used_index: u16) {
        match self {
            QueueRegion::Split(part) => part.published(used_index),
            QueueRegion::Packed(part) => part.published(used_index),
        }
    }
}
