// SPDX-License-Identifier: Apache-2.0
//! Mirrors that cannot be begun or completed, and commands that a mirror excludes.

use crate::rig::Rig;
use crate::{
    add, add_raw, begin, content, fill, guest, image, in_old_storage, mirror, parts, text,
    wait_until,
};
use driver::Device;
use std::fs;

fn with_disk() -> (Rig, Device) {
    let rig = Rig::new();
    add_raw(&rig);
    let device = guest(&rig, "a");
    (rig, device)
}

#[track_caller]
fn refused(rig: &Rig, words: &str, reason: &str) {
    let before = rig.place.files();
    let line = rig.refused(words, 1);
    assert!(line.contains(reason), "{words}: {line}");
    assert_eq!(rig.place.files(), before, "{words}");
}

#[test]
fn a_mirror_that_cannot_be_begun_says_why_and_leaves_nothing() {
    let (rig, mut device) = with_disk();
    fs::write(rig.path("precious"), "precious").unwrap();
    rig.ok("add m --backend mem --size 1M --socket-path m.sock");
    image(&rig, "r.img", "raw");
    add(&rig, "r", "--blk-file r.img --read-only");
    for (words, reason) in [
        ("mirror a --to precious", "precious: exists already; choose another name"),
        ("mirror a --to precious --overwrite", "precious: exists already; choose another name"),
        ("mirror a --to a.img", "a.img: exists already"),
        ("mirror a --to none/b", "its directory: No such file or directory"),
        ("mirror a --to precious/b", "Not a directory"),
        ("mirror a --to /proc/b", "/proc/b: cannot be created"),
        ("mirror a --to /dev/null", "exists already"),
        ("mirror x --to b", "there is none of this name"),
        ("mirror m --to b", "the disk has no image file"),
        ("mirror r --to b", "the disk is read-only"),
        ("mirror a --complete", "it is not being mirrored; begin that with --to"),
        ("mirror a --wait", "it is not being mirrored; begin that with --to"),
    ] {
        refused(&rig, words, reason);
        device.write(1, &[1; 512]).unwrap();
    }
    assert_eq!(rig.ok("mirror a --cancel"), "nothing to do\n");
    assert_eq!(fs::read(rig.path("precious")).unwrap(), b"precious");
    let mut raw = rig.connect();
    let call = r#"{"method":"io.vhostblk.Mirror","parameters":{"name":"a","target":"b"}}"#;
    let reply = raw.call(call);
    let why = reply["parameters"]["why"].as_str().unwrap();
    assert!(why.contains("the daemon has another directory"), "{reply}");
    in_old_storage(&rig, &mut device);
}

#[test]
fn other_commands_are_refused_during_a_mirror_and_work_after_it() {
    let (rig, mut device) = with_disk();
    fill(&mut device, 1);
    rig.ok("mirror a --to b --wait");
    for (words, reason) in [
        ("mirror a --to c", "of it is in progress"),
        ("mirror a --complete --update-config", "drop --update-config"),
        ("snapshot a --to c", "a mirror of it is in progress; complete that, or cancel it"),
        ("commit a", "a mirror of it is in progress"),
        ("backup a --to c", "a mirror of it is in progress"),
        ("resize a 17M", "the disk is being mirrored to other storage; repeat this"),
        ("upgrade", "the disk a cannot be passed on: a mirror of it is in progress"),
        ("switch a kernel", ""),
    ] {
        refused(&rig, words, reason);
        assert_eq!(mirror(&rig)["state"], "ready", "{words}");
    }
    // Those do not change the storage.
    for words in ["pause a", "resume a", "limit a --iops 100000", "set-cache a writethrough"] {
        rig.ok(words);
    }
    fill(&mut device, 2);
    rig.ok("mirror a --complete");
    assert!(content(&mut device).iter().all(|byte| *byte == 2));
    rig.ok("resize a 17M");
    rig.ok("snapshot a --to c");
    rig.ok("commit a");
    rig.ok("upgrade");
    rig.ok("mirror a --to d --complete");
    assert!(content(&mut device).iter().all(|byte| *byte == 2));
}

