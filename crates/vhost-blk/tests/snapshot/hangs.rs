// SPDX-License-Identifier: Apache-2.0
//! Storage that hangs, as its file system is frozen and what changes it waits: a backing file while an image is
//! merged into it, and the place of an overlay. The image is on another one.

use crate::mount::{Frozen, Mount, may_not_mount, run};
use crate::rig::Rig;
use crate::{BYTES, add, begin, content, error_of, fill, guest, image, mark, text};
use driver::Device;
use std::path::PathBuf;

/// Cluster size of an overlay.
const CLUSTER: u64 = 64 << 10;

/// A disk `a` in an empty overlay over an image on a file system that can be frozen.
struct Place {
    rig: Rig,
    mount: Mount,
    below: PathBuf,
}

impl Place {
    fn of(format: &str) -> (Place, Device) {
        let rig = Rig::new();
        let mount = Mount::ext4(64);
        let below = mount.path("a.img");
        run(&["qemu-img", "create", "-qf", format, text(&below), "16M"]);
        add(&rig, "a", &format!("--blk-file {} --format {format}", text(&below)));
        let device = guest(&rig, "a");
        rig.ok("snapshot a --to b");
        (Place { rig, mount, below }, device)
    }

    /// Expects that the guest goes on in the image, also while the backing file hangs, and that the next commit
    /// begins as soon as it answers.
    #[track_caller]
    fn goes_on(&self, frozen: Frozen<'_>, device: &mut Device, byte: u8) {
        let disk = self.rig.json("status a")["disk"].as_str().unwrap().to_owned();
        assert!(!disk.contains("being merged"), "{disk}");
        fill(device, byte);
        // The thread may write to the backing file until it has its answer.
        let line = self.rig.refused("commit a", 1);
        assert!(line.contains("of it is in progress"), "{line}");
        let line = self.rig.refused("snapshot a --to c", 1);
        assert!(line.contains("a commit of it is in progress"), "{line}");
        drop(frozen);
        let is_over = || self.rig.ok("commit a --cancel") == "nothing to do\n";
        self.rig.place.wait_until("the end of the thread", is_over);
        assert_eq!(mark(&self.below), Some(self.rig.path("b")));
        assert!(content(device).iter().all(|found| *found == byte));
        self.rig.ok("commit a");
        assert!(content(device).iter().all(|found| *found == byte));
        assert_eq!(mark(&self.below), None);
    }
}

/// The brake is on, and most of the guest's writes wait for the copy.
#[test]
fn a_backing_file_that_hangs_holds_the_writes_of_the_guest_for_a_bounded_time() {
    if may_not_mount() {
        return;
    }
    let (mut place, mut device) = Place::of("raw");
    place.rig.ok("log-level debug");
    let near_end = BYTES - 2 * CLUSTER;
    device.write(near_end / 512, &[1; 512]).unwrap();
    // The copy of the only cluster uses the bandwidth up, so that the look at the last one waits for it.
    let client = begin(&place.rig, "commit a --bandwidth 1K");
    let copied = || std::fs::read(&place.below).unwrap()[near_end as usize] == 1;
    place.rig.place.wait_until("the copy of the cluster", copied);
    device.write(0, &[2; 512]).unwrap();
    let frozen = Frozen::of(&place.mount);
    place.rig.ok("jobs a --bandwidth off");
    place.rig.daemon.log_line("the brake is on");
    // More than the bound: the last writes wait until the commit is given up, and the backing file still hangs.
    fill(&mut device, 2);
    let line = error_of(client);
    assert!(line.contains("no part of the copy was done for seconds"), "{line}");
    place.goes_on(frozen, &mut device, 3);
}

#[test]
fn a_backing_file_that_hangs_does_not_hold_a_cancel() {
    if may_not_mount() {
        return;
    }
    let (place, mut device) = Place::of("raw");
    fill(&mut device, 1);
    let frozen = Frozen::of(&place.mount);
    let client = begin(&place.rig, "commit a");
    place.rig.place.wait_until("the commit", || {
        place.rig.json("status a")["disk"].as_str().unwrap().contains("being merged")
    });
    place.rig.ok("commit a --cancel");
    let line = error_of(client);
    assert!(line.contains("it was cancelled"), "{line}");
    place.goes_on(frozen, &mut device, 4);
}

/// The mark of the backing file in use cannot be set.
#[test]
fn a_backing_file_that_hangs_while_it_is_opened_holds_no_other_disk() {
    if may_not_mount() {
        return;
    }
    let (place, mut device) = Place::of("qcow2");
    image(&place.rig, "o.img", "raw");
    add(&place.rig, "o", "--blk-file o.img");
    let frozen = Frozen::of(&place.mount);
    let client = begin(&place.rig, "commit a");
    let hangs = |(name, state): &(String, String)| name == "merge-target" && state == "D";
    let rig = &place.rig;
    rig.place.wait_until("the opening", || rig.daemon.threads().iter().any(hangs));
    rig.ok("--timeout 20 snapshot o --to over");
    fill(&mut device, 1);
    rig.ok("commit a --cancel");
    let line = error_of(client);
    assert!(line.contains("it was cancelled before its backing file was open"), "{line}");
    place.goes_on(frozen, &mut device, 6);
}

