// SPDX-License-Identifier: Apache-2.0
//! The in-flight region is true at every moment it can be observed, and the device resumes from it.
//! The tests read its layout from the vhost-user specification, "Inflight I/O tracking".

mod common;

use backend::wrap::Record;
use common::gate::{Gate, Permits};
use common::{Daemon, Setup, mem, wait_until};
use driver::{Area, Device, Options, Request};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::Ordering::{Acquire, Relaxed};
use vhost::VhostBackend;
use virtio_spec::blk::S_OK;
use virtio_spec::packed::DESC_F_USED;

const SIZE: usize = 128;
const QUEUES: usize = 2;

/// One queue's part of the region.
struct Part {
    area: Area,
    start: usize,
    bytes: usize,
    packed: bool,
}

impl Part {
    fn of(device: &Device, queue: usize, packed: bool) -> Self {
        let bytes = if packed { 32 + 32 * SIZE } else { 16 + 16 * SIZE };
        let area = device.inflight().expect("a region is used").area();
        // The queues share the region in equal parts, which are multiples of 64 bytes.
        let start = queue * (area.len() / QUEUES / 64 * 64);
        assert!(start + bytes <= area.len(), "the region has room for queue {queue}");
        Part { area, start, bytes, packed }
    }

    fn entry(&self, index: usize) -> usize {
        self.start + if self.packed { 32 + 32 * index } else { 16 + 16 * index }
    }

    /// Chain id of each entry in flight, by counter.
    fn in_flight(&self) -> BTreeMap<u64, u16> {
        let mut found = BTreeMap::new();
        for index in 0..SIZE {
            let at = self.entry(index);
            match self.area.load_u8(at, Acquire) {
                0 => continue,
                mark => assert_eq!(mark, 1, "a mark is 1"),
            }
            let id = if self.packed { self.area.load_u16(at + 16, Relaxed) } else { index as u16 };
            let before = found.insert(self.area.load_u64(at + 8, Relaxed), id);
            assert!(before.is_none(), "two entries have one counter");
        }
        found
    }

    /// Offsets of the marks of entries in flight.
    fn marked(&self) -> Vec<usize> {
        let entries = (0..SIZE).map(|index| self.entry(index));
        entries.filter(|at| self.area.load_u8(*at, Acquire) == 1).collect()
    }

    fn ids(&self) -> Vec<u16> {
        self.in_flight().into_values().collect()
    }

    fn used_idx(&self) -> u16 {
        self.area.load_u16(self.start + if self.packed { 16 } else { 14 }, Acquire)
    }

    fn check_header(&self) {
        assert_eq!(self.area.load_u16(self.start + 8, Relaxed), 1, "version");
        assert_eq!(usize::from(self.area.load_u16(self.start + 10, Relaxed)), SIZE, "desc_num");
    }
}

fn gated(options: &Options) -> (Daemon, Device, Permits) {
    let (disk, permits) = Gate::new(Arc::new(mem()));
    let queues = QUEUES as u16;
    let setup = Setup { queues, ..Setup::default() };
    let daemon = Daemon::start(Arc::new(disk), &setup);
    let options = Options { inflight: true, num_queues: queues, ..options.clone() };
    let device = daemon.connect(&options);
    (daemon, device, permits)
}

#[test]
fn chains_in_flight_are_marked_in_order_until_they_are_given_back() {
    for options in common::both_rings() {
        let (_daemon, mut device, permits) = gated(&options);
        let layout = device.layout();
        for index in [0, 1] {
            let part = Part::of(&device, index, options.packed);
            part.check_header();
            assert!(part.in_flight().is_empty());
            let mut returned = 0;
            // More than one lap of the ring.
            for round in 0..40 {
                let queue = device.queue(index);
                let mut ids: Vec<_> = (0..8)
                    .map(|sector| queue.submit(&Request::read(sector, 512), &layout).unwrap())
                    .collect();
                wait_until("all are marked", || part.in_flight().len() == 8);
                assert_eq!(part.ids(), ids, "round {round}: in the order in which they came");
                permits.release(3);
                for _ in 0..3 {
                    let (id, completion) = device.queue(index).collect().unwrap();
                    assert_eq!(completion.status, Some(S_OK));
                    ids.retain(|other| *other != id);
                    returned += 1;
                }
                let position = |returned: u16| {
                    if options.packed { returned % SIZE as u16 } else { returned }
                };
                wait_until("three are cleared", || {
                    part.in_flight().len() == 5 && part.used_idx() == position(returned)
                });
                assert_eq!(part.ids(), ids, "round {round}: the others stay marked");
                permits.release(5);
                for _ in 0..5 {
                    device.queue(index).collect().unwrap();
                    returned += 1;
                }
                wait_until("all are cleared", || {
                    part.in_flight().is_empty() && part.used_idx() == position(returned)
                });
            }
        }
    }
}

