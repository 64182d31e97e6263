// SPDX-License-Identifier: Apache-2.0
//! A lane's bounded pool of aligned buffers, for memory that O_DIRECT does not take.
// UNSAFETY: buffers are allocated with an alignment, handed to the kernel by address, and copied
// to and from guest memory.
#![expect(unsafe_code)]

use crate::{BufList, IoError};
use libc::iovec;
use std::alloc::{Layout, alloc_zeroed, dealloc};

/// Buffers of a lane: so many unaligned transfers run at once, the others wait.
pub(super) const BUFFERS: u16 = 4;
/// Size of one buffer: a larger transfer takes several ops.
pub(super) const BUFFER_BYTES: usize = 256 << 10;

/// The pool. A buffer is allocated when it is first taken and kept.
pub(super) struct BouncePool {
    layout: Layout,
    /// One list of one segment for each buffer, with the base address null until allocated.
    segments: Box<[iovec]>,
    free: Vec<u16>,
}

impl BouncePool {
    /// A pool of buffers aligned to `align` bytes (a power of two) at least.
    pub(super) fn new(align: usize) -> Self {
        let layout = Layout::from_size_align(BUFFER_BYTES, align.max(4096))
            .expect("alignment is a power of two of at most a block");
        let empty = iovec { iov_base: std::ptr::null_mut(), iov_len: 0 };
        BouncePool {
            layout,
            segments: vec![empty; usize::from(BUFFERS)].into(),
            free: (0..BUFFERS).rev().collect(),
        }
    }

    /// Takes a buffer; `None` while all are taken.
    pub(super) fn take(&mut self) -> Result<Option<u16>, IoError> {
        let Some(&number) = self.free.last() else { return Ok(None) };
        let segment = &mut self.segments[usize::from(number)];
        if segment.iov_base.is_null() {
            // SAFETY: the layout's size is not zero.
            segment.iov_base = unsafe { alloc_zeroed(self.layout) }.cast();
            if segment.iov_base.is_null() {
                return Err(IoError::Errno(libc::ENOMEM));
            }
        }
        self.free.pop();
        Ok(Some(number))
    }

    /// Gives a buffer back.
    pub(super) fn give(&mut self, number: u16) {
        debug_assert!(!self.free.contains(&number));
        self.free.push(number);
    }

    /// The buffer as the memory of one op of up to `len` bytes.
    pub(super) fn chunk(&mut self, number: u16, len: u64) -> BufList {
        let segment = &mut self.segments[usize::from(number)];
        segment.iov_len = usize::try_from(len).unwrap_or(BUFFER_BYTES).min(BUFFER_BYTES);
        // SAFETY: the list lives in a box and the buffer in the pool; the number's holder alone
        // uses them until its op is done.
        unsafe { BufList::new(segment, 1) }
    }

    /// Copies what the op will write from `bufs`.
    pub(super) fn load(&mut self, number: u16, bufs: &BufList) {
        let segment = &self.segments[usize::from(number)];
        // SAFETY: the buffer has `iov_len` bytes at least and no op is using it.
        unsafe { bufs.copy_out_raw(0, segment.iov_base.cast(), segment.iov_len) };
    }

    /// Copies the `len` bytes that the op has read to `bufs`.
    pub(super) fn unload(&self, number: u16, len: u64, bufs: &BufList) {
        let segment = &self.segments[usize::from(number)];
        let len = usize::try_from(len).unwrap_or(BUFFER_BYTES).min(segment.iov_len);
        // SAFETY: the buffer has `iov_len` bytes at least and its op is done.
        unsafe { bufs.copy_in_raw(0, segment.iov_base.cast_const().cast(), len) };
    }
}

impl Drop for BouncePool {
    fn drop(&mut self) {
        for segment in &self.segments {
            if !segment.iov_base.is_null() {
                // SAFETY: allocated in `take` with this layout.
                unsafe { dealloc(segment.iov_base.cast(), self.layout) };
            }
        }
    }
}
