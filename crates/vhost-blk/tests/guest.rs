// SPDX-License-Identifier: Apache-2.0
//! Effects of the options on a guest, seen by the project's own driver through the socket.

mod common;

use common::{Daemon, Place, program};
use driver::{Device, Error, Options, Request};
use std::os::unix::fs::FileExt;
use virtio_spec::blk::{F_CONFIG_WCE, F_DISCARD, F_RO, S_IOERR, S_OK};
use virtio_spec::features::bit;

/// A daemon for a place's image with `options`, and a guest on it.
fn guest(options: &[&str]) -> (Place, Daemon, Device) {
    guest_with(options, &Options::default())
}

fn guest_with(options: &[&str], choices: &Options) -> (Place, Daemon, Device) {
    let place = Place::new();
    let daemon = Daemon::start(place.serve().args(options), &place.socket);
    let device = Device::connect(&place.socket, choices).unwrap();
    (place, daemon, device)
}

#[test]
fn what_the_guest_writes_and_flushes_is_in_the_image() {
    let (place, _daemon, mut guest) = guest(&[]);
    guest.write(8, &[0x5a; 4096]).unwrap();
    guest.flush().unwrap();
    let mut found = [0; 4096];
    std::fs::File::open(&place.image).unwrap().read_exact_at(&mut found, 4096).unwrap();
    assert_eq!(found, [0x5a; 4096]);
    let mut read = [0; 4096];
    guest.read(8, &mut read).unwrap();
    assert_eq!(read, [0x5a; 4096]);
}

#[test]
fn the_guest_sees_size_serial_queues_and_block_size() {
    let (_place, _daemon, mut guest) =
        guest(&["--serial=disk-7", "--num-queues=3", "--logical-block-size=4096"]);
    let config = guest.config().unwrap();
    let (capacity, queues, block) = (config.capacity, config.num_queues, config.blk_size);
    assert_eq!((capacity, queues, block), (2048, 3, 4096));
    assert_eq!(guest.get_id().unwrap(), b"disk-7\0\0\0\0\0\0\0\0\0\0\0\0\0\0");
}

#[test]
fn a_read_only_disk_says_so_and_refuses_writes() {
    let (place, _daemon, mut guest) = guest(&["--read-only"]);
    assert_ne!(guest.features() & bit(F_RO), 0);
    assert!(matches!(guest.write(0, &[1; 512]), Err(Error::Status(Some(S_IOERR)))));
    assert!(std::fs::read(&place.image).unwrap().iter().all(|byte| *byte == 0));
}

#[test]
fn discard_off_takes_the_feature_away() {
    let (_place, _daemon, guest) = guest(&["--discard=off", "--direct=off"]);
    assert_eq!(guest.features() & bit(F_DISCARD), 0);
}

#[test]
fn writethrough_shows_in_the_configuration() {
    for (cache, writeback) in [("writeback", 1), ("writethrough", 0)] {
        let (_place, _daemon, mut guest) = guest(&["--cache", cache]);
        assert_ne!(guest.features() & bit(F_CONFIG_WCE), 0);
        assert_eq!(guest.config().unwrap().writeback, writeback, "{cache}");
    }
}

#[test]
fn packed_off_takes_the_layout_away() {
    let choices = Options { packed: true, ..Options::default() };
    let (_place, _daemon, mut guest) = guest_with(&["--packed=on"], &choices);
    guest.write(0, &[7; 512]).unwrap();

    let place = Place::new();
    let _daemon = Daemon::start(place.serve().arg("--packed=off"), &place.socket);
    let refused = Device::connect(&place.socket, &choices);
    assert!(matches!(refused, Err(Error::NotOffered(_))));
}

#[test]
fn queues_larger_than_queue_size_are_refused() {
    let place = Place::new();
    let _daemon = Daemon::start(place.serve().arg("--queue-size=64"), &place.socket);
    let choices = |queue_size| Options { queue_size, ..Options::default() };
    assert!(Device::connect(&place.socket, &choices(128)).is_err());
    Device::connect(&place.socket, &choices(64)).unwrap().write(0, &[7; 512]).unwrap();
}

#[test]
fn a_memory_disk_keeps_its_content_from_front_end_to_front_end() {
    let place = Place::new();
    let mut command = program();
    command.args(["--backend=mem", "--size=1M"]).arg("--socket-path").arg(&place.socket);
    let _daemon = Daemon::start(&mut command, &place.socket);
    Device::connect(&place.socket, &Options::default()).unwrap().write(1, &[3; 512]).unwrap();
    let mut second = Device::connect(&place.socket, &Options::default()).unwrap();
    let mut read = [0; 512];
    second.read(1, &mut read).unwrap();
    assert_eq!(read, [3; 512]);
}

#[test]
fn a_read_only_memory_disk_with_large_blocks_is_one_for_the_guest() {
    let place = Place::new();
    let mut command = program();
    command.args(["--backend=mem", "--size=7K", "--read-only", "--logical-block-size=4096"]);
    command.arg("--socket-path").arg(&place.socket);
    let _daemon = Daemon::start(&mut command, &place.socket);
    let mut guest = Device::connect(&place.socket, &Options::default()).unwrap();
    assert_eq!(guest.capacity_sectors().unwrap(), 8);
    assert_ne!(guest.features() & bit(F_RO), 0);
}

#[test]
fn a_fault_wrapper_reaches_the_guest_as_an_error() {
    let (_place, _daemon, mut guest) = guest(&["--wrap", "fault:ops=write,errno=EIO"]);
    assert!(matches!(guest.write(0, &[1; 512]), Err(Error::Status(Some(S_IOERR)))));
    guest.read(0, &mut [0; 512]).unwrap();
}

/// Submits a write and waits until it is in flight: the wrapper `delay` holds its completion
/// back, so that it is in the image by then.
fn write_in_flight(place: &Place, guest: &mut Device) {
    let layout = guest.layout();
    guest.queue(0).submit(&Request::write(0, &[9; 512]), &layout).unwrap();
    place.wait_until("the write is in the image", || {
        std::fs::read(&place.image).unwrap()[..512] == [9; 512]
    });
}

#[test]
fn sigterm_does_not_wait_for_storage_that_takes_a_minute() {
    let (place, mut daemon, mut guest) = guest(&["--wrap", "delay:us=60000000"]);
    write_in_flight(&place, &mut guest);
    daemon.signal(libc::SIGTERM);
    assert_eq!(daemon.wait().code(), Some(0));
    assert!(!place.socket.exists());
    daemon.log_line("leaving with I/O in flight");
}

#[test]
fn sigterm_lets_what_is_in_flight_finish_and_tells_the_guest() {
    let (place, mut daemon, mut guest) = guest(&["--wrap", "delay:us=300000"]);
    write_in_flight(&place, &mut guest);
    daemon.signal(libc::SIGTERM);
    assert_eq!(daemon.wait().code(), Some(0));
    let (_, completion) = guest.queue(0).try_collect().unwrap().expect("a used chain");
    assert_eq!(completion.status, Some(S_OK));
}
