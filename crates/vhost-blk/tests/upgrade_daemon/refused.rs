// SPDX-License-Identifier: Apache-2.0
//! Upgrades that one disk or the new program prevents: all disks are served on.

use crate::common::{Daemon, Place, USELESS, own_path};
use crate::loads::write_and_read;
use crate::mount::{Frozen, LossyDevice, Mount, may_not_mount};
use crate::rig::Rig;
use driver::{Device, Request};
use serde_json::Value;
use std::fs::File;

/// A daemon with the disk `good` and its guest.
fn with_good_disk() -> (Rig, Device) {
    let rig = Rig::new();
    rig.add("good", "");
    let mut guest = rig.guest("good");
    write_and_read(&mut guest, 0);
    (rig, guest)
}

/// Requests since the start of the queue: a stop begins anew.
fn since_start(rig: &Rig) -> Value {
    rig.json("status good")["queues"][0]["chains"].clone()
}

/// Expects that the disk `bad` refuses an upgrade before anything stops, with `words`.
#[track_caller]
fn refused_untouched(rig: &Rig, guest: &mut Device, words: &str) {
    let before = since_start(rig);
    let line = rig.refused("upgrade", 1);
    assert!(line.contains("bad") && line.contains(words), "{line}");
    assert_eq!(since_start(rig), before, "the queue was stopped");
    write_and_read(guest, 1);
}

#[test]
fn a_disk_in_the_memory_of_the_program_refuses_before_anything_stops() {
    let (rig, mut guest) = with_good_disk();
    rig.ok("add bad --backend mem --size 1M --socket-path bad.sock --num-queues 1");
    refused_untouched(&rig, &mut guest, "the disk bad cannot be passed on: the content of a mem");
    rig.ok("remove bad");
    rig.upgrade();
    write_and_read(&mut guest, 2);
}

#[test]
fn a_halted_disk_refuses_before_anything_stops_and_keeps_its_request() {
    let (rig, mut guest) = with_good_disk();
    rig.add("bad", "--on-error stop --wrap fault:ops=write,errno=EIO");
    let mut halted = rig.guest("bad");
    let layout = halted.layout();
    halted.queue(0).submit(&Request::write(0, &[1; 512]), &layout).unwrap();
    rig.place.wait_until("the halt", || !rig.json("status bad")["halted"].is_null());
    refused_untouched(&rig, &mut guest, "has halted the disk; resume it before the upgrade");
    assert!(!rig.json("status bad")["halted"].is_null());
    assert!(halted.queue(0).try_collect().unwrap().is_none(), "the request is kept");
}

#[test]
fn a_failed_sync_refuses_before_anything_stops() {
    if may_not_mount() {
        return;
    }
    let disk = LossyDevice::new();
    let (rig, mut guest) = with_good_disk();
    rig.ok(&format!(
        "add bad --direct off --data-plane uring --num-queues 1 --socket-path bad.sock --blk-file {}",
        disk.device.path.display()
    ));
    let mut full = rig.guest("bad");
    disk.lose();
    full.write(2048, &[2; 4096]).unwrap();
    full.flush().expect_err("a write without room is durable");
    disk.mend();
    refused_untouched(&rig, &mut guest, "a sync of the disk has failed");
    full.flush().expect_err("a refused upgrade forgets that writes were lost");
    drop(full);
    rig.ok("remove bad");
}

#[test]
fn a_disk_whose_storage_has_shrunk_or_options_are_unknown_is_found_by_the_check() {
    let (rig, mut guest) = with_good_disk();
    rig.add("bad", "");
    rig.upgrade();
    let image = File::options().write(true).open(rig.path("bad.img")).unwrap();
    image.set_len(512 << 10).unwrap();
    refused_untouched(&rig, &mut guest, "enlarge the storage");
    image.set_len(1 << 20).unwrap();
    // A new program without one of the options.
    let text = format!(
        "[ \"$1\" != upgrade-check ] || exec sh -c 'sed s/wrap/warp/ | {} \"$@\"' check \"$@\"\n\
         exec {} \"$@\"",
        own_path().display(),
        own_path().display(),
    );
    let program = rig.place.script("other", &text);
    let before = since_start(&rig);
    let line = rig.refused(&format!("upgrade --program {}", program.display()), 1);
    assert!(line.contains("unknown key `warp`"), "{line}");
    assert_eq!(since_start(&rig), before, "the queue was stopped");
    rig.upgrade();
    write_and_read(&mut guest, 2);
}

