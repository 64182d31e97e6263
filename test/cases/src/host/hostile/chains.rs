// SPDX-License-Identifier: Apache-2.0
//! Chains that no correct driver makes.

use super::{CANARY_BYTES, REGION, REGION_BYTES, SIZE};
use driver::{Area, GuestMemory, Queue};
use kit::rng::Rng;
use std::sync::Arc;
use std::sync::atomic::Ordering::{Relaxed, Release};
use virtio_spec::split::{DESC_F_INDIRECT, DESC_F_NEXT, DESC_F_WRITE};

/// Number of indirect tables, and of descriptors in each.
const TABLES: usize = 64;
const TABLE_LEN: usize = 64;
/// Bytes of consecutive headers.
const HEADERS: usize = 256;

/// The ring and the memory that its chains refer to.
#[derive(Clone)]
pub(super) struct Chains {
    desc: Area,
    avail: Area,
    used: u64,
    tables: Area,
    headers: Area,
    data: Area,
}

impl Chains {
    pub(super) fn new(memory: &Arc<GuestMemory>, queue: &mut Queue) -> Self {
        let [desc, avail, used] = queue.split().areas().map(Area::clone);
        Self {
            desc,
            avail,
            used: used.gpa(),
            tables: memory.alloc_area(TABLES * TABLE_LEN * 16, 4096),
            headers: memory.alloc_area(HEADERS * 64, 4096),
            data: memory.alloc_area(2 << 20, 4096),
        }
    }

    /// Fills the ring with `heads` chains and publishes them.
    pub(super) fn fill(&self, rng: &mut Rng, heads: u16) {
        for table in 0..TABLES {
            if rng.one_in(4) {
                self.random_table(rng, table);
            }
        }
        let mut next = 0;
        for position in 0..heads {
            let head = next;
            // A chain that faults the ring ends the batch, so most chains are wrong in other ways.
            next = match rng.below(40) {
                0 => self.random_chain(rng, head),
                1..4 => self.near_miss(rng, head),
                4 => self.indirect(rng, head),
                _ => self.sound(rng, head),
            } % SIZE;
            let entry = match rng.below(200) {
                0 => rng.number() as u16,
                1 => head.wrapping_sub(1),
                _ => head,
            };
            self.avail.store_u16(4 + 2 * usize::from(position % SIZE), entry, Relaxed);
        }
        let idx = if rng.one_in(50) { rng.number() as u16 } else { heads };
        self.avail.store_u16(2, idx, Release);
    }

    /// Changes memory while the device reads it.
    pub(super) fn scribble(&self, rng: &mut Rng) {
        let at = 16 * rng.below(SIZE.into()) as usize;
        let table_at = 16 * rng.below((TABLES * TABLE_LEN) as u64) as usize;
        match rng.below(8) {
            0 => self.desc.store_u64(at, self.address(rng), Relaxed),
            1 => self.desc.store_u32(at + 8, length(rng), Relaxed),
            2 => self.desc.store_u16(at + 12, rng.below(8) as u16, Relaxed),
            3 => self.desc.store_u16(at + 14, rng.number() as u16 % (2 * SIZE), Relaxed),
            4 => self.tables.store_u64(table_at, self.address(rng), Relaxed),
            5 => self.tables.store_u16(table_at + 12, rng.below(8) as u16, Relaxed),
            6 => {
                let header = 64 * rng.below(HEADERS as u64) as usize;
                self.headers.store_u32(header, rng.below(16) as u32, Relaxed);
            }
            _ => {
                let entry = 4 + 2 * rng.below(SIZE.into()) as usize;
                self.avail.store_u16(entry, rng.below(u64::from(SIZE) + 2) as u16, Relaxed);
            }
        }
    }

    fn put(&self, index: u16, gpa: u64, len: u32, flags: u16, next: u16) {
        let at = 16 * usize::from(index % SIZE);
        self.desc.store_u64(at, gpa, Relaxed);
        self.desc.store_u32(at + 8, len, Relaxed);
        self.desc.store_u16(at + 12, flags, Relaxed);
        self.desc.store_u16(at + 14, next, Relaxed);
    }

    /// An address: usually in memory, sometimes at an edge, in the rings, or unmapped.
    fn address(&self, rng: &mut Rng) -> u64 {
        let end = REGION + REGION_BYTES - CANARY_BYTES;
        match rng.below(16) {
            0 => REGION + rng.below(CANARY_BYTES),
            1 => end - rng.below(4096),
            2 => end + rng.below(CANARY_BYTES),
            3 => rng.number(),
            4 => u64::MAX - rng.below(8192),
            5 => self.desc.gpa() + rng.below(self.desc.len() as u64),
            6 => self.avail.gpa() + rng.below(self.avail.len() as u64),
            7 => self.used + rng.below(8 * u64::from(SIZE)),
            8 => self.tables.gpa() + rng.below(self.tables.len() as u64),
            _ => self.data.gpa() + rng.below(self.data.len() as u64 / 2),
        }
    }

