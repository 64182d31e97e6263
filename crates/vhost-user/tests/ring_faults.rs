// SPDX-License-Identifier: Apache-2.0
//! A broken ring stops its own queue only, says so, and can be set up again.

mod common;

use common::gate::Gate;
use common::plane::skip_on_kernel;
use common::{Daemon, LIMIT, Setup, both_rings, layouts, mem, wait_until};
use driver::{Device, Options, Placed, Request, Segment};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use vhost::VhostBackend;
use virtio_spec::blk::S_OK;
use virtio_spec::packed;
use virtio_spec::split::{DESC_F_INDIRECT, DESC_F_NEXT, DESC_F_WRITE};

/// No guest has memory here.
const NOWHERE: u64 = 0x7000_0000_0000;

fn two_queues() -> Setup {
    Setup { queues: 2, threads: 1, ..Setup::default() }
}

fn options(packed: bool) -> Options {
    Options { num_queues: 2, packed, ..Options::default() }
}

/// Breaks queue 0 by `mischief`; it must be reported, harm nothing else, and be got over.
fn breaks_one_queue_only(daemon: &Daemon, options: &Options, mischief: impl Fn(&mut Device)) {
    let mut device = daemon.connect(options);
    let layout = device.layout();
    device.write(5, &[5; 512]).unwrap();
    mischief(&mut device);
    device.queue(0).queue().kick();
    assert!(device.queue(0).queue().wait_err(LIMIT).unwrap(), "the err eventfd is signalled");
    let read = device.queue(1).execute(&Request::read(5, 512), &layout).unwrap();
    assert_eq!((read.status, read.data), (Some(S_OK), vec![5; 512]), "the other queue works");
    device.session().config().expect("the daemon answers");
    device.session().stop_queue(0).expect("the broken queue stops");
    match device.queue(0).queue().ring() {
        driver::Ring::Split(ring) => ring.reset(),
        driver::Ring::Packed(ring) => ring.reset(),
    }
    device.start_queue(0).expect("the queue starts again");
    let mut data = [0; 512];
    device.read(5, &mut data).unwrap();
    assert_eq!(data, [5; 512], "the queue works again");
    drop(device);
    daemon.next_outcome().expect("the connection ends well");
}

fn split_breaks(mischief: impl Fn(&mut Device)) {
    let daemon = Daemon::start(Arc::new(mem()), &two_queues());
    breaks_one_queue_only(&daemon, &options(false), mischief);
}

/// Makes a chain of one descriptor available, with everything as given.
fn one_descriptor(device: &mut Device, gpa: u64, len: u32, flags: u16, next: u16) {
    let ring = device.queue(0).queue().split();
    ring.write_descriptor(9, gpa, len, flags, next);
    ring.place_head(9);
    ring.publish();
}

#[test]
fn a_faulted_queue_reaches_the_observer_and_the_front_end() {
    let (notices, told) = std::sync::mpsc::channel();
    let setup = Setup { notices: Some(notices), ..two_queues() };
    let daemon = Daemon::start(Arc::new(mem()), &setup);
    for _ in 0..2 {
        breaks_one_queue_only(&daemon, &options(false), |device| {
            device.queue(0).queue().split().write_avail_idx(0x8000);
        });
        assert_eq!(told.recv_timeout(LIMIT), Ok(vhost_user::Notice::Faulted(0)));
    }
    assert!(told.try_recv().is_err(), "told twice");
}

#[test]
fn an_avail_index_that_jumps_stops_the_queue() {
    for jump in [129, 0x7fff, 0x8000] {
        split_breaks(|device| device.queue(0).queue().split().write_avail_idx(1 + jump));
    }
}

#[test]
fn an_avail_index_that_goes_back_stops_the_queue() {
    split_breaks(|device| device.queue(0).queue().split().write_avail_idx(0));
}

