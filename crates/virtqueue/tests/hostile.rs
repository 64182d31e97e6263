// SPDX-License-Identifier: Apache-2.0
//! A driver that breaks every rule: each ring is a ring fault or a legal chain, never a panic,
//! never a segment outside guest memory, never a changed queue.

mod common;

use common::reference::{INDIRECT, NEXT, WRITE};
use common::{Arena, DATA_END, HIGH, LOW, REGIONS, RINGS, Ranges, TABLES, TABLES_BORDER};
use virtqueue::{Chain, Layout, QueueError, RingFault, RingSetup, VirtQueue};

const AVAIL: u16 = 1 << 7;
const SIZE: u16 = 8;

/// A split queue of [`SIZE`] whose descriptors a test writes as it likes.
struct Split {
    arena: Arena,
    areas: [u64; 3],
    queue: VirtQueue,
    chain: Chain,
}

impl Split {
    fn new() -> Self {
        Self::with(|setup| setup)
    }

    fn with(change: impl Fn(RingSetup) -> RingSetup) -> Self {
        let arena = Arena::new();
        let areas = common::split_areas(SIZE);
        let queue = VirtQueue::start(&change(arena.setup(Layout::Split, SIZE, areas))).unwrap();
        Split { arena, areas, queue, chain: Chain::default() }
    }

    fn desc(&self, index: u16, buffer: (u64, u32), flags: u16, next: u16) {
        self.arena.write_desc(self.areas[0], index, buffer, flags, next);
    }

    fn offer(&self, head: u16) {
        self.arena.write_u16(self.areas[1] + 4, head);
        self.arena.write_u16(self.areas[1] + 2, 1);
    }

    /// Offers `head`; the fault must leave the queue and guest memory as they were.
    fn fault(&mut self, head: u16) -> RingFault {
        self.offer(head);
        let before = self.arena.snapshot();
        let fault = self.queue.take(&mut self.chain).expect_err("a ring fault");
        assert_eq!(self.queue.take(&mut self.chain), Err(fault), "the fault stays");
        assert_eq!((self.queue.base(), self.queue.used_index()), (0, 0));
        assert!(before == self.arena.snapshot(), "guest memory was written");
        fault
    }

    fn legal(&mut self, head: u16) -> (Ranges, Ranges) {
        self.offer(head);
        let head = self.queue.take(&mut self.chain).expect("legal").expect("available");
        head.abandon();
        self.arena.chain_ranges(&mut self.chain)
    }
}

#[test]
fn descriptor_that_points_to_itself_is_a_fault() {
    let mut split = Split::new();
    split.desc(3, (LOW, 1), NEXT, 3);
    assert_eq!(split.fault(3), RingFault::ChainTooLong { limit: SIZE.into() });
}

#[test]
fn loop_of_empty_descriptors_is_a_fault() {
    let mut split = Split::new();
    split.desc(0, (0, 0), NEXT, 1);
    split.desc(1, (0, 0), NEXT, 0);
    assert_eq!(split.fault(0), RingFault::ChainTooLong { limit: SIZE.into() });
}

#[test]
fn chain_of_all_descriptors_is_legal() {
    let mut split = Split::new();
    for index in 0..SIZE {
        let flags = if index + 1 < SIZE { NEXT } else { 0 };
        split.desc(index, (LOW + 0x1000 * u64::from(index), 16), flags, index + 1);
    }
    let (readable, writable) = split.legal(0);
    assert_eq!((readable.len(), writable.len()), (8, 0));
}

#[test]
fn head_or_next_beyond_the_table_is_a_fault() {
    let mut split = Split::new();
    split.desc(0, (LOW, 1), NEXT, 0xffff);
    let beyond = |index| RingFault::DescriptorIndex { index, size: SIZE };
    assert_eq!(split.fault(0), beyond(0xffff));
    assert_eq!(split.fault(SIZE), beyond(SIZE));
}

