// SPDX-License-Identifier: Apache-2.0
//! Split virtqueues, device side (section 2.7).

use crate::RingFault;
use crate::chain::{Chain, ChainHead, desc_from_le};
use crate::dirty_log::DirtyLog;
use crate::memory::GuestMemory;
use crate::notify::passed;
use crate::ring_area::RingArea;
use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};
use virtio_spec::split::{
    AVAIL_F_NO_INTERRUPT, DESC_F_INDIRECT, DESC_F_NEXT, IDX_OFFSET, RING_OFFSET, USED_F_NO_NOTIFY,
};

#[derive(Debug)]
pub(crate) struct SplitQueue {
    pub(crate) size: u16,
    pub(crate) desc: RingArea,
    pub(crate) avail: RingArea,
    pub(crate) used: RingArea,
    pub(crate) indirect: bool,
    pub(crate) event_idx: bool,
    /// Next avail entry to take.
    pub(crate) next_avail: u16,
    /// `avail.idx` as last read; the device may take the entries before it.
    pub(crate) seen_avail: u16,
    /// Next used entry to fill.
    pub(crate) next_used: u16,
    /// `used.idx` as last published.
    pub(crate) published: u16,
    /// `used.idx` at the last `needs_call`.
    pub(crate) signalled_used: u16,
    pub(crate) memory: Arc<GuestMemory>,
    pub(crate) hint: usize,
    pub(crate) log: Option<(Arc<DirtyLog>, u64)>,
}

impl SplitQueue {
    /// Returns whether the driver has made a chain available that was not taken yet.
    #[inline]
    pub(crate) fn has_avail(&mut self) -> Result<bool, RingFault> {
        if self.next_avail != self.seen_avail {
            return Ok(true);
        }
        // Acquire pairs with the driver's release of the entries before the index.
        let avail_idx = self.avail.load_u16(IDX_OFFSET, Ordering::Acquire);
        let ahead = avail_idx.wrapping_sub(self.next_avail);
        if ahead > self.size {
            return Err(RingFault::AvailIndex { avail_idx, next_avail: self.next_avail, ahead });
        }
        self.seen_avail = avail_idx;
        Ok(ahead != 0)
    }

    /// Returns the number of available chains; at most `size`, also if the index is faulty.
    /// [`SplitQueue::has_avail`] reports that fault.
    pub(crate) fn available(&self) -> u16 {
        // Relaxed: the caller reads no ring entry after this load.
        let avail_idx = self.avail.load_u16(IDX_OFFSET, Ordering::Relaxed);
        avail_idx.wrapping_sub(self.next_avail).min(self.size)
    }

    #[inline]
    pub(crate) fn take(&mut self, chain: &mut Chain) -> Result<Option<ChainHead>, RingFault> {
        if !self.has_avail()? {
            return Ok(None);
        }
        let entry = RING_OFFSET + 2 * usize::from(self.next_avail & (self.size - 1));
        let head = self.avail.load_u16(entry, Ordering::Relaxed);
        chain.begin(self.size, self.log.is_some());
        self.walk(head, chain)?;
        self.next_avail = self.next_avail.wrapping_add(1);
        Ok(Some(ChainHead { id: head, descs: 1 }))
    }

    pub(crate) fn take_resubmitted(
        &mut self,
        head: u16,
        chain: &mut Chain,
    ) -> Result<ChainHead, RingFault> {
        chain.begin(self.size, self.log.is_some());
        self.walk(head, chain)?;
        Ok(ChainHead { id: head, descs: 1 })
    }

    #[inline]
    fn walk(&mut self, head: u16, chain: &mut Chain) -> Result<(), RingFault> {
        let mut index = head;
        for _ in 0..self.size {
            if index >= self.size {
                return Err(RingFault::DescriptorIndex { index, size: self.size });
            }
            let desc = desc_from_le(self.desc.load_desc(index));
            if desc.flags & DESC_F_INDIRECT != 0 {
                if !self.indirect || desc.flags & DESC_F_NEXT != 0 {
                    return Err(RingFault::Indirect { len: desc.len });
                }
                return chain.add_indirect_split(&desc, &self.memory, &mut self.hint);
            }
            chain.add(&desc, &self.memory, &mut self.hint)?;
            if desc.flags & DESC_F_NEXT == 0 {
                return Ok(());
            }
            index = desc.next;
        }
        Err(RingFault::ChainTooLong { limit: u32::from(self.size) })
    }

