// SPDX-License-Identifier: Apache-2.0
//! Guest memory, by the guest's addresses and by the front-end's.

use std::fs::File;
use std::os::fd::OwnedFd;

use anyhow::{Context, Result, bail};
use vm_memory::{Bytes, FileOffset, GuestAddress, GuestMemoryMmap, GuestRegionMmap, MmapRegion};

/// Of a SET_MEM_TABLE: count and padding, then for each region four numbers of 8 bytes.
const TABLE_HEADER_BYTES: usize = 8;
const REGION_BYTES: usize = 32;

/// The guest's memory, mapped.
pub(super) struct Memory {
    map: GuestMemoryMmap,
    regions: Vec<Region>,
}

struct Region {
    guest: u64,
    bytes: u64,
    front_end: u64,
}

impl Memory {
    /// Maps what a SET_MEM_TABLE names.
    pub(super) fn map(payload: &[u8], fds: &mut Vec<OwnedFd>) -> Result<Self> {
        let numbers: Vec<u64> = payload
            .get(TABLE_HEADER_BYTES..)
            .context("no regions")?
            .chunks_exact(8)
            .map(|bytes| bytes.iter().rev().fold(0, |all, byte| all << 8 | u64::from(*byte)))
            .collect();
        let (mut regions, mut maps) = (Vec::new(), Vec::new());
        for (numbers, fd) in numbers.chunks_exact(REGION_BYTES / 8).zip(fds.drain(..)) {
            let &[guest, bytes, front_end, offset] = numbers else { bail!("a short region") };
            let file = FileOffset::new(File::from(fd), offset);
            let region = MmapRegion::from_file(file, usize::try_from(bytes)?)?;
            maps.push(GuestRegionMmap::new(region, GuestAddress(guest)).context("a region")?);
            regions.push(Region { guest, bytes, front_end });
        }
        Ok(Self { map: GuestMemoryMmap::from_regions(maps)?, regions })
    }

    /// The guest's address of one of the front-end's.
    pub(super) fn guest_address(&self, front_end: u64) -> Result<u64> {
        let inside = |region: &&Region| {
            front_end.checked_sub(region.front_end).is_some_and(|at| at < region.bytes)
        };
        let region = self.regions.iter().find(inside).context("an address of no region")?;
        Ok(front_end - region.front_end + region.guest)
    }

    pub(super) fn read(&self, at: u64, bytes: &mut [u8]) -> Result<()> {
        Ok(self.map.read_slice(bytes, GuestAddress(at))?)
    }

    pub(super) fn write(&self, at: u64, bytes: &[u8]) -> Result<()> {
        Ok(self.map.write_slice(bytes, GuestAddress(at))?)
    }

    pub(super) fn read_u16(&self, at: u64) -> Result<u16> {
        let mut bytes = [0; 2];
        self.read(at, &mut bytes)?;
        Ok(u16::from_le_bytes(bytes))
    }
}
