// SPDX-License-Identifier: Apache-2.0
//! Going on where an earlier daemon stopped: its chains are taken again, from the table (split) or
//! from the copies of their descriptors (packed).

mod common;

use common::{Arena, LOW, RINGS, TABLES};
use virtio_spec::packed::Desc;
use virtqueue::{Chain, InflightChain, Layout, RingFault, RingSetup, VirtQueue};

const NEXT: u16 = 1;
const WRITE: u16 = 2;
const INDIRECT: u16 = 4;
const AVAIL: u16 = 1 << 7;
const USED: u16 = 1 << 15;

fn split(arena: &Arena, used_idx: u16) -> VirtQueue {
    let areas = common::split_areas(8);
    arena.write_desc(areas[0], 5, (LOW, 16), NEXT, 2);
    arena.write_desc(areas[0], 2, (LOW + 64, 513), WRITE, 0);
    arena.write_u16(areas[2] + 2, used_idx);
    VirtQueue::start(&arena.setup(Layout::Split, 8, areas)).unwrap()
}

fn packed(arena: &Arena) -> VirtQueue {
    let areas = [RINGS, RINGS + 0x1000, RINGS + 0x2000];
    let setup = arena.setup(Layout::Packed, 7, areas);
    VirtQueue::start(&RingSetup { base: 0x8000_8000, ..setup }).unwrap()
}

fn desc(addr: u64, len: u32, id: u16, flags: u16) -> Desc {
    Desc { addr, len, id, flags }
}

#[test]
fn split_queue_goes_on_behind_the_chains_taken_before() {
    let arena = Arena::new();
    let mut queue = split(&arena, 0xfffe);
    let taken = [5, 1, 3].map(|head| InflightChain::Split { head });
    queue.resume(queue.used_index(), &taken);
    assert_eq!((queue.base(), queue.used_index()), (1, 0xfffe));
}

#[test]
fn split_chain_is_taken_again_without_moving_the_queue() {
    let arena = Arena::new();
    let mut queue = split(&arena, 4);
    let again = InflightChain::Split { head: 5 };
    queue.resume(4, std::slice::from_ref(&again));
    let mut chain = Chain::default();
    let head = queue.take_resubmitted(&again, &mut chain).unwrap();
    assert_eq!((head.id(), queue.base()), (5, 5));
    assert_eq!(arena.chain_ranges(&mut chain), (vec![(LOW, 16)], vec![(LOW + 64, 513)]));
    queue.push_used(head, 513);
    queue.publish();
    let used = common::split_areas(8)[2];
    assert_eq!(arena.read_u16(used + 2), 5);
    assert_eq!(arena.read(used + 4 + 8 * 4, 8), [5, 0, 0, 0, 1, 2, 0, 0]);
}

#[test]
fn split_head_that_makes_no_sense_is_a_fault() {
    let arena = Arena::new();
    let mut queue = split(&arena, 0);
    let fault = queue.take_resubmitted(&InflightChain::Split { head: 8 }, &mut Chain::default());
    assert_eq!(fault, Err(RingFault::DescriptorIndex { index: 8, size: 8 }));
}

#[test]
fn packed_queue_goes_on_behind_the_descriptors_taken_before() {
    let arena = Arena::new();
    let mut queue = packed(&arena);
    let three = vec![desc(LOW, 1, 0, NEXT), desc(LOW, 1, 0, NEXT), desc(LOW, 1, 4, 0)];
    let taken =
        [InflightChain::Packed { descs: three.clone() }, InflightChain::Packed { descs: three }];
    // Used at 5 of 7 in the first lap; six descriptors on: 4 in the second.
    queue.resume(0x8005, &taken);
    assert_eq!(queue.base(), 0x8005_0004);
}

/// The first owner has pushed a batch and dies before it publishes that. The driver finds no entry of it behind one of
/// the next owner, in either lap.
#[test]
fn packed_entries_of_a_batch_that_was_not_published_become_available_again() {
    const SIZE: u16 = 7;
    for base in [0x8000_8000_u32, 0x8005_8005, 0x0002_0002] {
        let arena = Arena::new();
        let setup = arena.setup(Layout::Packed, SIZE, [RINGS, RINGS + 0x1000, RINGS + 0x2000]);
        let start = || VirtQueue::start(&RingSetup { base, ..setup.clone() }).unwrap();
        let position = |at: u16| {
            let offset = (base as u16 & 0x7fff) + at;
            (offset % SIZE, (base & 0x8000 != 0) ^ (offset >= SIZE))
        };
        let is_used = |at: u16| {
            let (offset, wrap) = position(at);
            let flags = arena.read_u16(RINGS + u64::from(offset) * 16 + 14);
            (flags & AVAIL != 0, flags & USED != 0) == (wrap, wrap)
        };
        let again: Vec<_> = (0..4)
            .map(|id| {
                let (offset, wrap) = position(id);
                let flags = WRITE | if wrap { AVAIL } else { USED };
                arena.write_desc(RINGS, offset, (LOW, 512), id, flags);
                InflightChain::Packed { descs: vec![desc(LOW, 512, id, flags)] }
            })
            .collect();
        let mut chain = Chain::default();
        let mut first = start();
        for _ in 0..4 {
            let head = first.take(&mut chain).unwrap().expect("an available chain");
            first.push_used(head, 512);
        }
        assert_eq!([0, 1, 2, 3].map(is_used), [false, true, true, true], "{base:#x}");
        drop(first);
        let mut next = start();
        next.resume((base >> 16) as u16, &again);
        for used in 0..4_usize {
            let head = next.take_resubmitted(&again[3 - used], &mut chain).unwrap();
            next.push_used(head, 512);
            next.publish();
            assert_eq!([0, 1, 2, 3].map(is_used), [0, 1, 2, 3].map(|at| at <= used), "{base:#x}");
        }
    }
}

