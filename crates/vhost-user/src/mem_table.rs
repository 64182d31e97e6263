// SPDX-License-Identifier: Apache-2.0
//! The memory table of SET_MEM_TABLE, ADD_MEM_REG and REM_MEM_REG.

use crate::error::refusal;
use std::fs::File;
use std::io;
use std::sync::Arc;
use vhost::vhost_user::message::VhostUserMemoryRegion;
use virtqueue::{GuestMemory, MemoryError, Region};

/// Maximum number of regions; QEMU has the same bound of memory slots.
pub(crate) const SLOTS_MAX: usize = 509;
/// Maximum bytes of all regions. `virtqueue` bounds the tables of all disks together.
const TABLE_BYTES_MAX: u64 = 16 << 40;

/// The current memory table.
#[derive(Debug, Default)]
pub(crate) struct MemTable {
    regions: Vec<Region>,
}

impl MemTable {
    /// A table of the regions of SET_MEM_TABLE.
    pub(crate) fn set(regions: &[VhostUserMemoryRegion], files: Vec<File>) -> io::Result<Self> {
        let mut table = MemTable::default();
        for (region, file) in regions.iter().zip(files) {
            table.add(region, file)?;
        }
        Ok(table)
    }

    /// A table of mapped regions.
    pub(crate) fn of(regions: Vec<Region>) -> Self {
        MemTable { regions }
    }

    /// The regions, in the order of their messages.
    pub(crate) fn regions(&self) -> &[Region] {
        &self.regions
    }

    /// The table with an additional region.
    pub(crate) fn with(&self, region: &VhostUserMemoryRegion, file: File) -> io::Result<Self> {
        let mut table = MemTable::of(self.regions.clone());
        table.add(region, file)?;
        Ok(table)
    }

    fn add(&mut self, region: &VhostUserMemoryRegion, file: File) -> io::Result<()> {
        let (guest, user, len) = (region.guest_phys_addr, region.user_addr, region.memory_size);
        let taken: u64 = self.regions.iter().map(Region::len).sum();
        if len > TABLE_BYTES_MAX.saturating_sub(taken) {
            let most = TABLE_BYTES_MAX >> 30;
            return Err(refusal(format!("more than {most} GiB of guest memory; give it less")));
        }
        let region = Region::map(guest, user, len, file, region.mmap_offset).map_err(refusal)?;
        self.regions.push(region);
        Ok(())
    }

    /// The table without one region; `None` if the region is not in the table.
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

    /// The table for the data plane; refuses overlapping regions.
    pub(crate) fn to_memory(&self) -> Result<Arc<GuestMemory>, MemoryError> {
        GuestMemory::new(self.regions.clone()).map(Arc::new)
    }
}