#[test]
fn a_disk_that_is_merged_or_backed_up_is_not_mirrored() {
    let (rig, mut device) = with_disk();
    fill(&mut device, 1);
    let mut backup = begin(&rig, "backup a --to copy --bandwidth 64K");
    wait_until("the backup", || {
        rig.json("status a")["disk"].as_str().unwrap().contains("backed up")
    });
    let line = rig.refused("mirror a --to b", 1);
    assert!(line.contains("it is being backed up"), "{line}");
    backup.kill().unwrap();
    backup.wait().unwrap();
    wait_until("the end of the backup", || parts(&rig).is_empty());
    rig.ok("snapshot a --to over");
    fill(&mut device, 2);
    let mut commit = begin(&rig, "commit a --bandwidth 64K");
    wait_until("the merge", || {
        rig.json("status a")["disk"].as_str().unwrap().contains("being merged")
    });
    let line = rig.refused("mirror a --to b", 1);
    assert!(line.contains("a commit of it is in progress"), "{line}");
    assert_eq!(rig.ok("mirror a --cancel"), "nothing to do\n", "that is no mirror");
    commit.kill().unwrap();
    commit.wait().unwrap();
}

#[test]
fn a_mirror_goes_on_after_a_completion_that_is_refused() {
    let (rig, mut device) = with_disk();
    fill(&mut device, 1);
    rig.ok("mirror a --to b --wait");
    fs::write(rig.path("b"), "another file").unwrap();
    let line = rig.refused("mirror a --complete", 1);
    assert!(line.contains("/b: exists by now; move it away"), "{line}");
    assert_eq!(mirror(&rig)["state"], "ready");
    fill(&mut device, 2);
    fs::rename(rig.path("b"), rig.path("other")).unwrap();
    fs::rename(rig.path("a.img"), rig.path("moved")).unwrap();
    let line = rig.refused("mirror a --complete", 1);
    assert!(line.contains("a.img: No such file"), "{line}");
    fs::rename(rig.path("moved"), rig.path("a.img")).unwrap();
    let part = rig.path(&parts(&rig)[0]);
    fs::rename(&part, rig.path("moved")).unwrap();
    let line = rig.refused("mirror a --complete", 1);
    assert!(line.contains("give the new storage its path back"), "{line}");
    fs::rename(rig.path("moved"), &part).unwrap();
    rig.ok("mirror a --complete");
    assert_eq!(fs::read(rig.path("other")).unwrap(), b"another file");
    assert!(content(&mut device).iter().all(|byte| *byte == 2));
    assert!(text(&rig.path("b")).ends_with("/b"));
}

/// The disk has no front-end, so that a changed file restarts it as soon as the mirror has ended.
#[test]
fn a_reload_restarts_no_disk_that_is_mirrored() {
    let file = "blk-file = '@/a.img'\nsocket-path = '@/a.sock'\nnum-queues = 2\n";
    let rig = Rig::of_directory(&[]);
    image(&rig, "a.img", "raw");
    rig.write_file("a", file);
    rig.ok("reload");
    rig.ok(&format!("mirror a --to {} --wait", text(&rig.path("b"))));
    rig.write_file("a", &format!("{file}serial = 'new'\n"));
    let line = rig.refused("reload", 1);
    assert!(line.contains("failed: a"), "{line}");
    let told = crate::common::stdout(&rig.ctl("reload"));
    assert!(told.contains("a mirror of it is in progress"), "{told}");
    assert!(!mirror(&rig).is_null());
    // A change that needs no restart reaches the disk.
    rig.write_file("a", &format!("{file}limit-iops = 100000\n"));
    assert_eq!(rig.ok("reload"), "a: changed\n");
    rig.write_file("a", &format!("{file}serial = 'new'\n"));
    rig.ok("mirror a --cancel");
    assert_eq!(rig.ok("reload"), "a: restarted\n");
    assert_eq!(guest(&rig, "a").get_id().unwrap()[..3], *b"new");
}
