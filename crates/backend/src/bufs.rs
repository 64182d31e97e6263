// SPDX-License-Identifier: Apache-2.0
//! The memory of one I/O: a borrowed list of `iovec`s that name guest memory.
//!
//! The guest changes its memory while this code runs, so no Rust slice borrows it: `ptr::copy`
//! moves bytes in and out, or the kernel gets an `iovec`. A guest that gives one buffer to two queues makes two threads
//! write it at the same time: its content is then any mix of both, and no decision depends on it.
// UNSAFETY: the list borrows memory for the duration of asynchronous I/O, which no safe type can
// express. The caller of `BufList::new` guarantees it once.
#![expect(unsafe_code)]

use libc::iovec;

/// A list of memory segments. The caller of [`BufList::new`] guarantees its validity.
#[derive(Clone, Copy, Debug)]
pub struct BufList {
    iovs: *mut iovec,
    count: u32,
}

// SAFETY: the caller of `new` guarantees the memory, whichever thread carries out the I/O.
unsafe impl Send for BufList {}

impl BufList {
    /// No memory at all.
    pub const EMPTY: BufList = BufList { iovs: std::ptr::null_mut(), count: 0 };

    /// A list of the `count` segments at `iovs`.
    ///
    /// # Safety
    /// Until the I/O that uses the list completes, `iovs` points to `count` iovecs that no other
    /// code accesses, and each of them names memory that stays mapped (writable for a read).
    pub unsafe fn new(iovs: *mut iovec, count: usize) -> Self {
        BufList { iovs, count: u32::try_from(count).expect("a chain has at most 65536 segments") }
    }

    /// The segments.
    pub fn iovs(&self) -> &[iovec] {
        if self.count == 0 {
            return &[];
        }
        // SAFETY: the caller of `new` guarantees it.
        unsafe { std::slice::from_raw_parts(self.iovs, self.count as usize) }
    }

    /// Total length of the segments in bytes.
    pub fn total_bytes(&self) -> u64 {
        self.iovs().iter().map(|iov| iov.iov_len as u64).sum()
    }

    /// Returns whether the address of every segment is a multiple of `address_align` and its length
    /// a multiple of `len_align` (bytes; powers of two).
    pub fn is_aligned(&self, address_align: usize, len_align: usize) -> bool {
        self.iovs().iter().all(|iov| {
            (iov.iov_base as usize) & (address_align - 1) == 0 && iov.iov_len & (len_align - 1) == 0
        })
    }

    /// Removes the first `bytes` bytes, or all if there are fewer, after a short transfer.
    pub fn advance(&mut self, mut bytes: usize) {
        while self.count > 0 {
            // SAFETY: the caller of `new` guarantees it; `count` is above 0.
            let first = unsafe { &mut *self.iovs };
            if bytes < first.iov_len {
                first.iov_base = first.iov_base.cast::<u8>().wrapping_add(bytes).cast();
                first.iov_len -= bytes;
                return;
            }
            bytes -= first.iov_len;
            self.iovs = self.iovs.wrapping_add(1);
            self.count -= 1;
        }
    }

    /// The first `count_max` segments; one system call takes at most `IOV_MAX`.
    pub fn first(&self, count_max: u32) -> BufList {
        BufList { iovs: self.iovs, count: self.count.min(count_max) }
    }

    /// The first segments, as many as have at most `bytes_max` bytes together, and at least one.
    pub fn first_within(&self, bytes_max: u64) -> BufList {
        let mut bytes = 0;
        let fitting = self.iovs().iter().take_while(|iov| {
            bytes += iov.iov_len as u64;
            bytes <= bytes_max
        });
        let count = fitting.count() as u32;
        self.first(count.max(1))
    }

    /// Copies up to `to.len()` bytes from the segments, from byte `skip` on. Returns the number of
    /// bytes copied.
    pub fn copy_out(&self, skip: u64, to: &mut [u8]) -> usize {
        // SAFETY: `to` is writable for its length.
        unsafe { self.copy_out_raw(skip, to.as_mut_ptr(), to.len()) }
    }

    /// Copies up to `from.len()` bytes into the segments, from byte `skip` on. Returns the number
    /// of bytes copied.
    pub fn copy_in(&self, skip: u64, from: &[u8]) -> usize {
        // SAFETY: `from` is readable for its length.
        unsafe { self.copy_in_raw(skip, from.as_ptr(), from.len()) }
    }

    /// [`BufList::copy_out`] to memory that other threads may access at the same time.
    ///
    /// # Safety
    /// `to` is mapped and writable for `len` bytes.
    pub unsafe fn copy_out_raw(&self, skip: u64, to: *mut u8, len: usize) -> usize {
        self.for_each_piece(skip, len, |base, at, len| {
            // SAFETY: `base..base+len` lies in a segment (see `new`), `at + len` in `to`.
            unsafe { std::ptr::copy(base.cast_const(), to.add(at), len) }
        })
    }

    /// [`BufList::copy_in`] from memory that other threads may access at the same time.
    ///
    /// # Safety
    /// `from` is mapped and readable for `len` bytes.
    pub unsafe fn copy_in_raw(&self, skip: u64, from: *const u8, len: usize) -> usize {
        self.for_each_piece(skip, len, |base, at, len| {
            // SAFETY: `base..base+len` lies in a segment (see `new`), `at + len` in `from`.
            unsafe { std::ptr::copy(from.add(at), base, len) }
        })
    }

    /// Fills every segment with zeroes.
    pub fn fill_zero(&self) {
        self.zero(0, usize::MAX);
    }

    /// Fills up to `len` bytes of the segments with zeroes, from byte `skip` on.
    pub fn zero(&self, skip: u64, len: usize) {
        self.for_each_piece(skip, len, |base, _, len| {
            // SAFETY: `base..base+len` lies in a segment (see `new`).
            unsafe { std::ptr::write_bytes(base, 0, len) }
        });
    }

    /// Calls `visit(base, position, len)` for each piece of `[skip, skip + want)`. Returns the
    /// total length of the pieces.
    fn for_each_piece(
        &self,
        mut skip: u64,
        want: usize,
        mut visit: impl FnMut(*mut u8, usize, usize),
    ) -> usize {
        let mut at = 0;
        for iov in self.iovs() {
            let here = iov.iov_len as u64;
            if skip >= here {
                skip -= here;
                continue;
            }
            let len = (iov.iov_len - skip as usize).min(want - at);
            visit(iov.iov_base.cast::<u8>().wrapping_add(skip as usize), at, len);
            skip = 0;
            at += len;
            if at == want {
                break;
            }
        }
        at
    }
}
