// SPDX-License-Identifier: Apache-2.0
//! Stage *chain*: a descriptor chain, copied and checked.
// UNSAFETY: reads indirect tables, headers and status bytes through raw pointers.
#![expect(unsafe_code)]

use crate::RingFault;
use crate::memory::{GuestMemory, read_once};
use crate::ring_area::{load_indirect, words_of};
use libc::iovec;
use virtio_spec::packed;
use virtio_spec::split::{DESC_F_INDIRECT, DESC_F_NEXT, DESC_F_WRITE, Desc};

/// A chain may have max(queue size, this) descriptors: Linux sizes indirect tables by `seg_max`.
pub const CHAIN_DESCRIPTORS_MIN: u32 = 1024;

/// A chain that was taken from the ring and not yet returned. It must be returned exactly once, by
/// [`crate::VirtQueue::push_used`], or given up explicitly with [`ChainHead::abandon`].
#[derive(Debug, PartialEq, Eq)]
#[must_use = "a taken chain must reach the used ring"]
pub struct ChainHead {
    pub(crate) id: u16,
    pub(crate) descs: u16,
}

impl ChainHead {
    /// The index of the head descriptor (split) or the buffer id (packed).
    pub fn id(&self) -> u16 {
        self.id
    }

    /// Descriptors that the chain occupies in the ring (an indirect table occupies one).
    pub fn descriptor_count(&self) -> u16 {
        self.descs
    }

    /// Drops the chain without returning it to the driver. Allowed only when the queue itself is
    /// abandoned.
    pub fn abandon(self) {}
}

/// The memory of a chain: device-readable segments, then device-writable ones. The buffer is
/// reused from request to request: once it has grown, taking a chain allocates nothing.
#[derive(Debug, Default)]
pub struct Chain {
    iovs: Vec<iovec>,
    /// Guest-physical address and length in bytes of each writable segment, if dirty logging is on.
    writable_ranges: Vec<(u64, u64)>,
    readable_count: usize,
    readable_bytes: u64,
    writable_bytes: u64,
    /// Packed: copies of the chain's ring descriptors, if the set-up asks for them.
    ring_descs: Vec<packed::Desc>,
    log_writes: bool,
    limit: u32,
    seen: u32,
    /// Boundaries of memory regions that the buffers have crossed.
    crossed: u32,
}

// SAFETY: the iovecs are only addresses; the queue keeps the mappings that they name alive.
unsafe impl Send for Chain {}

impl Chain {
    /// A buffer with room for `segments` segments.
    pub fn with_capacity(segments: usize) -> Self {
        Chain { iovs: Vec::with_capacity(segments), ..Chain::default() }
    }

    /// Device-readable bytes that are left.
    pub fn readable_bytes(&self) -> u64 {
        self.readable_bytes
    }

    /// Device-writable bytes that are left.
    pub fn writable_bytes(&self) -> u64 {
        self.writable_bytes
    }

    /// Number of segments, readable and writable.
    pub fn segments(&self) -> usize {
        self.iovs.len()
    }

    pub(crate) fn begin(&mut self, queue_size: u16, log_writes: bool) {
        self.iovs.clear();
        self.writable_ranges.clear();
        self.ring_descs.clear();
        self.readable_count = 0;
        self.readable_bytes = 0;
        self.writable_bytes = 0;
        self.log_writes = log_writes;
        self.limit = u32::from(queue_size).max(CHAIN_DESCRIPTORS_MIN);
        self.seen = 0;
        self.crossed = 0;
    }

    /// Stores a copy of a ring descriptor.
    pub(crate) fn keep(&mut self, desc: packed::Desc) {
        self.ring_descs.push(desc);
    }

    /// Copies of the chain's descriptors in a packed ring, if
    /// [`crate::RingSetup::keep_descriptors`] is set. Used entries overwrite the originals.
    pub fn ring_descriptors(&self) -> &[packed::Desc] {
        &self.ring_descs
    }

    /// Adds the buffer of one descriptor. An empty buffer counts as a descriptor and adds no
    /// segment.
    #[inline]
    pub(crate) fn add(
        &mut self,
        desc: &Desc,
        memory: &GuestMemory,
        hint: &mut usize,
    ) -> Result<(), RingFault> {
        self.seen += 1;
        if self.seen > self.limit {
            return Err(RingFault::ChainTooLong { limit: self.limit });
        }
        let writable = desc.flags & DESC_F_WRITE != 0;
        if !writable && self.writable_bytes > 0 {
            return Err(RingFault::ReadableAfterWritable);
        }
        let (mut addr, mut len) = (desc.addr, u64::from(desc.len));
        while len > 0 {
            let Some((host, here)) = memory.locate(addr, len, hint) else {
                return Err(RingFault::NotMemory { addr, len });
            };
            self.add_segment(addr, host, here, writable);
            len -= here;
            addr = addr.wrapping_add(here);
            if len > 0 {
                self.cross()?;
            }
        }
        Ok(())
    }

