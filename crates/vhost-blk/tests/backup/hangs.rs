// SPDX-License-Identifier: Apache-2.0
//! Targets that hang: a frozen file system, where what changes it waits, and a server that says nothing.

use crate::mount::{Frozen, Mount, may_not_mount};
use crate::rig::Rig;
use crate::{Client, SLOW, assert_same, fill, parts_of};
use driver::{Device, Request};
use serde_json::json;
use std::os::unix::net::UnixListener;
use std::process::{Child, Stdio};
use std::time::Duration;
use virtio_spec::blk::S_OK;

/// A daemon with the disks `a` and `b`.
fn with_two_disks() -> Rig {
    let rig = Rig::of_directory(&[]);
    for name in ["a", "b"] {
        rig.add(name, "");
        fill(&rig.path(&format!("{name}.img")));
    }
    rig
}

/// Begins a backup of the disk `a`, and waits until its target is being opened.
fn begun(rig: &Rig, to: &str, state: &str) -> Child {
    let mut command = rig.command(&format!("backup a --to {to}"));
    let client = command.stderr(Stdio::null()).spawn().unwrap();
    let waits = |(name, is): &(String, String)| name == "backup-target" && is == state;
    rig.place.wait_until("the opening", || rig.daemon.threads().iter().any(waits));
    client
}

/// Expects that each kind of work on the disk `b` goes on, and the guest of the disk `a`.
#[track_caller]
fn others_go_on(rig: &Rig, guest: &mut Device) {
    assert_eq!(rig.json("--timeout 20 reload"), json!([]));
    rig.ok("--timeout 20 backup b --to copy-b --bitmap n");
    rig.ok("--timeout 20 bitmaps b --remove n");
    rig.ok("--timeout 20 snapshot b --to over-b");
    rig.ok("--timeout 20 commit b");
    rig.ok("--timeout 20 mirror b --to moved-b --complete");
    guest.write(100, &[1; 512]).unwrap();
    std::fs::remove_file(rig.path("copy-b")).unwrap();
}

fn target_threads(rig: &Rig) -> usize {
    rig.daemon.threads_named("backup-target")
}

/// Returns whether the daemon has the image of the disk `a` open.
fn has_image(rig: &Rig) -> bool {
    let image = rig.path("a.img");
    rig.daemon.descriptors().iter().any(|name| *name == image.display().to_string())
}

#[test]
fn a_target_that_hangs_while_it_is_opened_holds_neither_the_disk_nor_another_one() {
    if may_not_mount() {
        return;
    }
    let rig = with_two_disks();
    let mut guest = rig.guest("a");
    let mount = Mount::ext4(64);
    let to = mount.path("copy").display().to_string();
    let frozen = Frozen::of(&mount);
    let mut client = begun(&rig, &to, "D");
    others_go_on(&rig, &mut guest);
    for words in ["backup a --to other", "snapshot a --to over-a", "upgrade"] {
        let line = rig.refused(words, 1);
        assert!(
            line.contains("another backup of it") || line.contains("being backed up"),
            "{line}"
        );
    }
    client.kill().unwrap();
    client.wait().unwrap();
    // The thread is left alone, and the disk is free for other work.
    rig.place
        .wait_until("the end of the backup", || rig.ctl("snapshot a --to over-a").status.success());
    rig.ok("commit a");
    for (words, why) in [
        ("backup a --to other", "a storage of its last backup does not answer"),
        ("upgrade", "a storage of the backup to it does not answer"),
    ] {
        let line = rig.refused(words, 1);
        assert!(line.contains(why), "{line}");
    }
    drop(guest);
    rig.ok("remove a");
    rig.place.wait_until("the close of the image", || !has_image(&rig));
    assert_eq!(target_threads(&rig), 1);
    drop(frozen);
    rig.place.wait_until("the end of the thread", || target_threads(&rig) == 0);
    assert_eq!(parts_of(mount.place.path()), [""; 0]);
    assert!(!mount.path("copy").exists());
    rig.ok(&format!("backup b --to {to}"));
    rig.ok("upgrade");
}

#[test]
fn a_server_that_says_nothing_holds_no_other_disk_and_no_removal() {
    let rig = with_two_disks();
    let mut guest = rig.guest("a");
    let listener = UnixListener::bind(rig.path("silent")).unwrap();
    let mut client = begun(&rig, "nbd:unix:silent", "S");
    let _connection = listener.accept().unwrap();
    others_go_on(&rig, &mut guest);
    drop(guest);
    rig.ok("--timeout 20 remove a");
    assert_eq!(client.wait().unwrap().code(), Some(1));
    assert!(!has_image(&rig));
}

