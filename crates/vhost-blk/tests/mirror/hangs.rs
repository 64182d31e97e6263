// SPDX-License-Identifier: Apache-2.0
//! Targets that hang: the file system is frozen, and what changes it waits.

use crate::ended::with_disk;
use crate::mount::{Frozen, Mount, may_not_mount};
use crate::rig::Rig;
use crate::{
    add, add_raw, begin, content, error_of, fill, guest, image, in_old_storage, mirror, parts_in,
    target_threads, text, wait_until,
};
use std::fs;
use std::path::PathBuf;

/// Bytes that are copied at once with a small bandwidth.
const PIECE: u64 = 64 << 10;

/// The place of a target, on a file system that can be frozen.
struct Target {
    mount: Mount,
}

impl Target {
    fn new() -> Target {
        Target { mount: Mount::ext4(64) }
    }

    fn path(&self) -> PathBuf {
        self.mount.path("b")
    }

    /// Expects that nothing is left of a mirror some time after the release.
    #[track_caller]
    fn is_clean(&self, rig: &Rig) {
        wait_until("the end of the thread of the target", || target_threads(rig) == 0);
        assert_eq!(parts_in(self.mount.place.path()), [""; 0]);
        assert!(!self.path().exists());
    }
}

/// Returns whether the daemon has a file of its place open.
fn has_open(rig: &Rig, name: &str) -> bool {
    rig.daemon.descriptors().iter().any(|open| *open == text(&rig.path(name)))
}

/// Expects that neither a mirror of the disk `a` nor an upgrade begins.
#[track_caller]
fn waits_for_target(rig: &Rig, words: &str) {
    let line = rig.refused(words, 1);
    assert!(line.contains("a storage of its last mirror does not answer"), "{line}");
    let line = rig.refused("upgrade", 1);
    assert!(line.contains("a storage of the mirror to it does not answer"), "{line}");
    assert_eq!(target_threads(rig), 1);
}

/// The copy of changes hangs. The guest goes on, a cancel and a removal have their end, and the target is
/// given up when it answers.
#[test]
fn a_target_that_hangs_holds_neither_the_guest_nor_a_cancel_nor_the_disk() {
    if may_not_mount() {
        return;
    }
    let (rig, mut device) = with_disk("");
    let target = Target::new();
    let to = text(&target.path()).to_owned();
    rig.ok(&format!("mirror a --to {to} --wait"));
    let frozen = Frozen::of(&target.mount);
    fill(&mut device, 2);
    let client = begin(&rig, "mirror a --complete");
    fill(&mut device, 3);
    assert!(content(&mut device).iter().all(|byte| *byte == 3));
    rig.ok("mirror a --cancel");
    assert!(!error_of(client).is_empty());
    in_old_storage(&rig, &mut device);
    waits_for_target(&rig, &format!("mirror a --to {to}"));
    // The image is not kept open, and another disk of this name does not begin a second thread.
    drop(device);
    rig.ok("remove a");
    wait_until("the close of the image", || !has_open(&rig, "a.img"));
    add(&rig, "a", "--blk-file a.img");
    let mut device = guest(&rig, "a");
    waits_for_target(&rig, &format!("mirror a --to {to}"));
    drop(frozen);
    target.is_clean(&rig);
    rig.ok("upgrade");
    device.write(1, &[3; 512]).unwrap();
    assert!(content(&mut device).iter().all(|byte| *byte == 3));
    rig.ok(&format!("mirror a --to {to} --complete"));
    assert!(content(&mut device).iter().all(|byte| *byte == 3));
}

/// Nothing is to be copied, and the new file cannot get its name while the disk is drained.
#[test]
fn a_target_that_hangs_while_the_disk_is_drained_fails_the_mirror_and_the_guest_goes_on() {
    if may_not_mount() {
        return;
    }
    for format in ["raw", "qcow2"] {
        let (rig, mut device) = with_disk("");
        let target = Target::new();
        let to = text(&target.path()).to_owned();
        rig.ok(&format!("mirror a --to {to} --format {format} --wait"));
        let frozen = Frozen::of(&target.mount);
        let client = begin(&rig, "mirror a --complete");
        wait_until("the drain", || mirror(&rig)["state"] == "drained");
        // The drained disk takes them after its bounded wait.
        fill(&mut device, 2);
        let line = error_of(client);
        assert!(line.contains("did not take the rest of the copy in 5 s"), "{line}");
        in_old_storage(&rig, &mut device);
        drop(frozen);
        target.is_clean(&rig);
        fill(&mut device, 4);
        assert!(content(&mut device).iter().all(|byte| *byte == 4));
        assert!(fs::read(rig.path("a.img")).unwrap().iter().all(|byte| *byte == 4));
        rig.ok(&format!("mirror a --to {to} --format {format} --complete"));
        assert!(content(&mut device).iter().all(|byte| *byte == 4));
    }
}

