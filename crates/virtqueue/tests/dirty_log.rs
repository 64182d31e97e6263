// SPDX-License-Identifier: Apache-2.0
//! The dirty log of live migration: exactly the pages that the device wrote, each marked after
//! the write.

mod common;

use common::{Arena, HIGH, LOW, RINGS, TABLES, USER_BASE, dirty_log, drain_log, memfd};
use std::fs::File;
use std::sync::Arc;
use virtqueue::{Chain, ChainHead, DirtyLog, Layout, RingSetup, VirtQueue};

const NEXT: u16 = 1;
const WRITE: u16 = 2;
const INDIRECT: u16 = 4;
const AVAIL: u16 = 1 << 7;
/// Enough pages for every region of the arena.
const PAGES: u64 = (RINGS + common::RINGS_LEN) / 4096;

fn page(gpa: u64) -> u64 {
    gpa / 4096
}

/// A queue with a log, every ring area on pages of its own.
fn logged(
    arena: &Arena,
    layout: Layout,
    size: u16,
    event_idx: bool,
) -> (VirtQueue, [u64; 3], File) {
    let (log, file) = dirty_log(PAGES);
    let areas = match layout {
        Layout::Split => common::split_areas(size),
        Layout::Packed => [RINGS, RINGS + 0x8000, RINGS + 0x9000],
    };
    let base = if layout == Layout::Packed { 0x8000_8000 } else { 0 };
    let setup = arena.setup(layout, size, areas);
    let setup = RingSetup { base, event_idx, log: Some(log), ..setup };
    (VirtQueue::start(&setup).unwrap(), areas, file)
}

fn offer_split(arena: &Arena, areas: [u64; 3], heads: &[u16]) {
    for (i, head) in (0..).zip(heads) {
        arena.write_u16(areas[1] + 4 + 2 * i, *head);
    }
    arena.write_u16(areas[1] + 2, heads.len() as u16);
}

fn take(queue: &mut VirtQueue, chain: &mut Chain) -> ChainHead {
    queue.take(chain).expect("legal").expect("available")
}

#[test]
fn mark_sets_the_bit_of_every_page_touched_and_no_other() {
    let (log, file) = dirty_log(64);
    let cases: [(u64, u64, &[u64]); 7] = [
        (0, 0, &[]),
        (0, 1, &[0]),
        (4095, 1, &[0]),
        (4095, 2, &[0, 1]),
        (8 * 4096, 4096, &[8]),
        (7 * 4096 + 1, 3 * 4096, &[7, 8, 9, 10]),
        (63 * 4096 + 4095, 1, &[63]),
    ];
    for (addr, len, pages) in cases {
        log.mark(addr, len);
        assert_eq!(drain_log(&file), pages, "{len} bytes at {addr:#x}");
    }
}

#[test]
fn pages_beyond_the_log_are_ignored() {
    let (log, file) = dirty_log(16);
    log.mark(15 * 4096, u64::MAX);
    assert_eq!(drain_log(&file), [15]);
    log.mark(16 * 4096, 4096);
    log.mark(u64::MAX, 1);
    assert_eq!(drain_log(&file), [0u64; 0]);
}

#[test]
fn log_at_an_offset_in_its_file_touches_nothing_before_it() {
    let file = memfd(4096);
    let log = DirtyLog::map(file.try_clone().unwrap(), 100, 4).unwrap();
    log.mark(0, 1);
    log.mark(32 * 4096, 1); // the first page behind the log
    assert_eq!(drain_log(&file), [800]);
}

#[test]
fn empty_wrapping_or_too_long_logs_are_refused() {
    for (offset, len) in [(0, 0), (u64::MAX, 1), (1, u64::MAX), (0, 4097), (4096, 1)] {
        assert!(DirtyLog::map(memfd(4096), offset, len).is_err(), "{len} bytes at {offset}");
    }
}

#[test]
fn taking_a_chain_marks_nothing_and_lists_its_writable_ranges() {
    let arena = Arena::new();
    let (mut queue, areas, file) = logged(&arena, Layout::Split, 8, false);
    arena.write_desc(areas[0], 0, (LOW, 16), NEXT, 1);
    arena.write_desc(areas[0], 1, (HIGH - 100, 200), WRITE | NEXT, 2);
    arena.write_desc(areas[0], 2, (TABLES, 32), INDIRECT, 0);
    arena.write_desc(TABLES, 0, (LOW + 0x5000, 0), WRITE | NEXT, 1);
    arena.write_desc(TABLES, 1, (LOW + 0x6000, 513), WRITE, 0);
    offer_split(&arena, areas, &[0]);
    let mut chain = Chain::default();
    let head = take(&mut queue, &mut chain);
    assert_eq!(chain.writable_ranges(), [(HIGH - 100, 100), (HIGH, 100), (LOW + 0x6000, 513)]);
    let status = chain.take_status().unwrap();
    assert_eq!(status.guest_addr(), Some(LOW + 0x6000 + 512));
    assert_eq!(chain.writable_ranges(), [(HIGH - 100, 100), (HIGH, 100), (LOW + 0x6000, 512)]);
    assert_eq!(drain_log(&file), [0u64; 0]);
    head.abandon();
}