#[test]
fn avail_index_that_jumps_over_the_queue_is_a_fault() {
    for (avail_idx, base) in [(SIZE + 1, 0), (0xffff, 0), (3, 4), (SIZE, 0xffff)] {
        let mut split = Split::with(|setup| RingSetup { base, ..setup });
        split.arena.write_u16(split.areas[1] + 2, avail_idx);
        let next_avail = base as u16;
        let ahead = avail_idx.wrapping_sub(next_avail);
        let fault = Err(RingFault::AvailIndex { avail_idx, next_avail, ahead });
        assert_eq!(split.queue.has_avail(), fault.map(|(): ()| true));
        assert_eq!(split.queue.take(&mut split.chain).map(|_| ()), fault);
        assert_eq!(split.queue.base(), base);
    }
}

#[test]
fn avail_index_a_whole_queue_ahead_is_legal() {
    let mut split = Split::with(|setup| RingSetup { base: 0xfffe, ..setup });
    split.arena.write_u16(split.areas[1] + 2, 0xfffe_u16.wrapping_add(SIZE));
    assert_eq!(split.queue.has_avail(), Ok(true));
}

#[test]
fn readable_after_writable_is_a_fault_also_in_a_table() {
    let mut split = Split::new();
    split.desc(0, (LOW, 1), WRITE | NEXT, 1);
    split.desc(1, (LOW, 1), 0, 0);
    assert_eq!(split.fault(0), RingFault::ReadableAfterWritable);
    split.arena.write_desc(TABLES, 0, (LOW, 1), 0, 0);
    split.desc(1, (TABLES, 16), INDIRECT, 0);
    assert_eq!(split.fault(0), RingFault::ReadableAfterWritable);
}

#[test]
fn buffer_outside_memory_is_a_fault_even_by_one_byte() {
    let mut split = Split::new();
    let cases = [
        (0, 1, 0, 1),
        (LOW - 1, 2, LOW - 1, 2),
        (DATA_END - 1, 2, DATA_END, 1),
        (HIGH - 4, u32::MAX, DATA_END, u64::from(u32::MAX) - 0x8_0004),
        (u64::MAX, 1, u64::MAX, 1),
        (u64::MAX - 7, 16, u64::MAX - 7, 16),
    ];
    for (addr, len, first_bad, left) in cases {
        split.desc(0, (addr, len), 0, 0);
        assert_eq!(split.fault(0), RingFault::NotMemory { addr: first_bad, len: left });
    }
}

#[test]
fn buffer_that_wraps_the_address_space_does_not_reach_its_bottom() {
    // The best that a hostile front-end can do: memory at the very top and at 0.
    let top = u64::MAX - 0xfff;
    let arena =
        Arena::with_regions(&[(0, 0x1000, 0), (RINGS, 0x1_0000, 0x1000), (top, 0xfff, 0x1_1000)]);
    let areas = common::split_areas(SIZE);
    let mut queue = VirtQueue::start(&arena.setup(Layout::Split, SIZE, areas)).unwrap();
    arena.write_desc(areas[0], 0, (u64::MAX - 16, 64), 0, 0);
    arena.write_u16(areas[1] + 2, 1);
    let fault = queue.take(&mut Chain::default()).unwrap_err();
    assert_eq!(fault, RingFault::NotMemory { addr: u64::MAX, len: 48 });
}

#[test]
fn buffer_over_two_regions_is_one_range() {
    let mut split = Split::new();
    split.desc(0, (HIGH - 4096, 8192), WRITE, 0);
    assert_eq!(split.legal(0), (vec![], vec![(HIGH - 4096, 8192)]));
}

#[test]
fn empty_descriptors_need_no_memory_and_carry_nothing() {
    let mut split = Split::new();
    split.desc(0, (u64::MAX, 0), NEXT, 1);
    split.desc(1, (LOW, 8), NEXT, 2);
    split.desc(2, (0, 0), WRITE | NEXT, 3);
    split.desc(3, (LOW + 8, 8), WRITE, 0);
    assert_eq!(split.legal(0), (vec![(LOW, 8)], vec![(LOW + 8, 8)]));
    assert_eq!(split.chain.segments(), 2, "readable and writable neighbours stay apart");
}

