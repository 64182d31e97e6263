// SPDX-License-Identifier: Apache-2.0
//! Exports that cannot take a backup, and servers that fail during one: the backup fails with the
//! reason, and the disk, its guest and its bitmaps are unharmed.

use crate::common::{finish, one_line, program, wait_until};
use crate::incremental::{bitmaps, device, image_of, ok};
use crate::rig::{Raw, Rig};
use crate::served::{Served, served};
use crate::server::{Server, dirty_image, nbdkit, qemu};
use crate::{Client, MIB, SLOW, assert_same, fill, wait_for_end};
use driver::Request;
use serde_json::json;
use std::io::Write;
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixListener;
use std::path::Path;
use virtio_spec::blk::S_OK;

const BYTES: usize = 8 << 20;

/// The reason for which a backup to this place is refused.
#[track_caller]
fn refused(served: &Served, to: &str, options: &[&str]) -> String {
    let words = [&["backup", "--to", to], options].concat();
    let told = one_line(&served.ctl(&words), 1);
    assert!(!served.status()["disk"].to_string().contains("backed up"), "{told}");
    told
}

#[test]
fn an_export_that_cannot_take_the_disk_is_refused_with_the_reason() {
    let served = served(&[]);
    let place = &served.place;
    let image = |name: &str, bytes| dirty_image(place, name, bytes);
    let small = nbdkit(place, &image("small", 8 * MIB - 512), &[], &[]);
    let read_only = qemu(place, &image("ro", 8 * MIB), "raw", &["--read-only"]);
    let named = qemu(place, &image("named", 8 * MIB), "raw", &["--export-name=x"]);
    std::fs::write(place.path("keys"), "user:0123456789abcdef\n").unwrap();
    let keys = format!("--tls-psk={}", place.path("keys").display());
    let tls = nbdkit(place, &image("tls", 8 * MIB), &["--tls=require", &keys], &[]);
    let old = nbdkit(place, &image("old", 8 * MIB), &["--oldstyle"], &[]);
    let blocks = ["blocksize-minimum=4096", "blocksize-error-policy=error"];
    let large = image("large", 9 * MIB);
    let large = nbdkit(place, &large, &["--filter=blocksize-policy"], &blocks);
    let other = UnixListener::bind(place.path("other")).unwrap();
    let answers = std::thread::spawn(move || {
        let (mut client, _) = other.accept().unwrap();
        client.write_all(b"220 mail.example ESMTP\r\n").unwrap();
    });
    let unix = |name: &str| format!("nbd:unix:{}", place.path(name).display());
    for (to, why) in [
        (small.address.clone(), "has 8388096 bytes, and the disk 8388608; make it as large"),
        (read_only.address.clone(), "the export is read-only; let"),
        (named.address.clone(), "refuses the export \"\""),
        (tls.address.clone(), "wants TLS, which a Unix socket does not need; start"),
        (old.address.clone(), "speaks the oldstyle protocol"),
        (unix("other"), "does not begin with NBDMAGIC"),
        (unix("none"), "cannot be reached: No such file"),
        (unix("disk.img"), "cannot be reached: Connection refused"),
    ] {
        let told = refused(&served, &to, &[]);
        let socket = to.strip_prefix("nbd:unix:").unwrap();
        assert!(told.contains(why) && told.contains(socket), "{told}");
    }
    answers.join().unwrap();
    ok(&served, &["resize", &(8 * MIB + 512).to_string()]);
    let told = refused(&served, &large.address, &[]);
    assert!(told.contains("whole blocks of 4096 bytes, which this disk does not have"), "{told}");
    let before = dirty_image(place, "before", 8 * MIB);
    assert_same(&named.content(BYTES), &std::fs::read(before).unwrap());
}

