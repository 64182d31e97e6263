// SPDX-License-Identifier: Apache-2.0
//! Mirrors that end before their completion: the guest goes on in its old storage, and loses nothing.

use crate::moments::Moments;
use crate::mount::{Mount, may_not_mount};
use crate::rig::Rig;
use crate::{
    BYTES, QUEUES, add, add_raw, begin, content, error_of, fill, guest, image, in_old_storage,
    mirror, moved_to, parts, target_threads, text, wait_until,
};
use driver::{Device, Request};
use serde_json::Value;
use std::fs::{self, File};

pub(crate) fn with_disk(options: &str) -> (Rig, Device) {
    let rig = Rig::new();
    image(&rig, "a.img", "raw");
    add(&rig, "a", &format!("--blk-file a.img {options}"));
    let mut device = guest(&rig, "a");
    fill(&mut device, 1);
    (rig, device)
}

/// Moves the disk `a` from the file `b` to a new one of the old name.
fn move_back(rig: &Rig) {
    fs::remove_file(rig.path("a.img")).unwrap();
    drop(rig.json("mirror a --to a.img --complete"));
    fs::remove_file(rig.path("b")).unwrap();
}

#[test]
fn a_cancel_at_any_moment_leaves_the_guest_in_its_storage_or_in_the_new_one() {
    let (rig, mut device) = with_disk("");
    let mut before = content(&mut device);
    let mut moments = Moments::of(|| drop(rig.ok("mirror a --to b --complete")));
    move_back(&rig);
    for round in 0..16_u64 {
        let mut client = begin(&rig, "mirror a --to b --complete");
        moments.wait();
        if round % 2 == 0 {
            // The mirror outlives its client, and is then cancelled.
            client.kill().unwrap();
        }
        let cancel = rig.ctl("--json mirror a --cancel");
        let ended = client.wait_with_output().unwrap();
        let path = rig.json("snapshots a")[0]["path"].as_str().unwrap().to_owned();
        let has_moved = path == text(&rig.path("b"));
        let line = String::from_utf8(cancel.stderr).unwrap();
        match cancel.status.success() {
            true => {
                let told: Value = serde_json::from_slice(&cancel.stdout).unwrap();
                // There was no mirror yet, or none any more, or it is cancelled.
                assert!(told["changed"] == false || !has_moved, "{told}: it goes on in {path}");
            }
            false => assert!(has_moved && line.contains("has moved to the new storage"), "{line}"),
        }
        // The client may have begun a mirror after the cancel.
        rig.ok("mirror a --cancel");
        assert!(mirror(&rig).is_null());
        wait_until("the end of the thread of the target", || target_threads(&rig) == 0);
        moments.learn(has_moved);
        if has_moved {
            move_back(&rig);
        } else {
            let line = String::from_utf8(ended.stderr).unwrap();
            let reasons = ["was cancelled", "not being mirrored", "the daemon"];
            assert!(
                line.is_empty() || reasons.iter().any(|reason| line.contains(reason)),
                "{line}"
            );
            assert!(!rig.path("b").exists());
            in_old_storage(&rig, &mut device);
            before[512..1024].fill(1);
        }
        device.write(round + 8, &[round as u8; 512]).unwrap();
        before[(round as usize + 8) * 512..][..512].fill(round as u8);
        assert!(content(&mut device) == before, "round {round}");
    }
    moments.assert_both();
    let client = begin(&rig, "mirror a --to b --bandwidth 4K --complete");
    wait_until("the copy", || mirror(&rig)["state"] == "copying");
    assert_eq!(rig.json("mirror a --cancel")["changed"], true);
    assert!(error_of(client).contains("was cancelled"));
    in_old_storage(&rig, &mut device);
}

#[test]
fn a_mirror_outlives_its_client_and_goes_with_its_disk() {
    let (rig, device) = with_disk("");
    // 16 MiB at this rate take longer than this test.
    let mut client = begin(&rig, "mirror a --to b --bandwidth 64K --wait");
    // A client that goes before the begin is complete takes the mirror with it.
    let has_begun = || mirror(&rig)["copied_bytes"].as_u64().is_some_and(|bytes| bytes > 0);
    wait_until("the copy", has_begun);
    client.kill().unwrap();
    client.wait().unwrap();
    assert_eq!(mirror(&rig)["state"], "copying");
    assert_eq!(parts(&rig).len(), 1);
    drop(device);
    rig.ok("remove a");
    assert_eq!((parts(&rig).len(), rig.path("b").exists()), (0, false));
    // Nothing is locked.
    add(&rig, "a", "--blk-file a.img");
    let mut device = guest(&rig, "a");
    assert!(content(&mut device).iter().all(|byte| *byte == 1));
    in_old_storage(&rig, &mut device);
}