#[test]
fn table_of_no_or_a_broken_length_is_a_fault() {
    let mut split = Split::new();
    for len in [0, 1, 15, 17, 40, u32::MAX] {
        split.desc(0, (TABLES, len), INDIRECT, 0);
        assert_eq!(split.fault(0), RingFault::Indirect { len });
    }
}

#[test]
fn table_that_also_has_a_next_is_a_fault() {
    let mut split = Split::new();
    split.arena.write_desc(TABLES, 0, (LOW, 1), 0, 0);
    split.desc(0, (TABLES, 16), INDIRECT | NEXT, 1);
    split.desc(1, (LOW, 1), 0, 0);
    assert_eq!(split.fault(0), RingFault::Indirect { len: 16 });
}

#[test]
fn table_in_a_table_is_a_fault() {
    let mut split = Split::new();
    split.arena.write_desc(TABLES, 0, (TABLES + 64, 16), INDIRECT, 0);
    split.arena.write_desc(TABLES + 64, 0, (LOW, 1), 0, 0);
    split.desc(0, (TABLES, 16), INDIRECT, 0);
    assert_eq!(split.fault(0), RingFault::Indirect { len: 16 });
}

#[test]
fn table_is_a_fault_where_indirect_was_not_negotiated() {
    let mut split = Split::with(|setup| RingSetup { indirect: false, ..setup });
    split.arena.write_desc(TABLES, 0, (LOW, 1), 0, 0);
    split.desc(0, (TABLES, 16), INDIRECT, 0);
    assert_eq!(split.fault(0), RingFault::Indirect { len: 16 });
}

#[test]
fn table_outside_memory_is_a_fault_only_where_it_is_walked() {
    let mut split = Split::new();
    let end = REGIONS[3].0 + REGIONS[3].1;
    split.arena.write_desc(end - 24, 0, (LOW, 8), NEXT, 1);
    split.desc(0, (end - 24, 32), INDIRECT, 0);
    assert_eq!(split.fault(0), RingFault::NotMemory { addr: end - 24, len: 32 });
    split.arena.write_desc(end - 24, 0, (LOW, 8), 0, 1);
    assert_eq!(split.legal(0), (vec![(LOW, 8)], vec![]));
}

#[test]
fn table_over_two_regions_is_read_whole() {
    let mut split = Split::new();
    split.arena.write_desc(TABLES_BORDER - 24, 0, (LOW, 8), NEXT, 1);
    split.arena.write_desc(TABLES_BORDER - 24, 1, (LOW + 64, 8), WRITE, 0);
    split.desc(0, (TABLES_BORDER - 24, 32), INDIRECT, 0);
    assert_eq!(split.legal(0), (vec![(LOW, 8)], vec![(LOW + 64, 8)]));
}

#[test]
fn table_at_an_odd_address_is_read_whole() {
    let mut split = Split::new();
    split.arena.write_desc(TABLES + 1, 0, (LOW, 8), NEXT, 1);
    split.arena.write_desc(TABLES + 1, 1, (LOW + 64, 8), WRITE, 0);
    split.desc(0, (TABLES + 1, 32), INDIRECT, 0);
    assert_eq!(split.legal(0), (vec![(LOW, 8)], vec![(LOW + 64, 8)]));
}

#[test]
fn loop_and_next_beyond_a_table_are_faults() {
    let mut split = Split::new();
    split.desc(0, (TABLES, 32), INDIRECT, 0);
    split.arena.write_desc(TABLES, 0, (LOW, 8), NEXT, 2);
    assert_eq!(split.fault(0), RingFault::DescriptorIndex { index: 2, size: 2 });
    split.arena.write_desc(TABLES, 0, (LOW, 8), NEXT, 0);
    let limit = virtqueue::chain::CHAIN_DESCRIPTORS_MIN;
    assert_eq!(split.fault(0), RingFault::ChainTooLong { limit });
}

