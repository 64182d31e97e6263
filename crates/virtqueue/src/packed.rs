// SPDX-License-Identifier: Apache-2.0
//! Packed virtqueues, device side (section 2.8).

use crate::RingFault;
use crate::chain::{Chain, ChainHead, buffer_of, packed_desc_from_le};
use crate::dirty_log::DirtyLog;
use crate::memory::GuestMemory;
use crate::notify::passed;
use crate::ring_area::RingArea;
use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};
use virtio_spec::packed::{
    DESC_F_AVAIL, DESC_F_INDIRECT, DESC_F_NEXT, DESC_F_USED, DESC_F_WRITE, Desc, EVENT_DESC,
    EVENT_DISABLE, EVENT_ENABLE,
};

/// Byte offsets in a descriptor and in an event suppression structure.
const LEN_OFFSET: usize = 8;
const ID_OFFSET: usize = 12;
pub(crate) const FLAGS_OFFSET: usize = 14;
/// The base of a new ring: both wrap counters are 1 (section 2.8.1).
pub(crate) const BASE_OF_NEW: u32 = 0x8000_8000;
const EVENT_FLAGS_OFFSET: usize = 2;

/// A position in the ring: descriptor offset and wrap counter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Position {
    pub(crate) offset: u16,
    pub(crate) wrap: bool,
}

impl Position {
    /// Bits 0-14 and 15 of `bits`, as in SET_VRING_BASE and the event suppression structures.
    pub(crate) fn from_bits(bits: u16) -> Self {
        Position { offset: bits & 0x7fff, wrap: bits & 0x8000 != 0 }
    }

    pub(crate) fn bits(self) -> u16 {
        self.offset | u16::from(self.wrap) << 15
    }

    #[inline]
    pub(crate) fn advance(&mut self, descs: u16, size: u16) {
        let next = u32::from(self.offset) + u32::from(descs);
        let wraps = next >= u32::from(size);
        self.offset = if wraps { next - u32::from(size) } else { next } as u16;
        self.wrap ^= wraps;
    }
}

#[derive(Debug)]
pub(crate) struct PackedQueue {
    pub(crate) size: u16,
    pub(crate) desc: RingArea,
    /// Event suppression, written by the driver.
    pub(crate) driver: RingArea,
    /// Event suppression, written by the device.
    pub(crate) device: RingArea,
    pub(crate) indirect: bool,
    pub(crate) event_idx: bool,
    pub(crate) keep_descriptors: bool,
    pub(crate) next_avail: Position,
    pub(crate) next_used: Position,
    /// Offset of the first unpublished used entry, and the flags that will publish it.
    pub(crate) unpublished: Option<(u16, u16)>,
    /// Descriptors used since a call was last considered.
    pub(crate) used_since_call: u32,
    pub(crate) memory: Arc<GuestMemory>,
    pub(crate) hint: usize,
    pub(crate) log: Option<Arc<DirtyLog>>,
}

impl PackedQueue {
    /// Returns whether the descriptor at the next position is available (section 2.8.1).
    #[inline]
    pub(crate) fn has_avail(&self) -> bool {
        let at = usize::from(self.next_avail.offset) * 16 + FLAGS_OFFSET;
        // Acquire pairs with the driver's release of the chain before its first flags.
        let flags = self.desc.load_u16(at, Ordering::Acquire);
        let (avail, used) = (flags & DESC_F_AVAIL != 0, flags & DESC_F_USED != 0);
        avail == self.next_avail.wrap && used != self.next_avail.wrap
    }

    #[inline]
    pub(crate) fn take(&mut self, chain: &mut Chain) -> Result<Option<ChainHead>, RingFault> {
        if !self.has_avail() {
            return Ok(None);
        }
        chain.begin(self.size, self.log.is_some());
        let head = self.walk(chain)?;
        self.next_avail.advance(head.descs, self.size);
        Ok(Some(head))
    }

