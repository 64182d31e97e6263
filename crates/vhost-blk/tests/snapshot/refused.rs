// SPDX-License-Identifier: Apache-2.0
//! Snapshots that cannot be taken: the guest goes on in its image, and nothing is left behind.

use crate::mount::{LossyDevice, Mount, loop_device, may_not_mount, run};
use crate::rig::Rig;
use crate::{add, add_raw, guest, image, mark, text};
use driver::{Device, Request};
use std::fs;
use std::path::Path;

/// A daemon with the raw disk `a` and its guest.
fn with_disk() -> (Rig, Device) {
    let rig = Rig::new();
    add_raw(&rig);
    let device = guest(&rig, "a");
    (rig, device)
}

/// Expects the reason of a refusal, with a guest that goes on in the image `a.img`.
#[track_caller]
fn refused(rig: &Rig, device: &mut Device, words: &str, reason: &str) {
    let before = rig.place.files();
    let line = rig.refused(&format!("snapshot {words}"), 1);
    assert!(line.contains(reason), "{words}: {line}");
    assert_eq!(rig.place.files(), before, "{words}");
    device.write(1, &[1; 512]).unwrap();
    let disk = rig.json("status a")["disk"].to_string();
    assert!(disk.contains("a.img"), "{words}: {disk}");
    assert_eq!(mark(&rig.path("a.img")), None, "{words}");
}

#[test]
fn a_place_that_cannot_have_the_overlay_is_refused() {
    let (rig, mut device) = with_disk();
    fs::write(rig.path("precious"), "precious").unwrap();
    refused(&rig, &mut device, "a --to precious", "precious: exists already");
    assert_eq!(fs::read(rig.path("precious")).unwrap(), b"precious");
    refused(&rig, &mut device, "a --to a.img", "a.img: exists already");
    refused(&rig, &mut device, "a --to none/b.qcow2", "its directory: No such file or directory");
    refused(&rig, &mut device, "a --to precious/b", "its parent is no directory");
    refused(&rig, &mut device, "a --to /proc/b", "/proc/b: cannot be created");
    refused(&rig, &mut device, "a --to /", "it names no file");
    refused(&rig, &mut device, "x --to b", "there is none of this name");
    refused(&rig, &mut device, "a --to b --update-config", "drop --update-config");
    let mut raw = rig.connect();
    let call = r#"{"method":"io.vhostblk.Snapshot","parameters":{"name":"a","overlay":"b"}}"#;
    let reply = raw.call(call);
    let why = reply["parameters"]["why"].as_str().unwrap();
    assert!(why.contains("the daemon has another directory"), "{reply}");
}

#[test]
fn a_full_file_system_leaves_no_overlay_and_no_mark() {
    if may_not_mount() {
        return;
    }
    let (rig, mut device) = with_disk();
    let full = Mount::tmpfs(1);
    fs::write(full.path("rest"), vec![1; 1 << 20]).unwrap();
    let overlay = full.path("b.qcow2");
    refused(&rig, &mut device, &format!("a --to {}", text(&overlay)), "no space is left");
    assert!(!overlay.exists());
}

#[test]
fn a_disk_that_has_no_snapshots_says_why() {
    let (rig, mut device) = with_disk();
    rig.ok("add m --backend mem --size 1M --socket-path m.sock");
    image(&rig, "r.img", "raw");
    add(&rig, "r", "--blk-file r.img --read-only");
    for (words, reason) in
        [("m --to b", "the disk has no image file"), ("r --to b", "the disk is read-only")]
    {
        refused(&rig, &mut device, words, reason);
    }
    let line = rig.refused("snapshots m", 1);
    assert!(line.contains("the disk has no image file"), "{line}");
    fs::rename(rig.path("a.img"), rig.path("moved.img")).unwrap();
    let line = rig.refused("snapshot a --to b", 1);
    assert!(line.contains("a.img: No such file"), "{line}");
    fs::copy(rig.path("moved.img"), rig.path("a.img")).unwrap();
    refused(&rig, &mut device, "a --to b", "another file than the open one");
    fs::rename(rig.path("moved.img"), rig.path("a.img")).unwrap();
    rig.ok("snapshot a --to b");
}

#[test]
fn a_block_device_has_no_snapshots() {
    if may_not_mount() {
        return;
    }
    let (rig, mut device) = with_disk();
    let below = image(&rig, "d.img", "raw");
    let disk = loop_device(&below);
    add(&rig, "d", &format!("--blk-file {}", text(&disk.path)));
    refused(&rig, &mut device, "d --to b", "is a block device");
    refused(&rig, &mut device, "d --to b --no-mark", "is a block device");
}

#[test]
fn a_chain_of_32_files_gets_no_other() {
    let rig = Rig::new();
    image(&rig, "0", "qcow2");
    for n in 1..32 {
        let (below, path) = (format!("{}", n - 1), rig.path(&n.to_string()));
        run(&["qemu-img", "create", "-qf", "qcow2", "-b", &below, "-F", "qcow2", text(&path)]);
    }
    let options = "--format qcow2 --allow-backing same-dir";
    add(&rig, "full", &format!("--blk-file 31 {options}"));
    let line = rig.refused("snapshot full --to b", 1);
    assert!(line.contains("its chain has 32 files already; shorten it"), "{line}");
    assert_eq!((mark(&rig.path("31")), rig.path("b").exists()), (None, false));
    guest(&rig, "full").write(0, &[1; 512]).unwrap();
    rig.ok("remove full");
    add(&rig, "nearly", &format!("--blk-file 30 {options}"));
    rig.ok("snapshot nearly --to b");
    guest(&rig, "nearly").write(0, &[1; 512]).unwrap();
}