#[test]
fn a_head_beyond_the_table_stops_the_queue() {
    for head in [128, 0xffff] {
        split_breaks(|device| {
            let ring = device.queue(0).queue().split();
            ring.place_head(head);
            ring.publish();
        });
    }
}

#[test]
fn a_next_beyond_the_table_stops_the_queue() {
    split_breaks(|device| one_descriptor(device, 0x1000, 16, DESC_F_NEXT, 128));
}

#[test]
fn a_chain_that_loops_stops_the_queue() {
    split_breaks(|device| one_descriptor(device, 0x1000, 16, DESC_F_NEXT, 9));
    // A loop of empty buffers, which never fills anything up.
    split_breaks(|device| one_descriptor(device, 0x1000, 0, DESC_F_NEXT, 9));
}

#[test]
fn an_indirect_table_that_is_none_stops_the_queue() {
    if skip_on_kernel("the vhost core ignores NEXT beside INDIRECT") {
        return;
    }
    for len in [0, 8, 17] {
        split_breaks(|device| one_descriptor(device, 0x1000, len, DESC_F_INDIRECT, 0));
    }
    split_breaks(|device| one_descriptor(device, NOWHERE, 32, DESC_F_INDIRECT, 0));
    split_breaks(|device| {
        one_descriptor(device, 0x1000, 32, DESC_F_INDIRECT | DESC_F_NEXT, 3);
    });
}

#[test]
fn an_indirect_table_in_an_indirect_table_stops_the_queue() {
    split_breaks(|device| {
        let table = device.memory().alloc_area(32, 16);
        table.store_u64(0, table.gpa(), Ordering::Relaxed);
        table.store_u64(8, 16 | u64::from(DESC_F_INDIRECT) << 32, Ordering::Relaxed);
        one_descriptor(device, table.gpa(), 16, DESC_F_INDIRECT, 0);
    });
}

#[test]
fn an_indirect_table_that_loops_stops_the_queue() {
    if skip_on_kernel("the vhost core reads indirect tables in order, whatever NEXT says") {
        return;
    }
    split_breaks(|device| {
        let table = device.memory().alloc_area(32, 16);
        table.store_u64(0, 0x1000, Ordering::Relaxed);
        table.store_u64(8, u64::from(DESC_F_NEXT) << 32, Ordering::Relaxed);
        one_descriptor(device, table.gpa(), 32, DESC_F_INDIRECT, 0);
    });
}

#[test]
fn an_indirect_table_that_was_not_negotiated_stops_the_queue() {
    if skip_on_kernel("the vhost core takes indirect tables always") {
        return;
    }
    let daemon = Daemon::start(Arc::new(mem()), &two_queues());
    for packed in layouts() {
        let options = Options { indirect: false, ..options(packed) };
        breaks_one_queue_only(&daemon, &options, |device| {
            let read = device.queue(0).place(&Request::read(0, 512), &device_layout()).unwrap();
            device.queue(0).add_placed(read, true).unwrap();
            device.queue(0).queue().publish();
        });
    }
}

fn device_layout() -> driver::Layout {
    driver::Layout::default()
}

/// Chains that are wrong in themselves, on either ring.
fn bad_chain_breaks(segments: &[Segment]) {
    let daemon = Daemon::start(Arc::new(mem()), &two_queues());
    for packed in layouts() {
        for indirect in [false, true] {
            breaks_one_queue_only(&daemon, &options(packed), |device| {
                let placed = Placed { segments: segments.to_vec() };
                device.queue(0).add_placed(placed, indirect).unwrap();
                device.queue(0).queue().publish();
            });
        }
    }
}

#[test]
fn a_buffer_outside_guest_memory_stops_the_queue() {
    bad_chain_breaks(&[Segment::readable(NOWHERE, 16), Segment::writable(0x1000, 1)]);
    bad_chain_breaks(&[Segment::readable(u64::MAX - 7, 16), Segment::writable(0x1000, 1)]);
    bad_chain_breaks(&[Segment::readable(0x1000, u32::MAX), Segment::writable(0x1000, 1)]);
}