    /// Moves the queue to the used position of a previous owner with `descs` descriptors in flight.
    /// Restores the available flags of used entries that it wrote but did not publish: the driver
    /// would otherwise accept them after this queue's next publication.
    pub(crate) fn resume(&mut self, used: Position, descs: usize) {
        self.next_used = used;
        self.next_avail = used;
        for _ in 0..descs {
            self.restore_available(self.next_avail);
            self.next_avail.advance(1, self.size);
        }
    }

    /// Restores the available flags of an unpublished used entry. The driver has not read it: the
    /// first entry of that batch is still unpublished.
    fn restore_available(&mut self, at: Position) {
        if !self.was_used_at(at) {
            return;
        }
        let offset = usize::from(at.offset) * 16 + FLAGS_OFFSET;
        let flags = self.desc.load_u16(offset, Ordering::Relaxed) & !(DESC_F_AVAIL | DESC_F_USED);
        let available = if at.wrap { DESC_F_AVAIL } else { DESC_F_USED };
        // The release in `publish` orders this for the driver.
        self.desc.store_u16(offset, flags | available, Ordering::Relaxed);
        if let Some(log) = &self.log {
            log.mark(self.desc.guest_addr(offset), 2);
        }
    }

    pub(crate) fn take_resubmitted(
        &mut self,
        descs: &[Desc],
        chain: &mut Chain,
    ) -> Result<ChainHead, RingFault> {
        chain.begin(self.size, self.log.is_some());
        let mut taken = 0;
        for desc in descs {
            taken += 1;
            if self.add(*desc, taken, chain)? {
                return Ok(ChainHead { id: desc.id, descs: taken });
            }
        }
        Err(RingFault::ChainTooLong { limit: u32::from(taken) })
    }

    /// Returns whether the entry at `at` was published as used: its used bit equals the wrap
    /// counter. The avail bit proves nothing: the driver may have made the descriptor available
    /// again.
    pub(crate) fn was_used_at(&self, at: Position) -> bool {
        if at.offset >= self.size {
            return false;
        }
        let offset = usize::from(at.offset) * 16 + FLAGS_OFFSET;
        // Acquire pairs with the release in `publish` of the previous owner of the queue.
        let flags = self.desc.load_u16(offset, Ordering::Acquire);
        (flags & DESC_F_USED != 0) == at.wrap
    }

    #[inline]
    fn walk(&mut self, chain: &mut Chain) -> Result<ChainHead, RingFault> {
        let mut at = self.next_avail;
        for descs in 1..=self.size {
            let desc = packed_desc_from_le(self.desc.load_desc(at.offset));
            if self.add(desc, descs, chain)? {
                return Ok(ChainHead { id: desc.id, descs });
            }
            at.advance(1, self.size);
        }
        Err(RingFault::ChainTooLong { limit: u32::from(self.size) })
    }

    /// Adds descriptor number `position` (from 1) of the chain; returns whether it is the last.
    #[inline]
    fn add(&mut self, desc: Desc, position: u16, chain: &mut Chain) -> Result<bool, RingFault> {
        if self.keep_descriptors {
            chain.keep(desc);
        }
        let buffer = buffer_of(&desc);
        if desc.flags & DESC_F_INDIRECT != 0 {
            if !self.indirect || position > 1 || desc.flags & DESC_F_NEXT != 0 {
                return Err(RingFault::Indirect { len: desc.len });
            }
            chain.add_indirect_packed(&buffer, &self.memory, &mut self.hint)?;
            return Ok(true);
        }
        chain.add(&buffer, &self.memory, &mut self.hint)?;
        Ok(desc.flags & DESC_F_NEXT == 0)
    }

