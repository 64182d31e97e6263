// SPDX-License-Identifier: Apache-2.0
//! Upgrades of a chain that are refused: the old program serves on.

use crate::common::{USELESS, own_path};
use crate::mount::{Mount, loop_device, may_not_mount, run};
use crate::{Rig, add, add_raw, chain, content, guest, read_and_write, text, upgrade};
use serde_json::Value;
use std::fs;
use std::path::PathBuf;

/// The bytes of all files of [`chain`].
fn bytes(rig: &Rig) -> [Vec<u8>; 3] {
    ["top", "middle", "a.img"].map(|name| fs::read(rig.path(name)).unwrap())
}

#[test]
fn the_check_of_a_new_program_changes_no_file_and_stops_no_queue() {
    for format in ["raw", "qcow2"] {
        let rig = Rig::new();
        let mut device = chain(&rig, format);
        let since_start = || rig.json("status a")["queues"][0]["chains"].clone();
        let (before, running) = (bytes(&rig), since_start());
        let text =
            format!("{} \"$@\" || exit 1; echo it is broken >&2; exit 1", own_path().display());
        let failing = rig.place.script("failing", &text);
        let line = rig.refused(&format!("upgrade --program {}", failing.display()), 1);
        assert!(line.contains("it is broken") && line.contains("nothing was changed"), "{line}");
        assert!(bytes(&rig) == before, "the check has changed a file");
        assert_eq!(since_start(), running, "the queue was stopped");
        read_and_write(&mut device, 1);
        upgrade(&rig);
        read_and_write(&mut device, 2);
    }
}

#[test]
fn a_program_that_cannot_be_executed_leaves_the_chain_with_the_old_one() {
    let rig = Rig::new();
    let mut device = chain(&rig, "raw");
    upgrade(&rig);
    let before = rig.daemon.settled_descriptors();
    let useless = rig.place.script("once", USELESS);
    let line = rig.refused(&format!("upgrade --program {}", useless.display()), 1);
    assert!(line.contains("the old program serves on"), "{line}");
    rig.daemon.assert_descriptors(&before);
    read_and_write(&mut device, 1);
    let line = rig.refused("add b --blk-file top --format qcow2 --socket-path b.sock", 1);
    assert!(line.contains("the disk a of this daemon has it"), "{line}");
    upgrade(&rig);
    read_and_write(&mut device, 2);
    let before = content(&mut device);
    drop(device);
    rig.ok("remove a");
    run(&["qemu-img", "check", "-q", text(&rig.path("top"))]);
    add(&rig, "a", "--blk-file top --format qcow2 --allow-backing same-dir");
    assert!(content(&mut guest(&rig, "a")) == before);
}

#[test]
fn a_chain_that_is_not_the_open_one_any_more_is_refused() {
    let rig = Rig::new();
    let mut device = chain(&rig, "raw");
    // As `qemu-img rebase -u -b ''`, which respects the lock.
    let top = fs::File::options().write(true).open(rig.path("top")).unwrap();
    let header = fs::read(rig.path("top")).unwrap();
    std::os::unix::fs::FileExt::write_all_at(&top, &[0; 12], 8).unwrap();
    let line = rig.refused("upgrade", 1);
    assert!(
        line.contains("cannot take over a:") && line.contains("is not the one that is open"),
        "{line}"
    );
    std::os::unix::fs::FileExt::write_all_at(&top, &header[8..20], 8).unwrap();
    upgrade(&rig);
    read_and_write(&mut device, 1);
}

/// An image of 32 MiB in a file system over a base in the directory of the rig, which is full of data: the tables need
/// data before them. Returns its path, and its options.
fn over_a_base(rig: &Rig, mount: &Mount, create: &[&str]) -> (PathBuf, String) {
    let (path, base) = (mount.path("a.qcow2"), rig.path("base.raw"));
    fs::write(&base, vec![9; 32 << 20]).unwrap();
    let command = [&["qemu-img", "create", "-qf", "qcow2", "-F", "raw", "-b", text(&base)], create];
    run(&[&command.concat()[..], &[text(&path)]].concat());
    let options = format!("--blk-file {} --format qcow2 --allow-backing any", path.display());
    (path, options)
}