#[test]
fn a_readable_buffer_behind_a_writable_one_stops_the_queue() {
    bad_chain_breaks(&[Segment::writable(0x1000, 1), Segment::readable(0x1000, 16)]);
}

#[test]
fn a_packed_chain_that_never_ends_stops_the_queue() {
    if skip_on_kernel("there are no packed rings") {
        return;
    }
    let daemon = Daemon::start(Arc::new(mem()), &two_queues());
    breaks_one_queue_only(&daemon, &options(true), |device| {
        let ring = device.queue(0).queue().packed();
        (0..128).for_each(|n| ring.place(0x1000, 16, 7, packed::DESC_F_NEXT, n == 0));
        ring.publish();
    });
}

#[test]
fn a_packed_indirect_descriptor_in_the_middle_of_a_chain_stops_the_queue() {
    if skip_on_kernel("there are no packed rings") {
        return;
    }
    let daemon = Daemon::start(Arc::new(mem()), &two_queues());
    breaks_one_queue_only(&daemon, &options(true), |device| {
        let ring = device.queue(0).queue().packed();
        ring.place(0x1000, 16, 7, packed::DESC_F_NEXT, true);
        ring.place(0x1000, 16, 7, packed::DESC_F_INDIRECT, false);
        ring.publish();
    });
}

#[test]
fn a_packed_id_beyond_the_ring_is_given_back_as_it_came() {
    if skip_on_kernel("there are no packed rings") {
        return;
    }
    let daemon = Daemon::start(Arc::new(mem()), &two_queues());
    let mut device = daemon.connect(&options(true));
    let ring = device.queue(0).queue().packed();
    ring.place(0x1000, 16, 0xfedc, DESC_F_WRITE, true);
    ring.publish();
    device.queue(0).queue().kick();
    let id = || {
        let [ring, ..] = device.queue(0).queue().packed().areas();
        let flags = ring.load_u16(14, Ordering::Acquire);
        (flags & packed::DESC_F_USED != 0).then(|| ring.load_u16(12, Ordering::Relaxed))
    };
    let mut id = id;
    wait_until("the chain is used", || id().is_some());
    assert_eq!(id(), Some(0xfedc));
}

#[test]
fn an_err_eventfd_given_to_a_running_queue_is_the_one_signalled() {
    let daemon = Daemon::start(Arc::new(mem()), &two_queues());
    let mut device = daemon.connect(&options(false));
    let other = device.queue(1).queue().err_fd().try_clone().unwrap();
    device.session().frontend().set_vring_err(0, &other).unwrap();
    device.queue(0).queue().split().write_avail_idx(0x4000);
    device.queue(0).queue().kick();
    assert!(device.queue(1).queue().wait_err(LIMIT).unwrap());
}

#[test]
fn requests_in_flight_complete_after_the_ring_broke() {
    for options in both_rings() {
        let (disk, permits) = Gate::new(Arc::new(mem()));
        let daemon = Daemon::start(Arc::new(disk), &two_queues());
        let mut device = daemon.connect(&Options { num_queues: 2, ..options });
        let layout = device.layout();
        for sector in 0..4 {
            device.queue(0).submit(&Request::write(sector, &[7; 512]), &layout).unwrap();
        }
        let bad = [Segment::writable(0x1000, 1), Segment::readable(0x1000, 16)].to_vec();
        device.queue(0).add_placed(Placed { segments: bad }, false).unwrap();
        device.queue(0).queue().publish();
        device.queue(0).queue().kick();
        assert!(device.queue(0).queue().wait_err(LIMIT).unwrap());
        assert!(device.queue(0).try_collect().unwrap().is_none(), "the gate is closed");
        permits.open();
        for _ in 0..4 {
            assert_eq!(device.queue(0).collect().unwrap().1.status, Some(S_OK));
        }
        assert!(device.queue(0).try_collect().unwrap().is_none());
    }
}
