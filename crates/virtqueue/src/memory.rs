// SPDX-License-Identifier: Apache-2.0
//! The guest memory table: maps guest-physical addresses to addresses of this process.
// UNSAFETY: a region returns raw pointers into a mapping that is shared with the guest.
#![expect(unsafe_code)]

use crate::guard;
use crate::shared_mapping::SharedMapping;
use std::fs::File;
use std::sync::Arc;

/// Reasons to refuse a memory table or a dirty log.
#[derive(Debug, thiserror::Error)]
pub enum MemoryError {
    /// A region with a length of 0.
    #[error("memory region at {0:#x} has no bytes")]
    Empty(u64),
    /// A region that wraps the address space.
    #[error("memory region at {0:#x} wraps the address space")]
    Wraps(u64),
    /// Two regions that share guest-physical addresses.
    #[error("memory regions at {0:#x} and {1:#x} overlap")]
    Overlap(u64, u64),
    /// The file could not be mapped.
    #[error("cannot map memory region at {addr:#x}: {cause}")]
    Map {
        /// Guest-physical address.
        addr: u64,
        /// Error of the checks of the file, or of `mmap`.
        cause: String,
    },
}

/// One mapped region of guest memory.
#[derive(Clone, Debug)]
pub struct Region {
    guest_addr: u64,
    user_addr: u64,
    len: u64,
    host: *mut u8,
    /// Keeps `host` mapped.
    mapping: Arc<SharedMapping>,
}

// SAFETY: the pointer names the shared mapping that `mapping` keeps alive, and is valid in every
// thread.
unsafe impl Send for Region {}
// SAFETY: as above; every access is volatile, atomic or made by the kernel.
unsafe impl Sync for Region {}

impl Region {
    /// Maps `len` bytes of `file` from byte `file_offset` on as guest memory at guest-physical
    /// address `guest_addr`; `user_addr` is its address in the front-end (vhost-user,
    /// SET_MEM_TABLE).
    ///
    /// # Errors
    /// [`MemoryError`] if the region is empty or wraps, or the file cannot be mapped.
    pub fn map(
        guest_addr: u64,
        user_addr: u64,
        len: u64,
        file: File,
        file_offset: u64,
    ) -> Result<Self, MemoryError> {
        if len == 0 {
            return Err(MemoryError::Empty(guest_addr));
        }
        let ends = [guest_addr, user_addr, file_offset].map(|start| start.checked_add(len));
        if ends.contains(&None) {
            return Err(MemoryError::Wraps(guest_addr));
        }
        let mapping = SharedMapping::map(file, file_offset, len)
            .map_err(|cause| MemoryError::Map { addr: guest_addr, cause })?;
        let host = mapping.as_ptr();
        Ok(Region { guest_addr, user_addr, len, host, mapping: Arc::new(mapping) })
    }

    /// Guest-physical address of the first byte.
    pub fn guest_addr(&self) -> u64 {
        self.guest_addr
    }

    /// Address of the first byte in the front-end.
    pub fn user_addr(&self) -> u64 {
        self.user_addr
    }

    /// Length in bytes; never 0.
    #[expect(clippy::len_without_is_empty, reason = "a region is never empty")]
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Address of the first byte in this process.
    pub fn host(&self) -> *mut u8 {
        self.host
    }

    /// The mapped file, and the offset of the first byte in it.
    pub fn file(&self) -> (&File, u64) {
        self.mapping.file()
    }

    fn end(&self) -> u64 {
        self.guest_addr + self.len // `map` checked that this does not wrap
    }
}

/// The memory of the guest. It is immutable: a running queue shares it without a lock.
#[derive(Debug, Default)]
pub struct GuestMemory {
    regions: Vec<Region>,
}

