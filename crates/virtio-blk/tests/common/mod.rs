// SPDX-License-Identifier: Apache-2.0
//! A guest with one request in one split queue, laid out as a test likes.
#![allow(dead_code, unreachable_pub, missing_docs)] // each test program uses its own part

use backend::{Info, RangeLimits};
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use virtio_blk::{DiskView, RangeList, Refused, Request};
use virtqueue::{Chain, GuestMemory, Layout, Region, RingSetup, VirtQueue};

/// Sectors of the disk.
pub const CAPACITY: u64 = 1000;
/// Addresses of the readable and of the writable bytes; the rings are below.
pub const READABLE: u64 = 0x4000;
pub const WRITABLE: u64 = 0x8000;
const END: u64 = 0x2_0000;
const SIZE: u16 = 128;
const AREAS: [u64; 3] = [0, 0x1000, 0x2000];
const NEXT: u16 = 1;
const WRITE: u16 = 2;

pub const T_IN: u32 = 0;
pub const T_OUT: u32 = 1;
pub const T_FLUSH: u32 = 4;
pub const T_GET_ID: u32 = 8;
pub const T_GET_LIFETIME: u32 = 10;
pub const T_DISCARD: u32 = 11;
pub const T_WRITE_ZEROES: u32 = 13;
pub const T_SECURE_ERASE: u32 = 14;

/// VIRTIO_BLK_F_*, by the numbers of section 5.2.3.
pub const FLUSH: u64 = 1 << 9;
pub const CONFIG_WCE: u64 = 1 << 11;
pub const DISCARD: u64 = 1 << 13;
pub const WRITE_ZEROES: u64 = 1 << 14;
pub const SECURE_ERASE: u64 = 1 << 16;
pub const ALL: u64 = FLUSH | CONFIG_WCE | DISCARD | WRITE_ZEROES | SECURE_ERASE;

pub fn info() -> Info {
    let limits = |sectors_max, align_sectors| Some(RangeLimits { sectors_max, align_sectors });
    Info {
        description: "test".into(),
        capacity_sectors: CAPACITY,
        logical_block_bytes: 512,
        physical_block_bytes: 4096,
        io_min_bytes: 4096,
        io_opt_bytes: 65536,
        memory_align_bytes: 1,
        read_only: false,
        volatile_cache: true,
        discard: limits(100, 8),
        write_zeroes: limits(200, 1),
        write_zeroes_unmaps: true,
        secure_erase: limits(300, 16),
        io_poll: false,
        submission_blocks: false,
        grows_in_block: false,
    }
}

pub fn view(features: u64) -> DiskView {
    DiskView::new(&info(), features, Arc::new(AtomicBool::new(true)), "serial")
}

pub fn header(kind: u32, sector: u64) -> Vec<u8> {
    let mut bytes = kind.to_le_bytes().to_vec();
    bytes.extend(0xfeed_beef_u32.to_le_bytes()); // reserved: the device ignores it
    bytes.extend(sector.to_le_bytes());
    bytes
}

pub fn range(sector: u64, sectors: u32, flags: u32) -> Vec<u8> {
    let mut bytes = sector.to_le_bytes().to_vec();
    bytes.extend(sectors.to_le_bytes());
    bytes.extend(flags.to_le_bytes());
    bytes
}

/// Cuts `len` into descriptors of these lengths; the remainder is the last one.
pub fn cut(len: usize, cuts: &[usize]) -> Vec<usize> {
    let mut left = len;
    let mut pieces: Vec<usize> = Vec::new();
    for &cut in cuts {
        let piece = cut.min(left);
        pieces.push(piece);
        left -= piece;
    }
    if left > 0 {
        pieces.push(left);
    }
    pieces
}

/// A chain in guest memory.
pub struct Guest {
    file: File,
    memory: Arc<GuestMemory>,
    pub chain: Chain,
    pub ranges: RangeList,
    before: Vec<u8>,
}

