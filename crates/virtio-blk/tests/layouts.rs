// SPDX-License-Identifier: Apache-2.0
//! Every request in any legal layout (sections 2.7.4 and 5.2.6): the device makes no assumption
//! about how the bytes are spread over descriptors.

mod common;

use common::{
    ALL, Guest, READABLE, T_DISCARD, T_FLUSH, T_GET_ID, T_IN, T_OUT, T_SECURE_ERASE,
    T_WRITE_ZEROES, WRITABLE, cut, header, range, view,
};
use proptest::collection::vec;
use proptest::prelude::*;
use virtio_blk::{Completion, Kind, Range};

/// A request's readable bytes, the bytes that it may write before the status, what it means.
fn requests() -> Vec<(Vec<u8>, usize, Kind)> {
    let with = |kind, data: Vec<u8>| [header(kind, 0), data].concat();
    let ranges = || [range(8, 16, 0), range(0, 1, 0), range(999, 1, 0)].concat();
    let write = [header(T_OUT, 998), vec![0xab; 1024]].concat();
    let discard = Kind::Discard { bytes: 18 << 9, longest_bytes: 16 << 9, durable: false };
    vec![
        (header(T_IN, 7), 1536, Kind::Read { sector: 7, bytes: 1536 }),
        (header(T_IN, 1000), 0, Kind::Read { sector: 1000, bytes: 0 }),
        (write, 0, Kind::Write { sector: 998, bytes: 1024, durable: false }),
        (header(T_OUT, 0), 0, Kind::Write { sector: 0, bytes: 0, durable: false }),
        (header(T_FLUSH, 0), 0, Kind::Flush),
        (header(T_FLUSH, u64::MAX), 0, Kind::Flush),
        (header(T_GET_ID, 0), 20, Kind::GetId),
        (header(T_GET_ID, 0), 3, Kind::GetId),
        (with(T_DISCARD, ranges()), 0, discard),
        (with(T_WRITE_ZEROES, ranges()), 0, Kind::WriteZeroes { bytes: 18 << 9, durable: false }),
        (with(T_SECURE_ERASE, ranges()), 0, Kind::SecureErase { bytes: 18 << 9 }),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 600, ..ProptestConfig::default() })]

    #[test]
    fn any_layout_of_any_request_means_the_same(
        which in 0usize..11,
        readable_cuts in vec(prop_oneof![0usize..20, 500usize..520], 0..20),
        writable_cuts in vec(prop_oneof![0usize..4, 500usize..520], 0..20),
    ) {
        let (readable, room, kind) = requests().swap_remove(which);
        let readable_cuts = cut(readable.len(), &readable_cuts);
        let writable_cuts = cut(room + 1, &writable_cuts);
        let mut guest = Guest::new(&readable, &readable_cuts, &writable_cuts);
        let request = guest.parse(&view(ALL)).expect("a legal request");
        prop_assert_eq!(request.kind, kind);
        match kind {
            Kind::Write { bytes, .. } if bytes > 0 => {
                prop_assert_eq!(guest.data(false), (READABLE + 16, bytes));
            }
            _ if room > 0 => prop_assert_eq!(guest.data(true), (WRITABLE, room as u64)),
            _ => prop_assert_eq!(guest.data(true).1, 0),
        }
        let listed: Vec<Range> = std::iter::from_fn(|| guest.ranges.next_range()).collect();
        let expected = [(8, 16), (0, 1), (999, 1)];
        let expected = expected.map(|(sector, sectors)| Range { sector, sectors, unmap: false });
        prop_assert_eq!(listed, if readable.len() == 64 { expected.to_vec() } else { vec![] });
        let data_bytes = u64::min(room as u64, 1536) as u32;
        let used = Completion::of(kind, Ok(()), data_bytes).write(request.status);
        prop_assert_eq!(used, data_bytes + 1);
        prop_assert_eq!(guest.changes(), vec![(WRITABLE + room as u64, 0)]);
    }
}

#[test]
fn header_in_sixteen_descriptors_is_read_whole() {
    let mut guest = Guest::new(&header(T_IN, 0x0102), &[1; 16], &[512, 1]);
    let request = guest.parse(&view(ALL)).unwrap();
    assert_eq!(request.kind, Kind::Read { sector: 0x0102, bytes: 512 });
}

