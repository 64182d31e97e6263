// SPDX-License-Identifier: Apache-2.0
//! Bitmaps outlive an upgrade and a clean end, and no bitmap that could miss a change is trusted.

use crate::common::{Daemon, Place, finish, one_line, pattern, wait_until};
use crate::content::{content_by_qemu, under};
use crate::incremental::{backup, bitmaps, content_of, device, image_of, ok, refused};
use crate::load::Load;
use crate::moments::Moments;
use crate::mount::{loop_device, may_not_mount};
use crate::rig::Rig;
use crate::served::{Served, served};
use crate::server::{dirty_image, qemu};
use crate::{MIB, assert_same, fill, parts};
use backend::lock::user_of;
use driver::{Device, Options};
use std::fs;
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::path::PathBuf;
use std::process::Command;

const KILLS: u64 = 12;
const PART: u64 = 64 << 10;
const SECTORS: u64 = PART / 512;
const BITMAP: [&str; 2] = ["--bitmap", "b"];
const INCREMENTAL: [&str; 2] = ["--incremental", "b"];

/// The file that a clean end leaves beside the image.
fn side_file(served: &Served) -> PathBuf {
    served.place.path("disk.img.vhost-blk-bitmaps")
}

fn stop(served: &mut Served) {
    served.daemon.signal(libc::SIGTERM);
    assert!(served.daemon.wait().success());
}

/// The command of the next daemon, with more options.
fn next(place: &Place, control: &std::path::Path, options: &[&str]) -> Command {
    let mut command = place.serve();
    command.args(["--num-queues", "2", "--control-path"]).arg(control).args(options);
    command
}

fn start(served: &mut Served, options: &[&str]) {
    let mut command = next(&served.place, &served.control, options);
    served.daemon = Daemon::start(&mut command, &served.control);
}

fn restart(served: &mut Served) {
    stop(served);
    start(served, &["--data-plane", "uring"]);
}

/// A served disk whose bitmap has noted part 3, and its guest.
fn noted() -> (Served, Device) {
    let served = served(&[]);
    fill(&served.place.image);
    backup(&served, "full", &BITMAP);
    let mut device = device(&served);
    device.write(3 * SECTORS, &[1; 512]).unwrap();
    (served, device)
}

/// The same after a clean stop: the bitmap is in the file beside the image.
fn kept() -> Served {
    let (mut served, device) = noted();
    drop(device);
    stop(&mut served);
    served
}

#[test]
fn bitmaps_pass_on_through_upgrades_while_two_queues_write() {
    let served = served(&[]);
    let options = Options { num_queues: 2, ..Options::default() };
    let device = Device::connect(&served.place.socket, &options).unwrap();
    let layout = device.layout();
    let (_session, queues) = device.into_parts();
    let load = |(first, queue)| Load::new(queue, layout.clone(), first..first + 4096).of_up_to(64);
    let mut loads: Vec<Load> = (0..).step_by(8192).zip(queues).map(load).collect();
    backup(&served, "full", &BITMAP);
    for round in 0..5 {
        under(&mut loads, || {
            served.upgrade();
            backup(&served, &format!("copy-{round}"), &INCREMENTAL);
            served.upgrade();
        });
        let changed = bitmaps(&served)["b"]["changed_bytes"].clone();
        served.upgrade();
        assert_eq!(bitmaps(&served)["b"]["changed_bytes"], changed);
        let (copy, copied) = backup(&served, &format!("copied-{round}"), &INCREMENTAL);
        assert_eq!(copied, changed);
        assert!(copied < 8 * MIB, "not all of the disk");
        assert_same(&content_of(&copy, "qcow2"), &image_of(&served));
    }
    for load in loads {
        load.run(|_| false); // reads everything
    }
}

#[test]
fn an_upgrade_keeps_the_backups_of_all_bitmaps_and_the_reason_for_which_one_is_lost() {
    let mut served = served(&[]);
    fill(&served.place.image);
    let server = qemu(&served.place, &dirty_image(&served.place, "copy", 8 * MIB), "raw", &[]);
    let mut device = device(&served);
    backup(&served, "day", &["--bitmap", "day"]);
    ok(&served, &["backup", "--to", &server.address, "--bitmap", "week"]);
    device.write(3 * SECTORS, &[1; 512]).unwrap();
    let before = bitmaps(&served);
    served.upgrade();
    assert_eq!(bitmaps(&served), before);
    ok(&served, &["backup", "--to", &server.address, "--incremental", "week", "--verify"]);
    assert_same(&server.content(8 << 20), &image_of(&served));
    assert_eq!(backup(&served, "day-1", &["--incremental", "day"]).1, PART);
    // The guest goes to another host and comes back.
    let _log = device.start_log().unwrap();
    device.session().stop_queue(0).unwrap();
    served.daemon.log_line("gave the lock of the image up");
    device.reconnect(&served.place.socket).unwrap();
    served.daemon.log_line("took the lock of the image");
    served.upgrade();
    let told = refused(&served, &["--incremental", "day"]);
    assert!(told.contains("no bitmap day (the guest was on another host"), "{told}");
}