impl Guest {
    /// Lays out `readable` bytes in descriptors of these lengths, then writable ones.
    pub fn new(readable: &[u8], readable_cuts: &[usize], writable_cuts: &[usize]) -> Self {
        let fd = rustix::fs::memfd_create("guest", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        let file = File::from(fd);
        file.set_len(END).unwrap();
        file.write_all_at(&vec![0xee; (END - READABLE) as usize], READABLE).unwrap();
        file.write_all_at(readable, READABLE).unwrap();
        assert_eq!(readable_cuts.iter().sum::<usize>(), readable.len());
        let mut descs = Vec::new();
        for (start, cuts, flag) in [(READABLE, readable_cuts, 0), (WRITABLE, writable_cuts, WRITE)]
        {
            let mut at = start;
            for &len in cuts {
                descs.push((at, len as u32, flag));
                at += len as u64;
            }
        }
        for (i, (addr, len, flag)) in (0u16..).zip(&descs) {
            let more = if usize::from(i) + 1 < descs.len() { NEXT } else { 0 };
            let mut bytes = addr.to_le_bytes().to_vec();
            bytes.extend(len.to_le_bytes());
            bytes.extend((flag | more).to_le_bytes());
            bytes.extend((i + 1).to_le_bytes());
            file.write_all_at(&bytes, 16 * u64::from(i)).unwrap();
        }
        file.write_all_at(&1u16.to_le_bytes(), AREAS[1] + 2).unwrap();
        let region = Region::map(0, 0, END, file.try_clone().unwrap(), 0).unwrap();
        let memory = Arc::new(GuestMemory::new(vec![region]).unwrap());
        let setup = RingSetup {
            memory: Arc::clone(&memory),
            layout: Layout::Split,
            size: SIZE,
            desc_addr: AREAS[0],
            avail_addr: AREAS[1],
            used_addr: AREAS[2],
            base: 0,
            indirect: false,
            event_idx: false,
            keep_descriptors: false,
            log: None,
            used_log_addr: None,
        };
        let mut chain = Chain::default();
        let mut queue = VirtQueue::start(&setup).unwrap();
        queue.take(&mut chain).expect("legal").expect("available").abandon();
        let mut guest = Guest { file, memory, chain, ranges: RangeList::default(), before: vec![] };
        guest.before = guest.contents();
        guest
    }

    /// One readable and one writable descriptor.
    pub fn plain(readable: &[u8], writable: usize) -> Self {
        Self::new(readable, &[readable.len()], &[writable])
    }

    pub fn parse(&mut self, disk: &DiskView) -> Result<Request, Refused> {
        let result = Request::parse(&mut self.chain, disk, &mut self.ranges);
        assert!(self.before == self.contents(), "parsing wrote to guest memory");
        result
    }

    pub fn contents(&self) -> Vec<u8> {
        let mut bytes = vec![0; END as usize];
        self.file.read_exact_at(&mut bytes, 0).unwrap();
        bytes
    }

    /// Guest-physical addresses that changed since the chain was built, with their new values.
    pub fn changes(&self) -> Vec<(u64, u8)> {
        let after = self.contents();
        let changed = |&i: &usize| after[i] != self.before[i];
        (0..after.len()).filter(changed).map(|i| (i as u64, after[i])).collect()
    }

    /// Start and length of the data that remains to be read or written.
    pub fn data(&mut self, writable: bool) -> (u64, u64) {
        let host = self.memory.regions()[0].host() as u64;
        let segments = if writable { self.chain.writable() } else { self.chain.readable() };
        let pieces: Vec<_> = segments.iter().filter(|iov| iov.iov_len > 0).collect();
        let start = pieces.first().map_or(0, |iov| iov.iov_base as u64 - host);
        let mut end = start;
        for iov in pieces {
            assert_eq!(iov.iov_base as u64 - host, end, "a gap in the data");
            end += iov.iov_len as u64;
        }
        (start, end - start)
    }
}