#[test]
fn a_chain_is_marked_before_the_disk_sees_it_and_cleared_only_after_it_is_used() {
    for options in common::both_rings() {
        let (gate, permits) = Gate::new(Arc::new(mem()));
        let disk = Record::in_memory(Arc::new(gate));
        let log = disk.log();
        let daemon = Daemon::start(Arc::new(disk), &Setup::default());
        let mut device = daemon.connect(&Options { inflight: true, ..options.clone() });
        let layout = device.layout();
        let part = Part::of(&device, 0, options.packed);
        for round in 0..200 {
            let id = device.queue(0).submit(&Request::read(0, 512), &layout).unwrap();
            wait_until("the disk sees it", || log.entries().len() == 2 * round + 1);
            assert_eq!(part.ids(), [id], "round {round}: the disk works on it");
            let mark = part.marked()[0];
            // The place at which the device marks the chain as used: the earliest observation
            // possible.
            let (area, at) = match device.queue(0).queue().ring() {
                driver::Ring::Split(ring) => (ring.areas()[2].clone(), 2),
                driver::Ring::Packed(ring) => (ring.areas()[0].clone(), 16 * (round % SIZE) + 14),
            };
            permits.release(1);
            while part.area.load_u8(mark, Acquire) == 1 {
                std::hint::spin_loop();
            }
            let seen = area.load_u16(at, Acquire);
            if options.packed {
                let lap = (round / SIZE).is_multiple_of(2);
                assert_eq!(seen & DESC_F_USED != 0, lap, "round {round}: used when cleared");
            } else {
                assert_eq!(usize::from(seen), round + 1, "round {round}: used when cleared");
            }
            let used = device.queue(0).try_collect().unwrap();
            assert_eq!(used.expect("used before the mark is cleared").0, id, "round {round}");
        }
    }
}

#[test]
fn chains_that_an_earlier_daemon_left_are_done_once() {
    for options in common::both_rings() {
        let (daemon, mut device, permits) = gated(&options);
        permits.open();
        let layout = device.layout();
        let part = Part::of(&device, 0, options.packed);
        device.session().stop_queue(0).unwrap();
        let ids: Vec<_> = (0..4)
            .map(|n| device.queue(0).add(&Request::write(n, &[n as u8 + 1; 512]), &layout).unwrap())
            .collect();
        device.queue(0).queue().publish();
        // The state after a daemon took the first two and died.
        for (n, id) in ids.iter().enumerate().take(2) {
            leave(&mut device, &part, n, *id);
        }
        device.start_queue(0).unwrap();
        let mut returned: Vec<_> = (0..4).map(|_| device.queue(0).collect().unwrap().0).collect();
        returned.sort_unstable();
        let mut expected = ids.clone();
        expected.sort_unstable();
        assert_eq!(returned, expected, "each once");
        let recovered = [0, 1].map(|queue| daemon.status().queues[queue].total.recovered);
        assert_eq!(recovered, [2, 0], "those of the region");
        wait_until("all are cleared", || part.in_flight().is_empty());
        for n in 0..4 {
            let mut data = [0; 512];
            device.read(n, &mut data).unwrap();
            assert_eq!(data, [n as u8 + 1; 512]);
        }
    }
}

/// Marks chain `n` as in flight, as a daemon that took it would have done.
fn leave(device: &mut Device, part: &Part, n: usize, id: u16) {
    if matches!(device.queue(0).queue().ring(), driver::Ring::Packed(_)) {
        return leave_packed(device, part, n);
    }
    let at = part.entry(usize::from(id));
    part.area.store_u64(at + 8, n as u64 + 5, Relaxed);
    part.area.store_u8(at, 1, Relaxed);
}

