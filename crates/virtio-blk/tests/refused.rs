// SPDX-License-Identifier: Apache-2.0
//! Requests that are answered without being carried out: the status that the specification names,
//! and not one other byte touched.

mod common;

use common::*;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use virtio_blk::{Completion, DiskView, Kind, MAX_RANGES};

const S_IOERR: u8 = 1;
const S_UNSUPP: u8 = 2;

/// The request is refused with `code` in its last writable byte, and with nothing else.
fn refused(mut guest: Guest, disk: &DiskView, writable: usize, code: u8) {
    let refused = guest.parse(disk).expect_err("a refused request");
    assert_eq!(refused.code, code);
    assert_eq!(refused.write(), 1, "the written length is the status byte");
    assert_eq!(guest.changes(), [(WRITABLE + writable as u64 - 1, code)]);
}

fn plain(readable: &[u8], writable: usize, code: u8) {
    refused(Guest::plain(readable, writable), &view(ALL), writable, code);
}

fn write(sector: u64, bytes: usize) -> Vec<u8> {
    [header(T_OUT, sector), vec![7; bytes]].concat()
}

fn ranged(kind: u32, ranges: &[u8]) -> Vec<u8> {
    [header(kind, 0), ranges.to_vec()].concat()
}

#[test]
fn read_past_the_end_gets_ioerr_and_touches_nothing() {
    plain(&header(T_IN, CAPACITY), 513, S_IOERR);
    plain(&header(T_IN, CAPACITY - 1), 1025, S_IOERR);
    plain(&header(T_IN, CAPACITY + 1), 1, S_IOERR);
}

#[test]
fn write_past_the_end_gets_ioerr_and_touches_nothing() {
    plain(&write(CAPACITY, 512), 1, S_IOERR);
    plain(&write(CAPACITY - 1, 1024), 1, S_IOERR);
    plain(&write(CAPACITY + 1, 0), 1, S_IOERR);
}

#[test]
fn sector_that_wraps_2_to_the_64_gets_ioerr() {
    plain(&header(T_IN, u64::MAX), 513, S_IOERR);
    plain(&header(T_IN, 1 << 55), 513, S_IOERR); // `sector * 512` is 2^64
    plain(&header(T_IN, (1 << 55) + 1), 513, S_IOERR);
    plain(&write(u64::MAX, 512), 1, S_IOERR);
    plain(&write(1 << 55, 512), 1, S_IOERR);
}

#[test]
fn data_that_is_no_multiple_of_512_gets_ioerr() {
    plain(&header(T_IN, 0), 512, S_IOERR);
    plain(&header(T_IN, 0), 514, S_IOERR);
    plain(&header(T_IN, 0), 2, S_IOERR);
    plain(&write(0, 511), 1, S_IOERR);
    plain(&write(0, 1), 1, S_IOERR);
}

#[test]
fn missing_or_short_header_gets_ioerr() {
    refused(Guest::new(&[], &[], &[513]), &view(ALL), 513, S_IOERR);
    refused(Guest::new(&[], &[0, 0], &[1]), &view(ALL), 1, S_IOERR);
    plain(&header(T_IN, 0)[..15], 513, S_IOERR);
    refused(Guest::new(&header(T_IN, 0)[..15], &[5, 5, 5], &[1]), &view(ALL), 1, S_IOERR);
}

#[test]
fn missing_status_is_refused_without_a_written_byte() {
    for writable in [&[][..], &[0], &[0, 0]] {
        let mut guest = Guest::new(&write(0, 512), &[528], writable);
        let refused = guest.parse(&view(ALL)).expect_err("no status");
        assert!(refused.status.is_none());
        assert_eq!(refused.write(), 0);
        assert_eq!(guest.changes(), []);
    }
}

#[test]
fn unknown_types_get_unsupp() {
    for kind in [2, 3, 5, 6, 7, 9, T_GET_LIFETIME, 12, 15, 0x100, 0x8000_0000, u32::MAX] {
        plain(&header(kind, 0), 513, S_UNSUPP);
    }
}

