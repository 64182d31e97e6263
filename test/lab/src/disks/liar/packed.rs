// SPDX-License-Identifier: Apache-2.0
//! The device side of a packed ring (section 2.8), able to lie.

use std::sync::atomic::{Ordering, fence};

use anyhow::{Result, bail};
use kit::rng::Rng;
use virtio_spec::packed::{
    DESC_F_AVAIL, DESC_F_INDIRECT, DESC_F_NEXT, DESC_F_USED, DESC_F_WRITE, Desc, EVENT_BYTES,
};
use zerocopy::FromBytes;

use super::memory::Memory;
use super::ring::{Chain, Format, Part};
use super::split::{CHAIN_MAX, DESC_BYTES};

const LEN_OFFSET: u64 = 8;
const FLAGS_OFFSET: u64 = 14;

/// A place in the ring, and the lap's parity.
#[derive(Clone, Copy)]
struct Position {
    offset: u16,
    wrap: bool,
}

impl Position {
    /// Decodes the form of SET_VRING_BASE.
    fn from_bits(bits: u32) -> Self {
        Self { offset: bits as u16 & 0x7fff, wrap: bits & 0x8000 != 0 }
    }

    fn bits(self) -> u32 {
        u32::from(self.offset) | u32::from(self.wrap) << 15
    }

    fn advance(&mut self, places: u16, size: u16) {
        let next = u32::from(self.offset) + u32::from(places);
        self.wrap ^= next >= u32::from(size);
        self.offset = (next % u32::from(size)) as u16;
    }
}

pub(super) struct Packed {
    size: u16,
    ring: u64,
    /// Address of the driver's event suppression structure.
    driver: u64,
    next: Position,
    used: Position,
}

impl Packed {
    /// Addresses of the guest: descriptor ring, device area, driver area.
    pub(super) fn new(size: u16, base: u32, [ring, _, driver]: [u64; 3]) -> Self {
        let (next, used) = (Position::from_bits(base), Position::from_bits(base >> 16));
        Self { size, ring, driver, next, used }
    }

    fn at(&self, offset: u16) -> u64 {
        self.ring + DESC_BYTES * u64::from(offset % self.size)
    }

    /// The chain at `next`: the parts, the descriptors, and the id, which is in the last
    /// descriptor.
    fn chain(&self, memory: &Memory) -> Result<Chain> {
        let (mut at, mut chain) = (self.next, Chain { id: 0, places: 0, parts: Vec::new() });
        loop {
            let desc = read(memory, self.at(at.offset))?;
            chain.id = desc.id;
            chain.places += 1;
            if desc.flags & DESC_F_INDIRECT != 0 {
                for index in 0..(u64::from(desc.len) / DESC_BYTES).min(CHAIN_MAX as u64) {
                    chain.parts.push(part(&read(memory, desc.addr + DESC_BYTES * index)?));
                }
            } else {
                chain.parts.push(part(&desc));
            }
            if desc.flags & DESC_F_NEXT == 0 {
                return Ok(chain);
            }
            if chain.places >= self.size {
                bail!("a chain without end");
            }
            at.advance(1, self.size);
        }
    }

    /// Marks a place as used by the device.
    fn mark(&self, memory: &Memory, at: Position, more: u16) -> Result<()> {
        let flags = more | if at.wrap { DESC_F_AVAIL | DESC_F_USED } else { 0 };
        // The driver reads the other fields after the flags.
        fence(Ordering::Release);
        memory.write(self.at(at.offset) + FLAGS_OFFSET, &flags.to_le_bytes())
    }
}

fn read(memory: &Memory, at: u64) -> Result<Desc> {
    let mut bytes = [0; DESC_BYTES as usize];
    memory.read(at, &mut bytes)?;
    let Ok(desc) = Desc::read_from_bytes(&bytes) else { bail!("a descriptor's size") };
    Ok(desc)
}

fn part(desc: &Desc) -> Part {
    Part { addr: desc.addr, len: desc.len, writable: desc.flags & DESC_F_WRITE != 0 }
}

impl Format for Packed {
    fn take(&mut self, memory: &Memory) -> Result<Option<Chain>> {
        let flags = memory.read_u16(self.at(self.next.offset) + FLAGS_OFFSET)?;
        let (avail, used) = (flags & DESC_F_AVAIL != 0, flags & DESC_F_USED != 0);
        if avail != self.next.wrap || used == self.next.wrap {
            return Ok(None);
        }
        // The driver wrote the other fields before the flags.
        fence(Ordering::Acquire);
        let nonsense = Chain { id: 0, places: 1, parts: Vec::new() };
        let chain = self.chain(memory).unwrap_or(nonsense);
        self.next.advance(chain.places, self.size);
        Ok(Some(chain))
    }

    fn put(&mut self, memory: &Memory, id: u32, len: u32, chain: &Chain) -> Result<()> {
        let at = self.at(self.used.offset) + LEN_OFFSET;
        memory.write(at, &[&len.to_le_bytes()[..], &(id as u16).to_le_bytes()].concat())?;
        self.mark(memory, self.used, DESC_F_WRITE)?;
        self.used.advance(chain.places, self.size);
        Ok(())
    }

    /// A packed ring has no index: marks the skipped places as used, with their present content.
    fn publish(&mut self, memory: &Memory, jump: u16) -> Result<()> {
        let mut at = self.used;
        for _ in 0..jump % self.size {
            self.mark(memory, at, 0)?;
            at.advance(1, self.size);
        }
        Ok(())
    }

    /// Sets the flags so that the chain continues in the next one.
    fn join(&mut self, memory: &Memory, chain: &Chain) -> Result<()> {
        let mut next = self.used;
        next.advance(chain.places, self.size);
        let at = self.at(next.offset) + FLAGS_OFFSET;
        let flags = memory.read_u16(at)? | DESC_F_NEXT | DESC_F_INDIRECT;
        memory.write(at, &flags.to_le_bytes())
    }

    fn scribble(&mut self, memory: &Memory, rng: &mut Rng) -> Result<()> {
        let slot = rng.below(self.size.into()) as u16;
        memory.write(self.at(slot), &rng.bytes(DESC_BYTES as usize))?;
        memory.write(self.driver, &rng.bytes(EVENT_BYTES))
    }

    fn base(&self) -> u32 {
        self.next.bits() | self.used.bits() << 16
    }
}