#[test]
fn without_a_log_no_range_is_listed() {
    let arena = Arena::new();
    let areas = common::split_areas(8);
    let mut queue = VirtQueue::start(&arena.setup(Layout::Split, 8, areas)).unwrap();
    arena.write_desc(areas[0], 0, (LOW, 16), WRITE, 0);
    offer_split(&arena, areas, &[0]);
    let mut chain = Chain::default();
    take(&mut queue, &mut chain).abandon();
    assert!(chain.writable_ranges().is_empty());
    assert_eq!(chain.take_status().unwrap().guest_addr(), None);
}

#[test]
fn split_used_entries_and_index_are_marked_when_written() {
    let arena = Arena::new();
    // 1024 entries of 8 bytes: entries 0 to 510 on the first page, the last on the third.
    let (mut queue, areas, file) = logged(&arena, Layout::Split, 1024, false);
    arena.write_desc(areas[0], 0, (LOW, 1), WRITE, 0);
    offer_split(&arena, areas, &[0; 600]);
    let used = page(areas[2]);
    let mut chain = Chain::default();
    for number in 0..600 {
        let head = take(&mut queue, &mut chain);
        queue.push_used(head, 1);
        // Entry 511 begins at byte 4092: it lies on two pages.
        let expected = match number {
            0..511 => vec![used],
            511 => vec![used, used + 1],
            _ => vec![used + 1],
        };
        assert_eq!(drain_log(&file), expected, "entry {number}");
    }
    queue.publish();
    assert_eq!(drain_log(&file), [used], "the used index");
    queue.publish();
    assert_eq!(drain_log(&file), [0u64; 0], "nothing new was published");
}

#[test]
fn split_arm_and_suppress_mark_what_they_write() {
    for event_idx in [false, true] {
        let arena = Arena::new();
        let (mut queue, areas, file) = logged(&arena, Layout::Split, 1024, event_idx);
        queue.arm();
        let avail_event = areas[2] + 4 + 8 * 1024;
        let written = if event_idx { avail_event } else { areas[2] };
        assert_eq!(drain_log(&file), [page(written)]);
        queue.suppress();
        assert_eq!(drain_log(&file), [page(written)]);
    }
}

#[test]
fn split_used_ring_is_logged_where_the_front_end_says() {
    let arena = Arena::new();
    let (log, file) = dirty_log(PAGES);
    let areas = common::split_areas(8);
    let elsewhere = LOW + 0x3000;
    let setup = arena.setup(Layout::Split, 8, areas);
    let setup = RingSetup { log: Some(log), used_log_addr: Some(elsewhere), ..setup };
    let mut queue = VirtQueue::start(&setup).unwrap();
    queue.arm();
    assert_eq!(drain_log(&file), [page(elsewhere)]);
}

#[test]
fn packed_entries_are_marked_after_the_flags_that_show_them() {
    let arena = Arena::new();
    // 300 descriptors of 16 bytes: number 256 begins the second page.
    let (mut queue, areas, file) = logged(&arena, Layout::Packed, 300, false);
    for index in 0..300 {
        arena.write(areas[0] + 16 * index, &LOW.to_le_bytes());
        arena.write(areas[0] + 16 * index + 8, &1u32.to_le_bytes());
        arena.write_u16(areas[0] + 16 * index + 14, AVAIL | WRITE);
    }
    let ring = page(areas[0]);
    let mut chain = Chain::default();
    for number in 0..300 {
        let head = take(&mut queue, &mut chain);
        queue.push_used(head, 1);
        assert_eq!(drain_log(&file), [ring + number / 256], "entry {number}");
    }
    // The front-end may read and clear the log here, before the first entry's flags are stored.
    queue.publish();
    assert_eq!(drain_log(&file), [ring], "the flags that publish the batch");
    queue.publish();
    assert_eq!(drain_log(&file), [0u64; 0], "nothing new was published");
}

#[test]
fn packed_arm_and_suppress_mark_the_device_area() {
    let arena = Arena::new();
    let (mut queue, areas, file) = logged(&arena, Layout::Packed, 8, true);
    queue.arm();
    assert_eq!(drain_log(&file), [page(areas[2])]);
    queue.suppress();
    assert_eq!(drain_log(&file), [page(areas[2])]);
}

#[test]
fn ring_is_logged_by_guest_address_though_set_up_by_the_front_ends() {
    let arena = Arena::new();
    let (log, file) = dirty_log(PAGES);
    let areas = common::split_areas(8);
    let setup = RingSetup { log: Some(Arc::clone(&log)), ..arena.setup(Layout::Split, 8, areas) };
    assert_eq!(setup.used_addr, areas[2] + USER_BASE);
    VirtQueue::start(&setup).unwrap().arm();
    assert_eq!(drain_log(&file), [page(areas[2])]);
}