/// The guest writes no more, so that no write waits for the copy. The act that hangs is one of the first
/// completion, and delays the second one, too.
#[test]
fn a_completion_is_refused_in_time_while_the_copy_hangs_and_can_be_repeated() {
    if may_not_mount() {
        return;
    }
    let rig = Rig::new();
    add_raw(&rig);
    let mut device = guest(&rig, "a");
    device.write(0, &vec![1; PIECE as usize]).unwrap();
    let target = Target::new();
    let to = text(&target.path()).to_owned();
    // After the only piece with data, the first copy waits for the bandwidth.
    rig.ok(&format!("mirror a --to {to} --bandwidth 1K"));
    wait_until("the copy of the data", || mirror(&rig)["copied_bytes"] == PIECE);
    let call = r#"{"method":"io.vhostblk.CompleteMirror","parameters":{"name":"a"}}"#;
    let mut client = rig.connect();
    client.send(call);
    let frozen = Frozen::of(&target.mount);
    device.write(0, &[2; 512]).unwrap();
    assert_eq!(mirror(&rig)["state"], "copying");
    rig.ok("jobs a --bandwidth off");
    wait_until("the completion", || mirror(&rig)["state"] == "completing");
    for is_repeated in [true, false] {
        let told = client.receive().to_string();
        assert!(told.contains("no part of the copy was done for seconds"), "{told}");
        assert_eq!(mirror(&rig)["state"], "ready");
        if is_repeated {
            client.send(call);
        }
    }
    let before = content(&mut device);
    drop(frozen);
    rig.ok("mirror a --complete");
    assert!(content(&mut device) == before);
    assert!(fs::read(&to).unwrap() == before);
}

/// Neither the opening of a target nor the copy in a completion delays the control of other disks.
#[test]
fn a_target_that_hangs_delays_no_reload_and_no_other_disk() {
    if may_not_mount() {
        return;
    }
    let file = "blk-file = '@/a.img'\nsocket-path = '@/a.sock'\nnum-queues = 2\n";
    let rig = Rig::of_directory(&[("a", file)]);
    image(&rig, "a.img", "raw");
    image(&rig, "o.img", "raw");
    rig.ok("reload");
    add(&rig, "o", "--blk-file o.img");
    let mut device = guest(&rig, "a");
    let target = Target::new();
    let to = text(&target.path()).to_owned();
    let frozen = Frozen::of(&target.mount);
    let client = begin(&rig, &format!("mirror a --to {to}"));
    wait_until("the mirror", || !mirror(&rig).is_null());
    assert_eq!(rig.json("--timeout 20 reload"), serde_json::json!([]));
    rig.ok("--timeout 20 snapshot o --to over0");
    fill(&mut device, 1);
    rig.ok("--timeout 20 mirror a --cancel");
    assert!(error_of(client).contains("it was cancelled before its new storage was open"));
    drop(frozen);
    target.is_clean(&rig);
    // The same in a completion that has changes to copy.
    rig.ok(&format!("mirror a --to {to} --wait"));
    let frozen = Frozen::of(&target.mount);
    fill(&mut device, 2);
    let client = begin(&rig, "mirror a --complete --update-config");
    for round in 1..4 {
        assert_eq!(rig.json("--timeout 20 reload"), serde_json::json!([]));
        rig.ok(&format!("--timeout 20 snapshot o --to over{round}"));
    }
    assert!(!mirror(&rig).is_null());
    rig.ok("--timeout 20 mirror a --cancel");
    drop(error_of(client));
    drop(frozen);
    target.is_clean(&rig);
    in_old_storage(&rig, &mut device);
}

