// SPDX-License-Identifier: Apache-2.0
//! A daemon that is killed with requests in flight, and the one that takes them up.
//!
//! With `VHOST_BLK_TEST_PLANE=kernel` on the kernel's data plane: `VHOST_BLK_TEST_DISK` is then a
//! block device of 1 MiB or more that keeps what is written, best a slow one.

mod common;

use common::{Daemon, Place};
use driver::{Device, Layout, Options, Request};
use std::collections::{HashMap, HashSet};
use std::time::Duration;
use virtio_spec::blk::S_OK;

/// Writes take this long, reads nothing: completions overtake each other.
const SLOW_WRITES: &str = "delay:us=20000,ops=write";
const SECTORS: u64 = 2048;

fn options(packed: bool) -> Options {
    Options {
        packed,
        inflight: true,
        queue_size: 64,
        limit: Duration::from_secs(20),
        ..Options::default()
    }
}

/// Every sector's last pattern, and how it comes to be there.
struct Writer {
    sent: HashMap<u16, (u64, u8)>,
    stored: HashMap<u64, u8>,
    next: u8,
}

impl Writer {
    fn submit(&mut self, device: &mut Device, layout: &Layout) {
        self.next = self.next.wrapping_add(1);
        // A sector that no request in flight touches, so that the outcome is certain.
        let busy: HashSet<u64> = self.sent.values().map(|(sector, _)| *sector).collect();
        let start = u64::from(self.next) * 37 % SECTORS;
        let sector = (start..).map(|s| s % SECTORS).find(|s| !busy.contains(s)).unwrap();
        let request = Request::write(sector, &[self.next; 512]);
        let id = device.queue(0).submit(&request, layout).unwrap();
        assert!(self.sent.insert(id, (sector, self.next)).is_none());
    }

    fn collect(&mut self, device: &mut Device) {
        let (id, completion) = device.queue(0).collect().unwrap();
        assert_eq!(completion.status, Some(S_OK));
        let (sector, pattern) = self.sent.remove(&id).expect("each request completes once");
        self.stored.insert(sector, pattern);
    }
}

fn on_kernel() -> bool {
    std::env::var("VHOST_BLK_TEST_PLANE").is_ok_and(|plane| plane == "kernel")
}

/// A daemon whose writes take a while.
fn slow(place: &Place) -> Daemon {
    let mut command = place.serve();
    if on_kernel() {
        let disk = std::env::var_os("VHOST_BLK_TEST_DISK").expect("VHOST_BLK_TEST_DISK is set");
        command = common::program();
        command.args(["serve", "--data-plane", "kernel", "--blk-file"]).arg(disk);
        command.arg("--socket-path").arg(&place.socket);
    } else {
        command.args(["--wrap", SLOW_WRITES]);
    }
    Daemon::start(&mut command, &place.socket)
}

fn killed_under_load(packed: bool, layout: &Layout) {
    if packed && on_kernel() {
        println!("SKIP: the kernel's data plane has no packed rings");
        return;
    }
    let place = Place::new();
    let start = || slow(&place);
    let mut daemon = start();
    let mut device = Device::connect(&place.socket, &options(packed)).unwrap();
    let mut writer = Writer { sent: HashMap::new(), stored: HashMap::new(), next: 0 };
    for round in 0..5 {
        (0..12).for_each(|_| writer.submit(&mut device, layout));
        // A few complete, the others are in flight when the daemon dies.
        (0..round * 2).for_each(|_| writer.collect(&mut device));
        daemon.signal(libc::SIGKILL);
        daemon.wait();
        // The guest goes on while no daemon serves it.
        (0..3).for_each(|_| writer.submit(&mut device, layout));
        daemon = start();
        device.reconnect(&place.socket).unwrap();
        while !writer.sent.is_empty() {
            writer.collect(&mut device);
        }
    }
    for (sector, pattern) in &writer.stored {
        let mut data = [0; 512];
        device.read(*sector, &mut data).unwrap();
        assert_eq!(data, [*pattern; 512], "sector {sector}");
    }
}

#[test]
fn a_daemon_killed_under_load_is_followed_by_one_that_completes_every_request_once() {
    killed_under_load(false, &Layout::default());
}

#[test]
fn a_daemon_killed_under_load_with_indirect_tables_loses_no_request() {
    killed_under_load(false, &Layout::indirect());
}

#[test]
fn a_daemon_killed_under_load_with_a_packed_ring_loses_no_request() {
    killed_under_load(true, &Layout::default());
}

#[test]
fn a_daemon_killed_under_load_with_a_packed_ring_and_indirect_tables_loses_no_request() {
    killed_under_load(true, &Layout::indirect());
}

/// The daemon that follows finds a kernel module where there is one (in the lab), and would rather
/// have the kernel run the queues.
#[test]
fn packed_rings_are_served_on_by_a_daemon_that_does_not_offer_them_any_more() {
    let place = Place::new();
    let start = |plane| {
        let mut command = place.serve();
        Daemon::start(command.args(["--data-plane", plane]), &place.socket)
    };
    let mut daemon = start("uring");
    let mut device = Device::connect(&place.socket, &options(true)).unwrap();
    device.write(5, &[7; 512]).unwrap();
    daemon.signal(libc::SIGKILL);
    daemon.wait();
    let _daemon = start("auto");
    device.reconnect(&place.socket).unwrap();
    let mut data = [0; 512];
    device.read(5, &mut data).unwrap();
    assert_eq!(data, [7; 512]);
}

/// QEMU 7.2 stops a VM so: status 0 comes before GET_VRING_BASE.
#[test]
fn a_stop_by_status_zero_keeps_the_position_and_the_guest_goes_on_from_there() {
    const SET_STATUS: u32 = 39;
    const PROTOCOL_F_STATUS: u64 = 1 << 16;
    // The kernel's data plane has no packed rings.
    let layouts: &[bool] = if on_kernel() { &[false] } else { &[false, true] };
    for &packed in layouts {
        let place = Place::new();
        let _daemon = Daemon::start(&mut place.serve(), &place.socket);
        let options = options(packed);
        let protocol_features = options.protocol_features | PROTOCOL_F_STATUS;
        let options = Options { protocol_features, ..options };
        let mut device = Device::connect(&place.socket, &options).unwrap();
        (0..5).for_each(|sector| device.write(sector, &[7; 512]).unwrap());
        let zero = 0u64.to_ne_bytes();
        device.session().raw().message(SET_STATUS, &zero, &[]).unwrap();
        let position = device.queue(0).queue().base();
        assert_eq!(device.session().stop_queue(0).unwrap(), position);
        assert_ne!(position & 0x7fff, 0);
        device.start_queue(0).unwrap();
        device.write(5, &[8; 512]).unwrap();
    }
}