    #[inline]
    pub(crate) fn push_used(&mut self, head: &ChainHead, written_bytes: u32) {
        let entry = RING_OFFSET + 8 * usize::from(self.next_used & (self.size - 1));
        self.used.store_u32_pair(entry, u32::from(head.id), written_bytes);
        self.mark_used(entry, 8);
        self.next_used = self.next_used.wrapping_add(1);
    }

    /// Release pairs with the driver's acquire of `used.idx`: the driver sees the entries, the
    /// status bytes and the data that were written before.
    #[inline]
    pub(crate) fn publish(&mut self) {
        if self.published != self.next_used {
            self.used.store_u16(IDX_OFFSET, self.next_used, Ordering::Release);
            self.mark_used(IDX_OFFSET, 2);
            self.published = self.next_used;
        }
    }

    #[inline]
    pub(crate) fn needs_call(&mut self) -> bool {
        let (old, new) = (self.signalled_used, self.published);
        if old == new {
            return false;
        }
        self.signalled_used = new;
        // Pairs with the driver's fence between its store of `used_event` (or the flag) and its
        // last read of `used.idx`: one side sees the store of the other.
        fence(Ordering::SeqCst);
        if self.event_idx {
            let used_event = RING_OFFSET + 2 * usize::from(self.size);
            passed(self.avail.load_u16(used_event, Ordering::Relaxed), new, old)
        } else {
            self.avail.load_u16(0, Ordering::Relaxed) & AVAIL_F_NO_INTERRUPT == 0
        }
    }

    /// See [`crate::VirtQueue::may_wait_for_call`].
    pub(crate) fn may_wait_for_call(&self) -> bool {
        // Pairs as in `needs_call`, for entries that the previous owner published.
        fence(Ordering::SeqCst);
        if self.event_idx {
            // The last call is not known here: any entry of the last lap may lack one.
            let used_event = RING_OFFSET + 2 * usize::from(self.size);
            let event = self.avail.load_u16(used_event, Ordering::Relaxed);
            passed(event, self.published, self.published.wrapping_sub(self.size))
        } else {
            self.avail.load_u16(0, Ordering::Relaxed) & AVAIL_F_NO_INTERRUPT == 0
        }
    }

    /// Asks for a kick at the next chain.
    pub(crate) fn arm(&mut self) {
        if self.event_idx {
            self.ask_for_kick_at(self.next_avail);
        } else {
            self.used.store_u16(0, 0, Ordering::Relaxed);
            self.mark_used(0, 2);
        }
        // Pairs with the driver's fence between its store of `avail.idx` and its read of
        // `avail_event`. The caller reads `avail.idx` once more after this.
        fence(Ordering::SeqCst);
    }

    /// Asks for no kicks. With EVENT_IDX it sets `avail_event` to an entry that the driver has
    /// passed: the value of an earlier `arm` would still cause a kick.
    pub(crate) fn suppress(&mut self) {
        if self.event_idx {
            self.ask_for_kick_at(self.next_avail.wrapping_sub(1));
        } else {
            self.used.store_u16(0, USED_F_NO_NOTIFY, Ordering::Relaxed);
            self.mark_used(0, 2);
        }
    }

    fn ask_for_kick_at(&mut self, entry: u16) {
        let avail_event = RING_OFFSET + 8 * usize::from(self.size);
        self.used.store_u16(avail_event, entry, Ordering::Relaxed);
        self.mark_used(avail_event, 2);
    }

    #[inline]
    fn mark_used(&self, offset: usize, len: u64) {
        if let Some((log, used_addr)) = &self.log {
            // The front-end chooses this address freely: it may be near the maximum.
            log.mark(used_addr.saturating_add(offset as u64), len);
        }
    }
}
