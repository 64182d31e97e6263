// SPDX-License-Identifier: Apache-2.0
//! Driver side of the split ring (section 2.7). Free descriptors and chain lengths are kept in
//! private memory; the driver only writes the shared descriptor table and never reads it.

use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};

use virtio_spec::split::{
    AVAIL_ALIGN, AVAIL_F_NO_INTERRUPT, DESC_ALIGN, DESC_F_NEXT, IDX_OFFSET, RING_OFFSET,
    USED_ALIGN, USED_F_NO_NOTIFY, avail_ring_bytes, desc_table_bytes, used_ring_bytes,
};

use crate::memory::{Area, GuestMemory};
use crate::queue::{RingError, Segment, Used, passes_event, split_word};

/// Used entries after which a suppressed `used_event` is moved on, well before it wraps around.
const SUPPRESS_RENEW_ENTRIES: u16 = 0x4000;

/// A split virtqueue, driver side.
#[derive(Debug)]
pub struct SplitRing {
    size: u16,
    event_idx: bool,
    desc: Area,
    avail: Area,
    used: Area,
    /// Next descriptor after each one: in the free list, or in the chain that it belongs to.
    link: Vec<u16>,
    /// Descriptors of the chain that starts at each head; 0 if no chain in flight starts there.
    chain_len: Vec<u16>,
    free_head: u16,
    free: u16,
    in_flight: u16,
    avail_next: u16,
    avail_published: u16,
    avail_kicked: u16,
    used_next: u16,
    /// Last used index seen.
    used_seen: u16,
    /// Value of `used_next` when calls were last suppressed.
    suppressed_at: Option<u16>,
}

impl SplitRing {
    /// Puts an empty ring of `size` descriptors (a power of two) into guest memory.
    pub fn new(memory: &Arc<GuestMemory>, size: u16, event_idx: bool) -> Self {
        assert!(size.is_power_of_two(), "a split ring's size is a power of two");
        // Areas start on cache lines of their own, as in a careful driver.
        let line = |align: u64| align.max(64) as usize;
        let mut ring = Self {
            size,
            event_idx,
            desc: memory.alloc_area(desc_table_bytes(size), line(DESC_ALIGN)),
            avail: memory.alloc_area(avail_ring_bytes(size), line(AVAIL_ALIGN)),
            used: memory.alloc_area(used_ring_bytes(size), line(USED_ALIGN)),
            link: Vec::new(),
            chain_len: Vec::new(),
            free_head: 0,
            free: 0,
            in_flight: 0,
            avail_next: 0,
            avail_published: 0,
            avail_kicked: 0,
            used_next: 0,
            used_seen: 0,
            suppressed_at: None,
        };
        ring.forget_all();
        ring
    }

    /// Resets the ring to empty with all indices 0, also in guest memory.
    pub fn reset(&mut self) {
        self.avail.write(0, &vec![0; self.avail.len()]);
        self.used.write(0, &vec![0; self.used.len()]);
        self.avail_next = 0;
        self.avail_published = 0;
        self.avail_kicked = 0;
        self.used_next = 0;
        self.used_seen = 0;
        self.suppressed_at = None;
        self.forget_all();
    }

    fn forget_all(&mut self) {
        self.link = (1..=self.size).collect();
        self.chain_len = vec![0; self.size.into()];
        self.free_head = 0;
        self.free = self.size;
        self.in_flight = 0;
    }

    /// Guest-physical addresses of descriptor table, avail ring and used ring.
    pub fn addresses(&self) -> [u64; 3] {
        [self.desc.gpa(), self.avail.gpa(), self.used.gpa()]
    }

    /// The used index up to which chains were collected, for SET_VRING_BASE.
    pub fn base(&self) -> u16 {
        self.used_next
    }

    /// Chains added and not yet returned.
    pub fn in_flight(&self) -> u16 {
        self.in_flight
    }

    /// The descriptor that the next chain will start at.
    pub fn next_slot(&self) -> Option<u16> {
        (self.free > 0).then_some(self.free_head)
    }

    /// Adds a chain of one or more descriptors.
    pub fn add(&mut self, segments: &[Segment]) -> Result<u16, RingError> {
        assert!(!segments.is_empty(), "a chain has at least one descriptor");
        if segments.len() > self.free.into() {
            return Err(RingError::Full);
        }
        let head = self.free_head;
        let last = segments.len() - 1;
        for (i, segment) in segments.iter().enumerate() {
            let at = self.free_head;
            let next = self.link[usize::from(at)];
            let flags = segment.flags() | if i == last { 0 } else { DESC_F_NEXT };
            self.write_descriptor(at, segment.gpa, segment.len, flags, next);
            self.free_head = next;
        }
        self.enter(head, segments.len() as u16);
        Ok(head)
    }

    /// Adds a chain of one descriptor with flags as given.
    #[inline]
    pub fn add_one(&mut self, gpa: u64, len: u32, flags: u16) -> Result<u16, RingError> {
        let head = self.next_slot().ok_or(RingError::Full)?;
        self.write_descriptor(head, gpa, len, flags, 0);
        self.free_head = self.link[usize::from(head)];
        self.enter(head, 1);
        Ok(head)
    }

    #[inline]
    fn enter(&mut self, head: u16, descriptors: u16) {
        self.free -= descriptors;
        self.in_flight += 1;
        self.chain_len[usize::from(head)] = descriptors;
        self.place_head(head);
    }

