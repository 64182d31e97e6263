// SPDX-License-Identifier: Apache-2.0
//! The in-flight region (vhost-user, "Inflight I/O tracking"): shared memory in which the data
//! plane keeps, for every queue, which chains it has taken and not given back, so that a later
//! daemon can finish them. Kept true from the first request on.
// UNSAFETY: the region is memory shared with the front-end; every access goes through `cell`,
// which checks it against the queue's part of the mapping.
#![expect(unsafe_code)]

use std::fs::File;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicU16, AtomicU64, Ordering, fence};
use virtqueue::{ChainHead, Layout};
use vm_memory::{FileOffset, MmapRegion};

/// Version of the layout.
const VERSION: u16 = 1;
/// Header of a queue's part, and one entry of it, in bytes: split.
const SPLIT_HEADER_BYTES: usize = 16;
const SPLIT_ENTRY_BYTES: usize = 16;
/// ... and packed.
const PACKED_HEADER_BYTES: usize = 32;
const PACKED_ENTRY_BYTES: usize = 32;
/// A queue's part is a multiple of this, as QEMU's library lays it out.
const QUEUE_ALIGN_BYTES: usize = 64;

/// Bytes that one queue needs in the region.
pub fn queue_region_bytes(layout: Layout, queue_size: u16) -> usize {
    let size = usize::from(queue_size);
    let bytes = match layout {
        Layout::Split => SPLIT_HEADER_BYTES + SPLIT_ENTRY_BYTES * size,
        Layout::Packed => PACKED_HEADER_BYTES + PACKED_ENTRY_BYTES * size,
    };
    bytes.next_multiple_of(QUEUE_ALIGN_BYTES)
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
    /// A length too small for the larger of the two layouts in use, or a failed `mmap`.
    pub fn map(
        file: File,
        offset: u64,
        len: u64,
        num_queues: u16,
        queue_size: u16,
    ) -> io::Result<Arc<Self>> {
        let bad = |text: &str| io::Error::new(io::ErrorKind::InvalidInput, text.to_string());
        let offset = usize::try_from(offset).map_err(|_| bad("the offset is too large"))?;
        let needed = queue_region_bytes(Layout::Split, queue_size) * usize::from(num_queues);
        if len < needed as u64 {
            return Err(bad("the in-flight region is too small for its queues"));
        }
        let end = usize::try_from(len).ok().and_then(|len| len.checked_add(offset));
        let mapping = MmapRegion::build(
            Some(FileOffset::new(file, 0)),
            end.ok_or_else(|| bad("the in-flight region is too large"))?,
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_SHARED,
        )
        .map_err(|e| io::Error::other(e.to_string()))?;
        Ok(Arc::new(InflightRegion { mapping, offset, queue_size, num_queues }))
    }
}

/// One queue's part of the region, as its data-plane thread keeps it.
#[derive(Debug)]
pub(crate) struct QueueRegion {
    region: Arc<InflightRegion>,
    layout: Layout,
    start: usize,
    len: usize,
    counter: u64,
    /// Region entries of the batch that is pushed and not yet published.
    batch: Vec<u16>,
    /// Packed: free region entries, and where each buffer id's entry is.
    free: Vec<u16>,
    entry_of_id: Vec<u16>,
}

const NO_ENTRY: u16 = u16::MAX;

/// Field offsets of the two headers and entries.
mod at {
    pub(super) const VERSION: usize = 8;
    pub(super) const DESC_NUM: usize = 10;
    pub(super) const SPLIT_LAST_BATCH_HEAD: usize = 12;
    pub(super) const SPLIT_USED_IDX: usize = 14;
    pub(super) const PACKED_USED_IDX: usize = 16;
    pub(super) const PACKED_USED_WRAP: usize = 20;
    pub(super) const ENTRY_INFLIGHT: usize = 0;
    pub(super) const SPLIT_ENTRY_NEXT: usize = 6;
    pub(super) const SPLIT_ENTRY_COUNTER: usize = 8;
    pub(super) const PACKED_ENTRY_NUM: usize = 6;
    pub(super) const PACKED_ENTRY_COUNTER: usize = 8;
    pub(super) const PACKED_ENTRY_ID: usize = 16;
}

impl QueueRegion {
    /// The part of queue `index`, made ready for a queue of `size` descriptors whose used index is
    /// `used_index`. `None` when the region has no room for it.
    pub(crate) fn new(
        region: &Arc<InflightRegion>,
        layout: Layout,
        index: u16,
        size: u16,
        used_index: u16,
    ) -> Option<Self> {
        let len = queue_region_bytes(layout, region.queue_size);
        let start = region.offset + len * usize::from(index);
        let fits = index < region.num_queues
            && size <= region.queue_size
            && start + len <= region.mapping.size();
        let packed = layout == Layout::Packed;
        let mut part = QueueRegion {
            region: Arc::clone(region),
            layout,
            start,
            len,
            counter: 0,
            batch: Vec::with_capacity(usize::from(size)),
            free: if packed { (0..size).rev().collect() } else { Vec::new() },
            entry_of_id: if packed { vec![NO_ENTRY; 1 << 16] } else { Vec::new() },
        };
        fits.then(|| {
            part.store_u16(at::VERSION, VERSION);
            part.store_u16(at::DESC_NUM, size);
            part.store_used_index(used_index);
            part
        })
    }

