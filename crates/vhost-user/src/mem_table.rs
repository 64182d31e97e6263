// SPDX-License-Identifier: Apache-2.0
//! The memory table as messages build it: SET_MEM_TABLE, ADD_MEM_REG and REM_MEM_REG.

use crate::descriptor::check_holds;
use crate::session::refusal;
use std::fs::File;
use std::io;
use std::sync::Arc;
use vhost::vhost_user::message::VhostUserMemoryRegion;
use virtqueue::{GuestMemory, MemoryError, Region};

/// Most regions that a front-end may add; QEMU's own bound for memory slots.
pub(crate) const SLOTS_MAX: usize = 509;

/// The table of the moment.
#[derive(Debug, Default)]
pub(crate) struct MemTable {
    regions: Vec<Region>,
}

impl MemTable {
    /// Replaces the whole table.
    pub(crate) fn set(regions: &[VhostUserMemoryRegion], files: Vec<File>) -> io::Result<Self> {
        let regions: io::Result<_> =
            regions.iter().zip(files).map(|(region, file)| map(region, file)).collect();
        Ok(MemTable { regions: regions? })
    }

    /// The table with one region more.
    pub(crate) fn with(&self, region: &VhostUserMemoryRegion, file: File) -> io::Result<Self> {
        let mut regions = self.regions.clone();
        regions.push(map(region, file)?);
        Ok(MemTable { regions })
    }

    /// The table with one region less; `None` when it is not there.
    pub(crate) fn without(&self, gone: &VhostUserMemoryRegion) -> Option<Self> {
        let (guest, user, len) = (gone.guest_phys_addr, gone.user_addr, gone.memory_size);
        let at = self.regions.iter().position(|region| {
            region.guest_addr() == guest && region.user_addr() == user && region.len() == len
        })?;
        let mut regions = self.regions.clone();
        regions.remove(at);
        Some(MemTable { regions })
    }

    /// Number of regions.
    pub(crate) fn len(&self) -> usize {
        self.regions.len()
    }

    /// The table for the data plane; refuses regions that overlap.
    pub(crate) fn to_memory(&self) -> Result<Arc<GuestMemory>, MemoryError> {
        GuestMemory::new(self.regions.clone()).map(Arc::new)
    }
}

fn map(region: &VhostUserMemoryRegion, file: File) -> io::Result<Region> {
    let (guest, user, len) = (region.guest_phys_addr, region.user_addr, region.memory_size);
    check_holds(&file, region.mmap_offset, len)?;
    Region::map(guest, user, len, file, region.mmap_offset).map_err(refusal)
}