#[test]
fn the_end_of_the_daemon_cancels_a_mirror() {
    let (mut rig, device) = with_disk("");
    for is_ready in [false, true] {
        rig.ok(if is_ready { "mirror a --to b --wait" } else { "mirror a --to b --bandwidth 64K" });
        rig.ok("stop");
        assert!(rig.daemon.wait().success());
        assert_eq!((parts(&rig).len(), rig.path("b").exists()), (0, false));
        rig.restart(&[]);
        add(&rig, "a", "--blk-file a.img");
    }
    drop(device);
    assert!(content(&mut guest(&rig, "a")).iter().all(|byte| *byte == 1));
}

/// The storage does not complete a write: the process ends after 900 ms, and not with the write.
#[test]
fn an_end_of_the_daemon_without_a_drain_removes_the_incomplete_file() {
    let rig = Rig::new();
    image(&rig, "a.img", "raw");
    add(&rig, "a", "--blk-file a.img --wrap delay:us=600000000,ops=write");
    let mut device = guest(&rig, "a");
    rig.ok("mirror a --to b --wait");
    let layout = device.layout();
    device.queue(0).submit(&Request::write(0, &[1; 512]), &layout).unwrap();
    wait_until("the request is taken", || rig.json("status a")["queues"][0]["inflight"] == 1);
    let mut rig = rig;
    rig.ok("stop");
    rig.daemon.wait();
    assert_eq!((parts(&rig).len(), rig.path("b").exists()), (0, false));
}

#[test]
fn a_full_target_ends_the_mirror_and_no_request_of_the_guest() {
    if may_not_mount() {
        return;
    }
    let (rig, mut device) = with_disk("");
    let small = Mount::tmpfs(8);
    let target = small.path("b");
    for format in ["raw", "qcow2"] {
        let words = format!("mirror a --to {} --format {format} --wait", text(&target));
        let line = rig.refused(&words, 1);
        assert!(line.contains("writing the new storage: No space left"), "{line}");
        in_old_storage(&rig, &mut device);
        assert_eq!(fs::read_dir(small.place.path()).unwrap().count(), 0);
        let told = rig.ok("mirror a");
        assert!(told.contains("there is no mirror\nthe last one has ended: writing"), "{told}");
        let line = rig.refused("mirror a --complete", 1);
        assert!(line.contains("writing the new storage: No space left"), "{line}");
        let mut raw = rig.connect();
        let call = r#"{"method":"io.vhostblk.CompleteMirror","parameters":{"name":"a"}}"#;
        let why = raw.call(call)["parameters"]["why"].as_str().unwrap().to_owned();
        assert!(why.contains("not being mirrored any more: writing the new storage"), "{why}");
    }
    // It becomes full after the first copy, while a client completes the mirror.
    drop(device);
    rig.ok("remove a");
    fs::remove_file(rig.path("a.img")).unwrap();
    add_raw(&rig);
    let mut device = guest(&rig, "a");
    rig.ok(&format!("mirror a --to {} --wait", text(&target)));
    fill(&mut device, 3);
    let line = rig.refused("mirror a --complete", 1);
    assert!(line.contains("writing the new storage: No space left"), "{line}");
    in_old_storage(&rig, &mut device);
    device.write(1, &[3; 512]).unwrap();
    assert!(content(&mut device).iter().all(|byte| *byte == 3));
}

#[test]
fn an_error_of_the_old_storage_ends_the_mirror() {
    let (rig, mut device) = with_disk("");
    rig.ok("mirror a --to b --bandwidth 64K");
    let image = File::options().write(true).open(rig.path("a.img")).unwrap();
    image.set_len(BYTES - 4096).unwrap();
    rig.ok("jobs a --bandwidth off");
    wait_until("the end of the mirror", || mirror(&rig).is_null());
    let ended = rig.json("mirror a")["ended"].as_str().unwrap().to_owned();
    assert!(
        ended.contains("reading at") && ended.contains("check the storage of the disk"),
        "{ended}"
    );
    assert_eq!((parts(&rig).len(), rig.path("b").exists()), (0, false));
    assert_eq!(moved_to(&rig.path("a.img")), None);
    image.set_len(BYTES).unwrap();
    in_old_storage(&rig, &mut device);
}

