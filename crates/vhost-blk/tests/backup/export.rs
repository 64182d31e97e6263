// SPDX-License-Identifier: Apache-2.0
//! Backups into exports of NBD servers: qemu-nbd and nbdkit.

use crate::content::{content_by_qemu, under, write_some};
use crate::incremental::{bitmaps, device, image_of, ok};
use crate::load::Load;
use crate::served::{Served, served};
use crate::server::{Server, dirty_image, nbdkit, qemu, simple};
use crate::{Client, MIB, assert_same, fill};
use driver::{Device, Options};
use serde_json::{Value, json};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::Path;
use std::process::Command;

const BYTES: usize = 8 << 20;
const PART: u64 = 64 << 10;
const SECTORS: u64 = PART / 512;

/// Makes a backup with these options, and returns the number of copied bytes.
#[track_caller]
fn backup(served: &Served, server: &Server, options: &[&str]) -> u64 {
    let words = [&["backup", "--to", &server.address], options].concat();
    ok(served, &words)["copied_bytes"].as_u64().unwrap()
}

/// Full backups into the same export, each while two queues write.
fn backed_up_under_load(server: &Server, served: &Served, content: impl Fn() -> Vec<u8>) {
    let options = Options { num_queues: 2, ..Options::default() };
    let device = Device::connect(&served.place.socket, &options).unwrap();
    let layout = device.layout();
    let (_session, queues) = device.into_parts();
    let load = |(first, queue)| Load::new(queue, layout.clone(), first..first + 8192).of_up_to(64);
    let mut loads: Vec<Load> = (0..).step_by(8192).zip(queues).map(load).collect();
    for _ in 0..3 {
        write_some(&mut loads, 200);
        let at_the_start = image_of(served);
        let mut client =
            Client::start(&served.control, Path::new(&server.address), json!({"verify": true}));
        let last = under(&mut loads, || client.finish());
        assert_eq!(last["parameters"]["copied_bytes"], 8 * MIB, "{last}");
        assert!(image_of(served) != at_the_start, "nothing was written");
        assert_same(&content()[..BYTES], &at_the_start);
    }
    for load in loads {
        load.run(|_| false); // reads everything
    }
}

#[test]
fn a_copy_in_an_export_of_qemu_nbd_is_the_disk_at_its_start_although_two_queues_write() {
    let served = served(&[]);
    let image = dirty_image(&served.place, "raw", 9 * MIB);
    let server = qemu(&served.place, &image, "raw", &[]);
    backed_up_under_load(&server, &served, || server.content(BYTES));
    // The rest of a larger export is not touched.
    let rest = std::fs::read(&image).unwrap();
    let before = std::fs::read(dirty_image(&served.place, "before", 9 * MIB)).unwrap();
    assert_same(&rest[BYTES..], &before[BYTES..]);
}

#[test]
fn a_copy_in_a_named_export_of_a_qcow2_image_is_sound_for_qemu_img() {
    let served = served(&[]);
    let image = served.place.path("new.qcow2");
    let create = ["create", "-q", "-f", "qcow2", image.to_str().unwrap(), "8M"];
    let made = Command::new("qemu-img").args(create).status();
    assert!(made.expect("qemu-utils are installed").success());
    let mut server = qemu(&served.place, &image, "qcow2", &["--export-name=the disk"]);
    let socket = server.address.strip_prefix("nbd:unix:").unwrap().to_owned();
    server.address = format!("nbd+unix:///the%20disk?socket={socket}");
    backed_up_under_load(&server, &served, || content_by_qemu(&image));
    drop(server);
    let checked = Command::new("qemu-img").args(["check", "-q"]).arg(&image).status();
    assert!(checked.unwrap().success());
}

#[test]
fn a_copy_in_an_export_of_nbdkit_is_the_disk_at_its_start_although_two_queues_write() {
    let served = served(&[]);
    let image = dirty_image(&served.place, "raw", 8 * MIB);
    let server = nbdkit(&served.place, &image, &[], &[]);
    backed_up_under_load(&server, &served, || server.content(BYTES));
}

