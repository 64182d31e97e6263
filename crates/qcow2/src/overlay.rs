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
//! A phase begins when those before it are durable ([`crate::job::Out`]), also those of earlier commits. The end of
//! a commit is not durable: a FLUSH of the guest makes it so, or the next phase that needs it.
//!
//! A whole table that is written again is compared with the file, so that a commit has the changed sectors only.
//! Refcounts are raised ahead ([`crate::reserve`]).

use crate::places::Places;
use crate::reserve::{Counts, Reserve, Sector};
use std::collections::BTreeMap;
use std::io;
use std::ops::Range;

/// Smallest write that is atomic, in bytes.
pub(crate) const SECTOR: u64 = 512;
const SECTOR_BYTES: usize = SECTOR as usize;
pub(crate) const PHASES: usize = 7;
/// The header's fields `refcount_table_offset` and `refcount_table_clusters`.
const REFCOUNT_POINTER: std::ops::Range<u64> = 48..60;
/// Bytes that are read at once for a comparison.
const COMPARED: usize = 64 << 10;

/// Changed sectors by their number.
#[derive(Debug, Default)]
pub(crate) struct Overlay {
    sectors: BTreeMap<u64, Sector>,
    pub(crate) reserve: Reserve,
    /// The content of the file, for a comparison.
    compared: Vec<u8>,
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
    /// The clusters of the tables after it, if they are others than before.
    pub(crate) places: Option<Places>,
    /// End of the reserved clusters.
    pub(crate) reserved_end: u64,
}

impl Overlay {
    pub(crate) fn is_empty(&self) -> bool {
        self.sectors.is_empty()
    }

    /// Takes the end of a commit: the file has all changes.
    pub(crate) fn committed(&mut self) {
        self.sectors.clear();
        self.reserve.committed();
    }

