// SPDX-License-Identifier: Apache-2.0
//! Upgrades between and beside snapshots and commits, under a load that verifies every byte.

use crate::load::under_load;
use crate::mount::run;
use crate::{
    BUSY, QUEUES, Rig, add, add_raw, content, done, guest, image, text, upgrade, upgrade_under_load,
};
use std::fs;
use std::path::PathBuf;

const UPGRADES: usize = 20;
/// A sector that the load does not write.
const OLD: u64 = 30_000;

/// Expects that the disk `a` has the same content in `qemu-img` and at its next start, with sound images.
#[track_caller]
fn check_next_start(rig: &Rig, options: &str) {
    let before = content(&mut guest(rig, "a"));
    assert!(before[OLD as usize * 512..][..512] == [7; 512]);
    let files = rig.json("snapshots a");
    rig.ok("remove a");
    for file in files.as_array().unwrap() {
        if file["format"] == "qcow2" {
            run(&["qemu-img", "check", "-q", "-f", "qcow2", file["path"].as_str().unwrap()]);
        }
    }
    let (top, flat) = (files[0]["path"].as_str().unwrap(), rig.path("flat"));
    run(&["qemu-img", "convert", "-O", "raw", top, text(&flat)]);
    assert!(fs::read(&flat).unwrap() == before, "qemu-img reads something else");
    add(rig, "again", options);
    assert!(content(&mut guest(rig, "again")) == before);
}

#[test]
fn twenty_upgrades_between_snapshots_and_commits_lose_no_byte_and_no_descriptor() {
    for format in ["raw", "qcow2"] {
        let mut rig = Rig::new();
        rig.daemon.close_stderr(); // more lines than a pipe holds
        image(&rig, "a.img", format);
        add(&rig, "a", &format!("--blk-file a.img --format {format}"));
        let mut device = guest(&rig, "a");
        device.write(OLD, &[7; 512]).unwrap();
        let (id, mut options, mut pauses) = (rig.daemon.id(), String::new(), Vec::new());
        let (done, session) = under_load(device, QUEUES.into(), |loaded| {
            pauses = upgrade_under_load(&rig, UPGRADES, |n| {
                loaded.wait_for_progress(10);
                let words = match n % 4 {
                    // The load then writes to clusters that the new overlay does not have.
                    0 | 1 => format!("snapshot a --to {n}.qcow2"),
                    2 => "commit a".to_owned(),
                    _ => "status a".to_owned(),
                };
                if let Some(told) = done(|| rig.ctl(&format!("--json {words}")))["options"].as_str()
                {
                    options = told.to_owned();
                }
            });
            let descriptors = rig.daemon.settled_descriptors();
            upgrade_under_load(&rig, 3, |_| loaded.wait_for_progress(10));
            rig.daemon.assert_descriptors(&descriptors);
        });
        drop(session);
        assert!(done.iter().all(|done| done.reads + done.writes >= 10 * UPGRADES as u64));
        assert_eq!(rig.json("status a")["pid"], id);
        println!("pauses: {:?}, at most {:?}", pauses[UPGRADES / 2], pauses[UPGRADES - 1]);
        check_next_start(&rig, &options);
    }
}

#[test]
fn of_snapshots_and_upgrades_at_once_each_is_done_or_refused_with_a_reason() {
    let mut rig = Rig::new();
    rig.daemon.close_stderr();
    add_raw(&rig);
    let mut device = guest(&rig, "a");
    device.write(OLD, &[7; 512]).unwrap();
    let done_or_refused = |words: &str, reasons: &[&str]| {
        let output = rig.ctl(words);
        let told = String::from_utf8_lossy(&output.stderr).into_owned();
        let is_done = output.status.success();
        let mut known = BUSY.iter().chain(reasons);
        assert!(is_done || known.any(|reason| told.contains(reason)), "{words}: {told}");
        is_done
    };
    // The new program does not know the connection of another client.
    const HELD: &str = "an upgrade is in progress";
    let gone = ["ended without an answer", "reset by peer", "Broken pipe", HELD];
    let (_, session) = under_load(device, QUEUES.into(), |loaded| {
        loaded.wait_for_progress(10);
        let (snapshots, upgrades) = std::thread::scope(|scope| {
            let snapshots = scope.spawn(|| {
                (0..12).filter(|n| done_or_refused(&format!("snapshot a --to {n}"), &gone)).count()
            });
            let held = ["; wait for the end of that"];
            let upgrades = (0..UPGRADES).filter(|_| done_or_refused("upgrade", &held)).count();
            (snapshots.join().unwrap(), upgrades)
        });
        println!("{snapshots} snapshots, {upgrades} upgrades");
        if upgrades == 0 {
            // Each of them met a snapshot.
            upgrade_under_load(&rig, 1, |_| loaded.wait_for_progress(10));
        }
        if snapshots == 0 {
            rig.ok("snapshot a --to late");
        }
    });
    drop(session);
    let files = rig.json("snapshots a");
    let top = PathBuf::from(files[0]["path"].as_str().unwrap());
    let name = top.file_name().unwrap().to_str().unwrap();
    assert_ne!(name, "a.img");
    check_next_start(&rig, &format!("--blk-file {name} --format qcow2 --allow-backing same-dir"));
}

#[test]
fn a_disk_that_grew_and_a_small_cluster_pass_on() {
    let rig = Rig::new();
    let path = rig.path("a.qcow2");
    let size = "cluster_size=4k";
    run(&["qemu-img", "create", "-qf", "qcow2", "-o", size, text(&path), "16M"]);
    add(&rig, "a", "--blk-file a.qcow2 --format qcow2");
    let mut device = guest(&rig, "a");
    rig.ok("resize a 64M");
    for n in 0..3 {
        upgrade(&rig);
        // At the end, in tables that only the new size has.
        device.write(131_000 + n, &[n as u8 + 1; 512]).unwrap();
    }
    assert_eq!(device.capacity_sectors().unwrap(), 131_072);
    rig.ok("pause a");
    upgrade(&rig);
    assert_eq!(rig.json("status a")["paused"], true);
    rig.ok("resume a");
    let mut data = [0; 512];
    for n in 0..3 {
        device.read(131_000 + n, &mut data).unwrap();
        assert_eq!(data, [n as u8 + 1; 512]);
    }
    rig.ok("remove a");
    run(&["qemu-img", "check", "-q", "-f", "qcow2", text(&path)]);
}
