// SPDX-License-Identifier: Apache-2.0
//! The image's lock at the daemon's end: given up by one that is ordered to stop, waited for after one
//! that was killed.

mod common;

use backend::{File, FileOptions};
use common::{Daemon, Place};
use driver::{Device, Options, Request};
use kit::mount;
use mount::{Frozen, Mount, may_not_mount};
use std::process::Command;
use std::time::Duration;
use virtio_spec::blk::S_OK;

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

#[test]
fn an_image_of_a_running_program_is_waited_for_and_the_program_is_told() {
    let place = Place::new();
    let holder = lock_at_once(&place);
    let mut daemon = Daemon::spawn(&mut place.serve());
    let line = daemon.log_line("waits at most");
    assert!(line.contains("disk.img") && line.contains("(process "), "{line}");
    assert!(line.contains("at most 5 s"), "{line}");
    drop(holder);
    daemon.log_line("serving");
}

#[test]
fn the_next_daemon_waits_longer_for_the_io_of_a_killed_one_and_no_write_is_lost() {
    if may_not_mount() {
        return;
    }
    let mut place = Place::new();
    let mount = Mount::ext4(64);
    place.image = mount.path("disk.img");
    std::fs::File::create(&place.image).unwrap().set_len(1 << 20).unwrap();
    let mut serve = place.serve();
    serve.args(["--data-plane", "uring"]);
    let mut killed = Daemon::start(&mut serve, &place.socket);
    let limit = Duration::from_secs(60);
    let options = Options { inflight: true, limit, ..Options::default() };
    let mut guest = Device::connect(&place.socket, &options).unwrap();
    let layout = guest.layout();
    let frozen = Frozen::of(&mount);
    guest.queue(0).submit(&Request::write(8, &[7; 4096]), &layout).unwrap();
    // A kernel thread of io_uring has the write.
    let waits = |(name, state): &(String, String)| name.starts_with("iou-wrk") && state == "D";
    place.wait_until("the write is in the kernel", || killed.threads().iter().any(waits));
    killed.signal(libc::SIGKILL);
    place.wait_until("it has closed its files", || killed.descriptors().is_empty());
    let mut next = Daemon::spawn(&mut serve);
    let line = next.log_line("waits at most");
    assert!(
        line.contains("a process that cannot be seen") && line.contains("at most 30 s"),
        "{line}"
    );
    drop(frozen);
    next.log_line("serving");
    killed.wait();
    guest.reconnect(&place.socket).unwrap();
    assert_eq!(guest.queue(0).collect().unwrap().1.status, Some(S_OK));
    let mut data = [0; 4096];
    guest.read(8, &mut data).unwrap();
    assert_eq!(data, [7; 4096]);
}