#[test]
fn a_clean_stop_keeps_the_bitmaps_and_the_next_start_takes_them() {
    let (mut served, device) = noted();
    let server = qemu(&served.place, &dirty_image(&served.place, "copy", 8 * MIB), "raw", &[]);
    ok(&served, &["backup", "--to", &server.address, "--bitmap", "nbd"]);
    let before = bitmaps(&served);
    drop(device);
    stop(&mut served);
    let file = side_file(&served);
    assert_eq!(fs::metadata(&file).unwrap().permissions().mode() & 0o777, 0o600);
    assert!(fs::read(&file).unwrap().starts_with(b"vhost-blk bitmaps 1\n{\"about\":\"Changes of"));
    start(&mut served, &["--data-plane", "uring"]);
    assert!(!file.exists(), "it is removed before the guest can write");
    assert_eq!(bitmaps(&served), before);
    let mut device = self::device(&served);
    device.write(9 * SECTORS, &[2; 512]).unwrap();
    drop(device);
    restart(&mut served);
    let (next, copied) = backup(&served, "next", &INCREMENTAL);
    assert_eq!(copied, 2 * PART);
    assert_same(&content_of(&next, "qcow2"), &image_of(&served));
    ok(&served, &["backup", "--to", &server.address, "--incremental", "nbd", "--verify"]);
    assert_same(&server.content(8 << 20), &image_of(&served));
    // Upgrades and stops alternate.
    served.upgrade();
    restart(&mut served);
    assert_eq!(backup(&served, "last", &INCREMENTAL).1, 0);
    ok(&served, &["bitmaps", "--remove", "b"]);
    ok(&served, &["bitmaps", "--remove", "nbd"]);
    stop(&mut served);
    assert!(!file.exists(), "there is nothing to keep");
}

#[test]
fn the_bitmaps_of_a_chain_of_images_outlive_a_stop_and_a_changed_file_of_it_ends_them() {
    let (mut served, mut device) = noted();
    let overlay = served.place.path("overlay");
    ok(&served, &["snapshot", "--to", overlay.to_str().unwrap()]);
    device.write(9 * SECTORS, &[2; 512]).unwrap();
    drop(device);
    let chain = ["--format", "qcow2", "--allow-backing", "same-dir", "--data-plane", "uring"];
    let base = std::mem::replace(&mut served.place.image, overlay.clone());
    stop(&mut served);
    start(&mut served, &chain);
    let (next, copied) = backup(&served, "next", &INCREMENTAL);
    assert_eq!(copied, 2 * PART);
    assert_same(&content_of(&next, "qcow2"), &content_by_qemu(&overlay));
    stop(&mut served);
    let file = fs::File::options().write(true).open(base).unwrap();
    file.write_all_at(&[7], 5 * PART).unwrap();
    start(&mut served, &chain);
    assert!(refused(&served, &INCREMENTAL).contains("the image was changed or replaced"));
}

#[test]
fn a_disk_that_is_removed_and_added_again_goes_on_with_its_bitmaps() {
    let rig = Rig::new();
    rig.add("a", "");
    fill(&rig.path("a.img"));
    let mut guest = rig.guest("a");
    rig.ok("backup a --to full --bitmap b");
    guest.write(3 * SECTORS, &[1; 512]).unwrap();
    rig.ok("remove a");
    assert!(rig.path("a.img.vhost-blk-bitmaps").exists());
    // A start that fails leaves them.
    let again = "add a --blk-file a.img --data-plane uring --num-queues 1 --socket-path";
    rig.refused(&format!("{again} none/a.sock"), 1);
    rig.ok(&format!("{again} a.sock"));
    assert!(!rig.path("a.img.vhost-blk-bitmaps").exists());
    rig.ok("backup a --to next --incremental b");
    let copy = content_of(&rig.path("next"), "qcow2");
    assert_same(&copy, &fs::read(rig.path("a.img")).unwrap());
}

/// Kills the daemon, and waits until the next one can lock the image.
fn kill(served: &mut Served) {
    served.daemon.signal(libc::SIGKILL);
    served.daemon.wait();
    // The kernel holds the lock until it has destroyed the rings of the daemon.
    let image = fs::File::open(&served.place.image).unwrap();
    wait_until("the lock is free", || user_of(&image).unwrap().is_none());
}

