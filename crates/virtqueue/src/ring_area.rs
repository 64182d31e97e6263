// SPDX-License-Identifier: Apache-2.0
//! A ring area: a checked window of guest memory with atomic and single-read accessors.
// UNSAFETY: the window is memory shared with the guest. This file checks every access against the
// length and the alignment; the ring code itself is safe.
#![expect(unsafe_code)]

use crate::memory::{Region, read_once};
use std::sync::atomic::{AtomicU16, AtomicU32, AtomicU64, Ordering};

/// `len` bytes of one region. The address is a multiple of at least 2.
#[derive(Debug)]
pub(crate) struct RingArea {
    base: *mut u8,
    len: usize,
    guest_addr: u64,
    /// Keeps the mapping alive.
    _region: Region,
}

// SAFETY: `_region` keeps the shared memory mapped; every access is atomic or volatile.
unsafe impl Send for RingArea {}

impl RingArea {
    /// The window of `len` bytes at byte `offset` of `region`. `None` if it does not lie in the
    /// region or its address is not a multiple of `align`.
    pub(crate) fn new(region: &Region, offset: u64, len: usize, align: u64) -> Option<Self> {
        let end = offset.checked_add(len as u64)?;
        let base = region.host().wrapping_add(usize::try_from(offset).ok()?);
        let fits = end <= region.len() && (base as u64).is_multiple_of(align);
        fits.then(|| RingArea {
            base,
            len,
            guest_addr: region.guest_addr() + offset,
            _region: region.clone(),
        })
    }

    /// Guest-physical address of the byte at `offset`.
    pub(crate) fn guest_addr(&self, offset: usize) -> u64 {
        self.guest_addr + offset as u64
    }

    #[inline]
    fn at<T>(&self, offset: usize) -> *mut T {
        let size = size_of::<T>();
        assert!(offset + size <= self.len && offset.is_multiple_of(size), "ring offset {offset}");
        self.base.wrapping_add(offset).cast()
    }

    #[inline]
    pub(crate) fn load_u16(&self, offset: usize, order: Ordering) -> u16 {
        // SAFETY: `at` checked the bounds and the alignment (the base is a multiple of 2).
        u16::from_le(unsafe { AtomicU16::from_ptr(self.at(offset)) }.load(order))
    }

    #[inline]
    pub(crate) fn store_u16(&self, offset: usize, value: u16, order: Ordering) {
        // SAFETY: as in `load_u16`.
        unsafe { AtomicU16::from_ptr(self.at(offset)) }.store(value.to_le(), order);
    }

    /// Stores two 32-bit words, each once, in no order. The area must be aligned to at least 4.
    #[inline]
    pub(crate) fn store_u32_pair(&self, offset: usize, first: u32, second: u32) {
        debug_assert!((self.base as usize).is_multiple_of(4));
        // SAFETY: `at` checked the bounds; callers use it for areas aligned to 4.
        unsafe { AtomicU32::from_ptr(self.at(offset)) }.store(first.to_le(), Ordering::Relaxed);
        // SAFETY: as above.
        unsafe { AtomicU32::from_ptr(self.at(offset + 4)) }
            .store(second.to_le(), Ordering::Relaxed);
    }

    /// The area must be aligned to at least 4.
    #[inline]
    pub(crate) fn store_u32(&self, offset: usize, value: u32) {
        debug_assert!((self.base as usize).is_multiple_of(4));
        // SAFETY: `at` checked the bounds; callers use it for areas aligned to 4.
        unsafe { AtomicU32::from_ptr(self.at(offset)) }.store(value.to_le(), Ordering::Relaxed);
    }

    /// Reads the two words of descriptor `index` once. The area must be aligned to 16.
    #[inline]
    pub(crate) fn load_desc(&self, index: u16) -> [u64; 2] {
        let at: *mut u64 = self.at(usize::from(index) * 16);
        assert!(usize::from(index) * 16 + 16 <= self.len);
        debug_assert!((self.base as usize).is_multiple_of(8));
        // SAFETY: both words lie in the area, which is aligned to 16.
        let low = unsafe { AtomicU64::from_ptr(at) }.load(Ordering::Relaxed);
        // SAFETY: as above.
        let high = unsafe { AtomicU64::from_ptr(at.add(1)) }.load(Ordering::Relaxed);
        [low, high]
    }
}

/// Reads the two words at `table + index * 16` once, at any alignment.
///
/// # Safety
/// The table has more than `index` descriptors, in mapped memory.
#[inline]
pub(crate) unsafe fn load_indirect(table: *const u8, index: usize) -> [u64; 2] {
    let at = table.wrapping_add(index * 16);
    if !(at as usize).is_multiple_of(8) {
        // SAFETY: the caller guarantees it.
        return words_of(unsafe { read_once(at) });
    }
    let words = at.cast::<u64>();
    // SAFETY: the caller guarantees it, and the address is aligned.
    unsafe { [words.read_volatile(), words.add(1).read_volatile()] }
}

/// The two words of a descriptor.
#[inline]
pub(crate) fn words_of(bytes: [u8; 16]) -> [u64; 2] {
    let word = |at: usize| u64::from_ne_bytes(std::array::from_fn(|i| bytes[at + i]));
    [word(0), word(8)]
}