/// Expects that another client cancels the backup of the disk `a`, whose target hangs.
#[track_caller]
fn cancel(rig: &Rig, mut client: Child) {
    assert_eq!(rig.json("--timeout 20 backup a --cancel"), json!({"changed": true}));
    assert_eq!(client.wait().unwrap().code(), Some(1));
    assert_eq!(rig.json("backup a --cancel"), json!({"changed": false}));
    // The disk is free for other work.
    rig.ok("--timeout 20 snapshot a --to over-a");
    rig.ok("--timeout 20 commit a");
    std::fs::remove_file(rig.path("over-a")).unwrap();
}

#[test]
fn another_client_cancels_a_backup_whose_target_hangs() {
    let rig = with_two_disks();
    let listener = UnixListener::bind(rig.path("silent")).unwrap();
    let client = begun(&rig, "nbd:unix:silent", "S");
    let _connection = listener.accept().unwrap();
    assert_eq!(rig.json("jobs a")[0]["state"], "opening");
    cancel(&rig, client);
    // The server has not answered.
    rig.place.wait_until("the end of the thread", || target_threads(&rig) == 0);
    if may_not_mount() {
        return;
    }
    let mount = Mount::ext4(64);
    let to = mount.path("copy").display().to_string();
    let frozen = Frozen::of(&mount);
    let client = begun(&rig, &to, "D");
    assert_eq!(rig.json("jobs a")[0]["state"], "opening");
    cancel(&rig, client);
    drop(frozen);
    rig.place.wait_until("the end of the thread", || target_threads(&rig) == 0);
    assert!(!mount.path("copy").exists());
}

/// The writes of the guest wait for the copy.
#[test]
fn a_target_that_hangs_fails_the_backup_and_holds_the_writes_of_the_guest_for_a_bounded_time() {
    if may_not_mount() {
        return;
    }
    for format in ["raw", "qcow2"] {
        let rig = with_two_disks();
        let mut guest = rig.guest("a");
        let mount = Mount::ext4(64);
        let copy = mount.path("copy");
        let order = json!({"name": "a", "bandwidth": SLOW, "format": format});
        let mut client = Client::start(&rig.path("ctl"), &copy, order.clone());
        let frozen = Frozen::of(&mount);
        let layout = guest.layout();
        // In different clusters: the first one is copied, and its write to the target hangs.
        for cluster in 0..8_u64 {
            let write = Request::write(2047 - cluster * 128, &[cluster as u8; 512]);
            guest.queue(0).submit(&write, &layout).unwrap();
        }
        // More than the bound: the others wait until the backup is given up, and the target still hangs.
        for _ in 0..8 {
            assert_eq!(guest.queue(0).collect().unwrap().1.status, Some(S_OK));
        }
        let reply = client.finish();
        let why = reply["parameters"]["why"].to_string();
        assert!(
            why.contains("the target has not answered for 5 s, and writes of the guest"),
            "{reply}"
        );
        assert!(
            reply["parameters"]["remedy"].to_string().contains("check the storage of"),
            "{reply}"
        );
        assert_eq!(target_threads(&rig), 1);
        guest.write(0, &[9; 512]).unwrap();
        drop(frozen);
        rig.place.wait_until("the end of the thread", || target_threads(&rig) == 0);
        assert_eq!(parts_of(mount.place.path()), [""; 0]);
        rig.ok(&format!("backup a --to {} --format raw", copy.display()));
        assert_same(&std::fs::read(copy).unwrap(), &std::fs::read(rig.path("a.img")).unwrap());
    }
}

/// The drain has a short limit, because nothing can be done about storage that hangs. The bitmaps have a longer one.
#[test]
fn a_stop_waits_for_bitmaps_longer_than_for_requests() {
    if may_not_mount() {
        return;
    }
    let mut rig = Rig::new();
    let mount = Mount::ext4(64);
    rig.add_at("a", &mount.path("image"), "");
    rig.ok("backup a --to copy --bitmap n");
    let frozen = Frozen::of(&mount);
    rig.daemon.signal(libc::SIGTERM);
    // More than the limit of the drain.
    std::thread::sleep(Duration::from_millis(1500));
    drop(frozen);
    assert!(rig.daemon.wait().success());
    assert!(mount.path("image.vhost-blk-bitmaps").exists());
}

#[test]
fn a_stop_whose_backup_has_a_target_that_hangs_keeps_the_bitmaps() {
    if may_not_mount() {
        return;
    }
    let mut rig = Rig::of_directory(&[]);
    // In memory: its sync waits for no disk.
    let own = Mount::ext4(64);
    rig.add_at("a", &own.path("a.img"), "");
    rig.ok("backup a --to copy --bitmap n");
    let mount = Mount::ext4(64);
    let frozen = Frozen::of(&mount);
    let mut client = begun(&rig, &mount.path("copy").display().to_string(), "D");
    rig.daemon.signal(libc::SIGTERM);
    let kept = own.path("a.img.vhost-blk-bitmaps");
    rig.place.wait_until("the file of the bitmaps", || kept.exists());
    // The kernel lets the process end when its thread of the target is free.
    drop(frozen);
    assert!(rig.daemon.wait().success());
    client.wait().unwrap();
}