const KILLED: &str = "a crash or a kill of the daemon ends bitmaps";
/// A start changes the times of an image before it removes the file of the bitmaps.
const CHANGED: &str = "the image was changed or replaced while no daemon served it";

/// Expects that there is no bitmap for one of these reasons, and begins one again.
#[track_caller]
fn assert_ended(served: &Served, reasons: &[&str]) {
    let told = refused(served, &INCREMENTAL);
    let is_told = |reason: &&str| told.contains(&format!("no bitmap b ({reason});"));
    assert!(reasons.iter().any(is_told), "{told}");
    backup(served, "again", &BITMAP);
}

#[test]
fn a_kill_of_a_served_disk_ends_the_bitmaps() {
    for writes in [false, true] {
        let (mut served, device) = noted();
        drop(device);
        restart(&mut served);
        if writes {
            self::device(&served).write(9 * SECTORS, &[2; 512]).unwrap();
        }
        kill(&mut served);
        start(&mut served, &["--data-plane", "uring"]);
        assert_ended(&served, &[KILLED]);
    }
}

#[test]
fn a_kill_at_any_moment_of_a_start_or_a_stop_leaves_whole_bitmaps_or_none() {
    for stops in [true, false] {
        let (mut served, device) = noted();
        drop(device);
        let mut moments = if stops {
            Moments::of(|| stop(&mut served))
        } else {
            stop(&mut served);
            Moments::of(|| start(&mut served, &["--data-plane", "uring"]))
        };
        for _ in 0..KILLS {
            let (mut served, mut device) = noted();
            device.write(9 * SECTORS, &[2; 512]).unwrap();
            drop(device);
            if stops {
                served.daemon.signal(libc::SIGTERM);
            } else {
                stop(&mut served);
                let options = ["--data-plane", "uring"];
                let mut command = next(&served.place, &served.control, &options);
                served.daemon = Daemon::spawn(&mut command);
            }
            moments.wait();
            kill(&mut served);
            start(&mut served, &["--data-plane", "uring"]);
            assert_eq!(parts(&served.place), [""; 0]);
            let are_kept = !bitmaps(&served).is_empty();
            // A stop keeps them when it is complete, and a start takes them from their file.
            moments.learn(are_kept == stops);
            if are_kept {
                let (next, copied) = backup(&served, "next", &INCREMENTAL);
                assert_eq!(copied, 2 * PART);
                assert_same(&content_of(&next, "qcow2"), &image_of(&served));
            } else {
                assert_ended(&served, if stops { &[KILLED] } else { &[KILLED, CHANGED] });
            }
        }
        moments.assert_both();
    }
}

#[test]
fn bitmaps_of_an_image_that_was_changed_meanwhile_are_not_trusted() {
    let write = |served: &Served| {
        let image = &served.place.image;
        let before = fs::metadata(image).unwrap().modified().unwrap();
        let file = fs::File::options().write(true).open(image).unwrap();
        file.write_all_at(&pattern(512, 77), 50 * PART).unwrap();
        // The time of modification is no sign: anyone can set it back.
        file.set_modified(before).unwrap();
    };
    let replace = |served: &Served| {
        let (image, copy) = (&served.place.image, served.place.path("copy"));
        let copied = Command::new("cp").args(["--preserve=all"]).arg(image).arg(&copy).status();
        assert!(copied.unwrap().success());
        fs::rename(copy, image).unwrap();
    };
    let grow = |served: &Served| {
        let file = fs::File::options().write(true).open(&served.place.image).unwrap();
        file.set_len(9 * MIB).unwrap();
    };
    let acts: [&dyn Fn(&Served); 3] = [&write, &replace, &grow];
    for act in acts {
        let mut served = kept();
        act(&served);
        start(&mut served, &["--data-plane", "uring"]);
        let told = refused(&served, &INCREMENTAL);
        assert!(told.contains("no bitmap b (the image was changed or replaced while"), "{told}");
        assert!(!side_file(&served).exists());
        backup(&served, "again", &BITMAP);
        assert_eq!(backup(&served, "next", &INCREMENTAL).1, 0);
    }
}

/// Changes the bytes of a file.
type Damage = dyn Fn(&mut Vec<u8>);

#[test]
fn a_damaged_file_of_bitmaps_is_not_trusted() {
    let flip = |at: usize| move |bytes: &mut Vec<u8>| bytes[at] ^= 1;
    let acts: [(&Damage, &str); 6] = [
        (&flip(3), "another format"),
        (&flip(100), "damaged"),
        (&|bytes| *bytes.last_mut().unwrap() ^= 1, "damaged"),
        (&|bytes| bytes.truncate(bytes.len() - 9), "damaged"),
        (&|bytes| bytes.truncate(20), "damaged"),
        (&Vec::clear, "another format"),
    ];
    for (act, why) in acts {
        let mut served = kept();
        let mut bytes = fs::read(side_file(&served)).unwrap();
        act(&mut bytes);
        fs::write(side_file(&served), bytes).unwrap();
        start(&mut served, &["--data-plane", "uring"]);
        let told = refused(&served, &INCREMENTAL);
        assert!(told.contains(why) && !side_file(&served).exists(), "{told}");
    }
}