/// Nothing is to be copied, and the mark cannot be removed.
#[test]
fn a_backing_file_that_hangs_while_the_disk_is_drained_fails_the_commit_and_keeps_its_mark() {
    if may_not_mount() {
        return;
    }
    let (place, mut device) = Place::of("raw");
    let frozen = Frozen::of(&place.mount);
    let line = place.rig.refused("commit a", 1);
    assert!(line.contains("the backing file did not take the rest of the copy in 5 s"), "{line}");
    place.goes_on(frozen, &mut device, 5);
}

/// Expects that the reload of the configuration and each kind of work go on for the disk `o`.
#[track_caller]
fn others_go_on(rig: &Rig, device: &mut Device) {
    rig.ok("--timeout 20 snapshot o --to over");
    rig.ok("--timeout 20 backup o --to copy");
    rig.ok("--timeout 20 mirror o --to moved --complete");
    let line = rig.refused("--timeout 20 reload", 1);
    assert!(line.contains("no directory of configuration files"), "{line}");
    fill(device, 8);
}

#[test]
fn an_overlay_that_hangs_while_it_is_made_holds_neither_the_disk_nor_another_one() {
    if may_not_mount() {
        return;
    }
    let rig = Rig::new();
    for name in ["a", "o"] {
        image(&rig, &format!("{name}.img"), "raw");
        add(&rig, name, &format!("--blk-file {name}.img"));
    }
    let mut device = guest(&rig, "a");
    let mount = Mount::ext4(64);
    let words = format!("snapshot a --to {}", text(&mount.path("over")));
    let frozen = Frozen::of(&mount);
    let mut client = begin(&rig, &words);
    let hangs = |(name, state): &(String, String)| name == "snapshot-target" && state == "D";
    rig.place.wait_until("the making", || rig.daemon.threads().iter().any(hangs));
    others_go_on(&rig, &mut device);
    for words in ["snapshot a --to here", "commit a", "mirror a --to there", "backup a --to copy-a"]
    {
        let line = rig.refused(words, 1);
        assert!(line.contains("a snapshot of it is in progress; wait"), "{words}: {line}");
    }
    let line = rig.refused("upgrade", 1);
    assert!(line.contains("a snapshot of it is in progress; wait"), "{line}");
    client.kill().unwrap();
    client.wait().unwrap();
    // The thread is left alone, and the disk is free for other work.
    rig.place
        .wait_until("the end of the snapshot", || rig.ctl("backup a --to copy-a").status.success());
    let line = rig.refused(&words, 1);
    assert!(line.contains("a storage of its last snapshot does not answer"), "{line}");
    let line = rig.refused("upgrade", 1);
    assert!(line.contains("a storage of the snapshot to it does not answer"), "{line}");
    drop(frozen);
    rig.place
        .wait_until("the end of the thread", || rig.daemon.threads_named("snapshot-target") == 0);
    assert!(!mount.path("over").exists());
    rig.ok(&words);
    assert!(content(&mut device).iter().all(|found| *found == 8));
}

/// The exchange of the program waits for all threads, while all disks stand still.
#[test]
fn a_sync_for_a_command_that_hangs_refuses_an_upgrade_and_keeps_no_place_of_a_client_that_goes() {
    if may_not_mount() {
        return;
    }
    let rig = Rig::new();
    // A freeze makes its own file system durable, but not the one on an image in it.
    let below = Mount::ext4(128);
    let mount = Mount::ext4_in(below.place.path(), 64);
    run(&["qemu-img", "create", "-qf", "raw", text(&mount.path("a.img")), "16M"]);
    add(&rig, "a", &format!("--blk-file {} --direct off", text(&mount.path("a.img"))));
    image(&rig, "o.img", "raw");
    add(&rig, "o", "--blk-file o.img");
    let (mut device, mut other) = (guest(&rig, "a"), guest(&rig, "o"));
    device.write(0, &[1; 4096]).unwrap();
    let frozen = Frozen::of(&below);
    let client = begin(&rig, "snapshot a --to b");
    let syncing = || {
        let syncs = |(name, state): &&(String, String)| name == "apart" && state == "D";
        rig.daemon.threads().iter().filter(syncs).count()
    };
    rig.place.wait_until("the sync", || syncing() == 1);
    let clients = || rig.daemon.threads_named("control-client");
    let more = ["snapshot a --to c", "backup a --to d"].map(|words| begin(&rig, words));
    rig.place.wait_until("the other clients", || clients() == 3);
    for mut client in more {
        client.kill().unwrap();
        client.wait().unwrap();
    }
    rig.place.wait_until("the places of the clients", || clients() == 1);
    assert_eq!(syncing(), 1, "one sync of a disk at a time");
    let line = rig.refused("upgrade", 1);
    assert!(line.contains("waits for the storage of the disk a"), "{line}");
    fill(&mut other, 2);
    drop(frozen);
    assert!(client.wait_with_output().unwrap().status.success());
    assert!(
        ["c", "d"].iter().all(|name| !rig.path(name).exists()),
        "work of a client that has gone"
    );
    rig.ok("upgrade");
    assert_eq!(content(&mut device)[..4096], [1; 4096]);
}