    /// A chain was taken: it is in flight from now on.
    #[inline]
    pub(crate) fn taken(&mut self, head: &ChainHead) {
        self.counter += 1;
        let entry = match self.layout {
            Layout::Split => {
                let entry = SPLIT_HEADER_BYTES + SPLIT_ENTRY_BYTES * usize::from(head.id());
                self.store_u64(entry + at::SPLIT_ENTRY_COUNTER, self.counter);
                entry
            }
            Layout::Packed => {
                let Some(slot) = self.free.pop() else { return };
                self.entry_of_id[usize::from(head.id())] = slot;
                let entry = PACKED_HEADER_BYTES + PACKED_ENTRY_BYTES * usize::from(slot);
                self.store_u64(entry + at::PACKED_ENTRY_COUNTER, self.counter);
                self.store_u16(entry + at::PACKED_ENTRY_ID, head.id());
                self.store_u16(entry + at::PACKED_ENTRY_NUM, head.ring_descriptors());
                entry
            }
        };
        self.store_u8(entry + at::ENTRY_INFLIGHT, 1);
    }

    /// A chain is about to be pushed to the used ring.
    #[inline]
    pub(crate) fn pushing(&mut self, head: &ChainHead) {
        match self.layout {
            Layout::Split => {
                let entry = SPLIT_HEADER_BYTES + SPLIT_ENTRY_BYTES * usize::from(head.id());
                let previous = self.load_u16(at::SPLIT_LAST_BATCH_HEAD);
                self.store_u16(entry + at::SPLIT_ENTRY_NEXT, previous);
                self.store_u16(at::SPLIT_LAST_BATCH_HEAD, head.id());
                self.batch.push(head.id());
            }
            Layout::Packed => {
                let known = &mut self.entry_of_id[usize::from(head.id())];
                let slot = std::mem::replace(known, NO_ENTRY);
                if slot != NO_ENTRY {
                    self.batch.push(slot);
                }
            }
        }
    }

    /// The batch was published; the used index is now `used_index`.
    #[inline]
    pub(crate) fn published(&mut self, used_index: u16) {
        if self.batch.is_empty() {
            return;
        }
        // The used index must be visible before the entries are cleared (step 6 of the spec).
        fence(Ordering::Release);
        let (header, size) = match self.layout {
            Layout::Split => (SPLIT_HEADER_BYTES, SPLIT_ENTRY_BYTES),
            Layout::Packed => (PACKED_HEADER_BYTES, PACKED_ENTRY_BYTES),
        };
        for i in 0..self.batch.len() {
            let entry = header + size * usize::from(self.batch[i]);
            self.store_u8(entry + at::ENTRY_INFLIGHT, 0);
        }
        if self.layout == Layout::Packed {
            self.free.extend_from_slice(&self.batch);
        }
        self.batch.clear();
        fence(Ordering::Release);
        self.store_used_index(used_index);
    }

    fn store_used_index(&mut self, used_index: u16) {
        match self.layout {
            Layout::Split => self.store_u16(at::SPLIT_USED_IDX, used_index),
            Layout::Packed => {
                self.store_u16(at::PACKED_USED_IDX, used_index & 0x7fff);
                self.store_u8(at::PACKED_USED_WRAP, u8::from(used_index & 0x8000 != 0));
            }
        }
    }

    #[inline]
    fn cell<T>(&self, offset: usize) -> *mut T {
        let size = size_of::<T>();
        assert!(offset + size <= self.len && offset.is_multiple_of(size), "entry at {offset}");
        self.region.mapping.as_ptr().wrapping_add(self.start + offset).cast()
    }

    #[inline]
    fn store_u8(&self, offset: usize, value: u8) {
        // SAFETY: `cell` checked the bounds; the region keeps the mapping.
        unsafe { AtomicU8::from_ptr(self.cell(offset)) }.store(value, Ordering::Relaxed);
    }

    #[inline]
    fn store_u16(&self, offset: usize, value: u16) {
        // SAFETY: as above; parts start at multiples of 64 (the mapping's offset is checked).
        unsafe { AtomicU16::from_ptr(self.cell(offset)) }.store(value.to_le(), Ordering::Relaxed);
    }

    #[inline]
    fn load_u16(&self, offset: usize) -> u16 {
        // SAFETY: as above.
        u16::from_le(unsafe { AtomicU16::from_ptr(self.cell(offset)) }.load(Ordering::Relaxed))
    }

    #[inline]
    fn store_u64(&self, offset: usize, value: u64) {
        // SAFETY: as above.
        unsafe { AtomicU64::from_ptr(self.cell(offset)) }.store(value.to_le(), Ordering::Relaxed);
    }
}
