// SPDX-License-Identifier: Apache-2.0
//! Guest memory as the driver sees it: memfd-backed regions at chosen guest-physical addresses.
//!
//! All functions here panic on an address outside of the memory: the driver chooses the addresses,
//! so a wrong one is a bug of the test. This module knows nothing of rings and requests.

// UNSAFETY: maps shared memory and accesses it through raw pointers while the device does so too;
// no borrow (`&[u8]`) of such memory may exist, so safe slices cannot be used.
#![expect(unsafe_code)]

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::ptr::{self, NonNull};
use std::sync::Arc;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU8, AtomicU16, AtomicU32, AtomicU64, Ordering};

use rustix::fs::{MemfdFlags, memfd_create};
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};

/// One region of guest memory: a memfd of its own, mapped shared.
#[derive(Debug)]
pub struct Region {
    gpa: u64,
    size: usize,
    base: NonNull<u8>,
    file: File,
    /// Offset of the first byte that [`GuestMemory::alloc`] has not handed out yet.
    next: Mutex<usize>,
}

// SAFETY: the mapping belongs to the process, not to a thread, and lives until the region is
// dropped; all accesses are atomic or plain copies of bytes that the device may change anyway.
unsafe impl Send for Region {}
// SAFETY: as above; `&Region` gives out no reference into the mapping.
unsafe impl Sync for Region {}

impl Region {
    fn new(gpa: u64, size: usize, flags: MemfdFlags) -> io::Result<Self> {
        let file = File::from(memfd_create("guest-memory", MemfdFlags::CLOEXEC | flags)?);
        file.set_len(size as u64)?;
        Self::map(gpa, size, file)
    }

    fn map(gpa: u64, size: usize, file: File) -> io::Result<Self> {
        let prot = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a fresh mapping at an address chosen by the kernel replaces nothing.
        let base = unsafe { mmap(ptr::null_mut(), size, prot, MapFlags::SHARED, &file, 0)? };
        let base = NonNull::new(base.cast()).expect("mmap never returns null on success");
        Ok(Self { gpa, size, base, file, next: Mutex::new(0) })
    }

    /// Guest-physical address of the first byte.
    pub fn gpa(&self) -> u64 {
        self.gpa
    }

    /// Length in bytes.
    pub fn size(&self) -> u64 {
        self.size as u64
    }

    /// Address of the first byte in this process (vhost-user's "user address").
    pub fn user_address(&self) -> u64 {
        self.base.as_ptr() as u64
    }

    /// The memfd behind the region; offset 0 is the region's first byte.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }

    fn offset_of(&self, gpa: u64, len: usize) -> Option<usize> {
        let offset = usize::try_from(gpa.checked_sub(self.gpa)?).ok()?;
        (offset.checked_add(len)? <= self.size).then_some(offset)
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        // SAFETY: mapped by `map` with this length; every `Area` keeps the region alive by its Arc.
        let unmapped = unsafe { munmap(self.base.as_ptr().cast(), self.size) };
        debug_assert!(unmapped.is_ok(), "munmap of a region failed: {unmapped:?}");
    }
}

/// All regions of a guest. Cheap to share: always behind an [`Arc`].
#[derive(Debug)]
pub struct GuestMemory {
    regions: Vec<Arc<Region>>,
}

impl GuestMemory {
    /// Makes zero-filled memory with the given (guest-physical address, size) regions.
    pub fn new(layout: &[(u64, u64)]) -> io::Result<Arc<Self>> {
        Self::with_flags(layout, MemfdFlags::empty())
    }

    /// As [`Self::new`], with huge pages of 2 MiB; sizes must be multiples of that. The system must
    /// have reserved the pages.
    pub fn of_huge_pages(layout: &[(u64, u64)]) -> io::Result<Arc<Self>> {
        Self::with_flags(layout, MemfdFlags::HUGETLB | MemfdFlags::HUGE_2MB)
    }

