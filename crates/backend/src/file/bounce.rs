// SPDX-License-Identifier: Apache-2.0
//! A lane's bounded pool of aligned buffers, for transfers with an alignment that O_DIRECT refuses.
// UNSAFETY: allocates aligned buffers, passes their addresses to the kernel, and copies to and from
// guest memory.
#![expect(unsafe_code)]

use crate::{BufList, IoError, Slot};
use libc::iovec;
use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::collections::VecDeque;

/// Buffers of a lane; it bounds the unaligned transfers that run at the same time.
pub(super) const BUFFERS: u16 = 4;
/// Size of one buffer. A larger transfer takes several operations.
pub(super) const BUFFER_BYTES: usize = 256 << 10;

/// The pool. The first use of a buffer allocates it; the pool keeps it. I/Os that find no free buffer wait, and get one
/// in their order.
pub(super) struct BouncePool {
    layout: Layout,
    /// One segment for each buffer; its base address is null until the buffer is allocated.
    segments: Box<[iovec]>,
    free: Vec<u16>,
    waiting: VecDeque<Slot>,
    /// Free buffers of I/Os that do not wait any more, and have not taken theirs yet.
    promised: usize,
}

// SAFETY: the pool owns its buffers; the addresses are valid in every thread.
unsafe impl Send for BouncePool {}

impl BouncePool {
    /// A pool of buffers with an alignment of at least `align` bytes (a power of two).
    pub(super) fn new(align: usize) -> Self {
        let layout = Layout::from_size_align(BUFFER_BYTES, align.max(4096))
            .expect("alignment is a power of two of at most a block");
        let empty = iovec { iov_base: std::ptr::null_mut(), iov_len: 0 };
        BouncePool {
            layout,
            segments: vec![empty; usize::from(BUFFERS)].into(),
            free: (0..BUFFERS).rev().collect(),
            waiting: VecDeque::new(),
            promised: 0,
        }
    }

    /// Takes a buffer for the I/O of `slot`. `None`: it waits for [`BouncePool::end_of_wait`].
    pub(super) fn take(&mut self, slot: Slot) -> Result<Option<u16>, IoError> {
        if self.free.len() == self.promised {
            self.waiting.push_back(slot);
            return Ok(None);
        }
        self.take_free().map(Some)
    }

    /// Ends the wait of the oldest I/O, if there is a buffer for it. Its next event takes that:
    /// [`BouncePool::take_promised`].
    #[inline]
    pub(super) fn end_of_wait(&mut self) -> Option<Slot> {
        if self.waiting.is_empty() || self.free.len() == self.promised {
            return None;
        }
        self.promised += 1;
        self.waiting.pop_front()
    }

    /// Takes the buffer of an I/O whose wait has ended.
    pub(super) fn take_promised(&mut self) -> Result<u16, IoError> {
        self.promised -= 1;
        self.take_free()
    }

    fn take_free(&mut self) -> Result<u16, IoError> {
        let number = *self.free.last().expect("no more buffers are promised than are free");
        let segment = &mut self.segments[usize::from(number)];
        if segment.iov_base.is_null() {
            // SAFETY: the layout's size is not zero.
            segment.iov_base = unsafe { alloc_zeroed(self.layout) }.cast();
            if segment.iov_base.is_null() {
                return Err(IoError::Errno(libc::ENOMEM));
            }
        }
        self.free.pop();
        Ok(number)
    }

    /// Returns a buffer to the pool.
    pub(super) fn give(&mut self, number: u16) {
        debug_assert!(!self.free.contains(&number));
        self.free.push(number);
    }

    /// The buffer as the memory of one operation of up to `len` bytes.
    pub(super) fn chunk(&mut self, number: u16, len: u64) -> BufList {
        let segment = &mut self.segments[usize::from(number)];
        segment.iov_len = usize::try_from(len).unwrap_or(BUFFER_BYTES).min(BUFFER_BYTES);
        // SAFETY: the box owns the list and the pool owns the buffer. Only the holder of the number
        // uses them until its operation completes.
        unsafe { BufList::new(segment, 1) }
    }

    /// Copies `len` bytes of `bufs` into the buffer, from its byte `at` on.
    pub(super) fn load(&mut self, number: u16, at: usize, len: u64, bufs: &BufList) {
        let (base, len) = self.part(number, at, len);
        // SAFETY: `base..base + len` lies in the buffer and no op is using it.
        unsafe { bufs.copy_out_raw(0, base, len) };
    }

    /// Copies `len` bytes of the buffer, from its byte `at` on, to `bufs`.
    pub(super) fn unload(&self, number: u16, at: usize, len: u64, bufs: &BufList) {
        let (base, len) = self.part(number, at, len);
        // SAFETY: `base..base + len` lies in the buffer and its op is done.
        unsafe { bufs.copy_in_raw(0, base, len) };
    }

    /// Zeroes `len` bytes of the buffer, from its byte `at` on.
    pub(super) fn zero(&mut self, number: u16, at: usize, len: u64) {
        let (base, len) = self.part(number, at, len);
        // SAFETY: `base..base + len` lies in the buffer and no op is using it.
        unsafe { base.write_bytes(0, len) };
    }

    /// Address and length of a part of a taken buffer, limited to the size of the buffer.
    fn part(&self, number: u16, at: usize, len: u64) -> (*mut u8, usize) {
        let at = at.min(BUFFER_BYTES);
        let len = usize::try_from(len).unwrap_or(BUFFER_BYTES).min(BUFFER_BYTES - at);
        (self.segments[usize::from(number)].iov_base.cast::<u8>().wrapping_add(at), len)
    }
}

impl Drop for BouncePool {
    fn drop(&mut self) {
        for segment in &self.segments {
            if !segment.iov_base.is_null() {
                // SAFETY: `take` allocated it with this layout.
                unsafe { dealloc(segment.iov_base.cast(), self.layout) };
            }
        }
    }
}