/// The holes of the disk hide the former content of the export.
#[test]
fn zeroes_of_the_disk_are_zeroes_in_the_export_with_and_without_write_zeroes() {
    let served = served(&[]);
    let mut device = device(&served);
    device.write(5 * SECTORS + 3, &[1; 512]).unwrap();
    device.write(100 * SECTORS, &[2; 300 << 10]).unwrap();
    device.write(20 * SECTORS, &[0; 256 << 10]).unwrap();
    device.flush().unwrap();
    let image = dirty_image(&served.place, "holes", 8 * MIB);
    let server = qemu(&served.place, &image, "raw", &[]);
    backup(&served, &server, &["--verify"]);
    assert_same(&server.content(BYTES), &image_of(&served));
    let blocks = std::fs::metadata(&image).unwrap().blocks() * 512;
    assert!(blocks <= 7 * PART, "{blocks} bytes of the image are in use");
    let compared = ["compare", "-q", "-f", "raw", "-F", "raw", "-U"];
    let of_disk = served.place.image.as_path();
    let same = Command::new("qemu-img").args(compared).args([of_disk, &image]).status();
    assert!(same.unwrap().success());
    let image = dirty_image(&served.place, "data", 8 * MIB);
    let filters = ["--filter=nozero", "--filter=blocksize-policy"];
    let options =
        ["blocksize-minimum=512", "blocksize-maximum=96K", "blocksize-error-policy=error"];
    let server = nbdkit(&served.place, &image, &filters, &options);
    backup(&served, &server, &["--verify"]);
    assert_same(&server.content(BYTES), &image_of(&served));
}

#[test]
fn an_incremental_backup_writes_only_the_changed_parts_into_the_same_export() {
    let served = served(&[]);
    fill(&served.place.image);
    let image = dirty_image(&served.place, "copy", 9 * MIB);
    let server = qemu(&served.place, &image, "raw", &[]);
    let mut device = device(&served);
    assert_eq!(backup(&served, &server, &["--bitmap", "b"]), 8 * MIB);
    assert_same(&server.content(BYTES), &image_of(&served));
    let shown = bitmaps(&served)["b"]["backup"].clone();
    assert!(shown.as_str().unwrap().starts_with("nbd+unix:///?socket=/"), "{shown}");
    device.write(3 * SECTORS - 1, &[1; 1024]).unwrap();
    device.discard(10 * SECTORS, 2 * SECTORS as u32).unwrap();
    device.write_zeroes(20 * SECTORS, SECTORS as u32, 0).unwrap();
    device.write_zeroes(127 * SECTORS, SECTORS as u32, 1).unwrap();
    // A mark in an unchanged part shows that the part is not written.
    let file = std::fs::File::options().write(true).open(&image).unwrap();
    file.write_all_at(b"mark", 50 * PART).unwrap();
    let changed = [2, 3, 10, 11, 20, 127].len() as u64 * PART;
    assert_eq!(backup(&served, &server, &["--incremental", "b", "--verify"]), changed);
    let mut expected = image_of(&served);
    expected[50 * PART as usize..][..4].copy_from_slice(b"mark");
    assert_same(&server.content(BYTES), &expected);
    assert_eq!(backup(&served, &server, &["--incremental", "b"]), 0);
    // The disk grows up to the size of the export, and beyond.
    ok(&served, &["resize", "9M"]);
    device.write(17_000, &[5; 512]).unwrap();
    assert_eq!(backup(&served, &server, &["--incremental", "b"]), MIB);
    let copied = image_of(&served);
    assert_same(&std::fs::read(&image).unwrap()[BYTES..], &copied[BYTES..]);
}

/// Several backups of one disk may go to one export: the next complete one has all changes.
#[test]
fn a_cancelled_backup_into_an_export_is_mended_by_the_next_incremental_one() {
    let served = served(&[]);
    fill(&served.place.image);
    let image = dirty_image(&served.place, "copy", 8 * MIB);
    let server = nbdkit(&served.place, &image, &[], &[]);
    let mut device = device(&served);
    backup(&served, &server, &["--bitmap", "b"]);
    let slow = |order: Value| {
        let mut order = order;
        order["bandwidth"] = (2 * MIB).into();
        Client::start(&served.control, Path::new(&server.address), order)
    };
    for (round, order) in
        (1..).zip([json!({"incremental": "b"}), json!({"bitmap": "b"}), json!({})])
    {
        device.write(round * 10 * SECTORS, &[round as u8; 1 << 20]).unwrap();
        let client = slow(order);
        device.write((round * 10 + 1) * SECTORS, &[9; 1 << 10]).unwrap();
        drop(client);
        crate::wait_for_end(&served);
    }
    backup(&served, &server, &["--incremental", "b", "--verify"]);
    assert_same(&server.content(BYTES), &image_of(&served));
}

#[test]
fn a_server_that_cannot_make_data_durable_is_used_with_a_warning() {
    let mut served = served(&[]);
    let mut device = device(&served);
    device.write(300 * SECTORS / 4, &[1; 100 << 10]).unwrap();
    let server = simple(&served.place, &dirty_image(&served.place, "copy", 8 * MIB));
    backup(&served, &server, &["--verify"]);
    assert_same(&server.content(BYTES), &image_of(&served));
    served.daemon.log_line("the NBD server has no FLUSH");
}
