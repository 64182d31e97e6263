// SPDX-License-Identifier: Apache-2.0
//! Block devices as source and target of a mirror.

use crate::mount::{LossyDevice, Mount, loop_device, may_not_mount, run};
use crate::rig::Rig;
use crate::{BYTES, add, add_raw, content, fill, guest, image, mirror, text, wait_until};
use kit::loop_device::LoopDevice;
use std::fs::{self, File};
use std::os::unix::fs::symlink;

/// A loop device over a file of so many bytes that has old data.
fn device(rig: &Rig, name: &str, bytes: usize) -> LoopDevice {
    let below = rig.path(name);
    fs::write(&below, vec![0xee; bytes]).unwrap();
    loop_device(&below)
}

#[test]
fn a_disk_moves_to_a_block_device_and_back_to_a_file() {
    if may_not_mount() {
        return;
    }
    let rig = Rig::new();
    add_raw(&rig);
    let mut guest = guest(&rig, "a");
    guest.write(0, &[1; 4096]).unwrap();
    guest.write(20_000, &[2; 4096]).unwrap();
    let before = content(&mut guest);
    let disk = device(&rig, "below", BYTES as usize);
    let to = text(&disk.path);
    let line = rig.refused(&format!("mirror a --to {to}"), 1);
    assert!(line.contains("whose content is lost; give --overwrite"), "{line}");
    let told = rig.json(&format!("mirror a --to {to} --overwrite --complete"));
    assert_eq!(told["options"], format!("--blk-file {to} --format raw"));
    assert!(content(&mut guest) == before, "holes are zero, whatever the device had");
    guest.write(1, &[3; 512]).unwrap();
    let line = rig.refused(&format!("add b --socket-path b.sock --blk-file {to}"), 1);
    assert!(line.contains("the disk a of this daemon has it; remove that disk"), "{line}");
    let before = content(&mut guest);
    let told = rig.json("mirror a --to back --format qcow2 --complete");
    assert_eq!((&told["before"], &told["marked"]), (&to.into(), &false.into()));
    assert!(content(&mut guest) == before);
    guest.write(2, &[4; 512]).unwrap();
    // The device is free again, and nothing marks it: the answer has told that.
    add(&rig, "b", &format!("--blk-file {to}"));
}

/// A link to the device is turned to another one, which the guest must not go on in.
#[test]
fn a_device_that_was_not_copied_does_not_get_the_guest() {
    if may_not_mount() {
        return;
    }
    let rig = Rig::new();
    add_raw(&rig);
    let mut guest = guest(&rig, "a");
    fill(&mut guest, 1);
    let (copied, other) =
        (device(&rig, "below", BYTES as usize), device(&rig, "o", BYTES as usize));
    let link = rig.path("link");
    let turn = |to: &LoopDevice| {
        let _ = fs::remove_file(&link); // there is none at first
        symlink(&to.path, &link).unwrap();
    };
    turn(&copied);
    rig.ok(&format!("mirror a --to {} --overwrite --wait", text(&link)));
    turn(&other);
    let line = rig.refused("mirror a --complete", 1);
    assert!(line.contains("link: another file or device than the copied one"), "{line}");
    assert_eq!(mirror(&rig)["state"], "ready");
    guest.write(1, &[2; 512]).unwrap();
    assert!(fs::read(&other.path).unwrap().iter().all(|byte| *byte == 0xee));
    let before = content(&mut guest);
    turn(&copied);
    rig.ok("mirror a --complete");
    assert!(content(&mut guest) == before);
    assert!(fs::read(&other.path).unwrap().iter().all(|byte| *byte == 0xee));
}

#[test]
fn a_larger_device_makes_the_disk_grow_after_the_move() {
    if may_not_mount() {
        return;
    }
    let rig = Rig::new();
    add_raw(&rig);
    let mut guest = guest(&rig, "a");
    fill(&mut guest, 5);
    let larger = BYTES + (4 << 20);
    let disk = device(&rig, "below", larger as usize);
    rig.ok(&format!("mirror a --to {} --overwrite --complete", text(&disk.path)));
    assert!(content(&mut guest).iter().all(|byte| *byte == 5));
    wait_until("the growth", || rig.json("status a")["capacity_bytes"] == larger);
    guest.write((BYTES / 512) + 8, &[6; 512]).unwrap();
    let line = rig.refused("mirror a --to below", 1);
    assert!(line.contains("below: exists already; choose another name"), "{line}");
    // The growth of the device itself is noticed, too.
    File::options().write(true).open(rig.path("below")).unwrap().set_len(larger * 2).unwrap();
    disk.update_size().unwrap();
    wait_until("the second growth", || rig.json("status a")["capacity_bytes"] == larger * 2);
}