#[test]
fn bad_orders_for_an_export_are_refused() {
    let served = served(&[]);
    fill(&served.place.image);
    let server = qemu(&served.place, &dirty_image(&served.place, "copy", 8 * MIB), "raw", &[]);
    let to = &server.address;
    let told = refused(&served, to, &["--format", "qcow2"]);
    assert!(told.contains("the content of the disk itself; drop --format"), "{told}");
    for to in ["nbd:localhost:10809", "nbds://host", "nbd+unix:///x"] {
        let told = one_line(&served.ctl(&["backup", "--to", to]), 2);
        assert!(told.contains(to) && told.contains("give nbd:unix:PATH or"), "{told}");
    }
    let incremental = ["--incremental", "b"];
    assert!(refused(&served, to, &incremental).contains("it has no bitmap b"));
    // From an image to an export and back.
    let image = served.place.path("image");
    ok(&served, &["backup", "--to", image.to_str().unwrap(), "--bitmap", "b"]);
    let told = refused(&served, to, &incremental);
    assert!(told.contains("is the image") && told.contains("; give --to FILE, or make"), "{told}");
    ok(&served, &["backup", "--to", to, "--bitmap", "b"]);
    let next = served.place.path("next");
    let told = refused(&served, next.to_str().unwrap(), &incremental);
    assert!(told.contains("is in nbd+unix:///?socket=") && !next.exists(), "{told}");
    let named = format!("{to}:exportname=y");
    assert!(refused(&served, &named, &incremental).contains("; give --to nbd+unix:///?socket="));
    ok(&served, &["backup", "--to", to, "--incremental", "b"]);
    // The call itself.
    let call = |target: &str| {
        let mut client = Raw::connect(&served.control);
        client.call(
            &json!({"method": "io.vhostblk.Backup", "parameters": {"target": target}}).to_string(),
        )
    };
    assert_eq!(call("nbd:unix:relative")["parameters"]["parameter"], "target");
    assert!(call("nbd:host:1")["parameters"]["why"].to_string().contains("over a Unix socket"));
}

#[test]
fn a_relative_path_of_a_socket_is_that_of_the_client() {
    let served = served(&[]);
    fill(&served.place.image);
    let server = qemu(&served.place, &dirty_image(&served.place, "copy", 8 * MIB), "raw", &[]);
    let mut command = program();
    command.current_dir(served.place.dir.path()).args(["ctl", "--control-path"]);
    command.arg(&served.control).args(["backup", "--to", "nbd:unix:copy.nbd"]);
    assert!(finish(&mut command).status.success());
    assert_same(&server.content(BYTES), &image_of(&served));
}

#[test]
fn a_server_that_fails_a_write_fails_the_backup_with_its_error() {
    let served = served(&[]);
    fill(&served.place.image);
    let mut device = device(&served);
    let image = dirty_image(&served.place, "copy", 8 * MIB);
    let mut full = |error: &str, options: &[&str]| {
        let filter = ["--filter=error", error];
        let server = nbdkit(&served.place, &image, &filter[..1], &[&filter[1..], options].concat());
        let told = refused(&served, &server.address, &["--bitmap", "b", "--verify"]);
        device.write(100, &[4; 512]).unwrap();
        told
    };
    let told = full("error=ENOSPC", &["error-pwrite-rate=1"]);
    assert!(told.contains("a WRITE at 0 failed there: No space left"), "{told}");
    let told = full("error=EIO", &["error-pread-rate=1"]);
    assert!(told.contains("a READ at 0 failed there: Input/output error"), "{told}");
    assert!(bitmaps(&served).is_empty());
    // A hole of the disk.
    device.discard(0, 16_384).unwrap();
    let filters = ["--filter=error"];
    let options = ["error=EPERM", "error-zero-rate=1"];
    let server = nbdkit(&served.place, &image, &filters, &options);
    let told = refused(&served, &server.address, &[]);
    assert!(told.contains("a WRITE_ZEROES at 0 failed there: Operation not permitted"), "{told}");
}

