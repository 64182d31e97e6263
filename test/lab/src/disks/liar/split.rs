// SPDX-License-Identifier: Apache-2.0
//! A split ring (section 2.7), as a device sees it that may lie.

use anyhow::{Result, bail};
use kit::rng::Rng;
use virtio_spec::split::{
    DESC_F_INDIRECT, DESC_F_NEXT, DESC_F_WRITE, Desc, IDX_OFFSET, RING_OFFSET,
};
use zerocopy::FromBytes;

use super::memory::Memory;
use super::ring::{Chain, Format, Part};

pub(super) const DESC_BYTES: u64 = 16;
const DESC_FLAGS_OFFSET: u64 = 12;
const USED_ELEM_BYTES: u64 = 8;

/// Most descriptors that are followed.
pub(super) const CHAIN_MAX: usize = 1024;

pub(super) struct Split {
    size: u16,
    table: u64,
    used: u64,
    avail: u64,
    /// The next entry of the avail ring.
    next: u16,
    used_index: u16,
}

impl Split {
    /// Addresses of the guest: descriptor table, used ring, avail ring.
    pub(super) fn new(size: u16, base: u32, [table, used, avail]: [u64; 3]) -> Self {
        let next = base as u16;
        Self { size, table, used, avail, next, used_index: next }
    }

    fn parts(&self, memory: &Memory, head: u16) -> Result<Vec<Part>> {
        let (mut table, mut entries) = (self.table, u32::from(self.size));
        let (mut at, mut parts) = (head, Vec::new());
        while parts.len() < CHAIN_MAX {
            if u32::from(at) >= entries {
                bail!("a descriptor beyond its table");
            }
            let mut bytes = [0; DESC_BYTES as usize];
            memory.read(table + DESC_BYTES * u64::from(at), &mut bytes)?;
            let Ok(desc) = Desc::read_from_bytes(&bytes) else { bail!("a descriptor's size") };
            if desc.flags & DESC_F_INDIRECT != 0 {
                (table, entries, at) = (desc.addr, desc.len / DESC_BYTES as u32, 0);
                continue;
            }
            let writable = desc.flags & DESC_F_WRITE != 0;
            parts.push(Part { addr: desc.addr, len: desc.len, writable });
            if desc.flags & DESC_F_NEXT == 0 {
                return Ok(parts);
            }
            at = desc.next;
        }
        bail!("a chain without end")
    }
}

impl Format for Split {
    fn take(&mut self, memory: &Memory) -> Result<Option<Chain>> {
        if self.next == memory.read_u16(self.avail + IDX_OFFSET as u64)? {
            return Ok(None);
        }
        let at = self.avail + RING_OFFSET as u64 + 2 * u64::from(self.next % self.size);
        let head = memory.read_u16(at)?;
        self.next = self.next.wrapping_add(1);
        let parts = self.parts(memory, head).unwrap_or_default();
        Ok(Some(Chain { id: head, places: 1, parts }))
    }

    fn put(&mut self, memory: &Memory, id: u32, len: u32, _chain: &Chain) -> Result<()> {
        let slot = u64::from(self.used_index % self.size);
        let at = self.used + RING_OFFSET as u64 + USED_ELEM_BYTES * slot;
        memory.write(at, &[id.to_le_bytes(), len.to_le_bytes()].concat())?;
        self.used_index = self.used_index.wrapping_add(1);
        Ok(())
    }

    fn publish(&mut self, memory: &Memory, jump: u16) -> Result<()> {
        let index = self.used_index.wrapping_add(jump);
        memory.write(self.used + IDX_OFFSET as u64, &index.to_le_bytes())
    }

    fn join(&mut self, memory: &Memory, chain: &Chain) -> Result<()> {
        let at = self.table + DESC_BYTES * u64::from(chain.id % self.size) + DESC_FLAGS_OFFSET;
        let flags = memory.read_u16(at)? | DESC_F_NEXT;
        memory.write(at, &flags.to_le_bytes())
    }

    fn scribble(&mut self, memory: &Memory, rng: &mut Rng) -> Result<()> {
        let bytes = rng.bytes(DESC_BYTES as usize);
        let slot = rng.below(self.size.into());
        memory.write(self.table + DESC_BYTES * slot, &bytes)?;
        memory.write(self.avail + RING_OFFSET as u64 + 2 * slot, &bytes[..2])
    }

    fn base(&self) -> u32 {
        self.next.into()
    }
}