#[test]
fn a_device_that_cannot_have_the_disk_is_refused_and_keeps_its_content() {
    if may_not_mount() {
        return;
    }
    let rig = Rig::new();
    add_raw(&rig);
    let mut guest = guest(&rig, "a");
    let small = device(&rig, "small", (BYTES - 512) as usize);
    let enough = device(&rig, "enough", BYTES as usize);
    add(&rig, "d", &format!("--blk-file {}", text(&enough.path)));
    let mounted = rig.path("fs");
    File::create(&mounted).unwrap().set_len(32 << 20).unwrap();
    run(&["mkfs.ext4", "-q", "-F", text(&mounted)]);
    let mounted = loop_device(&mounted);
    let mount = Mount::of(&mounted.path);
    let blocks = rig.path("blocks");
    File::create(&blocks).unwrap().set_len(BYTES).unwrap();
    let large = LoopDevice::attach(&blocks, &["--sector-size=4096"]).unwrap();
    let of = |device: &LoopDevice, rest: &str| {
        rig.refused(&format!("mirror a --to {} --overwrite {rest}", text(&device.path)), 1)
    };
    // The file of the disk by another name.
    let own = loop_device(&rig.path("a.img"));
    for (line, reason) in [
        (of(&own, ""), "or lies below or above it; give another one"),
        (of(&small, ""), "and the disk 16777216; give a device that is as large or larger"),
        (of(&enough, ""), "in use by"),
        (of(&mounted, ""), "mounted, or claimed"),
        (of(&large, ""), "512 bytes in a block, and the new storage 4096"),
        (of(&small, "--format qcow2"), "drop --format"),
    ] {
        assert!(line.contains(reason), "{reason}: {line}");
        assert!(mirror(&rig).is_null());
        guest.write(1, &[1; 512]).unwrap();
    }
    // A disk without a lock must not write over it either.
    image(&rig, "u.img", "raw");
    add(&rig, "u", "--blk-file u.img --lock off");
    for (device, reason) in [(&enough, "in use by"), (&mounted, "mounted, or claimed")] {
        let to = text(&device.path);
        let line = rig.refused(&format!("mirror u --to {to} --overwrite"), 1);
        assert!(line.contains(reason), "{reason}: {line}");
    }
    rig.ok("remove u");
    let told = rig.refused(&format!("mirror d --to {} --overwrite", text(&enough.path)), 1);
    assert!(told.contains("is the storage of the disk already"), "{told}");
    rig.ok("remove d");
    drop(mount);
    for name in ["small", "enough"] {
        assert!(fs::read(rig.path(name)).unwrap().iter().all(|byte| *byte == 0xee), "{name}");
    }
}

#[test]
fn a_growth_of_the_old_device_during_a_mirror_is_adopted_after_its_end() {
    if may_not_mount() {
        return;
    }
    let rig = Rig::new();
    let disk = device(&rig, "below", BYTES as usize);
    add(&rig, "a", &format!("--blk-file {}", text(&disk.path)));
    let mut guest = guest(&rig, "a");
    rig.ok("mirror a --to b --wait");
    let larger = BYTES + (4 << 20);
    File::options().write(true).open(rig.path("below")).unwrap().set_len(larger).unwrap();
    disk.update_size().unwrap();
    let line = rig.refused(&format!("resize a {larger}"), 1);
    assert!(line.contains("mirrored"), "{line}");
    assert_eq!(rig.json("status a")["capacity_bytes"], BYTES);
    rig.ok("mirror a --cancel");
    wait_until("the growth", || rig.json("status a")["capacity_bytes"] == larger);
    guest.write(BYTES / 512, &[1; 512]).unwrap();
}

/// The guest was never told of DISCARD, which only the file in between supports.
#[test]
fn a_disk_moves_back_to_a_device_without_discard() {
    if may_not_mount() {
        return;
    }
    let rig = Rig::new();
    let memory = Mount::ramfs();
    let devices = ["below", "other"].map(|name| {
        fs::write(memory.path(name), vec![0; BYTES as usize]).unwrap();
        loop_device(&memory.path(name))
    });
    let [path, other] = [text(&devices[0].path), text(&devices[1].path)];
    add(&rig, "a", &format!("--blk-file {path}"));
    let mut device = guest(&rig, "a");
    fill(&mut device, 7);
    rig.ok("mirror a --to b --complete");
    rig.ok(&format!("mirror a --to {path} --overwrite --complete"));
    assert!(content(&mut device).iter().all(|byte| *byte == 7));
    // The guest of a file has read it.
    image(&rig, "c.img", "raw");
    add(&rig, "c", "--blk-file c.img");
    let line = rig.refused(&format!("mirror c --to {other} --overwrite"), 1);
    assert!(line.contains("DISCARD, and the new storage does not support it"), "{line}");
}

/// Each FLUSH fails on a disk that has lost a write. In the new storage it would succeed.
#[test]
fn a_disk_that_has_lost_a_write_stays_where_each_flush_fails() {
    if may_not_mount() {
        return;
    }
    let disk = LossyDevice::new();
    let rig = Rig::new();
    add(&rig, "a", &format!("--direct off --blk-file {}", text(&disk.device.path)));
    let mut guest = guest(&rig, "a");
    fill(&mut guest, 1);
    rig.ok("mirror a --to b.img --wait");
    disk.lose();
    guest.write(4096, &[2; 4096]).unwrap();
    guest.flush().expect_err("a write without room is durable");
    disk.mend();
    let line = rig.refused("mirror a --complete", 1);
    assert!(line.contains("completed writes may be lost"), "{line}");
    guest.flush().expect_err("the disk forgets that a write was lost");
    assert!(!rig.path("b.img").exists());
    let line = rig.refused("mirror a --to b.img --wait", 1);
    assert!(line.contains("completed writes may be lost"), "{line}");
}
