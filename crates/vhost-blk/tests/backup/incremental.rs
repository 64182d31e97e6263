// SPDX-License-Identifier: Apache-2.0
//! Incremental backups: each is, with the backups before it, the disk at its moment.

use crate::common::{one_line, wait_until};
use crate::content::{content_by_qemu, under, write_some};
use crate::load::Load;
use crate::mount::{Mount, may_not_mount};
use crate::served::{Served, served};
use crate::{Client, MIB, SLOW, assert_same, fill, parts, wait_for_end};
use driver::{Device, Options, Request};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

const PART: u64 = 64 << 10;
const SECTORS: u64 = PART / 512;

/// The content of a backup with those before it, which `qemu-img check` finds sound.
pub(crate) fn content_of(image: &Path, format: &str) -> Vec<u8> {
    if format == "raw" {
        return std::fs::read(image).unwrap();
    }
    let checked = Command::new("qemu-img").args(["check", "-q", "-f", format]).arg(image).status();
    assert!(checked.expect("qemu-utils are installed").success());
    content_by_qemu(image)
}

/// A command that succeeds.
#[track_caller]
pub(crate) fn ok(served: &Served, words: &[&str]) -> Value {
    let output = served.ctl(&[&["--json"], words].concat());
    assert!(output.status.success(), "{words:?}: {}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).unwrap()
}

/// Makes a backup with these options, and returns its path and the number of copied bytes.
#[track_caller]
pub(crate) fn backup(served: &Served, name: &str, options: &[&str]) -> (PathBuf, u64) {
    let target = served.place.path(name);
    let words = [&["backup", "--to", target.to_str().unwrap()], options].concat();
    let copied = ok(served, &words)["copied_bytes"].as_u64().unwrap();
    (target, copied)
}

/// The reason for which a backup with these options is refused. There is no new file.
#[track_caller]
pub(crate) fn refused(served: &Served, options: &[&str]) -> String {
    let target = served.place.path("refused");
    let words = [&["backup", "--to", target.to_str().unwrap()], options].concat();
    let told = one_line(&served.ctl(&words), 1);
    assert!(!target.exists() && parts(&served.place).is_empty());
    told
}

pub(crate) fn bitmaps(served: &Served) -> BTreeMap<String, Value> {
    let rows = ok(served, &["bitmaps"]);
    let rows = rows.as_array().unwrap().iter();
    rows.map(|row| (row["name"].as_str().unwrap().to_owned(), row.clone())).collect()
}

pub(crate) fn device(served: &Served) -> Device {
    let options = Options { limit: Duration::from_secs(20), ..Options::default() };
    Device::connect(&served.place.socket, &options).unwrap()
}

pub(crate) fn image_of(served: &Served) -> Vec<u8> {
    std::fs::read(&served.place.image).unwrap()
}

/// A full backup and several incremental ones, each while two queues write.
fn backed_up_under_load(in_overlay: bool, packed: bool, format: &str) {
    let served = served(&[]);
    let options = Options { num_queues: 2, packed, ..Options::default() };
    let device = Device::connect(&served.place.socket, &options).unwrap();
    let layout = device.layout();
    let (_session, queues) = device.into_parts();
    let load = |(first, queue)| Load::new(queue, layout.clone(), first..first + 2048).of_up_to(64);
    let mut loads: Vec<Load> = (0..).step_by(8192).zip(queues).map(load).collect();
    let mut image = served.place.image.clone();
    if in_overlay {
        write_some(&mut loads, 100);
        image = served.place.path("overlay");
        ok(&served, &["snapshot", "--to", image.to_str().unwrap()]);
    }
    let mut copies: Vec<(PathBuf, &str, Vec<u8>)> = Vec::new();
    for round in 0..4 {
        write_some(&mut loads, 10);
        let content = match in_overlay {
            false => std::fs::read(&image).unwrap(),
            true => content_by_qemu(&image),
        };
        let target = served.place.path(&format!("copy-{round}"));
        let (format, options) = match round {
            0 => (format, json!({"format": format, "bitmap": "b"})),
            _ => ("qcow2", json!({"incremental": "b", "bandwidth": 32 * MIB})),
        };
        let mut client = Client::start(&served.control, &target, options);
        let last = under(&mut loads, || client.finish());
        let copied = last["parameters"]["copied_bytes"].as_u64().expect("it is complete");
        assert_eq!(copied == 8 * MIB, round == 0, "{last}");
        copies.push((target, format, content));
        let told = served.status()["disk"].to_string();
        assert!(told.contains("changes are noted") && !told.contains("backed up"), "{told}");
    }
    for (target, format, content) in &copies {
        assert_same(&content_of(target, format), content);
    }
    for load in loads {
        load.run(|_| false); // reads everything
    }
}

#[test]
fn each_incremental_backup_is_the_disk_at_its_moment_although_two_queues_write() {
    backed_up_under_load(false, false, "raw");
    backed_up_under_load(false, true, "qcow2");
    backed_up_under_load(true, false, "qcow2");
}

/// A guest that writes each part once, so that a part that one backup forgets is in none.
#[test]
fn no_part_is_lost_between_the_backups_of_a_disk_that_never_rests() {
    let served = served(&[]);
    ok(&served, &["resize", "256M"]);
    backup(&served, "copy-0", &["--bitmap", "b"]);
    let (mut guest, stop) = (device(&served), AtomicBool::new(false));
    let write = || {
        for part in 0..256 * MIB / PART {
            if stop.load(Ordering::Relaxed) {
                return;
            }
            guest.write(part * SECTORS + part % SECTORS, &[7; 512]).unwrap();
        }
    };
    std::thread::scope(|scope| {
        scope.spawn(write);
        for round in 1..25 {
            backup(&served, &format!("copy-{round}"), &["--incremental", "b"]);
        }
        stop.store(true, Ordering::Relaxed);
    });
    let (last, _) = backup(&served, "copy-25", &["--incremental", "b"]);
    assert_same(&content_of(&last, "qcow2"), &image_of(&served));
}

#[test]
fn only_changed_parts_are_copied_also_discarded_and_zeroed_ones() {
    let served = served(&[]);
    fill(&served.place.image);
    let mut device = device(&served);
    backup(&served, "full", &["--bitmap", "b"]);
    device.write(3 * SECTORS - 1, &[1; 1024]).unwrap();
    device.discard(10 * SECTORS, 2 * SECTORS as u32).unwrap();
    device.write_zeroes(20 * SECTORS, SECTORS as u32, 0).unwrap();
    device.write_zeroes(30 * SECTORS + 1, 1, 0).unwrap();
    device.write_zeroes(127 * SECTORS, SECTORS as u32, 1).unwrap();
    let changed = [2, 3, 10, 11, 20, 30, 127].len() as u64 * PART;
    assert_eq!(bitmaps(&served)["b"]["changed_bytes"], changed);
    let (first, copied) = backup(&served, "first", &["--incremental", "b"]);
    assert_eq!(copied, changed);
    assert_same(&content_of(&first, "qcow2"), &image_of(&served));
    let (second, copied) = backup(&served, "second", &["--incremental", "b"]);
    assert_eq!(copied, 0);
    assert_same(&content_of(&second, "qcow2"), &image_of(&served));
    let info = crate::common::run(["info", "--json", second.to_str().unwrap()]);
    let told = String::from_utf8(info.stdout).unwrap();
    assert!(told.contains("first") && told.contains("full"), "{told}");
    // As a restore does it.
    let raw = served.place.path("restored");
    let words = ["convert", "-f", "qcow2", "--allow-backing", "same-dir"];
    let words = [&words[..], &[second.to_str().unwrap(), raw.to_str().unwrap()]].concat();
    assert!(crate::common::run(words).status.success());
    assert_same(&std::fs::read(raw).unwrap(), &image_of(&served));
}

#[test]
fn a_backup_that_is_cancelled_or_fails_leaves_its_bitmap_whole() {
    let served = served(&[]);
    fill(&served.place.image);
    let mut device = device(&served);
    // The first backup of a bitmap.
    let slow = json!({"bandwidth": SLOW, "bitmap": "b"});
    drop(Client::start(&served.control, &served.place.path("none"), slow));
    wait_for_end(&served);
    assert!(bitmaps(&served).is_empty());
    backup(&served, "full", &["--bitmap", "b"]);
    device.write(SECTORS, &[1; 512]).unwrap();
    // An incremental one, and a second full one; both with changes before and after their moment.
    let orders =
        [json!({"incremental": "b", "bandwidth": SLOW}), json!({"bitmap": "b", "bandwidth": SLOW})];
    for (at, order) in (2..).zip(orders) {
        device.write(10 * at * SECTORS, &[2; 128 << 10]).unwrap();
        let client = Client::start(&served.control, &served.place.path("none"), order);
        assert_eq!(bitmaps(&served)["b"]["busy"], true);
        device.write((10 * at + 1) * SECTORS, &[3; 128 << 10]).unwrap();
        drop(client);
        wait_for_end(&served);
    }
    let changed = [1, 20, 21, 22, 30, 31, 32].len() as u64 * PART;
    assert_eq!(bitmaps(&served)["b"]["changed_bytes"], changed);
    if !may_not_mount() {
        let small = Mount::tmpfs(1);
        let target = small.path("none");
        device.write(50 * SECTORS, &[7; 1 << 20]).unwrap();
        device.write(70 * SECTORS, &[7; 1 << 20]).unwrap();
        let words = ["backup", "--to", target.to_str().unwrap(), "--incremental", "b"];
        let told = one_line(&served.ctl(&words), 1);
        assert!(told.contains("space"), "{told}");
        assert_eq!(std::fs::read_dir(small.place.path()).unwrap().count(), 0);
    }
    let row = bitmaps(&served)["b"].clone();
    assert_eq!((&row["busy"], &row["problem"]), (&json!(false), &Value::Null));
    let (next, _) = backup(&served, "next", &["--incremental", "b"]);
    assert_same(&content_of(&next, "qcow2"), &image_of(&served));
}

#[test]
fn bitmaps_go_on_through_snapshots_commits_growth_and_pauses() {
    let served = served(&[]);
    fill(&served.place.image);
    let mut device = device(&served);
    backup(&served, "full", &["--bitmap", "b"]);
    device.write(0, &[1; 512]).unwrap();
    let overlay = served.place.path("overlay");
    ok(&served, &["snapshot", "--to", overlay.to_str().unwrap()]);
    device.write(10 * SECTORS, &[2; 512]).unwrap();
    let (first, copied) = backup(&served, "first", &["--incremental", "b"]);
    assert_eq!(copied, 2 * PART);
    assert_same(&content_of(&first, "qcow2"), &content_by_qemu(&overlay));
    device.write(20 * SECTORS, &[3; 512]).unwrap();
    ok(&served, &["commit"]);
    ok(&served, &["set-cache", "writethrough"]);
    ok(&served, &["pause"]);
    ok(&served, &["resume"]);
    device.write(30 * SECTORS, &[4; 512]).unwrap();
    let (second, copied) = backup(&served, "second", &["--incremental", "b"]);
    assert_eq!(copied, 2 * PART);
    assert_same(&content_of(&second, "qcow2"), &image_of(&served));
    let grown = 8 * MIB + 100 * 512;
    ok(&served, &["resize", &grown.to_string()]);
    device.write(16_384 + 50, &[5; 512]).unwrap();
    let (third, copied) = backup(&served, "third", &["--incremental", "b"]);
    assert_eq!(copied, 100 * 512);
    assert_same(&content_of(&third, "qcow2"), &image_of(&served));
    ok(&served, &["resize", &(9 * MIB).to_string()]);
    let (fourth, copied) = backup(&served, "fourth", &["--incremental", "b"]);
    assert_eq!(copied, MIB, "with the part of the former end");
    assert_same(&content_of(&fourth, "qcow2"), &image_of(&served));
}

/// The storage completes writes whose guest has gone.
#[test]
fn a_guest_that_is_killed_and_started_again_loses_no_note() {
    let served = served(&["--wrap", "delay:us=300000,ops=write"]);
    fill(&served.place.image);
    let mut device = device(&served);
    backup(&served, "full", &["--bitmap", "b"]);
    let layout = device.layout();
    for part in 0..8 {
        let write = Request::write(10 * part * SECTORS, &[part as u8 + 1; 4096]);
        device.queue(0).submit(&write, &layout).unwrap();
    }
    wait_until("the writes in flight", || ok(&served, &["status"])["queues"][0]["chains"] == 8);
    drop(device);
    let mut device = self::device(&served);
    device.write(5 * SECTORS, &[9; 512]).unwrap();
    let (next, copied) = backup(&served, "next", &["--incremental", "b"]);
    assert_eq!(copied, 9 * PART);
    assert_same(&content_of(&next, "qcow2"), &image_of(&served));
}

#[test]
fn each_bitmap_has_its_own_chain_and_a_full_backup_begins_a_new_one() {
    let served = served(&[]);
    fill(&served.place.image);
    let mut device = device(&served);
    backup(&served, "day-0", &["--bitmap", "day"]);
    backup(&served, "week-0", &["--bitmap", "week", "--format", "qcow2"]);
    for part in 1..=3 {
        device.write(part * SECTORS, &[part as u8; 512]).unwrap();
        let (copy, copied) = backup(&served, &format!("day-{part}"), &["--incremental", "day"]);
        assert_eq!(copied, PART);
        assert_same(&content_of(&copy, "qcow2"), &image_of(&served));
    }
    let (week, copied) = backup(&served, "week-1", &["--incremental", "week"]);
    assert_eq!(copied, 3 * PART);
    assert_same(&content_of(&week, "qcow2"), &image_of(&served));
    backup(&served, "new-0", &["--bitmap", "day"]);
    device.write(9 * SECTORS, &[9; 512]).unwrap();
    let (new, copied) = backup(&served, "new-1", &["--incremental", "day"]);
    assert_eq!(copied, PART);
    for name in ["day-0", "day-1", "day-2", "day-3"] {
        std::fs::remove_file(served.place.path(name)).unwrap();
    }
    assert_same(&content_of(&new, "qcow2"), &image_of(&served));
    ok(&served, &["bitmaps", "--remove", "day"]);
    assert!(served.status()["disk"].to_string().contains("changes are noted"));
    ok(&served, &["bitmaps", "--remove", "week"]);
    assert!(!served.status()["disk"].to_string().contains("changes are noted"));
    served.upgrade();
    device.write(0, &[1; 512]).unwrap();
}

#[test]
fn an_incremental_backup_that_could_miss_changes_is_refused() {
    let mut served = served(&[]);
    fill(&served.place.image);
    let mut device = device(&served);
    let incremental = ["--incremental", "b"];
    let told = refused(&served, &incremental);
    assert!(told.contains("no bitmap b") && told.contains("; make a full backup"), "{told}");
    let (full, _) = backup(&served, "full", &["--bitmap", "b"]);
    let told = one_line(&served.ctl(&["switch", "kernel"]), 1);
    assert!(told.contains("remove the bitmaps"), "{told}");
    // The last backup is moved away and comes back.
    let away = served.place.path("away");
    std::fs::rename(&full, &away).unwrap();
    let told = refused(&served, &incremental);
    assert!(told.contains("cannot be found") && told.contains("; put it back"), "{told}");
    std::fs::rename(&away, &full).unwrap();
    let (next, _) = backup(&served, "next", &incremental);
    std::fs::rename(&full, &away).unwrap();
    let told = refused(&served, &incremental);
    assert!(told.contains("full cannot be found"), "{told}");
    std::fs::rename(&away, &full).unwrap();
    // It is written.
    std::fs::File::options().write(true).open(&next).unwrap().set_len(16 << 20).unwrap();
    let told = refused(&served, &incremental);
    assert!(told.contains("was changed; put it back"), "{told}");
    let problem = bitmaps(&served)["b"]["problem"].to_string();
    assert!(problem.contains("was changed"), "{problem}");
    // The guest goes to another host and comes back.
    backup(&served, "second", &["--bitmap", "b"]);
    let _log = device.start_log().unwrap();
    device.session().stop_queue(0).unwrap();
    served.daemon.log_line("gave the lock of the image up");
    device.reconnect(&served.place.socket).unwrap();
    served.daemon.log_line("took the lock of the image");
    let told = refused(&served, &incremental);
    assert!(told.contains("on another host") && told.contains("; make a full"), "{told}");
    backup(&served, "third", &["--bitmap", "b"]);
    backup(&served, "fourth", &incremental);
    // A daemon that was killed leaves no bitmap.
    drop(device);
    served.daemon.signal(libc::SIGKILL);
    served.daemon.wait();
    let mut command = served.place.serve();
    command.args(["--data-plane", "uring", "--control-path"]).arg(&served.control);
    served.daemon = crate::common::Daemon::start(&mut command, &served.control);
    assert!(refused(&served, &incremental).contains("no bitmap b"));
}

#[test]
fn a_chain_has_as_many_files_as_can_be_read() {
    let served = served(&[]);
    backup(&served, "copy-1", &["--bitmap", "b"]);
    for file in 2..=32 {
        backup(&served, &format!("copy-{file}"), &["--incremental", "b"]);
    }
    assert_same(&content_of(&served.place.path("copy-32"), "qcow2"), &image_of(&served));
    let told = refused(&served, &["--incremental", "b"]);
    assert!(told.contains("32 files already") && told.contains("a full backup"), "{told}");
}

#[test]
fn bad_orders_are_refused_and_change_no_bitmap() {
    let served = served(&[]);
    for number in 0..16 {
        backup(&served, &format!("copy-{number}"), &["--bitmap", &format!("b{number}")]);
    }
    let told = refused(&served, &["--bitmap", "b16"]);
    assert!(told.contains("it has 16 bitmaps; remove"), "{told}");
    let told = refused(&served, &["--incremental", "b1", "--format", "raw"]);
    assert!(told.contains("is a qcow2 image; give --format qcow2"), "{told}");
    let client = Client::start(&served.control, &served.place.path("slow"), json!({}));
    drop(client);
    let told = one_line(&served.ctl(&["bitmaps", "--remove", "none"]), 1);
    assert!(told.contains("it has no bitmap none; see"), "{told}");
    for words in [
        &["backup", "--to", "x", "--bitmap", "a", "--incremental", "b"][..],
        &["backup", "--to", "x", "--bitmap", "a/b"],
        &["bitmaps", "--remove", ""],
    ] {
        assert_eq!(served.ctl(words).status.code(), Some(2), "{words:?}");
    }
    wait_for_end(&served);
    assert_eq!(bitmaps(&served).len(), 16);
    ok(&served, &["bitmaps", "--remove", "b3"]);
    assert_eq!(bitmaps(&served).len(), 15);
}

/// `--verify` of copies that were changed at the middle of the copy, and of others.
#[test]
fn a_copy_that_is_not_what_was_written_fails_its_verification() {
    let served = served(&[]);
    fill(&served.place.image);
    let mut device = device(&served);
    let (full, _) = backup(&served, "full", &["--bitmap", "b", "--verify"]);
    assert_same(&std::fs::read(full).unwrap(), &image_of(&served));
    device.discard(0, 20 * SECTORS as u32).unwrap();
    device.write(SECTORS, &[1; 700 * 512]).unwrap();
    device.write_zeroes(100 * SECTORS + 3, 5, 0).unwrap();
    let (next, _) = backup(&served, "next", &["--incremental", "b", "--verify"]);
    assert_same(&content_of(&next, "qcow2"), &image_of(&served));
    for part in 0..8 {
        device.write(part * 16 * SECTORS, &[2; 1 << 20]).unwrap();
    }
    for order in [json!({"bitmap": "b"}), json!({"incremental": "b"})] {
        let mut order = order;
        (order["verify"], order["bandwidth"]) = (true.into(), SLOW.into());
        let mut client = Client::start(&served.control, &served.place.path("bad"), order);
        let part = served.place.path(&parts(&served.place)[0]);
        let mut at = None;
        wait_until("a cluster is there", || {
            let written = std::fs::read(&part).unwrap();
            at = written.chunks(PART as usize).position(|cluster| cluster == [2; PART as usize]);
            at.is_some()
        });
        let file = std::fs::File::options().write(true).open(&part).unwrap();
        file.write_all_at(&[3], at.unwrap() as u64 * PART).unwrap();
        ok(&served, &["jobs", "--bandwidth", "off"]);
        let reply = client.finish();
        let why = reply["parameters"]["why"].as_str().unwrap_or_default();
        assert!(why.contains("another content than was written"), "{reply}");
        assert!(!served.place.path("bad").exists() && parts(&served.place).is_empty());
    }
    let (last, _) = backup(&served, "last", &["--incremental", "b", "--verify"]);
    assert_same(&content_of(&last, "qcow2"), &image_of(&served));
}

#[test]
fn a_bitmap_cannot_be_removed_during_a_backup() {
    let served = served(&[]);
    fill(&served.place.image);
    backup(&served, "full", &["--bitmap", "b"]);
    let slow = json!({"bandwidth": SLOW});
    let client = Client::start(&served.control, &served.place.path("slow"), slow);
    let told = one_line(&served.ctl(&["bitmaps", "--remove", "b"]), 1);
    assert!(told.contains("it is being backed up; wait"), "{told}");
    let output = served.ctl(&["bitmaps"]);
    let told = String::from_utf8(output.stdout).unwrap();
    assert!(told.starts_with("BITMAP") && told.contains("ready"), "{told}");
    drop(client);
    wait_for_end(&served);
}