#[test]
fn tables_that_could_not_be_written_refuse_before_anything_stops() {
    if may_not_mount() {
        return;
    }
    // A file system that learns in a sync that its device has no room.
    let below = Mount::tmpfs(8);
    let file = below.path("disk");
    fs::File::create(&file).unwrap().set_len(64 << 20).unwrap();
    let disk = loop_device(&file);
    // A journal and the tables of many inodes, which the kernel fills some seconds later, would take that room.
    run(&["mkfs.ext4", "-q", "-O", "^has_journal", "-N", "64", text(&disk.path)]);
    let above = Mount::of(&disk.path);
    let rig = Rig::new();
    let (_, options) = over_a_base(&rig, &above, &[]);
    add(&rig, "a", &options);
    let mut device = guest(&rig, "a");
    device.write(1, &[1; 512]).unwrap();
    let failed = (1..64).any(|n| device.write(n * 512, &vec![2; 256 << 10]).is_err());
    assert!(failed, "8 MiB have room for 16");
    device.flush().expect_err("the tables are durable");
    run(&["mount", "-o", "remount,size=96M", text(below.place.path())]);
    let line = rig.refused("upgrade", 1);
    assert!(
        line.contains("the disk a cannot be passed on: a sync of the disk has failed"),
        "{line}"
    );
    device.flush().expect_err("a refused upgrade forgets that writes were lost");
    drop(device);
    rig.ok("remove a");
}

/// The new program would open the tables without the changes that wait.
#[test]
fn tables_that_wait_for_room_refuse_until_there_is_some() {
    if may_not_mount() {
        return;
    }
    let mount = Mount::tmpfs(16);
    let rig = Rig::new();
    let (path, options) = over_a_base(&rig, &mount, &["-o", "cluster_size=2M"]);
    add(&rig, "a", &options);
    let mut device = guest(&rig, "a");
    let failed = (0..16).find(|n| device.write(n << 12, &[2; 4096]).is_err());
    let sector = failed.expect("16 MiB have room for 32") << 12;
    let line = rig.refused("upgrade", 1);
    assert!(line.contains("has no room for the tables of its qcow2 image; make room"), "{line}");
    device.write(0, &[3; 4096]).expect("its cluster is there");
    mount.resize(64);
    upgrade(&rig);
    device.write(sector, &[2; 4096]).expect("there is room");
    let mut found = [0; 4096];
    device.read(0, &mut found).unwrap();
    assert_eq!(found, [3; 4096]);
    drop(device);
    rig.ok("remove a");
    run(&["qemu-img", "check", "-q", text(&path)]);
}

/// Has the program see a changed state: `sed` is applied to it. Keeps the state in the file `state`.
fn with_state(rig: &Rig, sed: &str) -> String {
    let own = own_path();
    let text = format!(
        "[ \"$1\" != upgrade-check ] || exec sh -c 'tee {} | sed {sed} | {} \"$@\"' check \"$@\"\n\
         exec {} \"$@\"",
        rig.path("state").display(),
        own.display(),
        own.display(),
    );
    format!("upgrade --program {}", rig.place.script("other", &text).display())
}

/// The keys of the only disk in the state that a program has seen.
fn keys(rig: &Rig) -> Vec<String> {
    let state: Value = serde_json::from_slice(&fs::read(rig.path("state")).unwrap()).unwrap();
    assert_eq!(state["format"], 2);
    state["disks"][0].as_object().unwrap().keys().cloned().collect()
}

#[test]
fn an_older_program_reads_the_state_of_a_raw_disk_and_refuses_that_of_a_chain() {
    let rig = Rig::new();
    add_raw(&rig);
    rig.ok(&with_state(&rig, "s/a/a/"));
    let old = ["descriptors", "device", "front_ends", "image", "name", "options", "origin"];
    let mut found = keys(&rig);
    found.sort();
    assert_eq!(found, old);
    rig.ok("snapshot a --to top");
    let mut device = guest(&rig, "a");
    let line = rig.refused(&with_state(&rig, "s/,.backing.:/,\\\"odd\\\":/"), 1);
    assert!(keys(&rig).contains(&"backing".to_owned()));
    assert!(line.contains("unknown field `odd`") && line.contains("nothing was changed"), "{line}");
    read_after(&mut device);
    rig.ok(&with_state(&rig, "s/a/a/"));
    read_after(&mut device);
}

#[track_caller]
fn read_after(device: &mut driver::Device) {
    device.write(1, &[1; 512]).unwrap();
    let mut data = [0; 512];
    device.read(1, &mut data).unwrap();
    assert_eq!(data, [1; 512]);
}
