// SPDX-License-Identifier: Apache-2.0
//! Stage *chain*: a descriptor chain, copied and checked.
// UNSAFETY: indirect tables are read, and the request's edges copied, through raw pointers.
#![expect(unsafe_code)]

use crate::RingFault;
use crate::memory::{GuestMemory, read_once};
use crate::ring_area::load_indirect;
use libc::iovec;
use virtio_spec::packed;
use virtio_spec::split::{DESC_F_INDIRECT, DESC_F_NEXT, DESC_F_WRITE, Desc};

/// Most descriptors of a chain where the queue has fewer: Linux drivers fill indirect tables by
/// `seg_max`, not by the queue size.
pub const CHAIN_DESCRIPTORS_MIN_BOUND: u32 = 1024;

/// A chain taken from the ring and not yet given back: a debt paid exactly once, by
/// [`crate::VirtQueue::push_used`], or written off by name with [`ChainHead::abandon`].
#[derive(Debug, PartialEq, Eq)]
#[must_use = "a taken chain must reach the used ring"]
pub struct ChainHead {
    pub(crate) id: u16,
    pub(crate) descs: u16,
}

impl ChainHead {
    /// Split: index of the head descriptor. Packed: the buffer id.
    pub fn id(&self) -> u16 {
        self.id
    }

    /// Descriptors that the chain takes in the ring (an indirect table takes one).
    pub fn ring_descriptors(&self) -> u16 {
        self.descs
    }

    /// Gives the chain up without telling the driver: only when the queue itself is given up.
    pub fn abandon(self) {}
}

/// A chain's memory: device-readable segments, then device-writable ones. The buffer is reused
/// from request to request, so that taking a chain allocates nothing once it has grown.
#[derive(Debug, Default)]
pub struct Chain {
    iovs: Vec<iovec>,
    /// Guest-physical address and length of each writable segment, where dirty logging is on.
    written: Vec<(u64, u64)>,
    readable_count: usize,
    readable_bytes: u64,
    writable_bytes: u64,
    /// Packed: the chain's descriptors in the ring, where they are to be kept.
    ring_descs: Vec<packed::Desc>,
    log_writes: bool,
    limit: u32,
    seen: u32,
}

// SAFETY: the iovecs are only addresses; the mappings they name are kept alive by the queue.
unsafe impl Send for Chain {}

impl Chain {
    /// A buffer with room for `segments` before it must grow.
    pub fn with_capacity(segments: usize) -> Self {
        Chain { iovs: Vec::with_capacity(segments), ..Chain::default() }
    }

    /// Bytes that the device may read.
    pub fn readable_bytes(&self) -> u64 {
        self.readable_bytes
    }

    /// Bytes that the device may write.
    pub fn writable_bytes(&self) -> u64 {
        self.writable_bytes
    }

    /// Number of segments, readable and writable.
    pub fn segments(&self) -> usize {
        self.iovs.len()
    }

    pub(crate) fn begin(&mut self, queue_size: u16, log_writes: bool) {
        self.iovs.clear();
        self.written.clear();
        self.ring_descs.clear();
        self.readable_count = 0;
        self.readable_bytes = 0;
        self.writable_bytes = 0;
        self.log_writes = log_writes;
        self.limit = u32::from(queue_size).max(CHAIN_DESCRIPTORS_MIN_BOUND);
        self.seen = 0;
    }

    /// Keeps a copy of a descriptor of the ring.
    pub(crate) fn keep(&mut self, desc: packed::Desc) {
        self.ring_descs.push(desc);
    }

    /// The chain's descriptors in a packed ring, where [`crate::QueueSetup::keep_descriptors`]
    /// asked for them: the used entries overwrite them.
    pub fn ring_descriptors(&self) -> &[packed::Desc] {
        &self.ring_descs
    }