    /// Writes a descriptor unchanged. Hostile chains are built with it too.
    #[inline]
    pub fn write_descriptor(&self, index: u16, gpa: u64, len: u32, flags: u16, next: u16) {
        let at = 16 * usize::from(index);
        self.desc.store_u64(at, gpa, Ordering::Relaxed);
        self.desc.store_u64(at + 8, split_word(len, flags, next), Ordering::Relaxed);
    }

    /// Puts any number into the next avail entry, without bookkeeping: hostile if it is no head.
    #[inline]
    pub fn place_head(&mut self, head: u16) {
        let at = RING_OFFSET + 2 * usize::from(self.avail_next & (self.size - 1));
        self.avail.store_u16(at, head, Ordering::Relaxed);
        self.avail_next = self.avail_next.wrapping_add(1);
    }

    /// Stores any number as the avail index, without bookkeeping (hostile).
    pub fn write_avail_idx(&self, idx: u16) {
        self.avail.store_u16(IDX_OFFSET, idx, Ordering::Release);
    }

    /// Stores the avail ring's flags, regardless of EVENT_IDX.
    pub fn write_avail_flags(&self, flags: u16) {
        self.avail.store_u16(0, flags, Ordering::Release);
    }

    /// The descriptor table, avail ring and used ring as they lie in guest memory.
    pub fn areas(&self) -> [&Area; 3] {
        [&self.desc, &self.avail, &self.used]
    }

    /// The used index as the device last published it.
    #[inline]
    pub fn used_idx(&self) -> u16 {
        self.used.load_u16(IDX_OFFSET, Ordering::Acquire)
    }

    /// The used entry at a position of the ring, as it lies in memory: (id, len).
    #[inline]
    pub fn used_entry(&self, position: u16) -> (u32, u32) {
        let at = RING_OFFSET + 8 * usize::from(position & (self.size - 1));
        (self.used.load_u32(at, Ordering::Relaxed), self.used.load_u32(at + 4, Ordering::Relaxed))
    }

    /// Publishes all added chains to the device.
    #[inline]
    pub fn publish(&mut self) {
        self.avail_published = self.avail_next;
        self.write_avail_idx(self.avail_published);
    }

    /// True if the device asks for a kick for the chains published since the last call.
    #[inline]
    pub fn kick_is_asked(&mut self) -> bool {
        // Pairs with the device: store avail_event (or flags), fence, load avail.idx.
        fence(Ordering::SeqCst);
        let (old, new) = (self.avail_kicked, self.avail_published);
        self.avail_kicked = new;
        if old == new {
            return false;
        }
        if self.event_idx {
            let avail_event = RING_OFFSET + 8 * usize::from(self.size);
            passes_event(self.used.load_u16(avail_event, Ordering::Relaxed), new, old)
        } else {
            self.used.load_u16(0, Ordering::Relaxed) & USED_F_NO_NOTIFY == 0
        }
    }

    /// Takes the next used chain, if there is one.
    #[inline]
    pub fn take_used(&mut self) -> Result<Option<Used>, RingError> {
        if self.used_next == self.used_seen {
            self.used_seen = self.used_idx();
            let published = self.used_seen.wrapping_sub(self.used_next);
            if published == 0 {
                return Ok(None);
            }
            if published > self.in_flight {
                return Err(RingError::TooManyUsed { published, in_flight: self.in_flight });
            }
        }
        let (id, len) = self.used_entry(self.used_next);
        self.used_next = self.used_next.wrapping_add(1);
        self.free_chain(id)?;
        if self
            .suppressed_at
            .is_some_and(|at| self.used_next.wrapping_sub(at) >= SUPPRESS_RENEW_ENTRIES)
        {
            self.suppress_calls();
        }
        Ok(Some(Used { id: id as u16, len }))
    }

    #[inline]
    fn free_chain(&mut self, id: u32) -> Result<(), RingError> {
        let descriptors = self.chain_len.get(id as usize).copied().unwrap_or(0);
        if descriptors == 0 {
            return Err(RingError::UnknownId(id));
        }
        let head = id as u16;
        self.chain_len[usize::from(head)] = 0;
        let mut tail = head;
        for _ in 1..descriptors {
            tail = self.link[usize::from(tail)];
        }
        self.link[usize::from(tail)] = self.free_head;
        self.free_head = head;
        self.free += descriptors;
        self.in_flight -= 1;
        Ok(())
    }

    /// Arms calls. `false`: the device has used a chain in the meantime, so do not sleep.
    #[inline]
    pub fn arm_calls(&mut self) -> bool {
        self.suppressed_at = None;
        if self.event_idx {
            self.write_used_event(self.used_next);
        } else {
            self.write_avail_flags(0);
        }
        // Pairs with the device: store used.idx, fence, load used_event (or flags).
        fence(Ordering::SeqCst);
        self.used_idx() == self.used_next
    }

    /// Suppresses calls. With event index it names a position far behind: the device may just be deciding about the
    /// call for one that the driver has already seen.
    #[inline]
    pub fn suppress_calls(&mut self) {
        if self.event_idx {
            self.suppressed_at = Some(self.used_next);
            self.write_used_event(self.used_next.wrapping_sub(SUPPRESS_RENEW_ENTRIES));
        } else {
            self.write_avail_flags(AVAIL_F_NO_INTERRUPT);
        }
    }

    /// Stores `used_event` unchanged: the device calls when the used index passes it.
    #[inline]
    pub fn write_used_event(&self, event: u16) {
        self.avail.store_u16(RING_OFFSET + 2 * usize::from(self.size), event, Ordering::Relaxed);
    }
}