#[test]
fn buffers_that_span_many_small_regions_are_a_fault() {
    // Each byte is a region: a buffer of all of them is in as many pieces.
    let bytes = (0..256).map(|at| (HIGH + at, 1, 0x8000));
    let regions: Vec<_> = [(LOW, 0x8000, 0)].into_iter().chain(bytes).collect();
    let arena = Arena::with_regions(&regions);
    let areas = [LOW, LOW + 0x1000, LOW + 0x2000];
    let mut queue = VirtQueue::start(&arena.setup(Layout::Split, SIZE, areas)).unwrap();
    let table = LOW + 0x3000;
    for index in 0..5 {
        arena.write_desc(table, index, (HIGH, 256), NEXT, index + 1);
    }
    arena.write_desc(table, 3, (HIGH, 256), 0, 0);
    arena.write_desc(areas[0], 0, (table, 5 * 16), INDIRECT, 0);
    arena.write_u16(areas[1] + 2, 2);
    let mut chain = Chain::default();
    queue.take(&mut chain).unwrap().unwrap().abandon();
    assert_eq!((chain.segments(), chain.readable_bytes()), (1024, 1024));
    arena.write_desc(table, 3, (HIGH, 256), NEXT, 4);
    arena.write_desc(table, 4, (HIGH, 256), 0, 0);
    assert_eq!(queue.take(&mut chain), Err(RingFault::ChainTooFragmented { limit: 1024 }));
    assert_eq!(queue.base(), 1);
}

/// Memory for a queue of 32768 and a table of as many.
fn huge() -> (Arena, [u64; 3], u64) {
    let areas = [0x100_0000, 0x110_0000, 0x120_0000];
    let arena = Arena::with_regions(&[(LOW, 0x1_0000, 0x30_0000), (0x100_0000, 0x30_0000, 0)]);
    (arena, areas, 0x128_0000)
}

#[test]
fn chain_of_32768_descriptors_is_legal_and_its_loop_a_fault() {
    let (arena, areas, _) = huge();
    let mut queue = VirtQueue::start(&arena.setup(Layout::Split, 32768, areas)).unwrap();
    for index in 0..32768 {
        let flags = if index < 32767 { NEXT } else { 0 };
        arena.write_desc(areas[0], index, (LOW + u64::from(index % 2) * 16, 1), flags, index + 1);
    }
    arena.write_u16(areas[1] + 2, 2);
    let mut chain = Chain::default();
    queue.take(&mut chain).unwrap().unwrap().abandon();
    assert_eq!((chain.readable_bytes(), chain.segments()), (32768, 32768));
    arena.write_desc(areas[0], 32767, (LOW, 1), NEXT, 0);
    assert_eq!(queue.take(&mut chain), Err(RingFault::ChainTooLong { limit: 32768 }));
    assert_eq!(queue.base(), 1);
}

#[test]
fn table_longer_than_the_queue_allows_is_a_fault_also_packed() {
    let (arena, areas, table) = huge();
    for index in 0..1025 {
        arena.write_desc(table, index, (LOW, 1), 0, 0);
    }
    let setup = arena.setup(Layout::Packed, 16, areas);
    let setup = RingSetup { base: 0x8000_8000, ..setup };
    let mut queue = VirtQueue::start(&setup).unwrap();
    arena.write(areas[0], &table.to_le_bytes());
    arena.write(areas[0] + 8, &(16u32 * 1024).to_le_bytes());
    arena.write_u16(areas[0] + 14, AVAIL | INDIRECT);
    let mut chain = Chain::default();
    queue.take(&mut chain).unwrap().unwrap().abandon();
    assert_eq!(chain.readable_bytes(), 1024);
    arena.write(areas[0] + 16, &table.to_le_bytes());
    arena.write(areas[0] + 24, &(16u32 * 1025).to_le_bytes());
    arena.write_u16(areas[0] + 30, AVAIL | INDIRECT);
    assert_eq!(queue.take(&mut chain), Err(RingFault::ChainTooLong { limit: 1024 }));
    assert_eq!(queue.base(), 0x8000_8001);
}