#[test]
fn a_start_removes_the_incomplete_file_of_a_program_that_was_killed_in_its_stop() {
    let mut served = kept();
    let left = served.place.path(".disk.img.vhost-blk-bitmaps.part");
    fs::write(&left, "incomplete").unwrap();
    start(&mut served, &["--data-plane", "uring"]);
    assert!(!left.exists());
    restart(&mut served);
    assert_eq!(backup(&served, "next", &INCREMENTAL).1, PART);
}

#[test]
fn a_start_that_cannot_go_on_with_the_bitmaps_says_so_in_the_refusal() {
    let mut served = kept();
    start(&mut served, &["--data-plane", "uring", "--incoming", "on"]);
    assert!(!side_file(&served).exists());
    served.daemon.log_line("the bitmaps for incremental backups are lost");
    let _device = device_of(&served);
    let told = refused(&served, &INCREMENTAL);
    assert!(told.contains("waits for the guest of another host"), "{told}");
    // A read-only disk neither takes nor ends them.
    backup(&served, "again", &BITMAP);
    stop(&mut served);
    start(&mut served, &["--data-plane", "uring", "--read-only"]);
    assert!(side_file(&served).exists() && bitmaps(&served).is_empty());
    restart(&mut served);
    assert_eq!(backup(&served, "next", &INCREMENTAL).1, 0);
}

fn device_of(served: &Served) -> Device {
    Device::connect(&served.place.socket, &Options::default()).unwrap()
}

#[test]
fn a_file_of_bitmaps_that_cannot_be_written_or_removed_is_told_in_the_log() {
    let (mut served, device) = noted();
    drop(device);
    fs::create_dir(side_file(&served)).unwrap();
    served.daemon.signal(libc::SIGTERM);
    let told = served.daemon.log_line("the bitmaps for incremental backups are lost");
    assert!(told.contains("cannot be written") && told.contains("; let the daemon"), "{told}");
    assert!(served.daemon.wait().success());
    assert_eq!(fs::read_dir(served.place.dir.path()).unwrap().count(), 3, "image, copy, directory");
    start(&mut served, &["--data-plane", "uring"]);
    assert!(refused(&served, &INCREMENTAL).contains("cannot be removed"));
}

#[test]
fn a_start_that_fails_leaves_the_file_of_bitmaps_for_the_next_one() {
    let mut served = kept();
    fs::create_dir(&served.place.socket).unwrap();
    let mut command = next(&served.place, &served.control, &["--data-plane", "uring"]);
    one_line(&finish(&mut command), 1);
    assert!(side_file(&served).exists());
    // The same with a data plane that has no bitmaps.
    let mut command = next(&served.place, &served.control, &["--data-plane", "kernel"]);
    one_line(&finish(&mut command), 1);
    assert!(side_file(&served).exists());
    fs::remove_dir(&served.place.socket).unwrap();
    start(&mut served, &["--data-plane", "uring"]);
    assert_eq!(backup(&served, "next", &INCREMENTAL).1, PART);
}

#[test]
fn a_start_that_fails_without_the_lock_of_the_image_keeps_no_bitmaps() {
    let served = kept();
    fs::create_dir(&served.place.socket).unwrap();
    let waits = ["--data-plane", "uring", "--incoming", "on"];
    one_line(&finish(&mut next(&served.place, &served.control, &waits)), 1);
    assert!(!side_file(&served).exists(), "another program may have written meanwhile");
}

/// Another program that writes a block device while no daemon serves it leaves no trace.
#[test]
fn a_block_device_keeps_no_bitmaps_and_says_so() {
    if may_not_mount() {
        return;
    }
    let mut rig = Rig::new();
    let file = rig.path("file");
    fs::write(&file, vec![1; 1 << 20]).unwrap();
    let device = loop_device(&file);
    let shown = device.path.display();
    rig.ok(&format!("add a --blk-file {shown} --socket-path a.sock --data-plane uring"));
    rig.ok("backup a --to full --bitmap b");
    rig.ok("remove a");
    let told = rig.daemon.log_line("the bitmaps for incremental backups are lost");
    assert!(
        told.contains("shows no trace of the writes of other programs; make a full backup"),
        "{told}"
    );
}
