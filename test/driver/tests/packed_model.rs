// SPDX-License-Identifier: Apache-2.0
//! The packed ring against a small device written down here from section 2.8 alone.

use std::sync::Arc;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};

use driver::{GuestMemory, PackedRing, RingError, Segment, Used};
use virtio_spec::packed::{DESC_F_AVAIL, DESC_F_NEXT, DESC_F_USED, EVENT_DESC, EVENT_DISABLE};

/// The device's side: takes chains in order, returns them in any order.
struct Model {
    size: u16,
    take_at: (u16, bool),
    return_at: (u16, bool),
}

/// A chain as the device found it: id and descriptors' (address, length).
#[derive(Debug, PartialEq)]
struct Taken {
    id: u16,
    buffers: Vec<(u64, u32)>,
}

impl Model {
    fn new(size: u16) -> Self {
        Self { size, take_at: (0, true), return_at: (0, true) }
    }

    fn advance(size: u16, (index, wrap): (u16, bool), by: u16) -> (u16, bool) {
        if index + by >= size { (index + by - size, !wrap) } else { (index + by, wrap) }
    }

    fn take(&mut self, ring: &PackedRing) -> Option<Taken> {
        let desc = ring.areas()[0];
        let mut buffers = Vec::new();
        loop {
            let (index, wrap) = self.take_at;
            let at = 16 * usize::from(index);
            let flags = desc.load_u16(at + 14, Acquire);
            let available =
                (flags & DESC_F_AVAIL != 0) == wrap && (flags & DESC_F_USED != 0) != wrap;
            if !available {
                assert!(buffers.is_empty(), "a chain was shown only in part");
                return None;
            }
            buffers.push((desc.load_u64(at, Relaxed), desc.load_u32(at + 8, Relaxed)));
            self.take_at = Self::advance(self.size, self.take_at, 1);
            if flags & DESC_F_NEXT == 0 {
                return Some(Taken { id: desc.load_u16(at + 12, Relaxed), buffers });
            }
        }
    }

    fn give_back(&mut self, ring: &PackedRing, taken: &Taken, written: u32) {
        let desc = ring.areas()[0];
        let (index, wrap) = self.return_at;
        let at = 16 * usize::from(index);
        desc.store_u32(at + 8, written, Relaxed);
        desc.store_u16(at + 12, taken.id, Relaxed);
        desc.store_u16(at + 14, if wrap { DESC_F_AVAIL | DESC_F_USED } else { 0 }, Release);
        self.return_at = Self::advance(self.size, self.return_at, taken.buffers.len() as u16);
    }
}

fn ring(size: u16, event_idx: bool) -> (PackedRing, Model, Arc<GuestMemory>) {
    let memory = GuestMemory::new(&[(0, 1 << 20)]).unwrap();
    (PackedRing::new(&memory, size, event_idx), Model::new(size), memory)
}

const ONE: [Segment; 1] = [Segment::readable(0x1000, 16)];
const THREE: [Segment; 3] =
    [Segment::readable(0x1000, 16), Segment::writable(0x2000, 512), Segment::writable(0x3000, 1)];

#[test]
fn nothing_is_available_before_publish_and_the_whole_batch_after() {
    let (mut ring, mut model, _memory) = ring(8, false);
    let first = ring.add(&THREE).unwrap();
    let second = ring.add(&ONE).unwrap();
    assert_eq!(model.take(&ring), None);
    ring.publish();
    let buffers = vec![(0x1000, 16), (0x2000, 512), (0x3000, 1)];
    assert_eq!(model.take(&ring), Some(Taken { id: first, buffers }));
    assert_eq!(model.take(&ring), Some(Taken { id: second, buffers: vec![(0x1000, 16)] }));
    assert_eq!(model.take(&ring), None);
}

#[test]
fn chains_that_straddle_the_end_of_a_ring_come_back_for_many_laps() {
    let (mut ring, mut model, _memory) = ring(5, false);
    for lap in 0..1000 {
        let id = ring.add(&THREE).unwrap();
        ring.publish();
        let taken = model.take(&ring).expect("published");
        assert_eq!(ring.take_used(), Ok(None));
        model.give_back(&ring, &taken, lap);
        assert_eq!(ring.take_used(), Ok(Some(Used { id, len: lap })));
    }
}