#[test]
fn commands_that_were_not_negotiated_get_unsupp() {
    let cases = [
        (header(T_FLUSH, 0), FLUSH),
        (ranged(T_DISCARD, &range(0, 1, 0)), DISCARD),
        (ranged(T_WRITE_ZEROES, &range(0, 1, 0)), WRITE_ZEROES),
        (ranged(T_SECURE_ERASE, &range(0, 1, 0)), SECURE_ERASE),
    ];
    for (bytes, feature) in cases {
        refused(Guest::plain(&bytes, 1), &view(ALL & !feature), 1, S_UNSUPP);
        assert!(Guest::plain(&bytes, 1).parse(&view(feature)).is_ok(), "the others do not matter");
    }
}

#[test]
fn commands_that_the_disk_lacks_get_unsupp_whatever_was_negotiated() {
    let info = backend::Info { discard: None, write_zeroes: None, secure_erase: None, ..info() };
    let disk = DiskView::new(&info, ALL, Arc::new(AtomicBool::new(true)), "");
    for kind in [T_DISCARD, T_WRITE_ZEROES, T_SECURE_ERASE] {
        refused(Guest::plain(&ranged(kind, &range(0, 1, 0)), 1), &disk, 1, S_UNSUPP);
    }
}

#[test]
fn read_only_disk_refuses_what_writes_and_serves_what_does_not() {
    let info = backend::Info { read_only: true, ..info() };
    let disk = DiskView::new(&info, ALL, Arc::new(AtomicBool::new(true)), "");
    refused(Guest::plain(&write(0, 512), 1), &disk, 1, S_IOERR);
    for kind in [T_DISCARD, T_WRITE_ZEROES, T_SECURE_ERASE] {
        refused(Guest::plain(&ranged(kind, &range(0, 1, 0)), 1), &disk, 1, S_IOERR);
    }
    for (kind, writable) in [(T_IN, 513), (T_FLUSH, 1), (T_GET_ID, 21)] {
        assert!(Guest::plain(&header(kind, 0), writable).parse(&disk).is_ok(), "type {kind}");
    }
}

#[test]
fn reserved_range_flags_get_unsupp() {
    for flags in [2, 4, 3, 0x8000_0000, u32::MAX] {
        for kind in [T_DISCARD, T_WRITE_ZEROES, T_SECURE_ERASE] {
            plain(&ranged(kind, &range(0, 1, flags)), 1, S_UNSUPP);
        }
    }
}

#[test]
fn unmap_flag_of_discard_or_secure_erase_gets_unsupp() {
    plain(&ranged(T_DISCARD, &range(0, 1, 1)), 1, S_UNSUPP);
    plain(&ranged(T_SECURE_ERASE, &range(0, 1, 1)), 1, S_UNSUPP);
}

#[test]
fn no_range_or_half_a_range_gets_ioerr() {
    for kind in [T_DISCARD, T_WRITE_ZEROES, T_SECURE_ERASE] {
        plain(&ranged(kind, &[]), 1, S_IOERR);
        plain(&ranged(kind, &range(0, 1, 0)[..15]), 1, S_IOERR);
        plain(&ranged(kind, &[range(0, 1, 0), vec![0]].concat()), 1, S_IOERR);
    }
}

#[test]
fn parts_of_logical_blocks_get_ioerr_before_any_range_is_worked_on() {
    let info = backend::Info { logical_block_bytes: 4096, ..info() };
    let disk = DiskView::new(&info, ALL, Arc::new(AtomicBool::new(true)), "");
    for (sector, sectors) in [(1, 8), (8, 7), (4, 8), (8, 1)] {
        for kind in [T_DISCARD, T_WRITE_ZEROES, T_SECURE_ERASE] {
            let ranges = [range(0, 8, 0), range(sector, sectors, 0)].concat();
            refused(Guest::plain(&ranged(kind, &ranges), 1), &disk, 1, S_IOERR);
        }
        let bytes = sectors as usize * 512;
        let read = Guest::plain(&header(T_IN, sector), bytes + 1);
        refused(read, &disk, bytes + 1, S_IOERR);
        refused(Guest::plain(&write(sector, bytes), 1), &disk, 1, S_IOERR);
    }
    assert!(Guest::plain(&header(T_IN, 8), 4097).parse(&disk).is_ok());
}