/// The opening of a target keeps neither the image open, nor a thread for each mirror.
#[test]
fn a_target_that_hangs_while_it_is_opened_has_one_thread_and_not_the_image() {
    if may_not_mount() {
        return;
    }
    let (rig, mut device) = with_disk("");
    let target = Target::new();
    let words = format!("mirror a --to {}", text(&target.path()));
    let frozen = Frozen::of(&target.mount);
    let client = begin(&rig, &words);
    wait_until("the mirror", || !mirror(&rig).is_null());
    fill(&mut device, 2);
    rig.ok("--timeout 20 mirror a --cancel");
    assert!(error_of(client).contains("it was cancelled before its new storage was open"));
    waits_for_target(&rig, &words);
    drop(device);
    rig.ok("remove a");
    wait_until("the close of the image", || !has_open(&rig, "a.img"));
    add(&rig, "a", "--blk-file a.img");
    waits_for_target(&rig, &words);
    drop(frozen);
    target.is_clean(&rig);
    rig.ok("upgrade");
    rig.ok(&format!("{words} --complete"));
    assert!(content(&mut guest(&rig, "a")).iter().all(|byte| *byte == 2));
}

/// An incomplete file on a storage that hangs cannot be removed at the end of the process.
#[test]
fn a_target_that_hangs_does_not_delay_the_end_of_the_daemon() {
    if may_not_mount() {
        return;
    }
    let rig = Rig::new();
    image(&rig, "a.img", "raw");
    add(&rig, "a", "--blk-file a.img --wrap delay:us=20000000,ops=write");
    let mut device = guest(&rig, "a");
    let target = Target::new();
    rig.ok(&format!("mirror a --to {} --wait", text(&target.path())));
    let layout = device.layout();
    device.queue(0).submit(&driver::Request::write(0, &[1; 512]), &layout).unwrap();
    wait_until("the request is taken", || rig.json("status a")["queues"][0]["inflight"] == 1);
    let frozen = Frozen::of(&target.mount);
    let mut rig = rig;
    rig.ok("stop");
    // The last act before the exit, which waits for the thread in the frozen file system.
    wait_until("the removal of the control socket", || !rig.path("ctl").exists());
    drop(frozen);
    assert_eq!(rig.daemon.wait().code(), Some(0));
}

/// The end of a job rewrites the file of its disk, while writes of the guest may wait for the copy.
#[test]
fn a_directory_of_configurations_that_hangs_holds_neither_the_guest_nor_other_disks() {
    if may_not_mount() {
        return;
    }
    let mut rig = Rig::new();
    image(&rig, "a.img", "raw");
    image(&rig, "o.img", "raw");
    rig.ok("stop");
    rig.daemon.wait();
    let mount = Mount::ext4(64);
    let place = rig.place.dir.path().display();
    let file = format!("blk-file = '{place}/a.img'\nsocket-path = '{place}/a.sock'\n");
    fs::write(mount.path("a.toml"), format!("{file}num-queues = 2\n")).unwrap();
    rig.restart(&["--config-dir", text(mount.place.path())]);
    wait_until("the disk", || rig.path("a.sock").exists());
    add(&rig, "o", "--blk-file o.img");
    let mut device = guest(&rig, "a");
    fill(&mut device, 1);
    let over = rig.path("over").display().to_string();
    for command in ["mirror a --complete", "commit a", &format!("snapshot a --to {over}2")] {
        match command {
            "commit a" => drop(rig.ok(&format!("snapshot a --to {over} --update-config"))),
            "mirror a --complete" => drop(rig.ok("mirror a --to b --wait")),
            _ => {}
        }
        let frozen = Frozen::of(&mount);
        let client = begin(&rig, &format!("{command} --update-config"));
        for byte in 2..5 {
            fill(&mut device, byte);
        }
        let line = error_of(client);
        assert!(line.contains("has not answered for 5 s"), "{line}");
        rig.ok("--timeout 20 snapshot o --to over-o");
        rig.ok("--timeout 20 commit o");
        fs::remove_file(rig.path("over-o")).unwrap();
        if command.starts_with("mirror") {
            rig.ok("mirror a --cancel");
            in_old_storage(&rig, &mut device);
        }
        let line = rig.refused("upgrade", 1);
        assert!(line.contains("storage"), "{line}");
        fill(&mut device, 5);
        drop(frozen);
        wait_until("the end of the thread", || rig.ctl("upgrade").status.success());
        assert!(content(&mut device).iter().all(|byte| *byte == 5));
    }
    rig.ok("commit a --update-config");
    assert!(content(&mut device).iter().all(|byte| *byte == 5));
    // Without the disk, its image is free, although the thread waits.
    rig.ok("mirror a --to b --wait");
    let frozen = Frozen::of(&mount);
    let line = error_of(begin(&rig, "mirror a --complete --update-config"));
    assert!(line.contains("has not answered for 5 s"), "{line}");
    rig.ok("mirror a --cancel");
    drop(device);
    rig.ok("remove a");
    wait_until("the close of the image", || !has_open(&rig, "a.img"));
    drop(frozen);
}
