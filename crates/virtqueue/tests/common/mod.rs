// SPDX-License-Identifier: Apache-2.0
//! Guest memory that the device side under test, the tests' drivers and rust-vmm's queue all map.
#![allow(dead_code, unreachable_pub, missing_docs)] // each test program uses its own part

pub mod reference;

use libc::iovec;
use std::fs::File;
use std::sync::Arc;
use virtqueue::{Chain, DirtyLog, GuestMemory, Layout, Region, RingSetup};
use vm_memory::{Bytes, FileOffset, GuestAddress, GuestMemoryMmap};

/// Data: two regions without a gap between them; the first one has the higher file offset.
pub const LOW: u64 = 0x10_0000;
pub const HIGH: u64 = 0x18_0000;
pub const DATA_END: u64 = 0x20_0000;
/// Indirect tables: two regions whose border lies inside a descriptor.
pub const TABLES: u64 = 0x30_0000;
pub const TABLES_BORDER: u64 = 0x30_1008;
/// The ring areas.
pub const RINGS: u64 = 0x40_0000;
pub const RINGS_LEN: u64 = 0x2_0000;

/// Guest-physical address, length and file offset of each region.
pub const REGIONS: [(u64, u64, u64); 5] = [
    (LOW, 0x8_0000, 0x9_0000),
    (HIGH, 0x8_0000, 0x1_0000),
    (TABLES, 0x1008, 0x11_0000),
    (TABLES_BORDER, 0x2ff8, 0x12_0000),
    (RINGS, RINGS_LEN, 0x13_0000),
];

/// Difference between the front-end's addresses and guest-physical ones.
pub const USER_BASE: u64 = 0x7a00_0000_0000;

/// Guest-physical address and length of each range.
pub type Ranges = Vec<(u64, u64)>;

/// The memory, as the device under test and as rust-vmm's queue map it.
pub struct Arena {
    pub device: Arc<GuestMemory>,
    pub driver: GuestMemoryMmap,
}