#[test]
fn an_image_without_attributes_needs_no_mark_and_is_then_not_protected() {
    if may_not_mount() {
        return;
    }
    let rig = Rig::new();
    let plain = Mount::ramfs();
    let below = plain.path("a.img");
    fs::File::create(&below).unwrap().set_len(1 << 20).unwrap();
    // The file system has no holes to punch: the guest is offered no DISCARD.
    add(&rig, "a", &format!("--blk-file {} --discard off", text(&below)));
    let mut device = guest(&rig, "a");
    device.write(1, &[1; 512]).unwrap();
    let line = rig.refused("snapshot a --to b", 1);
    assert!(line.contains("no extended attributes") && line.contains("--no-mark"), "{line}");
    assert!(!rig.path("b").exists());
    device.write(2, &[2; 512]).unwrap();
    let told = rig.ok("snapshot a --to b --no-mark");
    assert!(
        told.contains("the image has no mark: make sure that no program writes to it"),
        "{told}"
    );
    let before = fs::read(&below).unwrap();
    device.write(2, &[3; 512]).unwrap();
    assert!(fs::read(&below).unwrap() == before);
    let mut data = [0; 512];
    for (sector, byte) in [(1, 1), (2, 3)] {
        device.read(sector, &mut data).unwrap();
        assert_eq!(data, [byte; 512]);
    }
    drop(device);
    rig.ok("remove a");
    add(&rig, "a", &format!("--blk-file {}", text(&below)));
}

#[test]
fn a_configuration_file_that_does_not_describe_the_disk_is_not_rewritten() {
    let rig = Rig::of_directory(&[(
        "a",
        "blk-file = '@/a.img'\nsocket-path = '@/a.sock'\nnum-queues = 2\n",
    )]);
    image(&rig, "a.img", "raw");
    rig.ok("reload");
    let mut device = guest(&rig, "a");
    let file = rig.path("conf/a.toml");
    let text_of = |path: &Path| fs::read_to_string(path).unwrap_or_default();
    for (new, reason) in [
        ("blk-file = '@/other.img'\nsocket-path = '@/a.sock'\n", "describes another image"),
        ("blk-file = '@/a.img'\nsocket-path = '@/a.sock'\nformat = 'qcow2'\n", "another image"),
        ("nonsense = 5\n", "unknown key"),
        ("blk-file", "line 1"),
    ] {
        rig.write_file("a", new);
        let before = text_of(&file);
        refused(&rig, &mut device, "a --to b --update-config", reason);
        assert_eq!(text_of(&file), before);
        assert_eq!(fs::read_dir(rig.path("conf")).unwrap().count(), 1, "{new}");
    }
    fs::remove_file(&file).unwrap();
    refused(&rig, &mut device, "a --to b --update-config", "a.toml cannot be rewritten: No such");
}

#[test]
fn a_disk_whose_storage_does_not_answer_keeps_its_image() {
    let rig = Rig::new();
    let path = image(&rig, "a.img", "raw");
    add(&rig, "a", "--blk-file a.img --wrap delay:us=12000000,ops=write");
    let mut device = guest(&rig, "a");
    let layout = device.layout();
    device.queue(0).submit(&Request::write(0, &[1; 512]), &layout).unwrap();
    rig.place
        .wait_until("the request is taken", || rig.json("status a")["queues"][0]["inflight"] == 1);
    // The client gives up before the request completes.
    let line = rig.refused("--timeout 1 snapshot a --to b", 3);
    assert!(line.contains("no answer in 1 s"), "{line}");
    rig.place.wait_until("the overlay goes", || !rig.path("b").exists());
    assert_eq!(device.queue(0).collect().unwrap().1.status, Some(0));
    assert_eq!(mark(&path), None);
    rig.ok("snapshot a --to b");
    let mut data = [0; 512];
    device.read(0, &mut data).unwrap();
    assert_eq!(data, [1; 512]);
}

/// Each FLUSH fails on a disk that has lost a write. In the backing file, or in an overlay, it would succeed.
#[test]
fn a_disk_that_has_lost_a_write_stays_where_each_flush_fails() {
    if may_not_mount() {
        return;
    }
    let disk = LossyDevice::new();
    run(&["mkfs.ext4", "-q", "-O", "^has_journal", text(&disk.device.path)]);
    let mount = Mount::of(&disk.device.path);
    let path = mount.path("a.qcow2");
    let path = text(&path);
    let rig = Rig::new();
    let base = image(&rig, "base.img", "raw");
    run(&["qemu-img", "create", "-qf", "qcow2", "-F", "raw", "-b", text(&base), path, "16M"]);
    add(&rig, "a", &format!("--direct off --format qcow2 --allow-backing any --blk-file {path}"));
    let mut device = guest(&rig, "a");
    for part in 0..8 {
        device.write(part * 2048, &vec![1; 1 << 20]).unwrap();
    }
    device.flush().unwrap();
    disk.lose();
    device.write(6 * 2048, &[2; 4096]).unwrap();
    device.flush().expect_err("a write without room is durable");
    disk.mend();
    for words in ["commit a", "snapshot a --to c.qcow2"] {
        let line = rig.refused(words, 1);
        assert!(line.contains("completed writes may be lost"), "{words}: {line}");
        device.flush().expect_err("the disk forgets that a write was lost");
    }
    assert!(!rig.path("c.qcow2").exists());
}