impl GuestMemory {
    /// Builds a table of regions.
    ///
    /// # Errors
    /// [`MemoryError::Overlap`] if two regions share guest-physical addresses.
    pub fn new(mut regions: Vec<Region>) -> Result<Self, MemoryError> {
        regions.sort_by_key(|region| region.guest_addr);
        for pair in regions.windows(2) {
            if pair[0].end() > pair[1].guest_addr {
                return Err(MemoryError::Overlap(pair[0].guest_addr, pair[1].guest_addr));
            }
        }
        Ok(GuestMemory { regions })
    }

    /// The regions, by ascending guest-physical address.
    pub fn regions(&self) -> &[Region] {
        &self.regions
    }

    /// Returns whether an access found that the front-end has truncated a part of the memory.
    #[inline]
    pub fn is_lost(&self) -> bool {
        guard::any_lost() && self.regions.iter().any(|region| region.mapping.is_lost())
    }

    /// Returns the address of guest-physical `addr` in this process, and the number of the `len`
    /// bytes from there on that lie in the same region; `None` if no region contains `addr`. `hint`
    /// caches the index of the last region.
    #[inline]
    pub fn locate(&self, addr: u64, len: u64, hint: &mut usize) -> Option<(*mut u8, u64)> {
        let region = match self.regions.get(*hint) {
            Some(region) if addr.wrapping_sub(region.guest_addr) < region.len => region,
            _ => self.search(addr, hint)?,
        };
        let offset = addr - region.guest_addr;
        // `offset < region.len`: the address stays inside the mapping.
        Some((region.host.wrapping_add(offset as usize), len.min(region.len - offset)))
    }

    #[cold]
    fn search(&self, addr: u64, hint: &mut usize) -> Option<&Region> {
        let index = self.regions.partition_point(|region| region.end() <= addr);
        let region = self.regions.get(index).filter(|region| region.guest_addr <= addr)?;
        *hint = index;
        Some(region)
    }

    /// Returns the region of the `len` bytes at *front-end* address `user_addr`, and their offset
    /// in it. Ring addresses are front-end addresses (vhost-user, SET_VRING_ADDR).
    pub fn locate_user(&self, user_addr: u64, len: u64) -> Option<(&Region, u64)> {
        self.regions.iter().find_map(|region| {
            let offset = user_addr.checked_sub(region.user_addr)?;
            (offset <= region.len && len <= region.len - offset).then_some((region, offset))
        })
    }
}

/// Copies `N` bytes of guest memory at `from`; each byte is read once.
///
/// # Safety
/// `from` points to `N` mapped bytes.
#[inline]
pub(crate) unsafe fn read_once<const N: usize>(from: *const u8) -> [u8; N] {
    let mut copy = [0; N];
    if from.align_offset(8) == 0 && N.is_multiple_of(8) {
        for (i, word) in copy.chunks_exact_mut(8).enumerate() {
            // SAFETY: inside the `N` bytes, aligned.
            let value = unsafe { from.cast::<u64>().add(i).read_volatile() };
            word.copy_from_slice(&value.to_ne_bytes());
        }
    } else {
        for (i, byte) in copy.iter_mut().enumerate() {
            // SAFETY: inside the `N` bytes.
            *byte = unsafe { from.add(i).read_volatile() };
        }
    }
    copy
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::shared_mapping::tests::memory_file;
    use rustix::fs::MemfdFlags;

    #[test]
    fn a_core_dump_has_nothing_of_the_guests_memory() {
        let file = memory_file(MemfdFlags::empty(), 8192);
        let region = Region::map(0, 0, 4096, file, 4096).unwrap();
        let maps = std::fs::read_to_string("/proc/self/smaps").unwrap();
        let start = format!("{:x}-", region.host() as usize);
        let flags = |line: &&str| line.starts_with("VmFlags:");
        let mut mapping = maps.lines().skip_while(|line| !line.starts_with(&start));
        let flags = mapping.find(flags).expect("the mapping is listed");
        assert!(flags.split_whitespace().any(|flag| flag == "dd"), "{flags}");
    }
}