#[test]
fn a_server_that_dies_in_the_middle_harms_neither_the_guest_nor_the_bitmap() {
    let served = served(&[]);
    fill(&served.place.image);
    let image = dirty_image(&served.place, "copy", 8 * MIB);
    let first = qemu(&served.place, &image, "raw", &[]);
    let mut device = device(&served);
    ok(&served, &["backup", "--to", &first.address, "--bitmap", "b"]);
    let mut server = Some(first);
    for (round, order) in (1..).zip([json!({"incremental": "b"}), json!({"bitmap": "b"})]) {
        device.write(round * 4096, &[round as u8; 1 << 20]).unwrap();
        let Server { process, address, .. } = server.take().unwrap();
        let mut order = order;
        order["bandwidth"] = SLOW.into();
        let mut client = Client::start(&served.control, Path::new(&address), order);
        device.write(round * 4096 + 512, &[77; 1 << 10]).unwrap();
        drop(process); // kills it
        // A write to a part that is not copied asks the copier, which finds the server dead.
        device.write(round * 4096 + 1024, &[78; 1 << 10]).unwrap();
        let reply = client.finish();
        let why = reply["parameters"]["why"].to_string();
        assert!(why.contains("it has ended the connection"), "{reply}");
        assert!(reply["parameters"]["remedy"].to_string().contains("start it again"), "{reply}");
        wait_for_end(&served);
        server = Some(qemu(&served.place, &image, "raw", &[]));
    }
    let server = server.unwrap();
    assert_eq!(bitmaps(&served)["b"]["problem"], json!(null));
    ok(&served, &["backup", "--to", &server.address, "--incremental", "b", "--verify"]);
    assert_same(&server.content(BYTES), &image_of(&served));
}

/// A write of the guest waits for the server, until the client goes.
#[test]
fn a_server_that_hangs_holds_nothing_longer_than_the_backup() {
    let served = served(&[]);
    fill(&served.place.image);
    let server = qemu(&served.place, &dirty_image(&served.place, "copy", 8 * MIB), "raw", &[]);
    let mut device = device(&served);
    let slow = json!({"bandwidth": SLOW});
    let client = Client::start(&served.control, Path::new(&server.address), slow);
    server.process.signal(libc::SIGSTOP);
    let layout = device.layout();
    for part in 0..16_u64 {
        let write = Request::write(8192 + part * 128, &[part as u8; 512]);
        device.queue(0).submit(&write, &layout).unwrap();
    }
    wait_until("the writes in flight", || ok(&served, &["status"])["queues"][0]["chains"] == 16);
    drop(client);
    for _ in 0..16 {
        assert_eq!(device.queue(0).collect().unwrap().1.status, Some(S_OK));
    }
    wait_for_end(&served);
    server.process.signal(libc::SIGCONT);
    ok(&served, &["backup", "--to", &server.address, "--verify"]);
    assert_same(&server.content(BYTES), &image_of(&served));
}

#[test]
fn a_copy_in_an_export_that_is_not_what_was_written_fails_its_verification() {
    let served = served(&[]);
    let image = dirty_image(&served.place, "copy", 8 * MIB);
    let server = qemu(&served.place, &image, "raw", &[]);
    let mut device = device(&served);
    ok(&served, &["backup", "--to", &server.address, "--bitmap", "b"]);
    for part in 0..8 {
        device.write(part * 2048, &[2; 1 << 20]).unwrap();
    }
    for order in [json!({"incremental": "b"}), json!({"bitmap": "b"})] {
        let mut order = order;
        (order["verify"], order["bandwidth"]) = (true.into(), SLOW.into());
        std::fs::write(&image, vec![0; BYTES]).unwrap();
        let mut client = Client::start(&served.control, Path::new(&server.address), order);
        wait_until("a cluster is there", || std::fs::read(&image).unwrap()[..512] == [2; 512]);
        let file = std::fs::File::options().write(true).open(&image).unwrap();
        file.write_all_at(&[3], 5).unwrap();
        ok(&served, &["jobs", "--bandwidth", "off"]);
        let reply = client.finish();
        let why = reply["parameters"]["why"].to_string();
        assert!(why.contains("another content than was written"), "{reply}");
    }
    ok(&served, &["backup", "--to", &server.address, "--incremental", "b", "--verify"]);
    assert_same(&server.content(BYTES), &image_of(&served));
}

#[test]
fn the_removal_of_a_disk_does_not_wait_for_a_server_that_hangs() {
    let rig = Rig::new();
    rig.add("a", "");
    fill(&rig.path("a.img"));
    let server = qemu(&rig.place, &dirty_image(&rig.place, "copy", MIB), "raw", &[]);
    let slow = json!({"name": "a", "bandwidth": SLOW});
    let mut client = Client::start(&rig.path("ctl"), Path::new(&server.address), slow);
    server.process.signal(libc::SIGSTOP);
    rig.ok("remove a");
    assert!(client.finish()["parameters"]["why"].to_string().contains("cancelled"));
    server.process.signal(libc::SIGCONT);
}
