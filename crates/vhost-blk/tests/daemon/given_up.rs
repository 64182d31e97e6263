// SPDX-License-Identifier: Apache-2.0
//! Disks whose storage does not answer are removed by force: the file system of their image is frozen.

use crate::mount::{Frozen, Mount, may_not_mount};
use crate::rig::{Rig, scrape};
use driver::{Device, Options, Request};
use serde_json::Value;
use std::io::Read;
use std::os::unix::net::UnixStream;
use std::time::Duration;
use virtio_spec::blk::S_OK;

/// Adds the disk `a` on a file system, with a guest whose write waits for that.
fn hung<'a>(rig: &Rig, mount: &'a Mount) -> (Device, Frozen<'a>) {
    rig.add_at("a", &mount.path("image"), "");
    let mut guest = guest(rig);
    let frozen = Frozen::of(mount);
    rig.submit("a", &mut guest, &Request::write(0, &[1; 4096]));
    (guest, frozen)
}

/// The options of a disk with the image on a file system.
fn on(mount: &Mount, socket: &str) -> String {
    let image = mount.path("image");
    let image = image.display();
    format!("--blk-file {image} --socket-path {socket} --data-plane uring --num-queues 1")
}

/// A guest of the disk `a` that connects again.
fn guest(rig: &Rig) -> Device {
    let limit = Duration::from_secs(60);
    let options = Options { limit, inflight: true, ..Options::default() };
    Device::connect(rig.path("a.sock"), &options).unwrap()
}

/// Names and states of the disks.
fn states(rig: &Rig) -> Vec<(String, String)> {
    let list = rig.json("list");
    let text = |value: &Value| value.as_str().unwrap().to_owned();
    list.as_array()
        .unwrap()
        .iter()
        .map(|disk| (text(&disk["name"]), text(&disk["state"])))
        .collect()
}

/// Waits until no disk is given up.
fn wait_for_release(rig: &Rig) {
    rig.place.wait_until("the end of the disk", || {
        states(rig).iter().all(|(_, state)| state != "given_up")
    });
}

#[test]
fn a_disk_whose_storage_hangs_leaves_its_name_by_force_and_goes_when_the_storage_answers() {
    if may_not_mount() {
        return;
    }
    let metrics = tempfile::tempdir().unwrap();
    let page = metrics.path().join("m");
    let rig = Rig::with(&["--metrics", &format!("unix:{}", page.display())]);
    let mount = Mount::ext4(64);
    let (_guest, frozen) = hung(&rig, &mount);
    let mut told = rig.events();
    let removed = rig.ok("remove a --force");
    assert!(removed.starts_with("given up: its image stays in use"), "{removed}");
    assert_eq!(states(&rig), [("a".to_owned(), "given_up".to_owned())]);
    assert!(scrape(&page).contains("\nvhost_blk_given_up_disks 1\n"));
    // The image and the threads are in use.
    let line = rig.refused(&format!("add b {}", on(&mount, "b.sock")), 1);
    let held =
        "the removed disk a of this daemon has it until its storage answers; check that storage";
    assert!(line.contains(held), "{line}");
    let line = rig.refused("upgrade", 1);
    assert!(line.contains("the disk a, which was given up, does not answer"), "{line}");
    // The name and the socket are free.
    rig.add("a", "");
    rig.guest("a").write(0, &[2; 512]).unwrap();
    let both = ["serving", "given_up"].map(|state| ("a".to_owned(), state.to_owned()));
    assert_eq!(states(&rig), both);
    let mut until = |last: &str| {
        let mut names: Vec<String> = Vec::new();
        while names.last().is_none_or(|name| name != last) {
            names.push(told.next_event()["event"].as_str().unwrap().to_owned());
        }
        names
    };
    assert_eq!(until("disconnected"), ["given_up", "added", "connected", "disconnected"]);
    drop(frozen);
    wait_for_release(&rig);
    let content = std::fs::read(mount.path("image")).unwrap();
    assert!(content[..4096] == [1; 4096], "the write was in flight");
    rig.ok(&format!("add b {}", on(&mount, "b.sock")));
    assert_eq!(rig.names(), ["a", "b"]);
    assert!(scrape(&page).contains("\nvhost_blk_given_up_disks 0\n"));
    rig.ok("upgrade");
    assert_eq!(until("released"), ["released"]);
}

#[test]
fn a_removal_ends_the_connection_those_that_wait_and_the_socket_before_the_storage_answers() {
    if may_not_mount() {
        return;
    }
    let rig = Rig::new();
    let mount = Mount::ext4(64);
    let (_guest, frozen) = hung(&rig, &mount);
    let mut waiting = UnixStream::connect(rig.path("a.sock")).unwrap();
    let line = rig.refused("--timeout 1 remove a", 3);
    assert!(line.contains("no answer in 1 s"), "{line}");
    waiting.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
    assert_eq!(waiting.read(&mut [0; 1]).unwrap(), 0, "nobody serves it");
    assert!(!rig.path("a.sock").exists());
    let line = rig.refused(&format!("add a {}", on(&mount, "a.sock")), 1);
    assert!(line.contains("is being removed"), "{line}");
    assert!(rig.ok("remove a --force").starts_with("given up: "));
    let line = rig.refused("remove a --force", 1);
    assert!(line.contains("there is none of this name"), "{line}");
    drop(frozen);
    wait_for_release(&rig);
}

#[test]
fn a_disk_whose_storage_answers_is_drained_by_a_removal_by_force() {
    let rig = Rig::new();
    rig.add("a", "");
    let _guest = rig.guest("a");
    assert_eq!(rig.ok("remove a --force"), "done\n");
    assert_eq!(states(&rig), []);
}

/// A late answer to the old requests would overwrite the memory of the new ones.
#[test]
fn requests_of_a_disk_that_was_given_up_are_not_carried_out_again_before_their_end() {
    if may_not_mount() {
        return;
    }
    let rig = Rig::new();
    let mount = Mount::ext4(64);
    let (mut guest, frozen) = hung(&rig, &mount);
    rig.ok("remove a --force");
    rig.add("a", "");
    assert!(guest.reconnect(rig.path("a.sock")).is_err());
    // The connection before has ended then.
    rig.guest("a").write(9, &[0; 512]).unwrap();
    let other = std::fs::read(rig.path("a.img")).unwrap();
    assert!(other.iter().all(|byte| *byte == 0), "the write was carried out again");
    drop(frozen);
    wait_for_release(&rig);
    guest.reconnect(rig.path("a.sock")).unwrap();
    let (_, done) = guest.queue(0).collect().unwrap();
    assert_eq!(done.status, Some(S_OK));
}

#[test]
fn the_daemon_ends_before_the_storage_of_a_disk_that_was_given_up_answers() {
    if may_not_mount() {
        return;
    }
    let mut rig = Rig::new();
    let mount = Mount::ext4(64);
    let (_guest, frozen) = hung(&rig, &mount);
    rig.ok("remove a --force");
    rig.daemon.signal(libc::SIGTERM);
    // Its last act. The kernel keeps the process, whose thread writes to the frozen file system.
    rig.place.wait_until("the end", || !rig.path("ctl").exists());
    drop(frozen);
    assert_eq!(rig.daemon.wait().code(), Some(0));
}