#[test]
fn requests_that_do_not_complete_hold_the_other_disks_no_longer_than_the_limit() {
    let (rig, mut guest) = with_good_disk();
    rig.add("bad", "--wrap delay:us=20000000,ops=write");
    let mut slow = rig.guest("bad");
    let layout = slow.layout();
    slow.queue(0).submit(&Request::write(0, &[1; 512]), &layout).unwrap();
    rig.place.wait_until("the request is taken", || {
        rig.json("status bad")["queues"][0]["inflight"] == 1
    });
    let line = rig.refused("upgrade", 1);
    let words = "the disk bad cannot be passed on: its requests in flight did not complete";
    assert!(line.contains(words), "{line}");
    // All disks had stopped at the same time: a start begins new counters.
    assert_eq!(since_start(&rig), 0);
    write_and_read(&mut guest, 1);
    // It is still stopping: nothing more is held by the next attempt.
    let line = rig.refused("upgrade", 1);
    assert!(line.contains("the disk bad cannot be passed on: it does not answer"), "{line}");
    assert_eq!(slow.queue(0).collect().unwrap().1.status, Some(0));
    rig.upgrade();
    write_and_read(&mut guest, 2);
    let mut data = [0; 512];
    slow.read(0, &mut data).unwrap();
    assert_eq!(data, [1; 512]);
}

#[test]
fn near_the_limit_on_open_files_no_disk_is_lost() {
    let place = Place::new();
    let limited =
        place.script("limited", &format!("ulimit -n 150; exec {} \"$@\"", own_path().display()));
    let mut command = std::process::Command::new(limited);
    command.args(["daemon", "--threads", "1", "--control-path"]).arg(place.path("ctl"));
    let daemon = Daemon::start(&mut command, &place.path("ctl"));
    let rig = Rig { daemon, place };
    rig.add("good", "");
    let mut guest = rig.guest("good");
    write_and_read(&mut guest, 0);
    // Until no descriptor is left for another one.
    let added = (0..50).take_while(|n| {
        let image = File::create(rig.path("x.img")).unwrap();
        image.set_len(1 << 20).unwrap();
        std::fs::rename(rig.path("x.img"), rig.path(&format!("d{n}.img"))).unwrap();
        let words = format!("add d{n} --blk-file d{n}.img --socket-path d{n}.sock --num-queues 1");
        rig.ctl(&words).status.success()
    });
    let added = added.count();
    assert!((2..50).contains(&added), "{added}");
    let line = rig.refused("upgrade", 1);
    assert!(line.contains("raise the limit on open files"), "{line}");
    assert_eq!(since_start(&rig), 3, "the queue was stopped");
    // With room, all disks pass on.
    let mut left = added;
    while !rig.ctl("upgrade").status.success() {
        assert_eq!(rig.names().len(), left + 1, "a disk is lost");
        left -= 1;
        rig.ok(&format!("remove d{left}"));
    }
    assert!(left > 0, "no disk remains");
    assert_eq!(rig.names().len(), left + 1, "a disk is lost");
    write_and_read(&mut guest, 1);
}

#[test]
fn a_program_that_cannot_take_over_changes_nothing() {
    let (rig, mut guest) = with_good_disk();
    rig.add("idle", "");
    let before = since_start(&rig);
    let failing = rig.place.script("failing", "echo it is broken >&2; exit 1");
    let line = rig.refused(&format!("upgrade --program {}", failing.display()), 1);
    assert!(line.contains("it is broken") && line.contains("nothing was changed"), "{line}");
    assert_eq!(since_start(&rig), before, "the queue was stopped");
    write_and_read(&mut guest, 1);
}