    /// Another number after each change of the content that imago reads.
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
        let range = offset.div_ceil(SECTOR)..(offset + len) / SECTOR;
        let found: Vec<u64> = self.sectors.range(range).map(|(number, _)| *number).collect();
        for number in found {
            self.sectors.remove(&number);
        }
    }

    /// Replaces the bytes of `buf`, which were read at `offset`, by those that imago has written.
    pub(crate) fn patch(&self, buf: &mut [u8], offset: u64) {
        let end = offset + buf.len() as u64;
        let sectors = offset / SECTOR..end.div_ceil(SECTOR);
        let seen = self.reserve.seen(sectors.clone());
        for (number, sector) in seen.chain(self.sectors.range(sectors)) {
            let start = number * SECTOR;
            let (from, to) = (start.max(offset), (start + SECTOR).min(end));
            buf[(from - offset) as usize..(to - offset) as usize]
                .copy_from_slice(&sector[(from - start) as usize..(to - start) as usize]);
        }
    }

    /// Keeps the sectors of a write that differ from those of the file.
    pub(crate) fn write(
        &mut self,
        mut data: &[u8],
        mut offset: u64,
        below: ReadBelow<'_>,
    ) -> io::Result<()> {
        while !data.is_empty() {
            let within = (offset % SECTOR) as usize;
            let len = match (within, data.len()) {
                (0, SECTOR_BYTES..) => data.len().min(COMPARED) / SECTOR_BYTES * SECTOR_BYTES,
                _ => data.len().min(SECTOR_BYTES - within),
            };
            let part;
            (part, data) = data.split_at(len);
            match part.as_chunks() {
                (sectors, []) => self.write_sectors(sectors, offset / SECTOR, below)?,
                _ => self.write_within(part, offset, below)?,
            }
            offset += len as u64;
        }
        Ok(())
    }

    /// Writes a part of a sector.
    fn write_within(&mut self, data: &[u8], offset: u64, below: ReadBelow<'_>) -> io::Result<()> {
        let (number, within) = (offset / SECTOR, (offset % SECTOR) as usize);
        let mut sector = [0; SECTOR_BYTES];
        below(&mut sector, number * SECTOR)?;
        self.patch(&mut sector, number * SECTOR);
        sector[within..within + data.len()].copy_from_slice(data);
        self.write_sectors(&[sector], number, below)
    }

    /// Writes whole sectors, from number `first` on.
    fn write_sectors(
        &mut self,
        new: &[Sector],
        first: u64,
        below: ReadBelow<'_>,
    ) -> io::Result<()> {
        self.compared.resize(COMPARED, 0);
        let old = &mut self.compared[..new.len() * SECTOR_BYTES];
        below(old, first * SECTOR)?;
        self.reserve.patch(old, first);
        for ((old, new), number) in old.as_chunks().0.iter().zip(new).zip(first..) {
            // imago makes room for a table with a write of another one, which a commit in progress may have fixed.
            if self.sectors.get(&number).unwrap_or(old) == new {
                continue;
            }
            self.revision += 1;
            if old != new {
                self.sectors.insert(number, *new);
            } else if !self.sectors.is_empty() {
                self.sectors.remove(&number);
            }
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

    /// The writes of each phase, and the clusters that they free. `known` are the places of the tables at the last
    /// commit.
    pub(crate) fn commit(
        &mut self,
        cluster_bytes: u64,
        known: Option<&Places>,
        below: ReadBelow<'_>,
    ) -> io::Result<Commit> {
        let is_new = |block| known.is_some_and(|known| !known.refcount_blocks.contains_key(&block));
        let known = known.filter(|known| self.keeps(known));
        self.reserve.begin();
        let mut commit = Commit::default();
        if known.is_none() {
            let read = |len, at| self.read(len, at, below);
            commit.places = Some(Places::read(cluster_bytes, &read)?);
        }
        let Some(places) = known.or(commit.places.as_ref()) else { return Ok(commit) };
        let phases = &mut commit.phases;
        for (number, new) in &self.sectors {
            let at = number * SECTOR;
            let cluster = at >> places.cluster_bits;
            // A new block is a cluster that no table names yet: the file may have freed data there.
            if let Some(block) = places.refcount_blocks.get(&cluster).filter(|_| !is_new(cluster)) {
                let mut old = [0; SECTOR as usize];
                below(&mut old, at)?;
                let counts = Counts::at(places, *block, at);
                // An allocation lowers no count, and a free raises none: one of both writes is enough.
                let change = self.reserve.change(*number, &counts, &old, new);
                if change.most != old {
                    push(&mut phases[0], at, &change.most);
                }
                if change.last != change.most {
                    push(&mut phases[6], at, &change.last);
                }
                commit.reserved_end = commit.reserved_end.max(change.reserved_end);
                counts.freed(&change.seen, new, &mut commit.freed);
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
        Ok(commit)
    }

    /// Returns whether the tables stay at these places: nothing that names one has changed.
    pub(crate) fn keeps(&self, places: &Places) -> bool {
        let first = |cluster: u64| (cluster << places.cluster_bits) / SECTOR;
        [&(0..1), &places.refcount_table, &places.l1_table].into_iter().all(|clusters| {
            self.sectors.range(first(clusters.start)..first(clusters.end)).next().is_none()
        })
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

#[cfg(test)]
mod tests {
    use super::*;

    const CLUSTER: u64 = 4096;

    /// An image whose refcount table is in cluster 1, with the blocks in clusters 2 and 5; the L1 table is empty.
    fn file() -> Vec<u8> {
        let mut file = vec![0; 6 * CLUSTER as usize];
        file[48..56].copy_from_slice(&CLUSTER.to_be_bytes());
        file[56..60].copy_from_slice(&1u32.to_be_bytes());
        file[96..100].copy_from_slice(&4u32.to_be_bytes());
        file[CLUSTER as usize..][..8].copy_from_slice(&(2 * CLUSTER).to_be_bytes());
        file
    }

    #[test]
    fn a_new_refcount_block_does_not_mix_with_the_freed_data_below_it() {
        let mut file = file();
        let block = 5 * CLUSTER;
        file[block as usize..].fill(0xa5);
        let below = |buf: &mut [u8], at: u64| {
            buf.copy_from_slice(&file[at as usize..][..buf.len()]);
            Ok(())
        };
        let read = |len, at: u64| Ok(file[at as usize..][..len].to_vec());
        let known = Places::read(CLUSTER, &read).expect("good tables");
        let mut counts = vec![0; CLUSTER as usize];
        counts[1] = 1;
        let mut overlay = Overlay::default();
        overlay.write(&counts, block, &below).expect("a write");
        overlay.write(&block.to_be_bytes(), CLUSTER + 8, &below).expect("a write");
        let commit = overlay.commit(CLUSTER, Some(&known), &below).expect("a commit");
        assert_eq!(commit.phases[0], [(block, counts)]);
        assert_eq!(commit.phases[6], []);
        assert_eq!(commit.freed, []);
    }
}