#[test]
fn packed_chain_without_an_end_is_a_fault() {
    let arena = Arena::new();
    let areas = [RINGS, RINGS + 0x1000, RINGS + 0x2000];
    let setup = arena.setup(Layout::Packed, SIZE, areas);
    let mut queue = VirtQueue::start(&RingSetup { base: 0x8003_8003, ..setup }).unwrap();
    for index in 0..u64::from(SIZE) {
        arena.write_u16(RINGS + 16 * index + 14, AVAIL | NEXT);
    }
    let fault = Err(RingFault::ChainTooLong { limit: SIZE.into() });
    assert_eq!(queue.take(&mut Chain::default()), fault);
    assert_eq!(queue.base(), 0x8003_8003);
}

#[test]
fn packed_table_behind_a_descriptor_is_a_fault() {
    let arena = Arena::new();
    let areas = [RINGS, RINGS + 0x1000, RINGS + 0x2000];
    let setup = arena.setup(Layout::Packed, SIZE, areas);
    let mut queue = VirtQueue::start(&RingSetup { base: 0x8000_8000, ..setup }).unwrap();
    arena.write_u16(RINGS + 14, AVAIL | NEXT);
    arena.write(RINGS + 16, &TABLES.to_le_bytes());
    arena.write(RINGS + 24, &16u32.to_le_bytes());
    arena.write_u16(RINGS + 30, AVAIL | INDIRECT);
    assert_eq!(queue.take(&mut Chain::default()), Err(RingFault::Indirect { len: 16 }));
}

#[test]
fn split_sizes_are_powers_of_two_up_to_32768() {
    let (arena, areas, _) = huge();
    for (size, fine) in [(1, true), (32768, true), (0, false), (3, false), (65535, false)] {
        let started = VirtQueue::start(&arena.setup(Layout::Split, size, areas));
        assert_eq!(started.err(), (!fine).then_some(QueueError::Size(size)));
    }
}

#[test]
fn ring_areas_that_leave_their_region_are_refused() {
    let arena = Arena::new();
    let end = RINGS + common::RINGS_LEN;
    let last = end - 16 * u64::from(SIZE);
    let [_, avail, used] = common::split_areas(SIZE);
    assert!(VirtQueue::start(&arena.setup(Layout::Split, SIZE, [last, avail, used])).is_ok());
    let cases = [
        ([last + 16, avail, used], "descriptor table"),
        ([last + 8, avail, used], "descriptor table"),
        ([last, avail + 1, used], "avail ring"),
        ([last, end - 6 - 2 * u64::from(SIZE) + 2, used], "avail ring"),
        ([last, avail, used + 2], "used ring"),
        ([last, avail, end - 4], "used ring"),
        ([last, avail, u64::MAX - common::USER_BASE], "used ring"),
        ([HIGH - 16, avail, used], "descriptor table"),
    ];
    for (areas, name) in cases {
        let started = VirtQueue::start(&arena.setup(Layout::Split, SIZE, areas));
        let QueueError::Area { area, .. } = started.unwrap_err() else { panic!("not the area") };
        assert_eq!(area, name);
    }
}

#[test]
fn base_of_more_than_16_bits_is_refused_for_a_split_queue() {
    let arena = Arena::new();
    let setup = arena.setup(Layout::Split, SIZE, common::split_areas(SIZE));
    let started = VirtQueue::start(&RingSetup { base: 0x1_0000, ..setup });
    assert_eq!(started.unwrap_err(), QueueError::Base(0x1_0000));
}
