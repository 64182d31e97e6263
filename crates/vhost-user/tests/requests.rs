// SPDX-License-Identifier: Apache-2.0
//! Every request type in every layout over the real data plane, with data, status byte and written
//! length compared.

mod common;

use backend::wrap::{Fault, FaultRule, OpSet};
use backend::{Disk, FileOptions, IoError};
use common::plane::{skip_on_kernel, skip_part_on_kernel};
use common::{DISK, Daemon, Setup, TMPFS, both_rings, every_ring, file, mem, pattern};
use driver::{Completion, Cuts, Device, Layout, Options, Placed, Request, Segment};
use std::sync::Arc;
use virtio_spec::blk::{
    F_DISCARD, F_FLUSH, F_RO, F_SECURE_ERASE, F_WRITE_ZEROES, RangeSegment, S_IOERR, S_OK,
    S_UNSUPP, WRITE_ZEROES_F_UNMAP,
};
use virtio_spec::features::bit;

fn direct() -> FileOptions {
    FileOptions::default()
}

fn cached() -> FileOptions {
    FileOptions { direct: false, ..FileOptions::default() }
}

fn ends(device: &mut Device, request: &Request, status: u8, written: u32) -> Completion {
    let layout = device.layout();
    ends_in(device, request, &layout, status, written)
}

fn ends_in(
    device: &mut Device,
    request: &Request,
    layout: &Layout,
    status: u8,
    written: u32,
) -> Completion {
    let completion = device.queue(0).execute(request, layout).expect("a completion");
    let got = (completion.status, completion.written);
    assert_eq!(got, (Some(status), written), "{layout:?}");
    completion
}

fn range(sector: u64, num_sectors: u32, flags: u32) -> RangeSegment {
    RangeSegment { sector, num_sectors, flags }
}

fn reads_as(device: &mut Device, sector: u64, expected: &[u8]) {
    let request = Request::read(sector, expected.len());
    let completion = ends(device, &request, S_OK, expected.len() as u32 + 1);
    assert!(completion.data == expected, "other bytes at sector {sector}");
}

/// One request of each type and what it leaves on the disk.
fn every_type(device: &mut Device) {
    let data = pattern(64 << 10, 1);
    ends(device, &Request::write(8, &data), S_OK, 1);
    reads_as(device, 8, &data);
    ends(device, &Request::flush(), S_OK, 1);
    for (flags, sector) in [(0, 16), (WRITE_ZEROES_F_UNMAP, 24)] {
        ends(device, &Request::write_zeroes(&[range(sector, 8, flags)]), S_OK, 1);
        reads_as(device, sector, &[0; 4096]);
    }
    ends(device, &Request::discard(&[range(32, 8, 0)]), S_OK, 1);
    reads_as(device, 8, &data[..4096]);
    reads_as(device, 40, &data[16 << 10..]);
    let id = ends(device, &Request::get_id(), S_OK, 21);
    assert_eq!(id.data, b"a serial number\0\0\0\0\0");
    ends(device, &Request::new(0x7777, 0, &[], 512), S_UNSUPP, 1);
    let empty = ends(device, &Request::write(0, &[]), S_OK, 1);
    assert!(empty.data.is_empty());
    ends(device, &Request::read(0, 0), S_OK, 1);
}

fn every_type_on_every_ring(disk: impl Disk + 'static) {
    let daemon = Daemon::of(disk);
    for options in every_ring() {
        every_type(&mut daemon.connect(&options));
    }
}

#[test]
fn every_request_type_does_what_it_says_on_a_disk_in_memory() {
    every_type_on_every_ring(mem());
}

#[test]
fn every_request_type_does_what_it_says_on_a_direct_file_in_memory() {
    let (disk, _directory) = file(TMPFS, direct());
    every_type_on_every_ring(disk);
}

#[test]
fn every_request_type_does_what_it_says_on_a_direct_file_on_disk() {
    let (disk, _directory) = file(DISK, direct());
    every_type_on_every_ring(disk);
}

#[test]
fn every_request_type_does_what_it_says_on_a_cached_file() {
    let (disk, _directory) = file(DISK, cached());
    every_type_on_every_ring(disk);
}

