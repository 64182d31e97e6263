// SPDX-License-Identifier: Apache-2.0
//! Driver side of the packed ring (section 2.8). Ids and chain lengths are kept in private memory.

use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};

use virtio_spec::packed::{
    DESC_ALIGN, DESC_F_AVAIL, DESC_F_NEXT, DESC_F_USED, EVENT_BYTES, EVENT_DESC, EVENT_DISABLE,
    EVENT_ENABLE, desc_ring_bytes,
};

use crate::memory::{Area, GuestMemory};
use crate::queue::{RingError, Segment, Used, packed_word, passes_event};

/// Bit 15 of `off_wrap` and of both halves of the vring base.
const WRAP_BIT: u16 = 1 << 15;

/// A place in the ring with its wrap counter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Position {
    index: u16,
    wrap: bool,
}

impl Position {
    const START: Self = Self { index: 0, wrap: true };

    #[inline]
    fn advance(&mut self, by: u16, size: u16) {
        self.index += by;
        if self.index >= size {
            self.index -= size;
            self.wrap = !self.wrap;
        }
    }

    fn off_wrap(self) -> u16 {
        self.index | if self.wrap { WRAP_BIT } else { 0 }
    }

    /// The flags that make a descriptor available at this place (section 2.8.1).
    #[inline]
    fn avail_flags(self) -> u16 {
        if self.wrap { DESC_F_AVAIL } else { DESC_F_USED }
    }
}

/// A packed virtqueue, driver side.
#[derive(Debug)]
pub struct PackedRing {
    size: u16,
    event_idx: bool,
    desc: Area,
    driver_event: Area,
    device_event: Area,
    free_ids: Vec<u16>,
    /// Descriptors of the chain with each id; 0 if the id is free.
    chain_len: Vec<u16>,
    free: u16,
    next_avail: Position,
    next_used: Position,
    /// Head flags of the first chain not yet published: stored last, they show the whole batch.
    withheld: Option<(u16, u16)>,
    /// Descriptors published since the last kick decision.
    unkicked: u16,
}

impl PackedRing {
    /// Puts an empty ring of `size` descriptors into guest memory.
    pub fn new(memory: &Arc<GuestMemory>, size: u16, event_idx: bool) -> Self {
        assert!(size > 0 && size <= WRAP_BIT, "a packed ring has 1 to 32768 descriptors");
        let mut ring = Self {
            size,
            event_idx,
            desc: memory.alloc_area(desc_ring_bytes(size), DESC_ALIGN.max(64) as usize),
            driver_event: memory.alloc_area(EVENT_BYTES, 64),
            device_event: memory.alloc_area(EVENT_BYTES, 64),
            free_ids: Vec::new(),
            chain_len: Vec::new(),
            free: 0,
            next_avail: Position::START,
            next_used: Position::START,
            withheld: None,
            unkicked: 0,
        };
        ring.forget_all();
        ring
    }

    /// Resets the ring to empty at its start, also in guest memory.
    pub fn reset(&mut self) {
        self.desc.write(0, &vec![0; self.desc.len()]);
        self.driver_event.store_u32(0, 0, Ordering::Relaxed);
        self.device_event.store_u32(0, 0, Ordering::Relaxed);
        self.next_avail = Position::START;
        self.next_used = Position::START;
        self.withheld = None;
        self.unkicked = 0;
        self.forget_all();
    }

    fn forget_all(&mut self) {
        self.free_ids = (0..self.size).rev().collect();
        self.chain_len = vec![0; self.size.into()];
        self.free = self.size;
    }

    /// Guest-physical addresses of descriptor ring, driver event and device event structures.
    pub fn addresses(&self) -> [u64; 3] {
        [self.desc.gpa(), self.driver_event.gpa(), self.device_event.gpa()]
    }

    /// The position up to which chains were collected, for SET_VRING_BASE: the same in the avail
    /// (low) and in the used (high) half.
    pub fn base(&self) -> u32 {
        u32::from(self.next_used.off_wrap()) * 0x1_0001
    }

    /// Chains added and not yet returned.
    pub fn in_flight(&self) -> u16 {
        self.size - self.free_ids.len() as u16
    }

    /// The id that the next chain will get.
    pub fn next_slot(&self) -> Option<u16> {
        if self.free == 0 { None } else { self.free_ids.last().copied() }
    }

    /// Adds a chain of one or more descriptors; returns its buffer id.
    pub fn add(&mut self, segments: &[Segment]) -> Result<u16, RingError> {
        assert!(!segments.is_empty(), "a chain has at least one descriptor");
        if segments.len() > self.free.into() {
            return Err(RingError::Full);
        }
        let id = self.take_id(segments.len() as u16)?;
        let last = segments.len() - 1;
        for (i, segment) in segments.iter().enumerate() {
            let next = if i == last { 0 } else { DESC_F_NEXT };
            self.place(segment.gpa, segment.len, id, segment.flags() | next, i == 0);
        }
        Ok(id)
    }

    /// Adds a chain of one descriptor with flags as given (avail and used bits excepted).
    #[inline]
    pub fn add_one(&mut self, gpa: u64, len: u32, flags: u16) -> Result<u16, RingError> {
        if self.free == 0 {
            return Err(RingError::Full);
        }
        let id = self.take_id(1)?;
        self.place(gpa, len, id, flags, true);
        Ok(id)
    }

