// SPDX-License-Identifier: Apache-2.0
//! The image's lock at the daemon's end: given up by one that is told to stop, waited for after one
//! that was killed.

mod common;

use backend::{File, FileOptions};
use common::{Daemon, Place};
use driver::{Device, Options};
use std::process::Command;
use std::time::Duration;

/// Opens and locks the image without waiting.
fn lock_at_once(place: &Place) -> File {
    let options = FileOptions { lock: Some(Duration::ZERO), ..FileOptions::default() };
    File::open(&place.image, options).expect("nobody has the image")
}

#[test]
fn after_sigterm_another_program_writes_the_image_at_once_each_of_50_times() {
    let has_qemu_io = Command::new("qemu-io").arg("--version").output().is_ok();
    if !has_qemu_io {
        println!("PARTLY SKIPPED: no qemu-io; the image is opened by this project's own code only");
    }
    let place = Place::new();
    for round in 0..50 {
        let mut daemon = Daemon::start(&mut place.serve(), &place.socket);
        let mut device = Device::connect(&place.socket, &Options::default()).unwrap();
        device.write(round, &[7; 512]).unwrap();
        daemon.signal(libc::SIGTERM);
        assert_eq!(daemon.wait_at_once().code(), Some(0));
        drop(lock_at_once(&place));
        if has_qemu_io {
            let mut command = Command::new("qemu-io");
            command.args(["-f", "raw", "-c", "write 0 512"]).arg(&place.image);
            let output = common::finish(&mut command);
            assert!(output.status.success(), "round {round}: {output:?}");
        }
    }
}

/// The lock of a process that is gone, whose I/O is not: here a descriptor of this process.
#[test]
fn an_image_whose_killed_user_has_io_in_flight_is_waited_for_and_the_user_is_told() {
    let place = Place::new();
    let holder = lock_at_once(&place);
    let mut daemon = Daemon::spawn(&mut place.serve());
    let line = daemon.log_line("waits for");
    assert!(line.contains("disk.img") && line.contains("at most"), "{line}");
    drop(holder);
    daemon.log_line("serving");
}