#[test]
fn header_and_data_in_one_descriptor_are_told_apart() {
    let bytes = [header(T_OUT, 5), vec![1; 512]].concat();
    let mut guest = Guest::plain(&bytes, 1);
    let request = guest.parse(&view(ALL)).unwrap();
    assert_eq!(request.kind, Kind::Write { sector: 5, bytes: 512, durable: false });
    assert_eq!(guest.data(false), (READABLE + 16, 512));
}

#[test]
fn status_is_the_last_byte_of_a_longer_descriptor() {
    let mut guest = Guest::plain(&header(T_IN, 5), 1025);
    let request = guest.parse(&view(ALL)).unwrap();
    assert_eq!(request.kind, Kind::Read { sector: 5, bytes: 1024 });
    assert_eq!(Completion::of(request.kind, Ok(()), 0).write(request.status), 1025);
    assert_eq!(guest.changes(), [(WRITABLE + 1024, 0)]);
}

#[test]
fn empty_descriptors_anywhere_change_nothing() {
    let bytes = [header(T_OUT, 5), vec![1; 512]].concat();
    let mut guest = Guest::new(&bytes, &[0, 16, 0, 0, 512, 0], &[0, 0, 1, 0]);
    let request = guest.parse(&view(ALL)).unwrap();
    assert_eq!(request.kind, Kind::Write { sector: 5, bytes: 512, durable: false });
    assert_eq!(Completion::of(request.kind, Ok(()), 0).write(request.status), 1);
    assert_eq!(guest.changes(), [(WRITABLE, 0)]);
}

#[test]
fn last_sectors_of_the_disk_can_be_read_and_written() {
    let mut guest = Guest::plain(&header(T_IN, 999), 513);
    assert_eq!(guest.parse(&view(ALL)).unwrap().kind, Kind::Read { sector: 999, bytes: 512 });
    let mut guest = Guest::plain(&[header(T_OUT, 998), vec![1; 1024]].concat(), 1);
    let kind = Kind::Write { sector: 998, bytes: 1024, durable: false };
    assert_eq!(guest.parse(&view(ALL)).unwrap().kind, kind);
}

#[test]
fn unmap_flag_of_write_zeroes_is_kept_range_by_range() {
    let bytes = [header(T_WRITE_ZEROES, 0), range(1, 2, 1), range(3, 4, 0)].concat();
    let mut guest = Guest::plain(&bytes, 1);
    let kind = guest.parse(&view(ALL)).unwrap().kind;
    assert_eq!(kind, Kind::WriteZeroes { bytes: 6 << 9, durable: false });
    assert_eq!(guest.ranges.next_range(), Some(Range { sector: 1, sectors: 2, unmap: true }));
    assert_eq!(guest.ranges.next_range(), Some(Range { sector: 3, sectors: 4, unmap: false }));
    assert_eq!(guest.ranges.next_range(), None);
}

#[test]
fn range_list_is_reused_without_leftovers() {
    let three = [range(1, 1, 0), range(2, 1, 0), range(3, 1, 0)].concat();
    let mut first = Guest::plain(&[header(T_DISCARD, 0), three].concat(), 1);
    first.parse(&view(ALL)).unwrap();
    let mut second = Guest::plain(&[header(T_DISCARD, 0), range(9, 1, 0)].concat(), 1);
    second.ranges = std::mem::take(&mut first.ranges);
    second.ranges.next_range();
    second.parse(&view(ALL)).unwrap();
    assert_eq!(second.ranges.next_range(), Some(Range { sector: 9, sectors: 1, unmap: false }));
    assert_eq!(second.ranges.next_range(), None);
}

#[test]
fn most_ranges_allowed_are_taken() {
    let ranges: Vec<u8> = (0..virtio_blk::MAX_RANGES).flat_map(|i| range(i.into(), 1, 0)).collect();
    let mut guest = Guest::plain(&[header(T_DISCARD, 0), ranges].concat(), 1);
    guest.parse(&view(ALL)).unwrap();
    assert_eq!(std::iter::from_fn(|| guest.ranges.next_range()).count(), 32);
}
