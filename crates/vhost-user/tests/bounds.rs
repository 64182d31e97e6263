// SPDX-License-Identifier: Apache-2.0
//! Bounds on the work of a stop and of a request, with a hostile driver.

mod common;

use backend::Null;
use common::gate::Gate;
use common::{Daemon, Setup, both_rings, wait_until};
use driver::{Device, Options, Placed, Request, Segment};
use std::sync::Arc;
use vhost_user::{Answer, Command};
use virtio_blk::{DISCARDED_SECTORS_MAX, ZEROED_SECTORS_MAX};
use virtio_spec::blk::{RangeSegment, S_IOERR, S_OK, T_IN, T_OUT};

/// The piece of memory that is named again and again.
const PIECE: u32 = 2 << 20;
/// Pieces of 1 GiB.
const GIB: usize = 512;

/// Guest memory with room for a piece.
fn roomy(options: Options) -> Options {
    Options { regions: vec![(0, 64 << 20)], ..options }
}

/// Chains that the first queue has taken. Its thread answers between two turns.
fn taken(daemon: &Daemon) -> u64 {
    let Some(Answer::Status(status)) = daemon.control().ask(Command::Status) else {
        panic!("the device is there");
    };
    status.queues[0].running.as_ref().expect("the queue runs").stats.chains
}

/// A read or write (`code`) of so many pieces.
fn huge(device: &Device, code: u32, pieces: usize) -> Placed {
    let memory = device.memory();
    let (header, data) = (memory.alloc(16, 16), memory.alloc(PIECE as usize, 4096));
    memory.write(header, &[&code.to_le_bytes()[..], &[0; 12]].concat());
    let mut segments = vec![Segment::readable(header, 16)];
    segments.extend(vec![Segment { gpa: data, len: PIECE, writable: code == T_IN }; pieces]);
    segments.push(Segment::writable(memory.alloc(1, 1), 1));
    Placed { segments }
}

#[test]
fn a_stop_waits_for_a_bounded_amount_of_data() {
    for options in both_rings() {
        let (gate, permits) = Gate::new(Arc::new(Null::new(1 << 40)));
        let daemon = Daemon::start(Arc::new(gate), &Setup::default());
        let mut device = daemon.connect(&roomy(options));
        let write = huge(&device, T_OUT, GIB / 8);
        for _ in 0..32 {
            device.queue(0).add_placed(write.clone(), true).unwrap();
        }
        device.queue(0).queue().publish();
        device.queue(0).queue().kick();
        wait_until("512 MiB are in flight", || taken(&daemon) >= 4);
        let in_flight = taken(&daemon);
        let opener = std::thread::spawn(move || permits.open());
        device.session().stop_queue(0).unwrap();
        opener.join().unwrap();
        assert_eq!(in_flight, 4, "more than 512 MiB were in flight");
    }
}

/// A gate before a disk without end, and a driver whose queue is full of `request` and one read.
/// Checks that the queue is stopped with `expected` chains in flight.
fn check_in_flight(expected: u64, request: &Request, options: Options) {
    let (gate, permits) = Gate::new(Arc::new(Null::new(1 << 50)));
    let daemon = Daemon::start(Arc::new(gate), &Setup::default());
    let mut device = daemon.connect(&Options { scratch_bytes: 1 << 20, ..options });
    let layout = device.layout();
    let mut requests = vec![request; 127];
    let read = Request::read(0, 4096);
    requests.push(&read);
    for request in requests {
        device.queue(0).add(request, &layout).unwrap();
    }
    device.queue(0).queue().publish();
    device.queue(0).queue().kick();
    wait_until("the bound is reached", || taken(&daemon) >= expected);
    let in_flight = taken(&daemon);
    let opener = std::thread::spawn(move || permits.open());
    device.session().stop_queue(0).unwrap();
    opener.join().unwrap();
    assert_eq!(in_flight, expected, "{request:?}");
}

fn range(sectors: u32) -> [RangeSegment; 1] {
    [RangeSegment { sector: 0, num_sectors: sectors, flags: 0 }]
}

#[test]
fn a_stop_waits_for_a_bounded_length_of_ranges() {
    const MIB: u32 = 2048;
    for options in both_rings() {
        check_in_flight(8, &Request::write_zeroes(&range(64 * MIB)), options.clone());
        check_in_flight(8, &Request::secure_erase(&range(64 * MIB)), options.clone());
        check_in_flight(8, &Request::discard(&range(1024 * MIB)), options);
    }
}

#[test]
fn a_queue_full_of_announced_ranges_keeps_no_read_waiting() {
    for options in both_rings() {
        let zeroes = Request::write_zeroes(&range(ZEROED_SECTORS_MAX));
        check_in_flight(128, &zeroes, options.clone());
        check_in_flight(128, &Request::discard(&range(DISCARDED_SECTORS_MAX)), options);
    }
}

#[test]
fn one_request_moves_1_gib_as_firmware_does_and_no_byte_more() {
    for options in both_rings() {
        let daemon = Daemon::of(Null::new(1 << 40));
        let mut device = daemon.connect(&roomy(options));
        for code in [T_IN, T_OUT] {
            for (pieces, status) in [(GIB, S_OK), (GIB + 1, S_IOERR), (GIB, S_OK)] {
                let request = huge(&device, code, pieces);
                device.queue(0).add_placed(request, true).unwrap();
                device.queue(0).queue().publish();
                device.queue(0).queue().kick();
                assert_eq!(device.queue(0).collect().unwrap().1.status, Some(status), "{pieces}");
            }
        }
    }
}