#[test]
fn every_request_type_does_what_it_says_in_pinned_memory() {
    let (disk, _directory) = file(TMPFS, direct());
    let setup = Setup { pin_memory: true, ..Setup::default() };
    let daemon = Daemon::start(Arc::new(disk), &setup);
    for options in both_rings() {
        every_type(&mut daemon.connect(&options));
    }
}

#[test]
fn secure_erase_leaves_zeroes_in_its_range_only() {
    if skip_on_kernel("the disk is a file, which has no SECURE_ERASE") {
        return;
    }
    let daemon = Daemon::of(mem());
    for options in both_rings() {
        let mut device = daemon.connect(&options);
        let data = pattern(3 * 512, 2);
        ends(&mut device, &Request::write(0, &data), S_OK, 1);
        ends(&mut device, &Request::secure_erase(&[range(1, 1, 0)]), S_OK, 1);
        reads_as(&mut device, 0, &[&data[..512], &[0; 512], &data[1024..]].concat());
    }
}

#[test]
fn a_command_of_many_ranges_covers_each_and_one_range_too_many_is_refused() {
    let daemon = Daemon::of(mem());
    let mut device = daemon.connect(&Options::default());
    let data = pattern(70 * 512, 3);
    ends(&mut device, &Request::write(0, &data), S_OK, 1);
    let ranges: Vec<_> = (0..33).map(|n| range(2 * n, 1, 0)).collect();
    if !skip_part_on_kernel("more ranges are taken than are offered") {
        ends(&mut device, &Request::write_zeroes(&ranges), S_IOERR, 1);
        reads_as(&mut device, 0, &data);
    }
    ends(&mut device, &Request::write_zeroes(&ranges[..32]), S_OK, 1);
    let mut expected = data;
    (0..32).for_each(|n| expected[n * 1024..n * 1024 + 512].fill(0));
    reads_as(&mut device, 0, &expected);
}

#[test]
fn one_bad_range_among_good_ones_touches_nothing() {
    let daemon = Daemon::of(mem());
    let mut device = daemon.connect(&Options::default());
    let data = pattern(4096, 4);
    ends(&mut device, &Request::write(0, &data), S_OK, 1);
    let end = device.capacity_sectors().unwrap();
    let bad = [range(end, 1, 0), range(end - 1, 2, 0), range(u64::MAX, 2, 0), range(0, 1 << 22, 0)];
    for bad in bad {
        ends(&mut device, &Request::write_zeroes(&[range(0, 8, 0), bad]), S_IOERR, 1);
        ends(&mut device, &Request::discard(&[range(0, 8, 0), bad]), S_IOERR, 1);
    }
    for flags in [2, u32::MAX] {
        let request = Request::write_zeroes(&[range(0, 8, 0), range(0, 8, flags)]);
        ends(&mut device, &request, S_UNSUPP, 1);
    }
    let unmap = Request::discard(&[range(0, 8, WRITE_ZEROES_F_UNMAP)]);
    ends(&mut device, &unmap, S_UNSUPP, 1);
    reads_as(&mut device, 0, &data);
}

/// Layouts that section 5.2.6 allows; the numbers of bytes fit requests of 8 KiB.
fn layouts() -> Vec<Layout> {
    let cuts = |readable: Cuts, writable: Cuts| Layout { readable, writable, ..Layout::default() };
    let odd = Cuts::Every(515);
    vec![
        cuts(Cuts::Joined, Cuts::Joined),
        cuts(Cuts::Lengths(vec![1, 2, 3, 4, 6]), Cuts::Usual),
        cuts(Cuts::Lengths(vec![17]), Cuts::Lengths(vec![8191])),
        cuts(Cuts::Lengths(vec![0, 16, 0, 512, 0]), Cuts::Lengths(vec![0, 1, 0, 511])),
        cuts(odd.clone(), odd.clone()),
        cuts(Cuts::Every(4096), Cuts::Every(4096)),
        Layout { misalign: 1, ..Layout::default() },
        Layout { align: 4096, misalign: 511, ..cuts(odd.clone(), odd) },
        Layout { align: 4096, ..Layout::default() },
    ]
}