    /// Counts a boundary between memory regions within a buffer. A front-end could have many small regions, and each
    /// of many buffers span all of them.
    #[cold]
    fn cross(&mut self) -> Result<(), RingFault> {
        self.crossed += 1;
        match self.crossed > self.limit {
            true => Err(RingFault::ChainTooFragmented { limit: self.limit }),
            false => Ok(()),
        }
    }

    #[inline]
    fn add_segment(&mut self, addr: u64, host: *mut u8, len: u64, writable: bool) {
        if writable {
            self.writable_bytes += len;
            if self.log_writes {
                self.writable_ranges.push((addr, len));
            }
        } else {
            self.readable_bytes += len;
        }
        let first_of_kind = self.iovs.len() == if writable { self.readable_count } else { 0 };
        if let Some(last) = self.iovs.last_mut().filter(|_| !first_of_kind)
            && last.iov_base.cast::<u8>().wrapping_add(last.iov_len) == host
        {
            last.iov_len += len as usize; // pages of the driver are often adjacent
            return;
        }
        self.iovs.push(iovec { iov_base: host.cast(), iov_len: len as usize });
        if !writable {
            self.readable_count += 1;
        }
    }

    /// Adds the buffers of an indirect table of a split queue (section 2.7.5.3).
    pub(crate) fn add_indirect_split(
        &mut self,
        table: &Desc,
        memory: &GuestMemory,
        hint: &mut usize,
    ) -> Result<(), RingFault> {
        let table = IndirectTable::new(table, memory, hint)?;
        let mut index = 0;
        loop {
            let desc = desc_from_le(table.table_entry(index, memory, hint)?);
            if desc.flags & DESC_F_INDIRECT != 0 {
                return Err(RingFault::Indirect { len: table.len });
            }
            self.add(&desc, memory, hint)?;
            if desc.flags & DESC_F_NEXT == 0 {
                return Ok(());
            }
            index = u32::from(desc.next);
            if index >= table.count {
                let size = u16::try_from(table.count).unwrap_or(u16::MAX);
                return Err(RingFault::DescriptorIndex { index: desc.next, size });
            }
        }
    }

    /// Adds the buffers of an indirect table of a packed queue (section 2.8.7): all its entries in
    /// order, of whose flags only WRITE counts.
    pub(crate) fn add_indirect_packed(
        &mut self,
        table: &Desc,
        memory: &GuestMemory,
        hint: &mut usize,
    ) -> Result<(), RingFault> {
        let table = IndirectTable::new(table, memory, hint)?;
        for index in 0..table.count {
            let desc = packed_desc_from_le(table.table_entry(index, memory, hint)?);
            self.add(&buffer_of(&desc), memory, hint)?;
        }
        Ok(())
    }

    /// Removes the first `N` bytes of the readable part and returns a copy; each byte is read once.
    /// Returns `None` and changes nothing if fewer than `N` bytes are readable.
    #[inline]
    pub fn take_front<const N: usize>(&mut self) -> Option<[u8; N]> {
        if self.readable_bytes < N as u64 {
            return None;
        }
        self.readable_bytes -= N as u64;
        let first = &mut self.iovs[0];
        let base = first.iov_base.cast::<u8>();
        if first.iov_len >= N {
            // SAFETY: the segment has `N` bytes of mapped memory.
            let copy = unsafe { read_once(base) };
            first.iov_base = base.wrapping_add(N).cast();
            first.iov_len -= N;
            return Some(copy);
        }
        Some(self.gather_front())
    }

    #[cold]
    fn gather_front<const N: usize>(&mut self) -> [u8; N] {
        let mut copy = [0; N];
        let mut filled = 0;
        for iov in &mut self.iovs[..self.readable_count] {
            while filled < N && iov.iov_len > 0 {
                // SAFETY: the segment has at least one byte of mapped memory.
                [copy[filled]] = unsafe { read_once(iov.iov_base.cast()) };
                iov.iov_base = iov.iov_base.cast::<u8>().wrapping_add(1).cast();
                iov.iov_len -= 1;
                filled += 1;
            }
        }
        copy
    }

    /// Removes the last writable byte, the place of the status byte (section 5.2.6). Returns `None`
    /// if the chain has no writable byte.
    #[inline]
    pub fn take_status(&mut self) -> Option<StatusByte> {
        if self.writable_bytes == 0 {
            return None;
        }
        self.writable_bytes -= 1;
        // Segments are not empty when they are added, and only this method shortens writable ones.
        let last = self.iovs.last_mut()?;
        last.iov_len -= 1;
        let host = last.iov_base.cast::<u8>().wrapping_add(last.iov_len);
        if last.iov_len == 0 {
            self.iovs.pop();
        }
        let addr = self.writable_ranges.last().map(|(addr, len)| addr + len - 1);
        if let Some((_, len)) = self.writable_ranges.last_mut() {
            *len -= 1;
        }
        Some(StatusByte { host, addr })
    }