    /// Adds the buffer of one descriptor. Empty buffers count but carry nothing.
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
            let outside = RingFault::NotMemory { addr, len };
            let (host, here) = memory.locate(addr, len, hint).ok_or(outside)?;
            self.add_segment(addr, host, here, writable);
            len -= here;
            addr = addr.wrapping_add(here);
        }
        Ok(())
    }

    #[inline]
    fn add_segment(&mut self, addr: u64, host: *mut u8, len: u64, writable: bool) {
        if writable {
            self.writable_bytes += len;
            if self.log_writes {
                self.written.push((addr, len));
            }
        } else {
            self.readable_bytes += len;
        }
        let first_of_kind = self.iovs.len() == if writable { self.readable_count } else { 0 };
        if let Some(last) = self.iovs.last_mut().filter(|_| !first_of_kind)
            && last.iov_base.cast::<u8>().wrapping_add(last.iov_len) == host
        {
            last.iov_len += len as usize; // the driver's pages are often neighbours
            return;
        }
        self.iovs.push(iovec { iov_base: host.cast(), iov_len: len as usize });
        if !writable {
            self.readable_count += 1;
        }
    }

    /// Adds the buffers of an indirect table (sections 2.7.5.3 and 2.8.8). In a packed queue the
    /// table is used in order and only its WRITE flags count.
    pub(crate) fn add_indirect(
        &mut self,
        table: &Desc,
        packed: bool,
        memory: &GuestMemory,
        hint: &mut usize,
    ) -> Result<(), RingFault> {
        let count = table.len / 16;
        if table.len == 0 || !table.len.is_multiple_of(16) {
            return Err(RingFault::Indirect { len: table.len });
        }
        let mut index = 0;
        loop {
            let mut desc = load_table_entry(table, index, memory, hint)?;
            if packed {
                desc.flags = desc.next; // `addr, len, id, flags`
            }
            if !packed && desc.flags & DESC_F_INDIRECT != 0 {
                return Err(RingFault::Indirect { len: table.len });
            }
            self.add(&desc, memory, hint)?;
            index = match packed {
                true => index + 1,
                false if desc.flags & DESC_F_NEXT == 0 => return Ok(()),
                false => u32::from(desc.next),
            };
            if index >= count {
                if packed {
                    return Ok(());
                }
                let size = u16::try_from(count).unwrap_or(u16::MAX);
                return Err(RingFault::DescriptorIndex { index: desc.next, size });
            }
        }
    }

    /// Cuts `N` bytes off the front of the readable part, each read once; `None` when it has
    /// fewer. The segments shrink accordingly.
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

    /// Cuts the last writable byte off: where the status byte goes. `None` when there is none.
    #[inline]
    pub fn take_status(&mut self) -> Option<StatusByte> {
        if self.writable_bytes == 0 {
            return None;
        }
        self.writable_bytes -= 1;
        // Segments are never empty when added, and only this method shortens writable ones.
        let last = self.iovs.last_mut()?;
        last.iov_len -= 1;
        let host = last.iov_base.cast::<u8>().wrapping_add(last.iov_len);
        if last.iov_len == 0 {
            self.iovs.pop();
        }
        let addr = self.written.last().map(|(addr, len)| addr + len - 1);
        if let Some((_, len)) = self.written.last_mut() {
            *len -= 1;
        }
        Some(StatusByte { host, addr })
    }

    /// The readable segments left.
    #[inline]
    pub fn readable(&mut self) -> &mut [iovec] {
        let readable = &mut self.iovs[..self.readable_count];
        // `take_front` leaves the segments that it used up, empty, in front.
        let start = readable.iter().position(|iov| iov.iov_len > 0).unwrap_or(readable.len());
        &mut readable[start..]
    }

    /// The writable segments left.
    #[inline]
    pub fn writable(&mut self) -> &mut [iovec] {
        &mut self.iovs[self.readable_count..]
    }

    /// Guest-physical ranges of the writable part; filled only where dirty logging is on.
    pub fn written(&self) -> &[(u64, u64)] {
        &self.written
    }
}

/// Where a request's status byte goes.
#[derive(Debug)]
pub struct StatusByte {
    host: *mut u8,
    addr: Option<u64>,
}

// SAFETY: only an address; the queue keeps its mapping alive.
unsafe impl Send for StatusByte {}

impl StatusByte {
    /// Guest-physical address, where dirty logging is on.
    pub fn guest_addr(&self) -> Option<u64> {
        self.addr
    }

    /// Stores the status. The used ring's release store makes it visible before the used entry.
    #[inline]
    pub fn write(self, status: u8) {
        // SAFETY: made by `Chain::take_status` from a mapped, device-writable byte; the queue
        // that holds the mapping is stopped only after its chains were completed.
        unsafe { self.host.write_volatile(status) }
    }
}

fn load_table_entry(
    table: &Desc,
    index: u32,
    memory: &GuestMemory,
    hint: &mut usize,
) -> Result<Desc, RingFault> {
    let addr = table.addr.wrapping_add(u64::from(index) * 16);
    let outside = RingFault::NotMemory { addr: table.addr, len: u64::from(table.len) };
    let (host, here) = memory.locate(addr, 16, hint).ok_or(outside)?;
    if here == 16 {
        // SAFETY: 16 bytes of one mapped region.
        return Ok(desc_from_le(unsafe { load_indirect(host, 0) }));
    }
    let mut bytes = [0; 16];
    for (i, byte) in bytes.iter_mut().enumerate() {
        let (host, _) = memory.locate(addr.wrapping_add(i as u64), 1, hint).ok_or(outside)?;
        // SAFETY: one byte of a mapped region.
        [*byte] = unsafe { read_once(host) };
    }
    Ok(desc_from_le(bytes))
}

/// Decodes a descriptor of a split queue.
#[inline]
pub(crate) fn desc_from_le(bytes: [u8; 16]) -> Desc {
    let [a0, a1, a2, a3, a4, a5, a6, a7, l0, l1, l2, l3, f0, f1, n0, n1] = bytes;
    Desc {
        addr: u64::from_le_bytes([a0, a1, a2, a3, a4, a5, a6, a7]),
        len: u32::from_le_bytes([l0, l1, l2, l3]),
        flags: u16::from_le_bytes([f0, f1]),
        next: u16::from_le_bytes([n0, n1]),
    }
}