fn any_layout_carries_the_same_data(disk: impl Disk + 'static) {
    let daemon = Daemon::of(disk);
    for options in both_rings() {
        let mut device = daemon.connect(&options);
        for (n, layout) in layouts().into_iter().enumerate() {
            for indirect in [false, true] {
                let layout = Layout { indirect, ..layout.clone() };
                let data = pattern(8192, n as u64 * 2 + u64::from(indirect));
                ends_in(&mut device, &Request::write(3, &data), &layout, S_OK, 1);
                reads_as(&mut device, 3, &data);
                let request = Request::read(3, data.len());
                let read = ends_in(&mut device, &request, &layout, S_OK, 8193);
                assert!(read.data == data, "{layout:?}");
            }
        }
    }
}

#[test]
fn any_legal_layout_carries_the_same_data_to_a_disk_in_memory() {
    any_layout_carries_the_same_data(mem());
}

#[test]
fn any_legal_layout_carries_the_same_data_to_a_direct_file_in_memory() {
    let (disk, _directory) = file(TMPFS, direct());
    any_layout_carries_the_same_data(disk);
}

#[test]
fn any_legal_layout_carries_the_same_data_to_a_direct_file_on_disk() {
    let (disk, _directory) = file(DISK, direct());
    any_layout_carries_the_same_data(disk);
}

#[test]
fn a_chain_as_long_as_the_queue_is_served() {
    let daemon = Daemon::of(mem());
    for options in both_rings() {
        let options = Options { queue_size: 64, ..options };
        let mut device = daemon.connect(&options);
        // Header, 62 segments and the status byte.
        let data = pattern(31 << 10, 5);
        let cuts = Cuts::Lengths([vec![16], vec![512; 62]].concat());
        let layout = Layout { readable: cuts, ..Layout::default() };
        ends_in(&mut device, &Request::write(0, &data), &layout, S_OK, 1);
        let layout = Layout { writable: Cuts::Lengths(vec![512; 62]), ..Layout::default() };
        let request = Request::read(0, data.len());
        let read = ends_in(&mut device, &request, &layout, S_OK, (31 << 10) + 1);
        assert!(read.data == data);
    }
}

#[test]
fn an_indirect_table_may_be_longer_than_the_queue() {
    let (disk, _directory) = file(TMPFS, direct());
    let daemon = Daemon::of(disk);
    for options in both_rings() {
        let mut device = daemon.connect(&Options { queue_size: 16, ..options });
        let data = pattern(126 * 512, 6);
        let cuts = Cuts::Every(512);
        let (readable, writable) = (Cuts::Lengths([vec![16], vec![512; 125]].concat()), cuts);
        let layout = Layout { readable, writable, ..Layout::indirect() };
        ends_in(&mut device, &Request::write(0, &data), &layout, S_OK, 1);
        let request = Request::read(0, data.len());
        let read = ends_in(&mut device, &request, &layout, S_OK, 126 * 512 + 1);
        assert!(read.data == data);
    }
}

#[test]
fn requests_larger_than_a_mebibyte_are_served_aligned_and_not() {
    let (disk, _directory) = file(TMPFS, direct());
    let daemon = Daemon::of(disk);
    for options in both_rings() {
        let mut device = daemon.connect(&Options { scratch_bytes: 16 << 20, ..options });
        for misalign in [0, 3] {
            let layout = Layout { misalign, ..device.layout() };
            let data = pattern(5 << 20, misalign as u64);
            ends_in(&mut device, &Request::write(1, &data), &layout, S_OK, 1);
            let request = Request::read(1, data.len());
            let read = ends_in(&mut device, &request, &layout, S_OK, (5 << 20) + 1);
            assert!(read.data == data);
        }
    }
}