#[test]
fn packed_chain_is_taken_again_from_its_copy_not_from_the_ring() {
    let arena = Arena::new();
    let mut queue = packed(&arena);
    arena.write(RINGS, &[0xff; 7 * 16]);
    let descs = vec![desc(LOW, 16, 0xdead, NEXT), desc(LOW + 64, 513, 3, WRITE)];
    let mut chain = Chain::default();
    let head = queue.take_resubmitted(&InflightChain::Packed { descs }, &mut chain).unwrap();
    assert_eq!((head.id(), head.descriptor_count()), (3, 2));
    assert_eq!(arena.chain_ranges(&mut chain), (vec![(LOW, 16)], vec![(LOW + 64, 513)]));
    head.abandon();
}

#[test]
fn packed_indirect_chain_is_taken_again_from_its_table() {
    let arena = Arena::new();
    let mut queue = packed(&arena);
    // A packed table: `addr, len, id, flags`.
    arena.write_desc(TABLES, 0, (LOW, 16), 0xdead, 0);
    arena.write_desc(TABLES, 1, (LOW + 64, 1), 0xdead, WRITE);
    let descs = vec![desc(TABLES, 32, 6, INDIRECT)];
    let mut chain = Chain::default();
    let head = queue.take_resubmitted(&InflightChain::Packed { descs }, &mut chain).unwrap();
    assert_eq!((head.id(), head.descriptor_count()), (6, 1));
    assert_eq!(arena.chain_ranges(&mut chain), (vec![(LOW, 16)], vec![(LOW + 64, 1)]));
    head.abandon();
}

#[test]
fn packed_copy_without_an_end_or_of_nothing_is_a_fault() {
    let arena = Arena::new();
    let mut queue = packed(&arena);
    for descs in [vec![], vec![desc(LOW, 1, 0, NEXT)], vec![desc(LOW, 1, 0, NEXT); 7]] {
        let limit = descs.len() as u32;
        let again = InflightChain::Packed { descs };
        let fault = queue.take_resubmitted(&again, &mut Chain::default());
        assert_eq!(fault, Err(RingFault::ChainTooLong { limit }));
    }
}

#[test]
fn chain_of_the_other_layout_is_a_fault() {
    let arena = Arena::new();
    let other = InflightChain::Packed { descs: vec![desc(LOW, 1, 0, 0)] };
    assert!(split(&arena, 0).take_resubmitted(&other, &mut Chain::default()).is_err());
    let other = InflightChain::Split { head: 0 };
    assert!(packed(&arena).take_resubmitted(&other, &mut Chain::default()).is_err());
}

#[test]
fn packed_entry_counts_as_used_also_after_the_driver_made_it_available_again() {
    const FIRST_LAP: u16 = 0x8000; // offset 0, wrap counter 1
    let arena = Arena::new();
    let queue = packed(&arena);
    let seen = [
        ("untouched", 0),
        ("available in the first lap", AVAIL),
        ("used in the first lap", AVAIL | USED),
        ("available again, in the second lap", USED),
    ]
    .map(|(name, flags)| {
        arena.write_u16(RINGS + 14, flags);
        (name, queue.was_used_at(FIRST_LAP))
    });
    assert_eq!(seen.map(|(_, used)| used), [false, false, true, true], "{seen:?}");
}

/// A front-end gives base 0 for a ring that has wrapped to its start, too. Of a chain of three
/// direct descriptors at the end of a lap only the first entry is marked as used.
#[test]
fn packed_ring_that_wrapped_to_the_start_is_no_new_one() {
    let arena = Arena::new();
    let areas = [RINGS, RINGS + 0x1000, RINGS + 0x2000];
    let base = || VirtQueue::start(&arena.setup(Layout::Packed, 8, areas)).unwrap().base();
    assert_eq!(base(), 0x8000_8000, "a ring in which nothing was used");
    for (index, flags) in (0..8).zip([AVAIL, AVAIL, AVAIL | USED, AVAIL, AVAIL, AVAIL | USED]) {
        arena.write_desc(RINGS, index, (LOW, 16), index, flags);
    }
    assert_eq!(base(), 0, "a ring that has wrapped");
}
