// SPDX-License-Identifier: Apache-2.0
//! Cutting header and status byte off a chain, however its bytes are spread.

mod common;

use common::{Arena, HIGH, LOW, joined};
use proptest::collection::vec;
use proptest::prelude::*;
use virtqueue::{Chain, GuestMemory, Layout, MemoryError, Region, VirtQueue};

const NEXT: u16 = 1;
const WRITE: u16 = 2;

/// Readable and writable buffers as a chain, with the arena that it lives in.
fn chain_of(readable: &[(u64, u32)], writable: &[(u64, u32)]) -> (Arena, Chain) {
    let arena = Arena::new();
    let areas = common::split_areas(64);
    let all = readable.iter().map(|b| (*b, 0)).chain(writable.iter().map(|b| (*b, WRITE)));
    let all: Vec<_> = all.collect();
    for (i, &(buffer, flags)) in (0..).zip(&all) {
        let more = if usize::from(i) + 1 < all.len() { NEXT } else { 0 };
        arena.write_desc(areas[0], i, buffer, flags | more, i + 1);
    }
    arena.write_u16(areas[1] + 2, 1);
    let mut queue = VirtQueue::start(&arena.setup(Layout::Split, 64, areas)).unwrap();
    let mut chain = Chain::with_capacity(1);
    queue.take(&mut chain).unwrap().unwrap().abandon();
    (arena, chain)
}

/// The guest-physical address of each byte.
fn bytes_of(ranges: &[(u64, u64)]) -> Vec<u64> {
    ranges.iter().flat_map(|&(addr, len)| addr..addr + len).collect()
}

fn buffers() -> impl Strategy<Value = Vec<(u64, u32)>> {
    let place = prop_oneof![LOW..LOW + 0x100, HIGH - 40..HIGH, Just(LOW)];
    let len = prop_oneof![Just(0u32), Just(1), 1u32..20, 16u32..64];
    vec((place, len), 0..12)
}

proptest! {
    #[test]
    fn header_is_the_first_bytes_however_split(readable in buffers(), writable in buffers()) {
        let (arena, mut chain) = chain_of(&readable, &writable);
        for (i, at) in (LOW..LOW + 0x200).chain(HIGH - 0x40..HIGH + 0x40).enumerate() {
            arena.write(at, &[(i % 251) as u8]);
        }
        let mut expected = bytes_of(&joined(readable.iter().map(|&(a, l)| (a, l.into()))));
        let writable_before = chain.writable().len();
        while expected.len() >= 16 {
            let copy = chain.take_front::<16>().unwrap();
            let wanted: Vec<u8> = expected.drain(..16).map(|at| arena.read(at, 1)[0]).collect();
            prop_assert_eq!(copy.as_slice(), wanted);
            prop_assert_eq!(chain.readable_bytes(), expected.len() as u64);
            prop_assert_eq!(bytes_of(&arena.ranges_of(chain.readable())), expected.clone());
        }
        prop_assert_eq!(chain.take_front::<16>(), None, "too few bytes are left alone");
        prop_assert_eq!(bytes_of(&arena.ranges_of(chain.readable())), expected);
        prop_assert_eq!(chain.writable().len(), writable_before);
    }

    #[test]
    fn status_is_the_last_writable_byte_however_split(
        readable in buffers(),
        writable in buffers(),
    ) {
        let (arena, mut chain) = chain_of(&readable, &writable);
        let mut expected = bytes_of(&joined(writable.iter().map(|&(a, l)| (a, l.into()))));
        let untouched = bytes_of(&arena.ranges_of(chain.readable()));
        let before = arena.snapshot();
        let Some(last) = expected.pop() else {
            prop_assert!(chain.take_status().is_none());
            return Ok(());
        };
        let status = chain.take_status().unwrap();
        prop_assert_eq!(chain.writable_bytes(), expected.len() as u64);
        prop_assert_eq!(bytes_of(&arena.ranges_of(chain.writable())), expected);
        prop_assert_eq!(bytes_of(&arena.ranges_of(chain.readable())), untouched);
        status.write(0xa5);
        prop_assert_eq!(arena.read(last, 1), [0xa5]);
        arena.write(last, &[0]);
        prop_assert!(before == arena.snapshot(), "more than the status byte was written");
    }
}

#[test]
fn neighbouring_buffers_become_one_segment() {
    let (_arena, mut chain) =
        chain_of(&[(LOW, 16), (LOW + 16, 4096)], &[(LOW + 4112, 512), (LOW + 4624, 1)]);
    assert_eq!((chain.readable().len(), chain.writable().len()), (1, 1));
    assert_eq!((chain.readable_bytes(), chain.writable_bytes()), (4112, 513));
}

#[test]
fn chain_buffer_is_reused_without_leftovers() {
    let (arena, mut chain) = chain_of(&[(LOW, 32)], &[(HIGH, 5)]);
    let areas = common::split_areas(64);
    let mut queue = VirtQueue::start(&arena.setup(Layout::Split, 64, areas)).unwrap();
    arena.write_desc(areas[0], 0, (LOW + 64, 7), 0, 0);
    let _ = (chain.take_front::<8>(), chain.take_status());
    queue.take(&mut chain).unwrap().unwrap().abandon();
    assert_eq!(arena.chain_ranges(&mut chain), (vec![(LOW + 64, 7)], vec![]));
    assert_eq!((chain.readable_bytes(), chain.writable_bytes()), (7, 0));
}

#[test]
fn regions_that_are_empty_wrap_or_outrun_their_file_are_refused() {
    let map = |gpa, user, len, offset| Region::map(gpa, user, len, common::memfd(0x4000), offset);
    assert!(matches!(map(0x1000, 0, 0, 0), Err(MemoryError::Empty(0x1000))));
    assert!(matches!(map(u64::MAX, 0, 1, 0), Err(MemoryError::Wraps(_))));
    assert!(matches!(map(0, u64::MAX, 1, 0), Err(MemoryError::Wraps(_))));
    assert!(matches!(map(0, 0, 1, u64::MAX), Err(MemoryError::Wraps(_))));
    assert!(matches!(map(0, 0, 0x4001, 0), Err(MemoryError::Map { .. })));
    assert!(matches!(map(0, 0, 0x1000, 0x3001), Err(MemoryError::Map { .. })));
    assert!(map(0, 0, 0x1000, 0x3000).is_ok());
}

#[test]
fn regions_that_overlap_are_refused_in_any_order_and_neighbours_are_not() {
    let map = |gpa, len| Region::map(gpa, 0, len, common::memfd(0x4000), 0).unwrap();
    let overlap = GuestMemory::new(vec![map(0x3000, 0x1000), map(0x1000, 0x2001)]);
    assert!(matches!(overlap, Err(MemoryError::Overlap(0x1000, 0x3000))));
    assert!(GuestMemory::new(vec![map(0x3000, 0x1000), map(0x1000, 0x2000)]).is_ok());
    let same = GuestMemory::new(vec![map(0x1000, 0x1000), map(0x1000, 0x1000)]);
    assert!(matches!(same, Err(MemoryError::Overlap(0x1000, 0x1000))));
}