    fn with_flags(layout: &[(u64, u64)], flags: MemfdFlags) -> io::Result<Arc<Self>> {
        let regions = layout
            .iter()
            .map(|&(gpa, size)| Region::new(gpa, size as usize, flags).map(Arc::new))
            .collect::<io::Result<_>>()?;
        Ok(Arc::new(Self { regions }))
    }

    /// Maps `size` bytes of a file that the daemon handed out (an in-flight region) at address 0.
    pub fn from_file(file: File, size: u64) -> io::Result<Arc<Self>> {
        let region = Region::map(0, size as usize, file)?;
        Ok(Arc::new(Self { regions: vec![Arc::new(region)] }))
    }

    /// The same memory without the other regions: allocations come from this one.
    pub fn only_region(&self, region: usize) -> Arc<Self> {
        Arc::new(Self { regions: vec![self.regions[region].clone()] })
    }

    /// The regions in the order in which they were given.
    pub fn regions(&self) -> &[Arc<Region>] {
        &self.regions
    }

    /// A view of `len` bytes at `gpa`. Panics if they do not lie in one region.
    pub fn area(&self, gpa: u64, len: usize) -> Area {
        let found = self.regions.iter().find_map(|r| Some((r, r.offset_of(gpa, len)?)));
        let (region, offset) =
            found.unwrap_or_else(|| panic!("{len} bytes at {gpa:#x} are not guest memory"));
        // SAFETY: `offset_of` checked that offset + len lies within the mapping.
        let base = unsafe { region.base.add(offset) };
        Area { _region: region.clone(), base, len, gpa }
    }

    /// Allocates `len` bytes aligned to `align` (a power of two) from the first region with room;
    /// they are never freed. Panics if there is no room: give the guest more memory.
    pub fn alloc(&self, len: usize, align: usize) -> u64 {
        self.regions
            .iter()
            .find_map(|region| alloc_in(region, len, align))
            .unwrap_or_else(|| panic!("no guest memory left for {len} bytes: add regions"))
    }

    /// As [`Self::alloc`], in the region with this number.
    pub fn alloc_in_region(&self, region: usize, len: usize, align: usize) -> u64 {
        alloc_in(&self.regions[region], len, align)
            .unwrap_or_else(|| panic!("no room in region {region} for {len} bytes"))
    }

    /// Allocates memory and returns a view of it.
    pub fn alloc_area(&self, len: usize, align: usize) -> Area {
        self.area(self.alloc(len, align), len)
    }

    /// Copies bytes out of guest memory.
    pub fn read(&self, gpa: u64, bytes: &mut [u8]) {
        self.area(gpa, bytes.len()).read(0, bytes);
    }

    /// Copies bytes into guest memory.
    pub fn write(&self, gpa: u64, bytes: &[u8]) {
        self.area(gpa, bytes.len()).write(0, bytes);
    }

    /// The form of an address that vhost-user messages use for vring addresses.
    pub fn user_address(&self, gpa: u64) -> u64 {
        self.area(gpa, 1).base.as_ptr() as u64
    }
}

fn alloc_in(region: &Region, len: usize, align: usize) -> Option<u64> {
    let mut next = region.next.lock().expect("no allocation panics while it holds the lock");
    let start = (region.gpa as usize + *next).next_multiple_of(align) - region.gpa as usize;
    let end = start.checked_add(len)?;
    if end > region.size {
        return None;
    }
    *next = end;
    Some(region.gpa + start as u64)
}

/// A checked window into one region. Numbers are little endian in memory, native in the calls.
#[derive(Clone, Debug)]
pub struct Area {
    /// Keeps the mapping alive.
    _region: Arc<Region>,
    base: NonNull<u8>,
    len: usize,
    gpa: u64,
}

// SAFETY: points into a mapping that the Arc'd region keeps alive; see `Region`.
unsafe impl Send for Area {}
// SAFETY: as for `Region`: accesses are atomic or copies of bytes shared with the device anyway.
unsafe impl Sync for Area {}

