// SPDX-License-Identifier: Apache-2.0
//! Configuration space and feature bits, byte by byte as section 5.2.4 lays them out.

mod common;

use backend::{Info, RangeLimits};
use common::info;
use virtio_blk::{DeviceConfig, DiskView, id_bytes};

fn config(info: Info) -> DeviceConfig {
    DeviceConfig { info, num_queues: 4, seg_max: 126, packed: true }
}

fn le(bytes: &[u8]) -> u64 {
    bytes.iter().rev().fold(0, |value, byte| value << 8 | u64::from(*byte))
}

#[test]
fn every_field_lies_at_its_offset() {
    let space = config(info()).space(true);
    // Offset, length, value; what is not named is 0.
    let fields: [(usize, usize, u64); 18] = [
        (0, 8, 1000),    // capacity
        (8, 4, 262_144), // size_max
        (12, 4, 126),    // seg_max
        (20, 4, 512),    // blk_size
        (24, 1, 3),      // physical_block_exp: 4096 = 512 << 3
        (26, 2, 8),      // min_io_size in blocks
        (28, 4, 128),    // opt_io_size in blocks
        (32, 1, 1),      // writeback
        (34, 2, 4),      // num_queues
        (36, 4, 100),    // max_discard_sectors
        (40, 4, 32),     // max_discard_seg
        (44, 4, 8),      // discard_sector_alignment
        (48, 4, 200),    // max_write_zeroes_sectors
        (52, 4, 1),      // max_write_zeroes_seg
        (56, 1, 1),      // write_zeroes_may_unmap
        (60, 4, 300),    // max_secure_erase_sectors
        (64, 4, 1),      // max_secure_erase_seg
        (68, 4, 16),     // secure_erase_sector_alignment
    ];
    assert_eq!(space.len(), 72);
    let mut rest = space.clone();
    for (offset, len, value) in fields {
        assert_eq!(le(&space[offset..offset + len]), value, "the field at byte {offset}");
        rest[offset..offset + len].fill(0);
    }
    assert_eq!(rest, [0; 72]);
}

#[test]
fn requests_that_the_limits_allow_are_below_the_kernels_bound() {
    let space = config(info()).space(true);
    assert!(le(&space[8..12]) * le(&space[12..16]) < 32 << 20);
}

#[test]
fn announced_ranges_are_short_unless_the_storage_wants_longer_ones() {
    let field = |info: &Info, at: usize| le(&config(info.clone()).space(true)[at..at + 4]);
    let limits = |align_sectors| Some(RangeLimits { sectors_max: 1 << 21, align_sectors });
    let [discard, zeroes, erase] = [36, 48, 60];
    let any =
        Info { discard: limits(8), write_zeroes: limits(1), secure_erase: limits(1), ..info() };
    assert_eq!([discard, zeroes, erase].map(|at| field(&any, at)), [128 << 10, 8 << 10, 8 << 10]);
    let coarse = Info { discard: limits(1 << 20), ..any };
    assert_eq!(field(&coarse, discard), 1 << 20);
}

#[test]
fn writeback_byte_follows_the_cache_mode() {
    let config = config(info());
    let (on, off) = (config.space(true), config.space(false));
    assert_eq!((on[32], off[32]), (1, 0));
    assert_eq!(on[..32], off[..32]);
    assert_eq!(on[33..], off[33..]);
}

#[test]
fn capacity_is_in_sectors_whatever_the_block_size() {
    let big = Info { capacity_sectors: 1 << 40, logical_block_bytes: 4096, ..info() };
    let space = config(big).space(true);
    assert_eq!(le(&space[0..8]), 1 << 40);
    assert_eq!(le(&space[20..24]), 4096);
    assert_eq!(space[24], 0, "physical and logical blocks are alike");
    assert_eq!((le(&space[26..28]), le(&space[28..32])), (1, 16));
}

#[test]
fn limits_of_absent_commands_are_0() {
    let bare = Info { discard: None, write_zeroes: None, secure_erase: None, ..info() };
    assert_eq!(config(bare).space(true)[36..], [0; 36]);
}

#[test]
fn unmap_is_promised_only_where_the_disk_does_it() {
    let info = Info { write_zeroes_unmaps: false, ..info() };
    assert_eq!(config(info).space(true)[56], 0);
}

#[test]
fn minimum_io_too_large_for_its_field_is_left_out() {
    let info = Info { io_min_bytes: 512 << 16, ..info() };
    assert_eq!(le(&config(info).space(true)[26..28]), 0);
}

/// SIZE_MAX, SEG_MAX, BLK_SIZE, FLUSH, TOPOLOGY, CONFIG_WCE; INDIRECT_DESC, EVENT_IDX, VERSION_1.
const ALWAYS: u64 =
    1 << 1 | 1 << 2 | 1 << 6 | 1 << 9 | 1 << 10 | 1 << 11 | 1 << 28 | 1 << 29 | 1 << 32;

#[test]
fn full_disk_offers_these_bits_and_no_other() {
    let with_disk = 1 << 12 | 1 << 13 | 1 << 14 | 1 << 16 | 1 << 34;
    assert_eq!(config(info()).features(), ALWAYS | with_disk);
}

#[test]
fn bare_disk_offers_only_what_it_can() {
    let bare = Info { discard: None, write_zeroes: None, secure_erase: None, ..info() };
    let config = DeviceConfig { info: bare, num_queues: 1, seg_max: 126, packed: false };
    assert_eq!(config.features(), ALWAYS);
}

#[test]
fn read_only_disk_offers_ro_and_no_command_that_writes() {
    let config = config(Info { read_only: true, ..info() });
    assert_eq!(config.features(), ALWAYS | 1 << 5 | 1 << 12 | 1 << 34);
}

#[test]
fn id_is_20_bytes_padded_with_zeroes_or_cut() {
    assert_eq!(id_bytes(""), [0; 20]);
    assert_eq!(&id_bytes("abc"), b"abc\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0");
    assert_eq!(&id_bytes("12345678901234567890"), b"12345678901234567890");
    assert_eq!(&id_bytes("123456789012345678901"), b"12345678901234567890");
    let view = DiskView::new(&info(), 0, Default::default(), "abc");
    assert_eq!(view.id(), &id_bytes("abc"));
}