#[test]
fn requests_outside_the_disk_get_ioerr_and_touch_nothing() {
    let daemon = Daemon::of(mem());
    for options in both_rings() {
        let mut device = daemon.connect(&options);
        let end = device.capacity_sectors().unwrap();
        let data = pattern(1024, 7);
        ends(&mut device, &Request::write(end - 2, &data), S_OK, 1);
        for sector in [end - 1, end, u64::MAX, u64::MAX / 512, 1 << 55, (1 << 55) - 1] {
            ends(&mut device, &Request::write(sector, &[0; 1024]), S_IOERR, 1);
            let read = ends(&mut device, &Request::read(sector, 1024), S_IOERR, 1);
            assert!(read.data.iter().all(|&byte| byte == 0xee), "a refused read wrote data");
        }
        for len in [1, 511, 513] {
            ends(&mut device, &Request::write(end - 2, &vec![0; len]), S_IOERR, 1);
            ends(&mut device, &Request::read(end - 2, len), S_IOERR, 1);
        }
        reads_as(&mut device, end - 2, &data);
    }
}

#[test]
fn requests_with_missing_parts_are_given_back() {
    let daemon = Daemon::of(mem());
    for options in both_rings() {
        let mut device = daemon.connect(&options);
        for indirect in [false, true] {
            let layout = Layout { indirect, ..Layout::default() };
            // Half a header.
            let half = Request { readable: vec![0; 8], writable_len: 513 };
            ends_in(&mut device, &half, &layout, S_IOERR, 1);
            let nothing = Request { readable: vec![], writable_len: 1 };
            ends_in(&mut device, &nothing, &layout, S_IOERR, 1);
            // No status byte.
            let deaf = Request { readable: vec![0; 16], writable_len: 0 };
            let completion = device.queue(0).execute(&deaf, &layout).unwrap();
            assert_eq!((completion.status, completion.written), (None, 0));
            // A command without, and with half a range.
            for len in [0, 8, 24] {
                let request = Request::new(virtio_spec::blk::T_DISCARD, 0, &vec![0; len], 0);
                ends_in(&mut device, &request, &layout, S_IOERR, 1);
            }
        }
        device.flush().unwrap();
    }
}

#[test]
fn a_chain_of_empty_descriptors_is_given_back() {
    let daemon = Daemon::of(mem());
    let mut device = daemon.connect(&Options::default());
    let empty = [Segment::readable(0x1000, 0), Segment::writable(0x1000, 0)].to_vec();
    device.queue(0).add_placed(Placed { segments: empty }, false).unwrap();
    device.queue(0).queue().publish();
    device.queue(0).queue().kick_if_asked();
    assert_eq!(device.queue(0).collect().unwrap().1.written, 0);
    device.flush().unwrap();
}

#[test]
fn a_short_id_buffer_gets_the_front_of_the_id_and_a_long_one_no_more_than_the_id() {
    let daemon = Daemon::of(mem());
    let mut device = daemon.connect(&Options::default());
    let short = ends(&mut device, &Request::new(8, 0, &[], 8), S_OK, 9);
    assert_eq!(short.data, b"a serial");
    let long = ends(&mut device, &Request::new(8, 0, &[], 30), S_OK, 21);
    assert_eq!(long.data[..20], *b"a serial number\0\0\0\0\0");
    assert_eq!(long.data[20..], [0xee; 10]);
}

#[test]
fn errors_of_the_storage_become_ioerr_and_the_queue_goes_on() {
    let rule = |ops: &str| FaultRule {
        ops: OpSet::parse(ops).unwrap(),
        sectors: Some(8..=15),
        every: 1,
        error: IoError::Errno(5),
    };
    let inner: Arc<dyn Disk> = Arc::new(Fault::new(Arc::new(mem()), rule("read+discard")));
    let daemon = Daemon::of(Fault::new(inner, rule("write+write-zeroes")));
    for options in both_rings() {
        let mut device = daemon.connect(&options);
        ends(&mut device, &Request::read(8, 512), S_IOERR, 1);
        ends(&mut device, &Request::read(0, 8192), S_IOERR, 1);
        ends(&mut device, &Request::write(15, &[1; 512]), S_IOERR, 1);
        ends(&mut device, &Request::write_zeroes(&[range(0, 4, 0), range(9, 1, 0)]), S_IOERR, 1);
        ends(&mut device, &Request::discard(&[range(0, 4, 0), range(9, 1, 0)]), S_IOERR, 1);
        ends(&mut device, &Request::write(16, &[1; 512]), S_OK, 1);
        reads_as(&mut device, 16, &[1; 512]);
    }
}

