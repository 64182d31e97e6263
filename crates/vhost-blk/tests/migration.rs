// SPDX-License-Identifier: Apache-2.0
//! The lock of the image follows a guest that migrates from one daemon to another.

mod common;

use backend::{File, FileError, FileOptions, LockError};
use common::{Daemon, Place};
use driver::{Device, Options};
use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

/// Two daemons with one image: the source serves it, the target waits for the guest.
struct Pair {
    place: Place,
    source: Daemon,
    target: Daemon,
    target_socket: PathBuf,
}

impl Pair {
    fn start() -> Pair {
        let place = Place::new();
        let target_socket = place.path("target.sock");
        let mut serve = place.serve();
        serve.args(["--data-plane", "uring", "--num-queues", "2"]);
        let source = Daemon::start(&mut serve, &place.socket);
        let mut serve = common::program();
        serve.args(["serve", "--data-plane", "uring", "--num-queues", "2", "--incoming", "on"]);
        serve.arg("--blk-file").arg(&place.image).arg("--socket-path").arg(&target_socket);
        let target = Daemon::start(&mut serve, &target_socket);
        Pair { place, source, target, target_socket }
    }

    /// A guest of the source.
    fn guest(&self, packed: bool) -> Device {
        Device::connect(&self.place.socket, &options(packed)).expect("the source serves it")
    }

    /// Another writer of the image; it does not wait.
    fn open(&self) -> Result<File, FileError> {
        let options = FileOptions { lock: Some(Duration::ZERO), ..FileOptions::default() };
        File::open(&self.place.image, options)
    }

    #[track_caller]
    fn refuses_a_second_writer(&self) {
        let opened = self.open();
        let refused = matches!(&opened, Err(FileError::Lock(LockError::InUse { .. })));
        assert!(refused, "a second writer: {opened:?}");
    }

    #[track_caller]
    fn has_no_writer(&self) {
        self.open().expect("nobody holds the lock");
    }
}

fn options(packed: bool) -> Options {
    Options { packed, limit: Duration::from_secs(20), ..Options::default() }
}

#[track_caller]
fn holds(device: &mut Device, sector: u64, byte: u8) {
    let mut data = [0; 512];
    device.read(sector, &mut data).unwrap();
    assert_eq!(data, [byte; 512], "sector {sector}");
}

#[test]
fn the_lock_follows_the_guest_and_the_death_of_the_source_changes_nothing() {
    for packed in [false, true] {
        let mut pair = Pair::start();
        let mut device = pair.guest(packed);
        device.write(1, &[1; 512]).unwrap();
        pair.refuses_a_second_writer();
        let _log = device.start_log().unwrap();
        device.write(2, &[2; 512]).unwrap();
        pair.refuses_a_second_writer();
        device.session().stop_queue(0).unwrap();
        pair.source.log_line("gave the lock of the image up");
        pair.has_no_writer();
        device.reconnect(&pair.target_socket).unwrap();
        pair.refuses_a_second_writer();
        pair.target.log_line("took the lock of the image");
        pair.source.signal(libc::SIGKILL);
        pair.source.wait();
        holds(&mut device, 1, 1);
        holds(&mut device, 2, 2);
        device.write(3, &[3; 512]).unwrap();
        pair.refuses_a_second_writer();
        qemu_is_refused(&pair);
    }
}

fn qemu_is_refused(pair: &Pair) {
    let mut command = Command::new("qemu-io");
    command.args(["-f", "raw", "-c", "write 0 512"]).arg(&pair.place.image);
    if Command::new("qemu-io").arg("--version").output().is_err() {
        return println!("PARTLY SKIPPED: no qemu-io; only this project's own code is refused");
    }
    let output = common::finish(&mut command);
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(!output.status.success() && text.contains("lock"), "{output:?}");
}

#[test]
fn only_the_last_queue_of_a_migration_gives_the_lock_up() {
    let pair = Pair::start();
    let options = Options { num_queues: 2, ..options(false) };
    let mut device = Device::connect(&pair.place.socket, &options).unwrap();
    // A VM that is stopped for another reason.
    (0..2).for_each(|index| assert_eq!(device.session().stop_queue(index).unwrap(), 0));
    pair.refuses_a_second_writer();
    (0..2).for_each(|index| device.start_queue(index).unwrap());
    let _log = device.start_log().unwrap();
    device.session().stop_queue(1).unwrap();
    pair.refuses_a_second_writer();
    device.session().stop_queue(0).unwrap();
    pair.has_no_writer();
}

#[test]
fn a_cancelled_migration_goes_on_at_the_source_and_the_target_is_refused() {
    let mut pair = Pair::start();
    let mut device = pair.guest(false);
    let _log = device.start_log().unwrap();
    device.session().stop_queue(0).unwrap();
    pair.has_no_writer();
    device.start_queue(0).unwrap();
    device.write(5, &[5; 512]).unwrap();
    pair.refuses_a_second_writer();
    // A guest at the target, as if the source were gone.
    let error = Device::connect(&pair.target_socket, &options(false)).err().expect("refused");
    let line = pair.target.log_line("cannot start");
    let source = format!("(process {})", pair.source.id());
    assert!(line.contains("in use by") && line.contains(&source), "{error}: {line}");
    holds(&mut device, 5, 5);
    // The next attempt succeeds.
    device.session().stop_queue(0).unwrap();
    device.reconnect(&pair.target_socket).unwrap();
    holds(&mut device, 5, 5);
}

#[test]
fn a_source_whose_image_was_taken_meanwhile_does_not_start_again_before_it_is_free() {
    let mut pair = Pair::start();
    let mut device = pair.guest(true);
    let _log = device.start_log().unwrap();
    device.session().stop_queue(0).unwrap();
    let other = pair.open().expect("nobody holds the lock");
    device.start_queue(0).expect_err("another program has the image");
    let line = pair.source.log_line("connection ended");
    assert!(line.contains("cannot start") && line.contains("in use by"), "{line}");
    // Nor does the target.
    Device::connect(&pair.target_socket, &options(false)).err().expect("another program has it");
    drop(other);
    device.reconnect(&pair.place.socket).unwrap();
    device.write(5, &[5; 512]).unwrap();
    pair.refuses_a_second_writer();
}

#[test]
fn the_guest_of_a_killed_source_goes_on_at_the_target() {
    let pair = Pair::start();
    let mut device = pair.guest(false);
    device.write(7, &[7; 512]).unwrap();
    pair.source.signal(libc::SIGKILL);
    device.reconnect(&pair.target_socket).unwrap();
    holds(&mut device, 7, 7);
    pair.refuses_a_second_writer();
}

#[test]
fn the_target_serves_an_image_that_grew_while_it_waited() {
    let mut pair = Pair::start();
    let mut device = pair.guest(false);
    let grown = 2 << 20;
    std::fs::OpenOptions::new()
        .write(true)
        .open(&pair.place.image)
        .unwrap()
        .set_len(grown)
        .unwrap();
    let _log = device.start_log().unwrap();
    device.session().stop_queue(0).unwrap();
    device.reconnect(&pair.target_socket).unwrap();
    device.write(grown / 512 - 1, &[9; 512]).unwrap();
    pair.target.log_line("the disk has another capacity");
}

#[test]
fn a_serve_without_incoming_is_refused_while_the_guest_runs() {
    let pair = Pair::start();
    let mut second = common::program();
    second.arg("serve").arg("--blk-file").arg(&pair.place.image);
    second.arg("--socket-path").arg(pair.place.path("other.sock"));
    let output = common::finish(&mut second);
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(1), "{text}");
    assert!(text.contains("in use by"), "{text}");
}
