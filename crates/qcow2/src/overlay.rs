// SPDX-License-Identifier: Apache-2.0
//! The changes of a file that wait for their commit, and the order in which they reach it.
//!
//! imago orders its cached tables, but not the tables that it writes at once (the L1 table and the
//! header). So no write of imago reaches the file directly: it stays here, and a commit writes all
//! in phases. After each phase, and at each instant inside of it, the file is consistent, except
//! that clusters may be leaked:
//!
//! 1. data, and clusters that no table names yet; refcounts, none lower than before;
//! 2. refcount tables, 3. the header's pointer to one;
//! 4. L2 tables, 5. the L1 table, 6. the rest of the header;
//! 7. refcounts that are lower than before.
//!
//! A phase without a write needs no sync. A write of the first phase that an earlier commit without room has
//! made already is not repeated; its sync still is ([`crate::job::Job::run`]).

use crate::check::refcount_of;
use crate::places::Places;
use std::collections::btree_map::{BTreeMap, Entry};
use std::io;
use std::ops::Range;

/// Smallest write that is atomic, in bytes.
const SECTOR: u64 = 512;
pub(crate) const PHASES: usize = 7;
/// The header's fields `refcount_table_offset` and `refcount_table_clusters`.
const REFCOUNT_POINTER: std::ops::Range<u64> = 48..60;

/// Changed sectors by their number.
#[derive(Debug, Default)]
pub(crate) struct Overlay {
    sectors: BTreeMap<u64, [u8; SECTOR as usize]>,
    revision: u64,
}

/// Reads from the file below.
pub(crate) type ReadBelow<'a> = &'a dyn Fn(&mut [u8], u64) -> io::Result<()>;

/// Writes of one phase: positions and bytes.
pub(crate) type Phase = Vec<(u64, Vec<u8>)>;

/// The work of a commit.
#[derive(Debug, Default)]
pub(crate) struct Commit {
    /// The writes.
    pub(crate) phases: [Phase; PHASES],
    /// The clusters that are free after it, and were not before.
    pub(crate) freed: Vec<Range<u64>>,
    /// The clusters of the tables after it.
    pub(crate) places: Places,
}

impl Overlay {
    pub(crate) fn is_empty(&self) -> bool {
        self.sectors.is_empty()
    }

    pub(crate) fn clear(&mut self) {
        self.sectors.clear();
    }

    /// Another number after each change.
    pub(crate) fn revision(&self) -> u64 {
        self.revision
    }

    /// End of the last changed sector.
    pub(crate) fn end(&self) -> u64 {
        self.sectors.last_key_value().map_or(0, |(number, _)| (number + 1) * SECTOR)
    }

    /// Forgets the changes of whole sectors in a range: newer data is in the file.
    pub(crate) fn forget(&mut self, offset: u64, len: u64) {
        self.revision += 1;
        for number in offset.div_ceil(SECTOR)..(offset + len) / SECTOR {
            self.sectors.remove(&number);
        }
    }

    /// Replaces the bytes of `buf`, which were read at `offset`, by changed ones.
    pub(crate) fn patch(&self, buf: &mut [u8], offset: u64) {
        let end = offset + buf.len() as u64;
        for (number, sector) in self.sectors.range(offset / SECTOR..end.div_ceil(SECTOR)) {
            let start = number * SECTOR;
            let (from, to) = (start.max(offset), (start + SECTOR).min(end));
            buf[(from - offset) as usize..(to - offset) as usize]
                .copy_from_slice(&sector[(from - start) as usize..(to - start) as usize]);
        }
    }

    pub(crate) fn write(
        &mut self,
        data: &[u8],
        offset: u64,
        below: ReadBelow<'_>,
    ) -> io::Result<()> {
        self.revision += 1;
        let end = offset + data.len() as u64;
        for number in offset / SECTOR..end.div_ceil(SECTOR) {
            let start = number * SECTOR;
            let (from, to) = (start.max(offset), (start + SECTOR).min(end));
            let sector = match self.sectors.entry(number) {
                Entry::Occupied(changed) => changed.into_mut(),
                Entry::Vacant(unchanged) => {
                    let mut sector = [0; SECTOR as usize];
                    if to - from < SECTOR {
                        below(&mut sector, start)?;
                    }
                    unchanged.insert(sector)
                }
            };
            sector[(from - start) as usize..(to - start) as usize]
                .copy_from_slice(&data[(from - offset) as usize..(to - offset) as usize]);
        }
        Ok(())
    }

