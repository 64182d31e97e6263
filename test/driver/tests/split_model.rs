// SPDX-License-Identifier: Apache-2.0
//! The split ring against used entries and event indices written by hand (section 2.7).

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use driver::{GuestMemory, RingError, Segment, SplitRing, Used};
use virtio_spec::split::{DESC_F_NEXT, DESC_F_WRITE};

const SIZE: u16 = 4;
const ONE: [Segment; 1] = [Segment::readable(0x1000, 16)];
const THREE: [Segment; 3] =
    [Segment::readable(0x1000, 16), Segment::writable(0x2000, 512), Segment::writable(0x3000, 1)];

fn ring(event_idx: bool) -> (SplitRing, Arc<GuestMemory>) {
    let memory = GuestMemory::new(&[(0, 1 << 20)]).unwrap();
    (SplitRing::new(&memory, SIZE, event_idx), memory)
}

/// The device's part: one used entry and the index after it.
fn use_chain(ring: &SplitRing, position: u16, id: u32, len: u32) {
    let used = ring.areas()[2];
    let at = 4 + 8 * usize::from(position % SIZE);
    used.store_u32(at, id, Relaxed);
    used.store_u32(at + 4, len, Relaxed);
    used.store_u16(2, position.wrapping_add(1), Relaxed);
}

#[test]
fn a_chain_lies_in_the_table_as_linked_descriptors() {
    let (mut ring, _memory) = ring(false);
    let head = ring.add(&THREE).unwrap();
    ring.publish();
    let [desc, avail, _] = ring.areas();
    assert_eq!((avail.load_u16(2, Relaxed), avail.load_u16(4, Relaxed)), (1, head));
    let at = |index: usize| {
        (desc.load_u64(16 * index, Relaxed), desc.load_u16(16 * index + 12, Relaxed))
    };
    assert_eq!(at(0), (0x1000, DESC_F_NEXT));
    assert_eq!(at(1), (0x2000, DESC_F_NEXT | DESC_F_WRITE));
    assert_eq!(at(2), (0x3000, DESC_F_WRITE));
    assert_eq!((desc.load_u16(14, Relaxed), desc.load_u16(30, Relaxed)), (1, 2));
}

#[test]
fn nothing_is_available_before_publish() {
    let (mut ring, _memory) = ring(false);
    ring.add(&ONE).unwrap();
    assert_eq!(ring.areas()[1].load_u16(2, Relaxed), 0);
}

#[test]
fn used_chains_free_all_their_descriptors() {
    let (mut ring, _memory) = ring(false);
    let long = ring.add(&THREE).unwrap();
    let short = ring.add(&ONE).unwrap();
    assert_eq!(ring.add(&ONE), Err(RingError::Full));
    use_chain(&ring, 0, short.into(), 7);
    use_chain(&ring, 1, long.into(), 513);
    assert_eq!(ring.take_used(), Ok(Some(Used { id: short, len: 7 })));
    assert_eq!(ring.take_used(), Ok(Some(Used { id: long, len: 513 })));
    assert_eq!(ring.take_used(), Ok(None));
    ring.add(&THREE).unwrap();
    ring.add(&ONE).unwrap();
}

#[test]
fn an_id_that_is_no_head_in_flight_is_reported() {
    let (mut ring, _memory) = ring(false);
    let head = ring.add(&THREE).unwrap();
    use_chain(&ring, 0, u32::from(head) + 1, 0);
    assert_eq!(ring.take_used(), Err(RingError::UnknownId(1)));
}

#[test]
fn an_id_beyond_the_table_is_reported() {
    let (mut ring, _memory) = ring(false);
    ring.add(&ONE).unwrap();
    use_chain(&ring, 0, 0x1_0000, 0);
    assert_eq!(ring.take_used(), Err(RingError::UnknownId(0x1_0000)));
}

#[test]
fn a_used_index_beyond_what_is_in_flight_is_reported() {
    let (mut ring, _memory) = ring(false);
    let head = ring.add(&ONE).unwrap();
    use_chain(&ring, 1, head.into(), 0);
    assert_eq!(ring.take_used(), Err(RingError::TooManyUsed { published: 2, in_flight: 1 }));
}

#[test]
fn a_kick_is_asked_when_avail_event_is_passed_and_only_once() {
    let (mut ring, _memory) = ring(true);
    ring.areas()[2].store_u16(4 + 8 * usize::from(SIZE), 2, Relaxed);
    let mut kicks = Vec::new();
    for position in 0..5 {
        let head = ring.add(&ONE).unwrap();
        ring.publish();
        kicks.push(ring.kick_is_asked());
        use_chain(&ring, position, head.into(), 0);
        ring.take_used().unwrap().unwrap();
    }
    assert_eq!(kicks, [false, false, true, false, false]);
}

#[test]
fn arming_says_whether_something_was_used_meanwhile() {
    let (mut ring, _memory) = ring(true);
    let head = ring.add(&ONE).unwrap();
    assert!(ring.arm_calls());
    assert_eq!(ring.areas()[1].load_u16(4 + 2 * usize::from(SIZE), Relaxed), 0);
    use_chain(&ring, 0, head.into(), 0);
    assert!(!ring.arm_calls());
}
