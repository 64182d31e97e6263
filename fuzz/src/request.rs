// SPDX-License-Identifier: Apache-2.0
//! Target `request`: any bytes as the readable part of a chain, in any layout.

use crate::Rng;
use crate::guest::{Guest, USER_BASE};
use backend::{Info, RangeLimits};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use virtio_blk::{DiskView, Kind, MAX_RANGES, RangeList, Request};
use virtqueue::{Chain, Layout, RingSetup, VirtQueue};

const CAPACITY: u64 = 2048;
const LIMIT: u32 = 256;
const SIZE: u16 = 32;
const AREAS: [u64; 3] = [0, 0x400, 0x500];
const READABLE: usize = 0x1000;
const WRITABLE: usize = 0x4800;
/// Options in front of the bytes: features, read-only and write-back, 6 readable and 6 writable
/// descriptor lengths.
const OPTIONS: usize = 4 + 12;

/// Parses the request and checks the result.
pub fn request(data: &[u8]) {
    let Some((options, readable)) = data.split_at_checked(OPTIONS) else { return };
    let Some(mut chain_in_memory) = Placed::new(options, readable) else { return };
    let Placed { guest, chain, .. } = &mut chain_in_memory;
    let (mut ranges, disk) = (RangeList::default(), view(options));
    let before = guest.contents();
    let (readable, writable) = (chain.readable_bytes(), chain.writable_bytes());
    let outcome = Request::parse(chain, &disk, &mut ranges);
    assert!(before == guest.contents(), "parsing wrote to guest memory");
    guest.check(chain);
    match outcome {
        Ok(request) => {
            assert!(readable >= 16 && writable >= 1);
            assert_eq!(chain.writable_bytes(), writable - 1);
            check(request.kind, chain, &mut ranges, options);
            request.status.write(0xa7);
        }
        Err(refused) => {
            assert!(refused.code == 1 || refused.code == 2);
            assert_eq!(refused.status.is_some(), writable > 0);
            let written = refused.write();
            assert_eq!(written, u32::from(writable > 0));
        }
    }
    let after = guest.contents();
    let changed = before.iter().zip(&after).filter(|(a, b)| a != b).count();
    assert!(changed <= 1, "more than the status byte was written");
}

/// An accepted request is in range and allowed.
fn check(kind: Kind, chain: &Chain, ranges: &mut RangeList, options: &[u8]) {
    let read_only = options[2] & 1 != 0;
    let on_disk = |sector: u64, bytes: u64| {
        assert!(bytes.is_multiple_of(512));
        assert!(u128::from(sector) * 512 + u128::from(bytes) <= u128::from(CAPACITY) * 512);
    };
    match kind {
        Kind::Read { sector, bytes } => {
            assert_eq!(bytes, chain.writable_bytes());
            on_disk(sector, bytes);
        }
        Kind::Write { sector, bytes, .. } => {
            assert!(!read_only);
            assert_eq!(bytes, chain.readable_bytes());
            on_disk(sector, bytes);
        }
        Kind::Flush | Kind::GetId => {}
        Kind::Discard { .. } | Kind::WriteZeroes { .. } | Kind::SecureErase { .. } => {
            assert!(!read_only);
            let (mut count, mut sum) = (0, 0);
            while let Some(range) = ranges.next_range() {
                count += 1;
                sum += range.sectors;
                assert!(range.sectors <= LIMIT);
                assert!(!range.unmap || matches!(kind, Kind::WriteZeroes { .. }));
                on_disk(range.sector, u64::from(range.sectors) * 512);
            }
            assert!((1..=MAX_RANGES).contains(&count));
            assert!(sum <= LIMIT || matches!(kind, Kind::Discard { .. }));
        }
    }
}