    /// The remaining readable segments.
    #[inline]
    pub fn readable(&mut self) -> &mut [iovec] {
        let readable = &mut self.iovs[..self.readable_count];
        // `take_front` leaves consumed segments, which are empty, at the front.
        let start = readable.iter().position(|iov| iov.iov_len > 0).unwrap_or(readable.len());
        &mut readable[start..]
    }

    /// The remaining writable segments.
    #[inline]
    pub fn writable(&mut self) -> &mut [iovec] {
        &mut self.iovs[self.readable_count..]
    }

    /// Guest-physical address and length in bytes of each writable range. Empty unless dirty
    /// logging is on.
    pub fn writable_ranges(&self) -> &[(u64, u64)] {
        &self.writable_ranges
    }
}

/// The place of a request's status byte.
#[derive(Debug)]
pub struct StatusByte {
    host: *mut u8,
    addr: Option<u64>,
}

// SAFETY: it holds only an address; the queue keeps the mapping alive.
unsafe impl Send for StatusByte {}

impl StatusByte {
    /// The guest-physical address, if dirty logging is on.
    pub fn guest_addr(&self) -> Option<u64> {
        self.addr
    }

    /// Stores the status. The release store of the used ring makes it visible before the used
    /// entry.
    #[inline]
    pub fn write(self, status: u8) {
        // SAFETY: `Chain::take_status` took the address of a mapped, device-writable byte. The
        // queue holds the mapping, and stops only after its chains have completed.
        unsafe { self.host.write_volatile(status) }
    }
}

/// An indirect table of either layout: at least one entry.
struct IndirectTable {
    addr: u64,
    len: u32,
    /// Number of entries.
    count: u32,
    /// Address in this process; `None`: the table lies in several regions, or not in guest memory.
    host: Option<*mut u8>,
}

impl IndirectTable {
    #[inline]
    fn new(desc: &Desc, memory: &GuestMemory, hint: &mut usize) -> Result<Self, RingFault> {
        let Desc { addr, len, .. } = *desc;
        if len == 0 || !len.is_multiple_of(16) {
            return Err(RingFault::Indirect { len });
        }
        let bytes = u64::from(len);
        let found = memory.locate(addr, bytes, hint).filter(|found| found.1 == bytes);
        Ok(IndirectTable { addr, len, count: len / 16, host: found.map(|(host, _)| host) })
    }

    /// Loads the words of entry `index`, which must be less than `count`.
    #[inline]
    fn table_entry(
        &self,
        index: u32,
        memory: &GuestMemory,
        hint: &mut usize,
    ) -> Result<[u64; 2], RingFault> {
        debug_assert!(index < self.count);
        match self.host {
            // SAFETY: `index < count`: the entry lies in the table, which is mapped.
            Some(host) => Ok(unsafe { load_indirect(host, index as usize) }),
            None => self.table_entry_in_pieces(index, memory, hint),
        }
    }

    /// Loads an entry of a table that lies in several regions.
    #[cold]
    fn table_entry_in_pieces(
        &self,
        index: u32,
        memory: &GuestMemory,
        hint: &mut usize,
    ) -> Result<[u64; 2], RingFault> {
        let addr = self.addr.wrapping_add(u64::from(index) * 16);
        let outside = RingFault::NotMemory { addr: self.addr, len: u64::from(self.len) };
        let (host, here) = memory.locate(addr, 16, hint).ok_or(outside)?;
        if here == 16 {
            // SAFETY: 16 bytes of one mapped region.
            return Ok(unsafe { load_indirect(host, 0) });
        }
        let mut bytes = [0; 16];
        for (i, byte) in bytes.iter_mut().enumerate() {
            let (host, _) = memory.locate(addr.wrapping_add(i as u64), 1, hint).ok_or(outside)?;
            // SAFETY: one byte of a mapped region.
            [*byte] = unsafe { read_once(host) };
        }
        Ok(words_of(bytes))
    }
}

/// Decodes a descriptor of a split queue from its two words.
#[inline]
pub(crate) fn desc_from_le(words: [u64; 2]) -> Desc {
    let [addr, rest] = words.map(u64::from_le);
    Desc { addr, len: rest as u32, flags: (rest >> 32) as u16, next: (rest >> 48) as u16 }
}

/// Decodes a descriptor of a packed queue from its two words.
#[inline]
pub(crate) fn packed_desc_from_le(words: [u64; 2]) -> packed::Desc {
    let Desc { addr, len, flags: id, next: flags } = desc_from_le(words);
    packed::Desc { addr, len, id, flags }
}

/// The buffer of a packed descriptor, for [`Chain::add`].
#[inline]
pub(crate) fn buffer_of(desc: &packed::Desc) -> Desc {
    Desc { addr: desc.addr, len: desc.len, flags: desc.flags, next: 0 }
}
