// SPDX-License-Identifier: Apache-2.0
//! An anonymous mapping that many lanes copy to and from at the same time.
// UNSAFETY: several threads write the memory without a lock, so only raw pointers access it. This
// file checks every access against the length of the mapping.
#![expect(unsafe_code)]

use crate::BufList;
use std::io;

/// Bytes of a page, which [`Map::free`] returns to the system.
pub(super) const PAGE: u64 = 4096;

/// Zeroed memory. Every method panics for a range outside it.
#[derive(Debug)]
pub(super) struct Map {
    base: *mut u8,
    len: usize,
}

// SAFETY: no code borrows the memory; raw pointers copy to and from it.
unsafe impl Send for Map {}
// SAFETY: as above.
unsafe impl Sync for Map {}

impl Map {
    pub(super) fn new(len: u64) -> io::Result<Self> {
        let len = usize::try_from(len).map_err(|_| io::Error::from_raw_os_error(libc::ENOMEM))?;
        if len == 0 {
            return Ok(Map { base: std::ptr::null_mut(), len });
        }
        let prot = libc::PROT_READ | libc::PROT_WRITE;
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        // SAFETY: a new anonymous mapping touches no existing memory.
        let base = unsafe { libc::mmap(std::ptr::null_mut(), len, prot, flags, -1, 0) };
        if base == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        Ok(Map { base: base.cast(), len })
    }

    pub(super) fn len(&self) -> u64 {
        self.len as u64
    }

    pub(super) fn read(&self, offset: u64, len: u64, into: &BufList) {
        let (from, len) = self.range(offset, len);
        // SAFETY: `range` checked it.
        unsafe { into.copy_in_raw(0, from, len) };
    }

    pub(super) fn write(&self, offset: u64, len: u64, from: &BufList) {
        let (to, len) = self.range(offset, len);
        // SAFETY: `range` checked it.
        unsafe { from.copy_out_raw(0, to, len) };
    }

    pub(super) fn fill_zero(&self, offset: u64, len: u64) {
        let (to, len) = self.range(offset, len);
        // SAFETY: `range` checked it.
        unsafe { std::ptr::write_bytes(to, 0, len) };
    }

    /// Zeroes the range and returns its whole pages to the system.
    pub(super) fn free(&self, offset: u64, len: u64) {
        let first_page = offset.next_multiple_of(PAGE);
        let end = offset + len;
        let end_page = end / PAGE * PAGE;
        if first_page >= end_page {
            return self.fill_zero(offset, len);
        }
        self.fill_zero(offset, first_page - offset);
        self.fill_zero(end_page, end - end_page);
        let (pages, pages_len) = self.range(first_page, end_page - first_page);
        // SAFETY: `range` checked it; private anonymous pages read as zeroes after this.
        let refused = unsafe { libc::madvise(pages.cast(), pages_len, libc::MADV_DONTNEED) } != 0;
        if refused {
            // The kernel refuses, for example, locked pages.
            self.fill_zero(first_page, end_page - first_page);
        }
    }

    fn range(&self, offset: u64, len: u64) -> (*mut u8, usize) {
        let inside = offset.checked_add(len).is_some_and(|end| end <= self.len());
        assert!(inside, "range outside the mapping");
        (self.base.wrapping_add(offset as usize), len as usize)
    }
}

impl Drop for Map {
    fn drop(&mut self) {
        if self.len > 0 {
            // SAFETY: `new` mapped it with this length; no pointer to it is left.
            unsafe { libc::munmap(self.base.cast(), self.len) };
        }
    }
}