fn view(options: &[u8]) -> DiskView {
    let limits = Some(RangeLimits { sectors_max: LIMIT, align_sectors: 1 });
    let info = Info {
        description: String::new(),
        capacity_sectors: CAPACITY,
        logical_block_bytes: 512,
        physical_block_bytes: 512,
        io_min_bytes: 0,
        io_opt_bytes: 0,
        memory_align_bytes: 1,
        read_only: options[2] & 1 != 0,
        volatile_cache: true,
        discard: limits,
        write_zeroes: limits,
        write_zeroes_unmaps: true,
        secure_erase: limits,
        io_poll: false,
        submission_blocks: false,
        grows_in_block: false,
    };
    // FLUSH, DISCARD, WRITE_ZEROES and SECURE_ERASE are bits 9 to 16.
    let features = u64::from(u16::from_le_bytes([options[0], options[1]])) << 9;
    DiskView::new(&info, features, Arc::new(AtomicBool::new(options[2] & 2 != 0)), "fuzz")
}

/// The chain, in guest memory.
struct Placed {
    guest: Guest,
    chain: Chain,
}

impl Placed {
    /// `None`: the chain would be empty.
    fn new(options: &[u8], readable: &[u8]) -> Option<Self> {
        let readable = &readable[..readable.len().min(0x3000)];
        let mut memory = vec![0; 0x8000];
        memory[READABLE..READABLE + readable.len()].copy_from_slice(readable);
        let mut descs = Vec::new();
        let mut at = READABLE;
        let mut left = readable.len();
        for cut in &options[4..10] {
            let len = usize::from(*cut).min(left);
            descs.push((at, len, 0));
            at += len;
            left -= len;
        }
        descs.push((at, left, 0));
        let mut at = WRITABLE;
        for cut in &options[10..16] {
            // Every other value is a multiple of 256, so that sums reach whole sectors.
            let len = if cut % 2 == 0 { usize::from(cut / 2) * 16 } else { usize::from(cut / 2) };
            descs.push((at, len, 2));
            at += len;
        }
        let last = descs.len() - 1;
        for (i, (at, len, flags)) in descs.into_iter().enumerate() {
            let desc = &mut memory[16 * i..16 * i + 16];
            desc[..8].copy_from_slice(&(at as u64).to_le_bytes());
            desc[8..12].copy_from_slice(&(len as u32).to_le_bytes());
            desc[12] = flags | u8::from(i < last);
            desc[14] = i as u8 + 1;
        }
        memory[0x402] = 1;
        let guest = Guest::new(&memory);
        let mut chain = Chain::default();
        let mut queue = VirtQueue::start(&setup(&guest)).expect("a legal queue");
        queue.take(&mut chain).expect("a legal chain")?.abandon();
        Some(Placed { guest, chain })
    }
}

fn setup(guest: &Guest) -> RingSetup {
    let [desc_addr, avail_addr, used_addr] = AREAS.map(|gpa| gpa + USER_BASE);
    RingSetup {
        memory: guest.memory.clone(),
        layout: Layout::Split,
        size: SIZE,
        desc_addr,
        avail_addr,
        used_addr,
        base: 0,
        indirect: false,
        event_idx: false,
        keep_descriptors: false,
        log: None,
        used_log_addr: None,
    }
}

/// A valid request, in a random layout.
pub(crate) fn seed(rng: &mut Rng) -> Vec<u8> {
    let kind = rng.pick(&[0u32, 0, 1, 1, 4, 8, 11, 13, 14]);
    let mut data = vec![0xff, 0xff, rng.pick(&[0, 2, 2, 2, 3]), 0];
    for _ in 0..6 {
        data.push(rng.pick(&[0, 1, 8, 16, 17, 100, 255]));
    }
    // A read of one sector: 32 * 16 bytes; then the status.
    let reads = if kind == 0 { [64, 0, 64, 0, 0] } else { [0; 5] };
    data.extend(reads);
    data.push(3);
    data.extend(kind.to_le_bytes());
    data.extend([0; 4]);
    data.extend(rng.below(CAPACITY - 2).to_le_bytes());
    match kind {
        1 => data.resize(data.len() + 512 * (1 + rng.below(4) as usize), 0x5a),
        11 | 13 | 14 => {
            for _ in 0..1 + rng.below(4) {
                data.extend(rng.below(CAPACITY - 300).to_le_bytes());
                data.extend((rng.below(257) as u32).to_le_bytes());
                data.extend(u32::from(kind == 13 && rng.one_in(2)).to_le_bytes());
            }
        }
        _ => {}
    }
    data
}
