// SPDX-License-Identifier: Apache-2.0
//! A block device that goes away below a running disk, and comes back at its path.

mod common;
#[path = "common/images.rs"]
mod images;
#[path = "common/rig.rs"]
#[allow(dead_code, reason = "each test program uses its part")]
mod rig;

use backend::FileOptions;
use common::wait_until;
use driver::{Device, Request};
use images::{BYTES, add, guest};
use kit::loop_device::LoopDevice;
use kit::mount;
use mount::{loop_device, may_not_mount};
use rig::{Raw, Rig};
use std::fs::{self, File};
use std::os::unix::fs::symlink;
use std::time::Duration;
use virtio_spec::blk::{S_IOERR, S_OK};

/// A disk `a` on a loop device that has a stable name. The path of the file below is its identity.
struct Away {
    rig: Rig,
    devices: Vec<LoopDevice>,
}

impl Away {
    fn new(options: &str) -> (Away, Device) {
        let mut away = Away { rig: Rig::new(), devices: Vec::new() };
        fs::write(away.rig.path("below"), vec![7; BYTES as usize]).unwrap();
        away.attach("below");
        let options = format!("--blk-file stable --data-plane uring {options}");
        add(&away.rig, "a", &options);
        let guest = guest(&away.rig, "a");
        (away, guest)
    }

    /// Turns the stable name to a new loop device over a file.
    fn attach(&mut self, file: &str) {
        let device = loop_device(&self.rig.path(file));
        let (link, next) = (self.rig.path("stable"), self.rig.path("next"));
        symlink(&device.path, &next).unwrap();
        fs::rename(next, link).unwrap();
        self.devices.push(device);
    }

    /// Takes the content from below the device, which can be read no more. Another file has it then.
    fn empty(&self) {
        let (below, emptied) = (self.rig.path("below"), self.rig.path("emptied"));
        fs::rename(&below, &emptied).unwrap();
        fs::copy(&emptied, &below).unwrap();
        File::options().write(true).open(emptied).unwrap().set_len(0).unwrap();
    }

    /// Removes the device as far as the kernel lets a process do this to an open one: it has no size any more.
    fn remove(&self) {
        self.empty();
        self.devices[0].update_size().unwrap();
        fs::remove_file(self.rig.path("stable")).unwrap();
    }

    /// The reason for which the disk has no device; empty: it has one.
    fn loss(&self) -> String {
        let reason = &self.rig.json("status a")["storage_gone"]["reason"];
        reason.as_str().unwrap_or_default().to_owned()
    }

    #[track_caller]
    fn wait_for_loss(&self, part: &str) {
        wait_until(part, || self.loss().contains(part));
    }

    #[track_caller]
    fn wait_for_return(&self) {
        wait_until("the return", || self.loss().is_empty());
    }

    fn is_halted(&self) -> bool {
        !self.rig.json("status a")["halted"].is_null()
    }
}

/// Submits a write of one sector.
fn submit(guest: &mut Device, sector: u64, byte: u8) {
    let layout = guest.layout();
    guest.queue(0).submit(&Request::write(sector, &[byte; 512]), &layout).unwrap();
}

fn status_of(guest: &mut Device) -> Option<u8> {
    guest.queue(0).collect().unwrap().1.status
}

fn reads_as(guest: &mut Device, sector: u64, byte: u8) {
    let mut data = [0; 512];
    guest.read(sector, &mut data).unwrap();
    assert_eq!(data, [byte; 512], "sector {sector}");
}

/// The next event that is no failure of a request.
fn next_event(events: &mut Raw) -> String {
    let mut names =
        std::iter::repeat_with(|| events.next_event()["event"].as_str().unwrap().to_owned());
    names.find(|name| name != "failed").unwrap()
}

#[test]
fn a_disk_goes_on_with_its_device_and_the_guest_gets_errors_meanwhile() {
    if may_not_mount() {
        return;
    }
    let (mut away, mut guest) = Away::new("");
    let mut events = away.rig.events();
    guest.write(1, &[1; 512]).unwrap();
    away.remove();
    submit(&mut guest, 2, 2);
    assert_eq!(status_of(&mut guest), Some(S_IOERR));
    away.wait_for_loss("its block device has gone");
    // It has grown meanwhile.
    let larger = BYTES + (4 << 20);
    File::options().write(true).open(away.rig.path("below")).unwrap().set_len(larger).unwrap();
    away.attach("below");
    away.wait_for_return();
    wait_until("the growth", || away.rig.json("status a")["capacity_bytes"] == larger);
    for (sector, byte) in [(0, 7), (1, 1), (2, 7)] {
        reads_as(&mut guest, sector, byte);
    }
    guest.write(3, &[3; 512]).unwrap();
    guest.write(larger / 512 - 1, &[4; 512]).unwrap();
    guest.flush().unwrap();
    assert_eq!(fs::read(away.rig.path("below")).unwrap()[3 * 512], 3);
    let locking = FileOptions { lock: Some(Duration::ZERO), ..FileOptions::default() };
    let told = backend::File::open(away.rig.path("stable"), locking).unwrap_err().to_string();
    assert!(told.contains("in use by"), "the new device is locked: {told}");
    let names = [(); 3].map(|()| next_event(&mut events));
    assert_eq!(names, ["storage_gone", "resized", "storage_returned"]);
    away.rig.ok("remove a");
    away.rig.ok("stop");
}

