// SPDX-License-Identifier: Apache-2.0
//! A plain model of the rings that a device reads, by sections 2.7 and 2.8 of the specification:
//! no pointers, no caches, nothing shared with the code under test but the bound on long chains.

use super::{Arena, joined};
use virtqueue::chain::CHAIN_DESCRIPTORS_MIN;

pub const NEXT: u16 = 1;
pub const WRITE: u16 = 2;
pub const INDIRECT: u16 = 4;

/// A legal chain.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Found {
    pub id: u16,
    pub descriptors: u16,
    pub readable: Vec<(u64, u64)>,
    pub writable: Vec<(u64, u64)>,
}

/// The ring breaks a rule.
#[derive(Debug, PartialEq, Eq)]
pub struct Broken(pub &'static str);

#[derive(Clone, Copy)]
struct Desc {
    addr: u64,
    len: u32,
    flags: u16,
    last: u16,
}

/// A queue as its driver laid it out.
pub struct Ring<'a> {
    pub arena: &'a Arena,
    pub size: u16,
    pub areas: [u64; 3],
    pub indirect: bool,
}

#[derive(Default)]
struct Buffers {
    count: u32,
    readable: Vec<(u64, u64)>,
    writable: Vec<(u64, u64)>,
}

impl Ring<'_> {
    /// `last` is what the last two bytes say, after `flags` (split) or before them (packed).
    fn desc(&self, addr: u64, packed: bool) -> Result<Desc, Broken> {
        let b = self.arena.try_read(addr, 16).ok_or(Broken("descriptor outside memory"))?;
        let half = |at: usize| u16::from_le_bytes([b[at], b[at + 1]]);
        let (flags, last) = if packed { (half(14), half(12)) } else { (half(12), half(14)) };
        let addr = u64::from_le_bytes(b[..8].try_into().unwrap());
        Ok(Desc { addr, len: u32::from_le_bytes(b[8..12].try_into().unwrap()), flags, last })
    }

    fn add(&self, buffers: &mut Buffers, desc: Desc) -> Result<(), Broken> {
        buffers.count += 1;
        if buffers.count > u32::from(self.size).max(CHAIN_DESCRIPTORS_MIN) {
            return Err(Broken("too long"));
        }
        let writable = desc.flags & WRITE != 0;
        if !writable && super::sum(&buffers.writable) > 0 {
            return Err(Broken("readable after writable"));
        }
        let (mut addr, mut left) = (desc.addr, u64::from(desc.len));
        while left > 0 {
            let here = self.arena.device.regions().iter().find_map(|region| {
                let offset = addr.checked_sub(region.guest_addr())?;
                (offset < region.len()).then(|| left.min(region.len() - offset))
            });
            let here = here.ok_or(Broken("buffer outside memory"))?;
            let list = if writable { &mut buffers.writable } else { &mut buffers.readable };
            list.push((addr, here));
            left -= here;
            addr += here;
        }
        Ok(())
    }

    fn add_table(&self, buffers: &mut Buffers, table: Desc, packed: bool) -> Result<(), Broken> {
        if table.len == 0 || !table.len.is_multiple_of(16) {
            return Err(Broken("table length"));
        }
        let count = table.len / 16;
        let mut index = 0;
        while index < count {
            let at = table.addr.checked_add(16 * u64::from(index)).ok_or(Broken("wraps"))?;
            let desc = self.desc(at, packed)?;
            // Section 2.8.7: only WRITE counts in the table of a packed queue.
            if !packed && desc.flags & INDIRECT != 0 {
                return Err(Broken("table in a table"));
            }
            self.add(buffers, desc)?;
            if packed {
                index += 1;
            } else if desc.flags & NEXT == 0 {
                return Ok(());
            } else {
                index = u32::from(desc.last);
            }
        }
        if packed { Ok(()) } else { Err(Broken("index beyond the table")) }
    }

    fn found(buffers: Buffers, id: u16, descriptors: u16) -> Found {
        let Buffers { readable, writable, .. } = buffers;
        Found { id, descriptors, readable: joined(readable), writable: joined(writable) }
    }

    /// The chain at `position` of the avail ring.
    pub fn split(&self, position: u16) -> Result<Option<Found>, Broken> {
        let ahead = self.arena.read_u16(self.areas[1] + 2).wrapping_sub(position);
        if ahead > self.size {
            return Err(Broken("avail index"));
        }
        if ahead == 0 {
            return Ok(None);
        }
        let head = self.arena.read_u16(self.areas[1] + 4 + 2 * u64::from(position % self.size));
        let (mut buffers, mut index) = (Buffers::default(), head);
        for _ in 0..self.size {
            if index >= self.size {
                return Err(Broken("index beyond the table"));
            }
            let desc = self.desc(self.areas[0] + 16 * u64::from(index), false)?;
            if desc.flags & INDIRECT != 0 {
                if !self.indirect || desc.flags & NEXT != 0 {
                    return Err(Broken("indirect"));
                }
                self.add_table(&mut buffers, desc, false)?;
                return Ok(Some(Self::found(buffers, head, 1)));
            }
            self.add(&mut buffers, desc)?;
            if desc.flags & NEXT == 0 {
                return Ok(Some(Self::found(buffers, head, 1)));
            }
            index = desc.last;
        }
        Err(Broken("loop"))
    }

    /// The chain at descriptor `offset` of a packed ring, in a lap with this wrap counter.
    pub fn packed(&self, offset: u16, wrap: bool) -> Result<Option<Found>, Broken> {
        let at = |index: u16| self.areas[0] + 16 * u64::from(index % self.size);
        let first = self.desc(at(offset), true)?;
        if (first.flags & 0x80 != 0) != wrap || (first.flags & 0x8000 != 0) == wrap {
            return Ok(None);
        }
        let mut buffers = Buffers::default();
        for number in 0..self.size {
            let place = (u32::from(offset) + u32::from(number)) % u32::from(self.size);
            let desc = self.desc(at(place as u16), true)?;
            if desc.flags & INDIRECT != 0 {
                if !self.indirect || number > 0 || desc.flags & NEXT != 0 {
                    return Err(Broken("indirect"));
                }
                self.add_table(&mut buffers, desc, true)?;
                return Ok(Some(Self::found(buffers, desc.last, 1)));
            }
            self.add(&mut buffers, desc)?;
            if desc.flags & NEXT == 0 {
                return Ok(Some(Self::found(buffers, desc.last, number + 1)));
            }
        }
        Err(Broken("loop"))
    }
}