    pub(crate) fn read(
        &self,
        len: usize,
        offset: u64,
        below: ReadBelow<'_>,
    ) -> io::Result<Vec<u8>> {
        let mut found = vec![0; len];
        below(&mut found, offset)?;
        self.patch(&mut found, offset);
        Ok(found)
    }

    /// The writes of each phase, and the clusters that they free.
    pub(crate) fn commit(&self, cluster_bytes: u64, below: ReadBelow<'_>) -> io::Result<Commit> {
        let places = Places::read(cluster_bytes, &|len, at| self.read(len, at, below))?;
        let Commit { mut phases, mut freed, .. } = Commit::default();
        for (number, new) in &self.sectors {
            let at = number * SECTOR;
            let cluster = at >> places.cluster_bits;
            if let Some(block) = places.refcount_blocks.get(&cluster) {
                let mut old = [0; SECTOR as usize];
                below(&mut old, at)?;
                // An allocation lowers no count, and a free raises none: one of both writes is enough.
                let most = larger(&old, new, places.refcount_order);
                if most != old {
                    push(&mut phases[0], at, &most);
                }
                if most != new {
                    push(&mut phases[6], at, new);
                }
                places.free(*block, at, &old, new, &mut freed);
            } else if at == 0 {
                let mut old = [0; SECTOR as usize];
                below(&mut old, at)?;
                let range = REFCOUNT_POINTER.start as usize..REFCOUNT_POINTER.end as usize;
                if old[range.clone()] != new[range.clone()] {
                    old[range.clone()].copy_from_slice(&new[range]);
                    push(&mut phases[2], at, &old);
                }
                if &old != new {
                    push(&mut phases[5], at, new);
                }
            } else {
                let phase = match () {
                    () if cluster == 0 => 5,
                    () if places.refcount_table.contains(&cluster) => 1,
                    () if places.l1_table.contains(&cluster) => 4,
                    () if places.l2_tables.contains(&cluster) => 3,
                    () => 0,
                };
                push(&mut phases[phase], at, new);
            }
        }
        Ok(Commit { phases, freed, places })
    }
}

/// Adds a write, to the previous one if it continues it.
fn push(phase: &mut Phase, at: u64, data: &[u8]) {
    match phase.last_mut() {
        Some((start, before)) if *start + before.len() as u64 == at => {
            before.extend_from_slice(data)
        }
        _ => phase.push((at, data.to_vec())),
    }
}

/// The larger of two refcounts, for each of a sector of them.
fn larger(old: &[u8], new: &[u8], order: u32) -> Vec<u8> {
    let mut found = Vec::with_capacity(new.len());
    if order >= 3 {
        let bytes = 1 << (order - 3);
        for (old, new) in old.chunks(bytes).zip(new.chunks(bytes)) {
            found.extend_from_slice(old.max(new)); // big-endian: the order of the bytes
        }
        return found;
    }
    let (width, mask) = (1 << order, (1u16 << (1 << order)) - 1);
    for (old, new) in old.iter().zip(new) {
        let field = |shift: u32| {
            let part = |byte: u8| (u16::from(byte) >> shift) & mask;
            part(*old).max(part(*new)) << shift
        };
        found.push((0..8).step_by(width).map(|shift| field(shift as u32)).sum::<u16>() as u8);
    }
    found
}

impl Places {
    /// Adds the clusters whose refcounts become 0 by a change of the sector at `at`, in a block.
    fn free(&self, block: u64, at: u64, old: &[u8], new: &[u8], freed: &mut Vec<Range<u64>>) {
        let within = at & ((1 << self.cluster_bits) - 1);
        let first = block * self.counts(1 << self.cluster_bits) + self.counts(within);
        for entry in 0..self.counts(SECTOR) {
            let count = |sector| refcount_of(sector, entry, self.refcount_order);
            if count(new) > 0 || count(old) == 0 || first + entry == 0 {
                continue;
            }
            let start = (first + entry) << self.cluster_bits;
            let end = start + (1 << self.cluster_bits);
            match freed.last_mut() {
                Some(last) if last.end == start => last.end = end,
                _ => freed.push(start..end),
            }
        }
    }
}