#[test]
fn a_halted_disk_tries_its_requests_again_on_the_device_that_is_back() {
    if may_not_mount() {
        return;
    }
    for paused in [false, true] {
        let (mut away, mut guest) = Away::new("--on-error stop");
        away.remove();
        submit(&mut guest, 2, 2);
        wait_until("the halt", || away.is_halted());
        away.wait_for_loss("its block device has gone");
        let line = away.rig.refused("resume a", 1);
        assert!(
            line.contains("cannot resume the disk a: its block device has gone; bring"),
            "{line}"
        );
        assert!(away.is_halted());
        if paused {
            away.rig.ok("pause a");
        }
        away.attach("below");
        away.wait_for_return();
        if paused {
            assert!(away.is_halted(), "the operator has paused it");
            away.rig.ok("resume a");
        }
        assert_eq!(status_of(&mut guest), Some(S_OK));
        assert!(!away.is_halted());
        reads_as(&mut guest, 2, 2);
        reads_as(&mut guest, 1, 7);
    }
}

#[test]
fn a_disk_with_a_failed_flush_waits_for_the_operator() {
    if may_not_mount() {
        return;
    }
    let (mut away, mut guest) = Away::new("--on-error stop --wrap fault:ops=flush,every=1");
    guest.flush().unwrap_err();
    wait_until("the halt", || away.is_halted());
    submit(&mut guest, 2, 2);
    away.remove();
    away.rig.refused("resume a", 1);
    away.attach("below");
    away.wait_for_return();
    assert!(away.is_halted(), "completed writes may be lost");
    away.rig.ok("resume a");
    assert_eq!(status_of(&mut guest), Some(S_OK));
}

#[test]
fn another_device_and_a_smaller_one_are_refused_and_not_written() {
    if may_not_mount() {
        return;
    }
    let (mut away, mut guest) = Away::new("--on-error stop");
    away.remove();
    submit(&mut guest, 2, 2);
    away.wait_for_loss("its block device has gone");
    fs::write(away.rig.path("other"), vec![9; BYTES as usize]).unwrap();
    away.attach("other");
    away.wait_for_loss("another device is at its path");
    assert!(away.loss().contains("/other; give the disk its device back"), "{}", away.loss());
    let line = away.rig.refused("resume a", 1);
    assert!(line.contains("another device is at its path"), "{line}");
    File::options().write(true).open(away.rig.path("below")).unwrap().set_len(BYTES / 2).unwrap();
    away.attach("below");
    away.wait_for_loss("fewer than the 16777216 of the disk; enlarge it");
    assert!(away.is_halted());
    let page = away.rig.ok("status a");
    assert!(page.contains("storage     the device that is back has 8388608 bytes"), "{page}");
    assert!(fs::read(away.rig.path("other")).unwrap().iter().all(|byte| *byte == 9));
    File::options().write(true).open(away.rig.path("below")).unwrap().set_len(BYTES).unwrap();
    away.devices[2].update_size().unwrap();
    away.wait_for_return();
    assert_eq!(status_of(&mut guest), Some(S_OK));
}

/// As with NBD, whose device stays without a server.
#[test]
fn a_device_that_fails_is_left_for_the_one_at_its_path_and_one_that_works_is_not() {
    if may_not_mount() {
        return;
    }
    let (mut away, mut guest) = Away::new("");
    let data = fs::read(away.rig.path("below")).unwrap();
    fs::create_dir(away.rig.path("x")).unwrap();
    fs::write(away.rig.path("x/below"), &data).unwrap();
    away.attach("x/below");
    guest.write(1, &[1; 512]).unwrap();
    assert_eq!(fs::read(away.rig.path("below")).unwrap()[512], 1, "it works");
    away.empty();
    assert!(guest.read(0, &mut [0; 512]).is_err());
    away.wait_for_loss("another device is at its path");
    away.attach("below");
    away.wait_for_return();
    reads_as(&mut guest, 1, 1);
    reads_as(&mut guest, 0, 7);
    assert!(fs::read(away.rig.path("x/below")).unwrap() == data);
}

#[test]
fn a_disk_that_may_have_lost_writes_in_the_page_cache_is_refused() {
    if may_not_mount() {
        return;
    }
    let (mut away, mut guest) = Away::new("--direct off");
    guest.write(1, &[1; 512]).unwrap();
    away.remove();
    let _ = guest.write(BYTES / 512 - 8, &[2; 4096]); // the cache may take it
    let _ = guest.flush();
    away.attach("below");
    away.wait_for_loss("completed writes may be lost with the host's page cache");
}

#[test]
fn the_changes_of_a_device_that_was_away_are_not_known() {
    if may_not_mount() {
        return;
    }
    let (mut away, mut guest) = Away::new("");
    away.rig.ok("backup a --to full.qcow2 --format qcow2 --bitmap b");
    away.remove();
    submit(&mut guest, 2, 2);
    assert_eq!(status_of(&mut guest), Some(S_IOERR));
    away.attach("below");
    away.wait_for_return();
    wait_until("the device", || guest.write(2, &[2; 512]).is_ok());
    let line = away.rig.refused("backup a --to next.qcow2 --incremental b", 1);
    assert!(line.contains("its device was away since its last backup"), "{line}");
    away.rig.ok("backup a --to again.qcow2 --format qcow2 --bitmap b");
    away.rig.ok("backup a --to next.qcow2 --incremental b");
}