/// Copies descriptor `n` of the ring into entry `n`, as a daemon that took it would have done.
fn leave_packed(device: &mut Device, part: &Part, n: usize) {
    let [ring, ..] = device.queue(0).queue().packed().areas();
    let (from, at) = (16 * n, part.entry(n));
    part.area.store_u64(at + 24, ring.load_u64(from, Relaxed), Relaxed);
    part.area.store_u32(at + 20, ring.load_u32(from + 8, Relaxed), Relaxed);
    part.area.store_u16(at + 16, ring.load_u16(from + 12, Relaxed), Relaxed);
    part.area.store_u16(at + 18, ring.load_u16(from + 14, Relaxed), Relaxed);
    part.area.store_u16(at + 4, n as u16, Relaxed);
    part.area.store_u16(at + 6, 1, Relaxed);
    part.area.store_u64(at + 8, n as u64 + 5, Relaxed);
    part.area.store_u8(at, 1, Relaxed);
    part.area.store_u16(12, n as u16 + 1, Relaxed);
    part.area.store_u16(14, n as u16 + 1, Relaxed);
}

/// QEMU 10.0.13 asks for a region of 128 descriptors and sets up queues of 1024.
#[test]
fn a_queue_larger_than_the_region_was_asked_for_is_kept() {
    for options in common::both_rings() {
        let options =
            Options { queue_size: SIZE as u16, inflight_queue_size: SIZE as u16 / 8, ..options };
        let (_daemon, mut device, permits) = gated(&options);
        let layout = device.layout();
        for index in 0..QUEUES {
            let part = Part::of(&device, index, options.packed);
            part.check_header();
            let queue = device.queue(index);
            let ids: Vec<_> = (0..40)
                .map(|sector| queue.submit(&Request::read(sector, 512), &layout).unwrap())
                .collect();
            wait_until("all are marked", || part.ids() == ids);
        }
        permits.open();
        for index in 0..QUEUES {
            for _ in 0..40 {
                device.queue(index).collect().unwrap();
            }
        }
    }
}

#[test]
fn a_region_full_of_garbage_does_no_harm() {
    for options in common::both_rings() {
        for seed in 1..20 {
            let (daemon, mut device, permits) = gated(&options);
            permits.open();
            let part = Part::of(&device, 0, options.packed);
            device.session().stop_queue(0).unwrap();
            let garbage = common::pattern(part.bytes - 12, seed);
            part.area.write(part.start + 12, &garbage);
            // The daemon may refuse the queue or report it as broken; it must go on serving.
            let _either = device.start_queue(0);
            drop(device);
            let _how = daemon.next_outcome();
            let mut device = daemon.connect(&options);
            device.write(0, &[1; 512]).unwrap();
        }
    }
}

#[test]
fn a_reset_forgets_the_region() {
    for options in common::both_rings() {
        let (daemon, mut device, permits) = gated(&options);
        permits.open();
        let layout = device.layout();
        let part = Part::of(&device, 0, options.packed);
        device.session().stop_queue(0).unwrap();
        let id = device.queue(0).add(&Request::write(0, &[1; 512]), &layout).unwrap();
        device.queue(0).queue().publish();
        leave(&mut device, &part, 0, id);
        device.session().reset_device().unwrap();
        match device.queue(0).queue().ring() {
            driver::Ring::Split(ring) => ring.reset(),
            driver::Ring::Packed(ring) => ring.reset(),
        }
        device.start_queue(0).unwrap();
        device.write(7, &[7; 512]).unwrap();
        assert_eq!(daemon.status().queues[0].total.recovered, 0, "the chain of the time before");
    }
}

/// QEMU does not know the position of a packed ring when it connects again: the ring does not tell,
/// and QEMU sends an outdated position. The region knows it, with or without requests in flight.
#[test]
fn a_packed_position_of_the_region_counts_even_with_nothing_in_flight() {
    for options in common::both_rings().into_iter().filter(|options| options.packed) {
        let (_daemon, mut device, permits) = gated(&options);
        permits.open();
        (0..5).for_each(|sector| device.write(sector, &[1; 512]).unwrap());
        let layout = device.layout();
        device.session().stop_queue(0).unwrap();
        device.session().set_vring_base(0, 0x8000_8000).unwrap();
        let kick = device.queue(0).queue().kick_fd().try_clone().unwrap();
        device.session().frontend().set_vring_kick(0, &kick).unwrap();
        let completion = device.queue(0).execute(&Request::read(4, 512), &layout).unwrap();
        assert_eq!(completion.data, [1; 512]);
    }
}