macro_rules! numbers {
    ($($load:ident $store:ident $int:ty, $atomic:ty;)*) => {$(
        /// Loads a little-endian number at a byte offset aligned to its size.
        #[inline]
        pub fn $load(&self, offset: usize, order: Ordering) -> $int {
            // SAFETY: `at` checked range and alignment; others access it atomically or by copies.
            <$int>::from_le(unsafe { <$atomic>::from_ptr(self.at(offset)) }.load(order))
        }

        /// Stores a little-endian number at a byte offset aligned to its size.
        #[inline]
        pub fn $store(&self, offset: usize, value: $int, order: Ordering) {
            // SAFETY: as for the load above.
            unsafe { <$atomic>::from_ptr(self.at(offset)) }.store(value.to_le(), order);
        }
    )*};
}

impl Area {
    /// Guest-physical address of the first byte.
    pub fn gpa(&self) -> u64 {
        self.gpa
    }

    /// Length in bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// True if the area has no bytes.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Address of the first byte in this process (vhost-user's "user address").
    pub fn user_address(&self) -> u64 {
        self.base.as_ptr() as u64
    }

    #[inline]
    fn at<T>(&self, offset: usize) -> *mut T {
        assert!(offset <= self.len && size_of::<T>() <= self.len - offset, "outside of the area");
        // SAFETY: the assertion keeps the pointer inside of the mapping.
        let at = unsafe { self.base.as_ptr().add(offset) };
        assert!(at.addr().is_multiple_of(size_of::<T>()), "not aligned");
        at.cast()
    }

    numbers! {
        load_u8 store_u8 u8, AtomicU8;
        load_u16 store_u16 u16, AtomicU16;
        load_u32 store_u32 u32, AtomicU32;
        load_u64 store_u64 u64, AtomicU64;
    }

    /// Copies bytes out of the area.
    pub fn read(&self, offset: usize, bytes: &mut [u8]) {
        assert!(offset <= self.len && bytes.len() <= self.len - offset, "outside of the area");
        // SAFETY: checked above; `bytes` is ours, hence no overlap with the mapping.
        unsafe {
            let from = self.base.as_ptr().add(offset);
            ptr::copy_nonoverlapping(from, bytes.as_mut_ptr(), bytes.len());
        }
    }

    /// Copies bytes into the area.
    pub fn write(&self, offset: usize, bytes: &[u8]) {
        assert!(offset <= self.len && bytes.len() <= self.len - offset, "outside of the area");
        // SAFETY: checked above; `bytes` is ours, hence no overlap with the mapping.
        unsafe {
            let to = self.base.as_ptr().add(offset);
            ptr::copy_nonoverlapping(bytes.as_ptr(), to, bytes.len());
        }
    }

    /// Copies `len` bytes out into a vector.
    pub fn to_vec(&self, offset: usize, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        self.read(offset, &mut bytes);
        bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn regions_are_found_by_guest_physical_address() {
        let memory = GuestMemory::new(&[(0x1000, 0x2000), (0x1_0000_0000, 0x1000)]).unwrap();
        memory.write(0x1_0000_0ff0, b"sixteen bytes ok");
        assert_eq!(memory.area(0x1_0000_0ff0, 16).to_vec(8, 8), b"bytes ok");
    }

    #[test]
    #[should_panic(expected = "are not guest memory")]
    fn bytes_past_a_region_are_refused() {
        let memory = GuestMemory::new(&[(0x1000, 0x1000)]).unwrap();
        memory.area(0x1ff9, 8);
    }

    #[test]
    fn allocations_are_aligned_and_apart() {
        let memory = GuestMemory::new(&[(0x1000, 0x3000)]).unwrap();
        let (first, second) = (memory.alloc(10, 16), memory.alloc(10, 4096));
        assert_eq!((first, second), (0x1000, 0x2000));
    }

    #[test]
    fn numbers_are_little_endian_in_memory() {
        let memory = GuestMemory::new(&[(0, 0x1000)]).unwrap();
        let area = memory.area(0, 16);
        area.store_u32(4, 0x0102_0304, Ordering::Relaxed);
        assert_eq!(area.to_vec(4, 4), [4, 3, 2, 1]);
    }
}