    #[inline]
    fn take_id(&mut self, descriptors: u16) -> Result<u16, RingError> {
        let id = self.free_ids.pop().ok_or(RingError::Full)?;
        self.chain_len[usize::from(id)] = descriptors;
        self.free -= descriptors;
        Ok(id)
    }

    /// Writes the next descriptor of the ring without bookkeeping of ids (hostile chains too). The
    /// flags of the first head since the last publish are withheld until then.
    #[inline]
    pub fn place(&mut self, gpa: u64, len: u32, id: u16, flags: u16, head: bool) {
        let index = self.next_avail.index;
        let flags = flags | self.next_avail.avail_flags();
        if head && self.withheld.is_none() {
            self.withheld = Some((index, flags));
            // Stores all but the flags; those in memory still say "not available".
            let at = 16 * usize::from(index);
            self.desc.store_u64(at, gpa, Ordering::Relaxed);
            self.desc.store_u32(at + 8, len, Ordering::Relaxed);
            self.desc.store_u16(at + 12, id, Ordering::Relaxed);
        } else {
            self.write_descriptor(index, gpa, len, id, flags);
        }
        self.next_avail.advance(1, self.size);
        self.unkicked += 1;
    }

    /// Writes a descriptor unchanged, avail and used bits included (hostile).
    #[inline]
    pub fn write_descriptor(&self, index: u16, gpa: u64, len: u32, id: u16, flags: u16) {
        let at = 16 * usize::from(index);
        self.desc.store_u64(at, gpa, Ordering::Relaxed);
        self.desc.store_u64(at + 8, packed_word(len, id, flags), Ordering::Release);
    }

    /// The descriptor ring, driver event and device event structures as they lie in memory.
    pub fn areas(&self) -> [&Area; 3] {
        [&self.desc, &self.driver_event, &self.device_event]
    }

    /// Publishes all added chains to the device.
    #[inline]
    pub fn publish(&mut self) {
        if let Some((index, flags)) = self.withheld.take() {
            self.desc.store_u16(16 * usize::from(index) + 14, flags, Ordering::Release);
        }
    }

    /// True if the device asks for a kick for the chains published since the last call.
    #[inline]
    pub fn kick_is_asked(&mut self) -> bool {
        // Pairs with the device: store its event structure, fence, load the descriptor's flags.
        fence(Ordering::SeqCst);
        let added = std::mem::take(&mut self.unkicked);
        if added == 0 {
            return false;
        }
        let event = self.device_event.load_u32(0, Ordering::Relaxed);
        let (off_wrap, flags) = (event as u16, (event >> 16) as u16);
        if !self.event_idx || flags != EVENT_DESC {
            return flags != EVENT_DISABLE;
        }
        let mut asked_at = off_wrap & !WRAP_BIT;
        if (off_wrap & WRAP_BIT != 0) != self.next_avail.wrap {
            asked_at = asked_at.wrapping_sub(self.size);
        }
        let new = self.next_avail.index;
        passes_event(asked_at, new, new.wrapping_sub(added))
    }

    #[inline]
    fn used_is_ready(&self) -> bool {
        let at = 16 * usize::from(self.next_used.index) + 14;
        let flags = self.desc.load_u16(at, Ordering::Acquire);
        let (avail, used) = (flags & DESC_F_AVAIL != 0, flags & DESC_F_USED != 0);
        avail == used && used == self.next_used.wrap
    }

    /// Takes the next used chain, if there is one.
    #[inline]
    pub fn take_used(&mut self) -> Result<Option<Used>, RingError> {
        if !self.used_is_ready() {
            return Ok(None);
        }
        let at = 16 * usize::from(self.next_used.index) + 8;
        let word = self.desc.load_u64(at, Ordering::Relaxed);
        let (len, id) = (word as u32, (word >> 32) as u16);
        let descriptors = self.chain_len.get(usize::from(id)).copied().unwrap_or(0);
        if descriptors == 0 {
            return Err(RingError::UnknownId(id.into()));
        }
        self.chain_len[usize::from(id)] = 0;
        self.free_ids.push(id);
        self.free += descriptors;
        self.next_used.advance(descriptors, self.size);
        Ok(Some(Used { id, len }))
    }

    /// Arms calls. `false`: the device has used a chain in the meantime, so do not sleep.
    #[inline]
    pub fn arm_calls(&mut self) -> bool {
        if self.event_idx {
            self.write_driver_event(self.next_used.off_wrap(), EVENT_DESC);
        } else {
            self.write_driver_event(0, EVENT_ENABLE);
        }
        // Pairs with the device: store the used descriptor, fence, load the driver's event.
        fence(Ordering::SeqCst);
        !self.used_is_ready()
    }

    /// Suppresses calls.
    #[inline]
    pub fn suppress_calls(&mut self) {
        self.write_driver_event(0, EVENT_DISABLE);
    }

    /// Stores the driver event suppression structure unchanged.
    #[inline]
    pub fn write_driver_event(&self, off_wrap: u16, flags: u16) {
        let word = u32::from(off_wrap) | u32::from(flags) << 16;
        self.driver_event.store_u32(0, word, Ordering::Relaxed);
    }
}