#[test]
fn a_program_that_cannot_be_executed_leaves_all_disks_running_and_no_descriptor() {
    let (rig, mut guest) = with_good_disk();
    rig.add("idle", "");
    rig.upgrade();
    let before = rig.daemon.settled_descriptors();
    let useless = rig.place.script("once", USELESS);
    let line = rig.refused(&format!("upgrade --program {}", useless.display()), 1);
    assert!(line.contains("the old program serves on"), "{line}");
    rig.daemon.assert_descriptors(&before);
    write_and_read(&mut guest, 1);
    write_and_read(&mut rig.guest("idle"), 0);
    rig.add("new", "");
    rig.upgrade();
    write_and_read(&mut guest, 2);
}

#[test]
fn a_disk_that_the_new_program_cannot_start_is_lost_alone() {
    let mut rig = Rig::new();
    std::fs::create_dir(rig.path("log")).unwrap();
    ["good", "idle"].iter().for_each(|name| rig.add(name, ""));
    rig.add("bad", &format!("--wrap record:path={}", rig.path("log/bad").display()));
    let mut guest = rig.guest("good");
    let mut lost = rig.guest("bad");
    lost.write(0, &[1; 512]).unwrap();
    std::fs::remove_dir_all(rig.path("log")).unwrap();
    let line = rig.refused("upgrade", 1);
    assert!(line.contains("the new program runs without the disks bad; "), "{line}");
    rig.daemon.log_line("disk=\"bad\"");
    assert_eq!(rig.names(), ["good", "idle"]);
    write_and_read(&mut guest, 1);
    write_and_read(&mut rig.guest("idle"), 0);
    // Its lock and its socket are free.
    assert!(!rig.path("bad.sock").exists());
    rig.ok("add bad --blk-file bad.img --socket-path bad.sock --num-queues 1");
    let mut data = [0; 512];
    rig.guest("bad").read(0, &mut data).unwrap();
    assert_eq!(data, [1; 512]);
}

/// Nothing of the check and of the new program writes to an image: a disk at rest passes on while its storage hangs.
#[test]
fn a_disk_at_rest_whose_storage_hangs_passes_on() {
    if may_not_mount() {
        return;
    }
    let (rig, mut guest) = with_good_disk();
    let mount = Mount::ext4(64);
    let image = mount.path("image");
    File::create(&image).unwrap().set_len(1 << 20).unwrap();
    rig.ok(&format!(
        "add bad --blk-file {} --socket-path bad.sock --data-plane uring --num-queues 1",
        image.display()
    ));
    let mut idle = rig.guest("bad");
    write_and_read(&mut idle, 1);
    idle.flush().unwrap();
    let frozen = Frozen::of(&mount);
    rig.upgrade();
    write_and_read(&mut guest, 1);
    let mut data = [0; 512];
    idle.read(0, &mut data).unwrap();
    drop(frozen);
    // It has DISCARD as before.
    idle.discard(64, 8).unwrap();
    write_and_read(&mut idle, 2);
}

/// The check waits for a storage, and no signal ends it.
#[test]
fn a_check_that_cannot_be_killed_is_given_up_and_all_disks_are_served_on() {
    if may_not_mount() {
        return;
    }
    let (rig, mut guest) = with_good_disk();
    let mount = Mount::ext4(64);
    let text = format!(
        "[ \"$1\" = upgrade-check ] && echo >{}\nexec {} \"$@\"",
        mount.path("file").display(),
        own_path().display(),
    );
    let program = rig.place.script("other", &text);
    let frozen = Frozen::of(&mount);
    let line = rig.refused(&format!("upgrade --program {}", program.display()), 1);
    assert!(line.contains("cannot take over (no end in 10 s)"), "{line}");
    write_and_read(&mut guest, 1);
    assert!(rig.daemon.threads_named("reap") > 0, "the check has ended on a frozen file system");
    rig.upgrade();
    drop(frozen);
    write_and_read(&mut guest, 2);
}