/// The drain cannot end: the client gives up, the guest goes on, and the mirror, too.
#[test]
fn a_completion_whose_client_gives_up_is_withdrawn() {
    let rig = Rig::new();
    image(&rig, "a.img", "raw");
    add(&rig, "a", "--blk-file a.img --wrap delay:us=8000000,ops=write");
    let mut device = guest(&rig, "a");
    rig.ok("mirror a --to b --wait");
    let layout = device.layout();
    device.queue(0).submit(&Request::write(0, &[1; 512]), &layout).unwrap();
    wait_until("the request is taken", || rig.json("status a")["queues"][0]["inflight"] == 1);
    let mut client = begin(&rig, "mirror a --complete");
    wait_until("the completion", || mirror(&rig)["state"] == "completing");
    client.kill().unwrap();
    client.wait().unwrap();
    wait_until("the withdrawal", || mirror(&rig)["state"] == "ready");
    assert_eq!(device.queue(0).collect().unwrap().1.status, Some(0));
    assert!(rig.json("status a")["disk"].as_str().unwrap().contains("a.img"));
    rig.ok("mirror a --complete");
    let mut data = [0; 512];
    device.read(0, &mut data).unwrap();
    assert_eq!(data, [1; 512]);
}

/// Completions, each after some attempts.
const ROUNDS: u64 = 12;

/// A withdrawal comes at any moment of the copy, the drain and the move: the mirror goes on with every part,
/// or it is complete.
#[test]
fn completions_that_are_withdrawn_at_any_moment_lose_no_part() {
    // The drain waits for a flush, longer than the daemon waits between its looks at the client.
    let (rig, mut device) = with_disk("--wrap delay:us=200000,ops=flush");
    let layout = device.layout();
    let flush = |device: &mut Device| device.queue(1).submit(&Request::flush(), &layout).unwrap();
    let flushed = |device: &mut Device| {
        assert_eq!(device.queue(1).collect().unwrap().1.status, Some(0));
    };
    let start =
        |to: &str| rig.ok(&format!("mirror a --to {to} --format qcow2 --bandwidth 64M --wait"));
    start("first");
    fill(&mut device, 1);
    let mut moments = Moments::of(|| {
        flush(&mut device);
        rig.ok("mirror a --complete");
    });
    flushed(&mut device);
    fs::remove_file(rig.path("a.img")).unwrap();
    let mut name = "first".to_owned();
    for round in 0..ROUNDS {
        start(&round.to_string());
        let mut attempts = 0;
        while attempts < 4 && !mirror(&rig).is_null() {
            attempts += 1;
            fill(&mut device, (round * 4 + attempts) as u8);
            flush(&mut device);
            let mut client = rig.connect();
            client.send(r#"{"method":"io.vhostblk.CompleteMirror","parameters":{"name":"a"}}"#);
            moments.wait();
        }
        let mut is_withdrawn = false;
        // A busy daemon reads the last order late: it withdraws or carries it out meanwhile.
        wait_until("the completion", || {
            if mirror(&rig).is_null() {
                return true;
            }
            let output = rig.ctl("mirror a --complete");
            let stderr = String::from_utf8_lossy(&output.stderr);
            let late = ["it is not being mirrored", "another client completes it"];
            let is_late = late.iter().any(|why| stderr.contains(why));
            assert!(output.status.success() || is_late, "round {round}: {stderr}");
            is_withdrawn = output.status.success();
            is_withdrawn
        });
        let path = rig.json("snapshots a")[0]["path"].as_str().unwrap().to_owned();
        assert_eq!(path, text(&rig.path(&round.to_string())));
        let byte = (round * 4 + attempts) as u8;
        assert!(content(&mut device).iter().all(|found| *found == byte), "round {round}");
        (0..attempts).for_each(|_| flushed(&mut device));
        fs::remove_file(rig.path(&name)).unwrap();
        name = round.to_string();
        moments.learn(!is_withdrawn);
    }
    moments.assert_both();
}

/// A front-end that leaves in any state neither ends nor harms the mirror.
#[test]
fn a_mirror_outlives_front_ends() {
    let (rig, device) = with_disk("");
    rig.ok("mirror a --to b --wait");
    drop(device);
    let mut device = guest(&rig, "a");
    device.write(3, &[9; 512]).unwrap();
    drop(device);
    rig.ok("mirror a --complete");
    let mut data = [0; 512];
    guest(&rig, "a").read(3, &mut data).unwrap();
    assert_eq!(data, [9; 512]);
}

#[test]
fn a_guest_that_moves_to_another_host_ends_its_mirror_and_its_disk_grows_if_it_returns() {
    for lock in ["auto", "off"] {
        let (rig, mut device) = with_disk(&format!("--lock {lock}"));
        rig.ok("mirror a --to b");
        let _log = device.start_log().unwrap();
        for queue in 0..usize::from(QUEUES) {
            device.session().stop_queue(queue).unwrap();
        }
        wait_until("the end of the mirror", || mirror(&rig).is_null());
        assert!(rig.json("mirror a")["ended"].as_str().unwrap().contains("another host"), "{lock}");
        device.reconnect(rig.path("a.sock")).unwrap();
        in_old_storage(&rig, &mut device);
        rig.ok("resize a 17M");
        device.write(BYTES / 512, &[1; 512]).unwrap();
    }
}