#[test]
fn a_flush_that_fails_gets_ioerr() {
    let ops = OpSet::parse("flush").unwrap();
    let rule = FaultRule { ops, sectors: None, every: 1, error: IoError::Errno(28) };
    let daemon = Daemon::of(Fault::new(Arc::new(mem()), rule));
    let mut device = daemon.connect(&Options::default());
    ends(&mut device, &Request::flush(), S_IOERR, 1);
}

#[test]
fn a_read_only_disk_says_so_and_refuses_all_that_writes() {
    let (writable, directory) = file(TMPFS, direct());
    drop(writable);
    let options = FileOptions { read_only: true, ..direct() };
    let disk = backend::File::open(directory.path().join("image.raw"), options).unwrap();
    let daemon = Daemon::of(disk);
    let mut device = daemon.connect(&Options::default());
    assert_ne!(device.features() & bit(F_RO), 0);
    let ranged = bit(F_DISCARD) | bit(F_WRITE_ZEROES) | bit(F_SECURE_ERASE);
    assert_eq!(device.session().offered() & ranged, 0);
    ends(&mut device, &Request::write(0, &[1; 512]), S_IOERR, 1);
    ends(&mut device, &Request::discard(&[range(0, 8, 0)]), S_UNSUPP, 1);
    ends(&mut device, &Request::write_zeroes(&[range(0, 8, 0)]), S_UNSUPP, 1);
    ends(&mut device, &Request::flush(), S_OK, 1);
    reads_as(&mut device, 0, &[0; 4096]);
}

#[test]
fn a_read_only_disk_stays_so_where_the_driver_did_not_negotiate_it() {
    let (writable, directory) = file(TMPFS, direct());
    drop(writable);
    let options = FileOptions { read_only: true, ..direct() };
    let disk = backend::File::open(directory.path().join("image.raw"), options).unwrap();
    let daemon = Daemon::of(disk);
    let features = Options::default().features & !bit(F_RO);
    let mut device = daemon.connect(&Options { features, ..Options::default() });
    ends(&mut device, &Request::write(0, &[1; 512]), S_IOERR, 1);
}

#[test]
fn commands_that_were_not_negotiated_are_unsupported() {
    let daemon = Daemon::of(mem());
    let ranged = bit(F_DISCARD) | bit(F_WRITE_ZEROES) | bit(F_SECURE_ERASE) | bit(F_FLUSH);
    let features = Options::default().features & !ranged;
    let mut device = daemon.connect(&Options { features, ..Options::default() });
    assert_ne!(device.session().offered() & ranged, 0);
    let data = pattern(4096, 8);
    ends(&mut device, &Request::write(0, &data), S_OK, 1);
    ends(&mut device, &Request::discard(&[range(0, 8, 0)]), S_UNSUPP, 1);
    ends(&mut device, &Request::write_zeroes(&[range(0, 8, 0)]), S_UNSUPP, 1);
    ends(&mut device, &Request::secure_erase(&[range(0, 8, 0)]), S_UNSUPP, 1);
    ends(&mut device, &Request::flush(), S_UNSUPP, 1);
    ends(&mut device, &Request::get_id(), S_OK, 21);
    reads_as(&mut device, 0, &data);
}

#[test]
fn queues_spread_over_several_threads_see_one_disk() {
    let (disk, _directory) = file(TMPFS, direct());
    let setup = Setup { queues: 4, threads: 3, ..Setup::default() };
    let daemon = Daemon::start(Arc::new(disk), &setup);
    for options in both_rings() {
        let mut device = daemon.connect(&Options { num_queues: 4, ..options });
        let layout = device.layout();
        for (writer, reader) in [(0, 3), (1, 0), (2, 1), (3, 2)] {
            let data = pattern(4096, writer as u64 + 11);
            let request = Request::write(writer as u64 * 8, &data);
            let written = device.queue(writer).execute(&request, &layout).unwrap();
            assert_eq!(written.status, Some(S_OK));
            let request = Request::read(writer as u64 * 8, 4096);
            let read = device.queue(reader).execute(&request, &layout).unwrap();
            assert!(read.data == data, "queue {reader} reads what queue {writer} wrote");
        }
    }
}
