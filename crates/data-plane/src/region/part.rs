// SPDX-License-Identifier: Apache-2.0
//! Checked loads and stores of one queue's part of the in-flight region.
// UNSAFETY: the region is memory shared with the front-end. `cell` checks every access against the
// part.
#![expect(unsafe_code)]

use super::InflightRegion;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicU16, AtomicU32, AtomicU64, Ordering};

/// `len` bytes of the region.
#[derive(Debug)]
pub(super) struct Part {
    region: Arc<InflightRegion>,
    start: usize,
    len: usize,
}

impl Part {
    /// The part at byte `start` (a multiple of 64) of the region; `None` if it does not fit.
    pub(super) fn new(region: &Arc<InflightRegion>, start: usize, len: usize) -> Option<Self> {
        let fits = start + len <= region.mapping.size();
        fits.then(|| Part { region: Arc::clone(region), start, len })
    }

    /// Returns whether a part of the mapping is lost, this one or another.
    #[inline]
    pub(super) fn is_lost(&self) -> bool {
        self.region.mapping.is_lost()
    }

    #[inline]
    fn cell<T>(&self, offset: usize) -> *mut T {
        let size = size_of::<T>();
        assert!(offset + size <= self.len && offset.is_multiple_of(size), "region cell {offset}");
        self.region.mapping.as_ptr().wrapping_add(self.start + offset).cast()
    }

    #[inline]
    pub(super) fn store_u8(&self, offset: usize, value: u8) {
        // SAFETY: `cell` checked the bounds; the region keeps the memory mapped.
        unsafe { AtomicU8::from_ptr(self.cell(offset)) }.store(value, Ordering::Relaxed);
    }

    #[inline]
    pub(super) fn store_u16(&self, offset: usize, value: u16) {
        // SAFETY: as above. The region begins at a multiple of 8 (`InflightRegion::map` checks the
        // offset), `start` is a multiple of 64, and `cell` checks `offset`: the address is aligned.
        unsafe { AtomicU16::from_ptr(self.cell(offset)) }.store(value.to_le(), Ordering::Relaxed);
    }

    #[inline]
    pub(super) fn store_u32(&self, offset: usize, value: u32) {
        // SAFETY: as above.
        unsafe { AtomicU32::from_ptr(self.cell(offset)) }.store(value.to_le(), Ordering::Relaxed);
    }

    #[inline]
    pub(super) fn store_u64(&self, offset: usize, value: u64) {
        // SAFETY: as above.
        unsafe { AtomicU64::from_ptr(self.cell(offset)) }.store(value.to_le(), Ordering::Relaxed);
    }

    pub(super) fn load_u8(&self, offset: usize) -> u8 {
        // SAFETY: as above.
        unsafe { AtomicU8::from_ptr(self.cell(offset)) }.load(Ordering::Relaxed)
    }

    pub(super) fn load_u16(&self, offset: usize) -> u16 {
        // SAFETY: as above.
        u16::from_le(unsafe { AtomicU16::from_ptr(self.cell(offset)) }.load(Ordering::Relaxed))
    }

    pub(super) fn load_u32(&self, offset: usize) -> u32 {
        // SAFETY: as above.
        u32::from_le(unsafe { AtomicU32::from_ptr(self.cell(offset)) }.load(Ordering::Relaxed))
    }

    pub(super) fn load_u64(&self, offset: usize) -> u64 {
        // SAFETY: as above.
        u64::from_le(unsafe { AtomicU64::from_ptr(self.cell(offset)) }.load(Ordering::Relaxed))
    }
}