#[test]
fn chains_returned_out_of_order_free_their_own_descriptors() {
    let (mut ring, mut model, _memory) = ring(4, false);
    let (long, short) = (ring.add(&THREE).unwrap(), ring.add(&ONE).unwrap());
    assert_eq!(ring.add(&ONE), Err(RingError::Full));
    ring.publish();
    let (first, second) = (model.take(&ring).unwrap(), model.take(&ring).unwrap());
    model.give_back(&ring, &second, 2);
    model.give_back(&ring, &first, 1);
    assert_eq!(ring.take_used(), Ok(Some(Used { id: short, len: 2 })));
    assert_eq!(ring.add(&THREE), Err(RingError::Full));
    assert_eq!(ring.take_used(), Ok(Some(Used { id: long, len: 1 })));
    assert_eq!(ring.in_flight(), 0);
    ring.add(&THREE).unwrap();
}

#[test]
fn an_id_that_is_not_in_flight_is_reported() {
    let (mut ring, mut model, _memory) = ring(4, false);
    ring.add(&ONE).unwrap();
    ring.publish();
    let mut taken = model.take(&ring).unwrap();
    taken.id = 3;
    model.give_back(&ring, &taken, 0);
    assert_eq!(ring.take_used(), Err(RingError::UnknownId(3)));
}

#[test]
fn a_kick_is_asked_when_the_event_descriptor_is_passed_and_only_once() {
    let (mut ring, _model, _memory) = ring(8, true);
    // Descriptor 2 of the first lap (wrap counter 1).
    ring.areas()[2].store_u32(0, 0x8002 | u32::from(EVENT_DESC) << 16, Relaxed);
    let mut kicks = Vec::new();
    for _ in 0..5 {
        ring.add(&ONE).unwrap();
        ring.publish();
        kicks.push(ring.kick_is_asked());
    }
    assert_eq!(kicks, [false, false, true, false, false]);
}

#[test]
fn a_kick_is_asked_for_an_event_descriptor_of_the_next_lap() {
    let (mut ring, mut model, _memory) = ring(4, true);
    // Descriptor 1 of the second lap (wrap counter 0).
    ring.areas()[2].store_u32(0, 1 | u32::from(EVENT_DESC) << 16, Relaxed);
    let mut kicks = Vec::new();
    for _ in 0..7 {
        ring.add(&ONE).unwrap();
        ring.publish();
        kicks.push(ring.kick_is_asked());
        let taken = model.take(&ring).unwrap();
        model.give_back(&ring, &taken, 0);
        ring.take_used().unwrap().unwrap();
    }
    assert_eq!(kicks, [false, false, false, false, false, true, false]);
}

#[test]
fn no_kick_is_asked_by_a_device_that_disabled_them() {
    let (mut ring, _model, _memory) = ring(4, false);
    ring.areas()[2].store_u32(0, u32::from(EVENT_DISABLE) << 16, Relaxed);
    ring.add(&ONE).unwrap();
    ring.publish();
    assert!(!ring.kick_is_asked());
}

#[test]
fn arming_says_whether_something_was_used_meanwhile() {
    let (mut ring, mut model, _memory) = ring(4, true);
    ring.add(&ONE).unwrap();
    ring.publish();
    assert!(ring.arm_calls());
    assert_eq!(ring.areas()[1].load_u32(0, Relaxed), 0x8000 | u32::from(EVENT_DESC) << 16);
    let taken = model.take(&ring).unwrap();
    model.give_back(&ring, &taken, 0);
    assert!(!ring.arm_calls());
}

#[test]
fn the_base_names_the_same_place_and_wrap_counter_twice() {
    let (mut ring, mut model, _memory) = ring(2, false);
    assert_eq!(ring.base(), 0x8000_8000);
    for _ in 0..3 {
        ring.add(&ONE).unwrap();
        ring.publish();
        let taken = model.take(&ring).unwrap();
        model.give_back(&ring, &taken, 0);
        ring.take_used().unwrap().unwrap();
    }
    assert_eq!(ring.base(), 0x0001_0001);
}