    fn random_table(&self, rng: &mut Rng, table: usize) {
        for n in 0..TABLE_LEN {
            let at = 16 * (table * TABLE_LEN + n);
            let flags = if rng.one_in(20) { rng.number() as u16 } else { rng.below(4) as u16 };
            let next = if rng.one_in(10) { rng.number() as u16 } else { n as u16 + 1 };
            self.tables.store_u64(at, self.address(rng), Relaxed);
            self.tables.store_u32(at + 8, length(rng), Relaxed);
            self.tables.store_u16(at + 12, flags, Relaxed);
            self.tables.store_u16(at + 14, next, Relaxed);
        }
    }

    /// Writes descriptors that are correct only by chance. Returns the index after the last one.
    fn random_chain(&self, rng: &mut Rng, head: u16) -> u16 {
        let count = 1 + rng.below(6) as u16;
        for n in head..head + count {
            let flags = if rng.one_in(8) { rng.number() as u16 } else { rng.below(8) as u16 };
            let next = match rng.below(6) {
                0 => rng.number() as u16,
                1 => head,
                _ => n + 1,
            };
            self.put(n, self.address(rng), length(rng), flags, next);
        }
        head + count
    }

    fn header(&self, rng: &mut Rng, slot: u16) -> u64 {
        let at = 64 * (usize::from(slot) % HEADERS);
        let kinds = [0, 0, 1, 1, 4, 8, 11, 13, 14, 2, rng.number() as u32];
        let sector = if rng.one_in(8) { rng.number() } else { rng.below(4096) };
        self.headers.store_u32(at, *rng.pick(&kinds), Relaxed);
        self.headers.store_u64(at + 8, sector, Relaxed);
        // A range, for requests that take one.
        self.headers.store_u64(at + 16, rng.below(1024), Relaxed);
        self.headers.store_u32(at + 24, rng.below(64) as u32, Relaxed);
        self.headers.store_u32(
            at + 28,
            if rng.one_in(4) { rng.number() as u32 } else { 0 },
            Relaxed,
        );
        self.headers.gpa() + at as u64
    }

    /// Writes a request as a correct driver does.
    fn sound(&self, rng: &mut Rng, head: u16) -> u16 {
        let header = self.header(rng, head);
        let write = if rng.one_in(2) { DESC_F_WRITE } else { 0 };
        let data = self.data.gpa() + 512 * rng.below(2048);
        let header_len = if rng.one_in(4) { 32 } else { 16 };
        self.put(head, header, header_len, DESC_F_NEXT, (head + 1) % SIZE);
        let bytes = 512 * (1 + rng.below(32)) as u32;
        self.put(head + 1, data, bytes, DESC_F_NEXT | write, (head + 2) % SIZE);
        self.put(head + 2, header + 48, 1, DESC_F_WRITE, 0);
        head + 3
    }

    /// Writes such a request with one error.
    fn near_miss(&self, rng: &mut Rng, head: u16) -> u16 {
        let after = self.sound(rng, head);
        let at = 16 * usize::from((head + rng.below(3) as u16) % SIZE);
        match rng.below(4) {
            0 => self.desc.store_u64(at, self.address(rng), Relaxed),
            1 => self.desc.store_u32(at + 8, length(rng), Relaxed),
            2 => self.desc.store_u16(at + 12, rng.number() as u16 & 7, Relaxed),
            _ => self.desc.store_u16(at + 14, rng.number() as u16, Relaxed),
        }
        after
    }

    /// Writes a chain that continues in an indirect table.
    fn indirect(&self, rng: &mut Rng, head: u16) -> u16 {
        let table = self.tables.gpa() + 16 * (TABLE_LEN as u64) * rng.below(TABLES as u64);
        let lens = [16, 32, 48, 160, 1024, 0, 15, 17, 1 << 20, 65536 * 16, u32::MAX];
        let flags =
            if rng.one_in(6) { rng.number() as u16 | DESC_F_INDIRECT } else { DESC_F_INDIRECT };
        let gpa = if rng.one_in(6) { self.address(rng) } else { table };
        self.put(head, gpa, *rng.pick(&lens), flags, head + 1);
        head + 1
    }
}

fn length(rng: &mut Rng) -> u32 {
    let lens = [0, 1, 15, 16, 17, 511, 512, 513, 4096, 65536, 1 << 20, 1 << 31, u32::MAX];
    match rng.below(3) {
        0 => *rng.pick(&lens),
        1 => rng.below(8192) as u32,
        _ => 512 * (1 + rng.below(16)) as u32,
    }
}