pub fn memfd(len: u64) -> File {
    let fd = rustix::fs::memfd_create("guest", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
    let file = File::from(fd);
    file.set_len(len).unwrap();
    file
}

impl Arena {
    pub fn new() -> Self {
        Self::with_regions(&REGIONS)
    }

    /// Makes a memory with these regions, by ascending address.
    pub fn with_regions(regions: &[(u64, u64, u64)]) -> Self {
        let end = regions.iter().map(|&(_, len, offset)| len + offset).max().unwrap();
        let file = memfd(end.next_multiple_of(4096));
        let device = regions.iter().map(|&(gpa, len, offset)| {
            let user = gpa.wrapping_add(USER_BASE);
            Region::map(gpa, user, len, file.try_clone().unwrap(), offset).unwrap()
        });
        let driver = regions.iter().map(|&(gpa, len, offset)| {
            let file = FileOffset::new(file.try_clone().unwrap(), offset);
            (GuestAddress(gpa), len as usize, Some(file))
        });
        Arena {
            device: Arc::new(GuestMemory::new(device.collect()).unwrap()),
            driver: GuestMemoryMmap::from_ranges_with_files(driver.collect::<Vec<_>>()).unwrap(),
        }
    }

    pub fn setup(&self, layout: Layout, size: u16, areas: [u64; 3]) -> RingSetup {
        let [desc_addr, avail_addr, used_addr] = areas.map(|gpa| gpa.wrapping_add(USER_BASE));
        RingSetup {
            memory: Arc::clone(&self.device),
            layout,
            size,
            desc_addr,
            avail_addr,
            used_addr,
            base: 0,
            indirect: true,
            event_idx: false,
            keep_descriptors: false,
            log: None,
            used_log_addr: None,
        }
    }

    pub fn write(&self, gpa: u64, bytes: &[u8]) {
        self.driver.write_slice(bytes, GuestAddress(gpa)).unwrap();
    }

    pub fn write_u16(&self, gpa: u64, value: u16) {
        self.write(gpa, &value.to_le_bytes());
    }

    pub fn read(&self, gpa: u64, len: usize) -> Vec<u8> {
        self.try_read(gpa, len).unwrap()
    }

    pub fn try_read(&self, gpa: u64, len: usize) -> Option<Vec<u8>> {
        gpa.checked_add(len as u64)?;
        let mut bytes = vec![0; len];
        self.driver.read_slice(&mut bytes, GuestAddress(gpa)).ok()?;
        Some(bytes)
    }

    pub fn read_u16(&self, gpa: u64) -> u16 {
        u16::from_le_bytes(self.read(gpa, 2).try_into().unwrap())
    }

    /// Writes a descriptor of a split queue or of an indirect table.
    pub fn write_desc(
        &self,
        table: u64,
        index: u16,
        (addr, len): (u64, u32),
        flags: u16,
        next: u16,
    ) {
        let mut bytes = [0; 16];
        bytes[..8].copy_from_slice(&addr.to_le_bytes());
        bytes[8..12].copy_from_slice(&len.to_le_bytes());
        bytes[12..14].copy_from_slice(&flags.to_le_bytes());
        bytes[14..].copy_from_slice(&next.to_le_bytes());
        self.write(table + 16 * u64::from(index), &bytes);
    }

    /// A copy of the whole guest memory.
    pub fn snapshot(&self) -> Vec<Vec<u8>> {
        let regions = self.device.regions().iter();
        regions.map(|region| self.read(region.guest_addr(), region.len() as usize)).collect()
    }

    /// Guest-physical ranges that the iovecs name, with neighbours joined. Panics if one of their
    /// bytes is not guest memory.
    pub fn ranges_of(&self, iovs: &[iovec]) -> Ranges {
        let mut pieces = Vec::new();
        for iov in iovs {
            let (mut host, mut left) = (iov.iov_base as u64, iov.iov_len as u64);
            while left > 0 {
                let holds =
                    |region: &&Region| host.wrapping_sub(region.host() as u64) < region.len();
                let region = self.device.regions().iter().find(holds);
                let region = region.expect("a segment leaves guest memory");
                let offset = host - region.host() as u64;
                let here = left.min(region.len() - offset);
                pieces.push((region.guest_addr() + offset, here));
                host += here;
                left -= here;
            }
        }
        joined(pieces)
    }

    /// Readable and writable ranges of a chain.
    pub fn chain_ranges(&self, chain: &mut Chain) -> (Ranges, Ranges) {
        (self.ranges_of(chain.readable()), self.ranges_of(chain.writable()))
    }
}

/// The same bytes in the same order with the fewest ranges.
pub fn joined(pieces: impl IntoIterator<Item = (u64, u64)>) -> Ranges {
    let mut all: Ranges = Vec::new();
    for (addr, len) in pieces.into_iter().filter(|&(_, len)| len > 0) {
        match all.last_mut() {
            Some(last) if last.0.wrapping_add(last.1) == addr => last.1 += len,
            _ => all.push((addr, len)),
        }
    }
    all
}

pub fn sum(ranges: &[(u64, u64)]) -> u64 {
    ranges.iter().map(|(_, len)| len).sum()
}

/// Addresses of the areas of a split queue of `size` in [`RINGS`], at least one page each.
pub fn split_areas(size: u16) -> [u64; 3] {
    let size = u64::from(size);
    let avail = (RINGS + 16 * size).next_multiple_of(4096);
    [RINGS, avail, (avail + 6 + 2 * size).next_multiple_of(4096)]
}

/// A dirty log of `pages` pages and the file behind it.
pub fn dirty_log(pages: u64) -> (Arc<DirtyLog>, File) {
    let len = pages.div_ceil(8);
    let file = memfd(len);
    (Arc::new(DirtyLog::map(file.try_clone().unwrap(), 0, len).unwrap()), file)
}

/// Returns the numbers of the pages marked in a log and clears the log.
pub fn drain_log(file: &File) -> Vec<u64> {
    use std::os::unix::fs::FileExt;
    let mut bytes = vec![0; file.metadata().unwrap().len() as usize];
    file.read_exact_at(&mut bytes, 0).unwrap();
    file.write_all_at(&vec![0; bytes.len()], 0).unwrap();
    let marked = |page: &u64| bytes[(page / 8) as usize] & (1 << (page % 8)) != 0;
    (0..8 * bytes.len() as u64).filter(marked).collect()
}
