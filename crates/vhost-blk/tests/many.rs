// SPDX-License-Identifier: Apache-2.0
//! A hundred daemons at once, and the largest queue.

mod common;

use common::{Daemon, Place};
use driver::{Device, Layout, Options, Request};
use std::time::Duration;
use virtio_spec::blk::S_OK;

const DAEMONS: usize = 100;
/// Descriptors of a daemon that serves one front-end with one queue. A machine's usual limit for a
/// process is 1024.
const DESCRIPTORS_MAX: usize = 64;
/// Memory of its own that such a daemon may take.
const OWN_KIB_MAX: u64 = 16 << 10;

fn own_kib(pid: u32) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("RssAnon:")).unwrap();
    line.split_whitespace().next().unwrap().parse().unwrap()
}

#[test]
fn a_hundred_daemons_answer_each_with_its_own_disk_and_within_bounds() {
    let options =
        Options { scratch_bytes: 64 << 10, limit: Duration::from_secs(60), ..Options::default() };
    let daemons: Vec<(Place, Daemon)> = (0..DAEMONS)
        .map(|_| {
            let place = Place::new();
            let daemon = Daemon::start(place.serve().arg("--num-queues=1"), &place.socket);
            (place, daemon)
        })
        .collect();
    // Guests come after all daemons, which would inherit their descriptors.
    let mut all: Vec<(Place, Daemon, Device)> = daemons
        .into_iter()
        .map(|(place, daemon)| {
            let guest = Device::connect(&place.socket, &options).unwrap();
            (place, daemon, guest)
        })
        .collect();
    for (n, (_, _, guest)) in (0..).zip(&mut all) {
        guest.write(n, &[n as u8 + 1; 512]).unwrap();
        guest.flush().unwrap();
    }
    for (n, (place, daemon, guest)) in (0..).zip(&mut all) {
        let mut data = [0; 512];
        guest.read(n, &mut data).unwrap();
        assert_eq!(data, [n as u8 + 1; 512], "disk {n}");
        let image = std::fs::read(&place.image).unwrap();
        let written: Vec<u64> =
            (0..).zip(image.chunks(512)).filter(|(_, s)| s[0] != 0).map(|(n, _)| n).collect();
        assert_eq!(written, [n], "sectors of disk {n}");
        let descriptors = std::fs::read_dir(format!("/proc/{}/fd", daemon.id())).unwrap().count();
        assert!(descriptors <= DESCRIPTORS_MAX, "daemon {n} has {descriptors} descriptors");
        let kib = own_kib(daemon.id());
        assert!(kib <= OWN_KIB_MAX, "daemon {n} has {kib} KiB");
    }
    for (_, daemon, _) in &mut all {
        daemon.signal(libc::SIGTERM);
    }
    for (_, daemon, _) in &mut all {
        assert_eq!(daemon.wait().code(), Some(0));
    }
}

#[test]
fn a_queue_of_32768_is_served_right_when_allowed_and_refused_in_clear_words_when_not() {
    for packed in [false, true] {
        let options = Options {
            packed,
            inflight: true,
            queue_size: 32768,
            limit: Duration::from_secs(60),
            scratch_bytes: 32 << 20,
            ..Options::default()
        };
        let place = Place::new();
        let mut daemon = Daemon::start(place.serve().arg("--queue-size=32768"), &place.socket);
        let mut guest = Device::connect(&place.socket, &options).unwrap();
        // Thousands in flight at once, and more than a turn of the ring.
        let (layout, mut ended) = (Layout::default(), 0);
        for round in 0..6_u64 {
            for n in 0..8000 {
                let request = match n % 2 {
                    0 => Request::write(n % 2048, &[(round + n % 2048) as u8; 512]),
                    _ => Request::read((n + round) % 2048, 512),
                };
                guest.queue(0).submit(&request, &layout).unwrap();
            }
            for _ in 0..8000 {
                let (_, completion) = guest.queue(0).collect().unwrap();
                assert_eq!(completion.status, Some(S_OK));
                ended += 1;
            }
        }
        assert_eq!(ended, 48_000);
        let mut data = [0; 512];
        guest.read(100, &mut data).unwrap();
        assert_eq!(data, [105; 512]);
        drop(guest);
        daemon.signal(libc::SIGTERM);
        assert_eq!(daemon.wait().code(), Some(0));

        let place = Place::new();
        // Without the option, QEMU's largest queue is served: its front-end does not ask before.
        let mut daemon = Daemon::start(&mut place.serve(), &place.socket);
        let options = Options { inflight: false, queue_size: 1024, ..options };
        let mut guest = Device::connect(&place.socket, &options).unwrap();
        guest.read(100, &mut data).unwrap();
        drop(guest);
        let options = Options { queue_size: 32768, ..options };
        assert!(Device::connect(&place.socket, &options).is_err(), "packed {packed}");
        let said = daemon.log_line("32768");
        assert!(said.contains("--queue-size 1024"), "{said}");
    }
}
