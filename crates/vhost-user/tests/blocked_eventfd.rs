// SPDX-License-Identifier: Apache-2.0
//! A front-end that makes a call or err eventfd blocking again, and fills it up, loses its own disk, and nothing else
//! happens.
// UNSAFETY: `EventFd` lends its descriptor as a number only.
#![expect(unsafe_code)]

mod common;

use common::plane::skip_on_kernel;
use common::{Daemon, LIMIT, OneThread, both_rings, wait_until};
use driver::{Device, Options, Request, Segment};
use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};
use std::os::fd::{AsRawFd, BorrowedFd};
use std::time::{Duration, Instant};
use vmm_sys_util::eventfd::EventFd;

const REASON: &str = "the kernel signals an eventfd without a wait";

fn wait_for_fault(daemon: &Daemon) {
    wait_until("the queue goes on", || daemon.is_faulted());
}

/// Lets each later write to an eventfd wait for ever.
fn block(eventfd: &EventFd) {
    // SAFETY: the eventfd is open as long as the reference to it.
    let fd = unsafe { BorrowedFd::borrow_raw(eventfd.as_raw_fd()) };
    // The daemon's descriptor has the same flags.
    let flags = fcntl_getfl(fd).unwrap();
    fcntl_setfl(fd, flags | OFlags::NONBLOCK).unwrap();
    // The daemon may signal it meanwhile.
    while eventfd.write(u64::MAX - 1).is_err() {
        let _ = eventfd.read();
    }
    fcntl_setfl(fd, flags - OFlags::NONBLOCK).unwrap();
}

/// Sends a request whose end calls the driver.
fn submit(device: &mut Device) {
    let layout = device.layout();
    device.queue(0).queue().arm_calls();
    device.queue(0).submit(&Request::read(0, 512), &layout).unwrap();
}

/// Two disks on one thread. The second one loses its queue by `attack`, and each later one.
fn loses_its_disk(attack: impl Fn(&mut Device, &Daemon)) {
    let thread = OneThread::new();
    let mut neighbour = thread.first.connect(&Options::default());
    for ring in both_rings() {
        let daemon = thread.another();
        let mut device = daemon.connect(&ring);
        device.write(1, &[1; 512]).unwrap();
        attack(&mut device, &daemon);
        neighbour.write(2, &[2; 512]).unwrap();
        wait_for_fault(&daemon);
        assert!(device.queue(0).queue().wait_err(LIMIT).unwrap(), "the front-end is not told");
        drop(device);
        daemon.next_outcome().unwrap();
        // A wait for each new queue would still hold the neighbour up.
        let _device = daemon.connect(&ring);
        wait_for_fault(&daemon);
        neighbour.read(2, &mut [0; 512]).unwrap();
    }
}

#[test]
fn a_blocked_call_eventfd_stops_its_own_disk_only() {
    if skip_on_kernel(REASON) {
        return;
    }
    loses_its_disk(|device, _| {
        block(device.queue(0).queue().call_fd());
        submit(device);
    });
}

/// No write waits as long as the time between two looks of the daemon.
#[test]
fn a_call_eventfd_that_is_blocked_again_and_again_stops_its_own_disk_only() {
    if skip_on_kernel(REASON) {
        return;
    }
    loses_its_disk(|device, daemon| {
        block(device.queue(0).queue().call_fd());
        let begin = Instant::now();
        while !daemon.is_faulted() {
            assert!(begin.elapsed() < LIMIT, "the queue goes on");
            submit(device);
            std::thread::sleep(Duration::from_millis(20));
            block(device.queue(0).queue().call_fd());
            let _ = device.queue(0).try_collect();
        }
    });
}

/// The thread of the connection writes to it.
#[test]
fn a_blocked_err_eventfd_holds_up_no_other_disk() {
    if skip_on_kernel(REASON) {
        return;
    }
    let thread = OneThread::new();
    let mut neighbour = thread.first.connect(&Options::default());
    for ring in both_rings() {
        let daemon = thread.another();
        let mut device = daemon.connect(&ring);
        block(device.queue(0).queue().err_fd());
        // A descriptor outside of the guest's memory is a ring fault.
        let outside = Segment::readable(u64::MAX - 4096, 16);
        device.queue(0).queue().add(&[outside]).unwrap();
        device.queue(0).queue().publish();
        device.queue(0).queue().kick();
        neighbour.write(2, &[2; 512]).unwrap();
        // The control plane goes on, too.
        wait_for_fault(&daemon);
        drop(device);
        daemon.next_outcome().unwrap();
        daemon.connect(&ring).write(3, &[3; 512]).unwrap();
        daemon.next_outcome().unwrap();
    }
}