#[test]
fn ranges_that_have_to_be_done_are_bounded_as_a_whole() {
    let two = |most: u32| [range(0, most - 50, 0), range(500, 50, 0)].concat();
    for (kind, most) in [(T_WRITE_ZEROES, 200), (T_SECURE_ERASE, 300)] {
        assert!(Guest::plain(&ranged(kind, &two(most)), 1).parse(&view(ALL)).is_ok());
        plain(&ranged(kind, &two(most + 1)), 1, S_IOERR);
    }
    let all = [range(0, 100, 0), range(500, 100, 0)].concat();
    assert!(Guest::plain(&ranged(T_DISCARD, &all), 1).parse(&view(ALL)).is_ok());
}

#[test]
fn too_many_ranges_get_ioerr() {
    let ranges: Vec<u8> = (0..=MAX_RANGES).flat_map(|i| range(i.into(), 1, 0)).collect();
    for kind in [T_DISCARD, T_WRITE_ZEROES, T_SECURE_ERASE] {
        plain(&ranged(kind, &ranges), 1, S_IOERR);
    }
}

#[test]
fn range_over_its_commands_limit_gets_ioerr() {
    for (kind, most) in [(T_DISCARD, 100), (T_WRITE_ZEROES, 200), (T_SECURE_ERASE, 300)] {
        let fine = ranged(kind, &range(0, most, 0));
        assert!(Guest::plain(&fine, 1).parse(&view(ALL)).is_ok());
        plain(&ranged(kind, &range(0, most + 1, 0)), 1, S_IOERR);
    }
}

#[test]
fn one_bad_range_refuses_all() {
    let good = range(0, 1, 0);
    for bad in [range(CAPACITY, 1, 0), range(CAPACITY - 1, 2, 0), range(u64::MAX, 1, 0)] {
        for kind in [T_DISCARD, T_WRITE_ZEROES, T_SECURE_ERASE] {
            plain(&ranged(kind, &[good.clone(), bad.clone()].concat()), 1, S_IOERR);
            plain(&ranged(kind, &[bad.clone(), good.clone()].concat()), 1, S_IOERR);
        }
    }
}

#[test]
fn write_is_durable_without_flush_or_in_write_through_mode_only() {
    let bytes = [
        write(0, 512),
        ranged(T_DISCARD, &range(0, 1, 0)),
        ranged(T_WRITE_ZEROES, &range(0, 1, 0)),
    ];
    let cases = [(ALL, true, false), (ALL, false, true), (ALL & !FLUSH, true, true)];
    for (features, writeback, expected) in cases {
        let disk = DiskView::new(&info(), features, Arc::new(AtomicBool::new(writeback)), "");
        for bytes in &bytes {
            let kind = Guest::plain(bytes, 1).parse(&disk).unwrap().kind;
            let (Kind::Write { durable, .. }
            | Kind::Discard { durable, .. }
            | Kind::WriteZeroes { durable, .. }) = kind
            else {
                panic!("{kind:?}")
            };
            assert_eq!(durable, expected, "{kind:?}, writeback {writeback}");
        }
    }
}

#[test]
fn cache_mode_counts_from_the_moment_it_changes() {
    let writeback = Arc::new(AtomicBool::new(true));
    let disk = DiskView::new(&info(), ALL, Arc::clone(&writeback), "");
    let durable = || match Guest::plain(&write(0, 512), 1).parse(&disk).unwrap().kind {
        Kind::Write { durable, .. } => durable,
        kind => panic!("{kind:?}"),
    };
    assert!(!durable());
    writeback.store(false, Ordering::Relaxed);
    assert!(durable());
}

#[test]
fn failed_io_counts_no_data() {
    let read = Kind::Read { sector: 0, bytes: 4096 };
    let failed = Completion::of(read, Err(backend::IoError::EndOfStorage), 0);
    assert_eq!((failed.code, failed.data_bytes), (S_IOERR, 0));
    let failed = Completion::of(read, Err(backend::IoError::Errno(5)), 0);
    assert_eq!((failed.code, failed.data_bytes), (S_IOERR, 0));
    let unsupported =
        Completion::of(Kind::SecureErase { bytes: 0 }, Err(backend::IoError::Unsupported), 0);
    assert_eq!((unsupported.code, unsupported.data_bytes), (S_UNSUPP, 0));
}

#[test]
fn written_length_does_not_wrap() {
    let mut guest = Guest::plain(&header(T_FLUSH, 0), 1);
    let status = guest.parse(&view(ALL)).unwrap().status;
    let read = Kind::Read { sector: 0, bytes: 1 << 32 };
    assert_eq!(Completion::of(read, Ok(()), 0).write(status), u32::MAX);
}