    #[inline]
    pub(crate) fn push_used(&mut self, head: &ChainHead, written_bytes: u32) {
        let Position { offset, wrap } = self.next_used;
        let at = usize::from(offset) * 16;
        self.desc.store_u32(at + LEN_OFFSET, written_bytes);
        self.desc.store_u16(at + ID_OFFSET, head.id, Ordering::Relaxed);
        let mut flags = if wrap { DESC_F_AVAIL | DESC_F_USED } else { 0 };
        if written_bytes > 0 {
            flags |= DESC_F_WRITE; // section 2.8.4: `len` is valid
        }
        match self.unpublished {
            // The driver stops at the first entry of a batch until `publish` writes its flags.
            None => self.unpublished = Some((offset, flags)),
            // Release pairs with the driver's acquire of each entry's flags: it sees id and length.
            Some(_) => self.desc.store_u16(at + FLAGS_OFFSET, flags, Ordering::Release),
        }
        if let Some(log) = &self.log {
            log.mark(self.desc.guest_addr(at), 16);
        }
        self.next_used.advance(head.descs, self.size);
        self.used_since_call += u32::from(head.descs);
    }

    /// Release pairs with the driver's acquire of the flags: it sees ids, lengths, status bytes
    /// and data of the whole batch.
    #[inline]
    pub(crate) fn publish(&mut self) {
        if let Some((offset, flags)) = self.unpublished.take() {
            let at = usize::from(offset) * 16 + FLAGS_OFFSET;
            self.desc.store_u16(at, flags, Ordering::Release);
            if let Some(log) = &self.log {
                log.mark(self.desc.guest_addr(at), 2); // after the write: a mark before may be lost
            }
        }
    }

    #[inline]
    pub(crate) fn needs_call(&mut self) -> bool {
        let used = std::mem::take(&mut self.used_since_call);
        if used == 0 {
            return false;
        }
        // Pairs with the driver's fence between its write of the event suppression structure and
        // its last read of the ring: one side sees the store of the other.
        fence(Ordering::SeqCst);
        // Acquire pairs with the driver's release store of the flags after the position.
        match self.driver.load_u16(EVENT_FLAGS_OFFSET, Ordering::Acquire) & 3 {
            EVENT_DISABLE => false,
            EVENT_DESC if self.event_idx && used < u32::from(self.size) => {
                let event = Position::from_bits(self.driver.load_u16(0, Ordering::Relaxed));
                let new = self.next_used;
                let same_lap = event.wrap == new.wrap;
                let lap = if same_lap { 0 } else { self.size };
                passed(
                    event.offset.wrapping_sub(lap),
                    new.offset,
                    new.offset.wrapping_sub(used as u16),
                )
            }
            _ => true,
        }
    }

    /// See [`crate::VirtQueue::may_wait_for_call`]. With EVENT_DESC the answer depends on the last
    /// call, which is not known here: it counts as a request for a call.
    pub(crate) fn may_wait_for_call(&self) -> bool {
        // Pairs as in `needs_call`, for entries that the previous owner published.
        fence(Ordering::SeqCst);
        self.driver.load_u16(EVENT_FLAGS_OFFSET, Ordering::Acquire) & 3 != EVENT_DISABLE
    }

    /// Asks for a kick at the next chain.
    pub(crate) fn arm(&mut self) {
        let flags = if self.event_idx { EVENT_DESC } else { EVENT_ENABLE };
        self.device.store_u16(0, self.next_avail.bits(), Ordering::Relaxed);
        // Release pairs with the driver's acquire of these flags: it sees the position.
        self.device.store_u16(EVENT_FLAGS_OFFSET, flags, Ordering::Release);
        self.mark_device_area();
        // Pairs with the driver's fence between its store of the flags and its read of this
        // structure. The caller reads the ring once more after this.
        fence(Ordering::SeqCst);
    }

    /// Asks for no kicks.
    pub(crate) fn suppress(&mut self) {
        self.device.store_u16(EVENT_FLAGS_OFFSET, EVENT_DISABLE, Ordering::Relaxed);
        self.mark_device_area();
    }

    fn mark_device_area(&self) {
        if let Some(log) = &self.log {
            log.mark(self.device.guest_addr(0), 4);
        }
    }
}
