// SPDX-License-Identifier: Apache-2.0
//! The image lock, between two of ours and against QEMU.

mod common;

use backend::{Disk, File, FileError, FileOptions, LockError};
use common::{DISK, Image, TMPFS};
use rustix::fs::XattrFlags;
use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::Duration;

const QEMU: &str = "qemu-system-x86_64";

fn image() -> Image {
    Image::new(DISK, 1 << 20).expect("an image can be made")
}

fn open(path: &Path, read_only: bool) -> File {
    let options = FileOptions { read_only, ..FileOptions::default() };
    File::open(path, options).expect("the image opens")
}

fn lock(path: &Path, read_only: bool) -> (File, Result<(), LockError>) {
    let file = open(path, read_only);
    let outcome = file.lock();
    (file, outcome)
}

#[test]
fn a_second_writer_is_refused_and_told_who_holds_it() {
    let image = image();
    let (_first, outcome) = lock(&image.path, false);
    outcome.expect("nobody else has it");
    let (_second, outcome) = lock(&image.path, false);
    let text = outcome.expect_err("two writers").to_string();
    // Its own process id would name this program as the one to stop.
    assert!(text.contains("in use by another disk of this program"), "{text}");
    assert!(text.contains("image.raw") && text.contains("--lock off"), "{text}");
    assert!(!text.contains('\n'), "{text}");
}

/// The other program may have put an overlay over the image while it had the lock.
#[test]
fn a_lock_is_not_taken_again_for_writing_if_the_marks_of_the_image_cannot_be_read() {
    let image = Image::new(TMPFS, 1 << 20).unwrap();
    let file = open(&image.path, false);
    let lock = file.image_lock();
    lock.take(Duration::ZERO).expect("nobody else has it");
    lock.give_up().expect("the sync succeeds");
    // Longer than a path.
    let mark = rustix::fs::setxattr(
        &image.path,
        "user.vhost-blk.overlay",
        &[b'a'; 5000],
        XattrFlags::empty(),
    );
    if mark.is_err() {
        println!("SKIP: the kernel has no such attributes of files in memory");
        return;
    }
    let told = lock.take(Duration::ZERO).expect_err("the mark is unknown").to_string();
    assert!(told.contains("cannot be read") && told.contains("; check its storage"), "{told}");
    let other = open(&image.path, true);
    other.lock().expect("the lock is free");
    let reader = other.image_lock();
    reader.take(Duration::ZERO).expect("a reader needs no mark");
    let told = File::open(&image.path, FileOptions::default()).expect_err("the mark is unknown");
    assert!(matches!(told, FileError::Lock(LockError::MarkUnknown { .. })), "{told}");
}

#[test]
fn readers_share_and_keep_a_writer_out() {
    let image = image();
    let (_first, outcome) = lock(&image.path, true);
    outcome.expect("nobody else has it");
    let (second, outcome) = lock(&image.path, true);
    outcome.expect("readers share");
    let (writer, outcome) = lock(&image.path, false);
    assert!(matches!(outcome, Err(LockError::InUse { .. })), "{outcome:?}");
    drop((_first, second));
    writer.lock().expect("the readers are gone");
}

#[test]
fn a_writer_keeps_readers_out() {
    let image = image();
    let (writer, outcome) = lock(&image.path, false);
    outcome.expect("nobody else has it");
    let (_reader, outcome) = lock(&image.path, true);
    assert!(matches!(outcome, Err(LockError::InUse { .. })), "{outcome:?}");
    writer.lock().expect("locking again does not conflict with oneself");
}

#[test]
fn a_refused_lock_leaves_nothing_behind() {
    let image = image();
    let (first, outcome) = lock(&image.path, true);
    outcome.expect("nobody else has it");
    let (_refused_but_open, outcome) = lock(&image.path, false);
    outcome.expect_err("a reader is there");
    drop(first);
    let (_third, outcome) = lock(&image.path, false);
    outcome.expect("the refused writer holds nothing");
}

#[test]
fn a_lane_keeps_the_lock_when_the_disk_is_dropped() {
    let image = image();
    let (disk, outcome) = lock(&image.path, false);
    outcome.expect("nobody else has it");
    let lane = disk.open_lane().expect("the lane opens");
    drop(disk);
    let (second, outcome) = lock(&image.path, false);
    outcome.expect_err("the lane still writes");
    drop(lane);
    second.lock().expect("the lane is gone");
}

/// QEMU with the image as a virtio-blk disk, stopped before its first instruction.
fn qemu(path: &Path, read_only: bool) -> Result<Child, String> {
    let read_only = if read_only { "on" } else { "off" };
    let path = path.display();
    let drive = format!("file={path},format=raw,if=none,id=d,read-only={read_only}");
    Command::new(QEMU)
        .args(["-S", "-M", "q35,accel=tcg", "-display", "none", "-nodefaults", "-qmp", "stdio"])
        .args(["-drive", &drive, "-device", "virtio-blk-pci,drive=d"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .map_err(|why| format!("{QEMU}: {why}"))
}

/// Waits until it is up, or has refused to start.
fn wait_until_up(qemu: &mut Child) -> bool {
    let commands = "{\"execute\":\"qmp_capabilities\"}\n{\"execute\":\"query-block\"}\n";
    let stdin = qemu.stdin.as_mut().expect("piped");
    // QEMU may be gone already.
    let _ = stdin.write_all(commands.as_bytes());
    let stdout = BufReader::new(qemu.stdout.as_mut().expect("piped"));
    stdout.lines().map_while(Result::ok).any(|line| line.contains("image.raw"))
}

fn quit(mut qemu: Child) -> (ExitStatus, String) {
    let stdin = qemu.stdin.as_mut().expect("piped");
    // QEMU may be gone already.
    let _ = stdin.write_all(b"{\"execute\":\"quit\"}\n");
    let output = qemu.wait_with_output().expect("QEMU ends");
    (output.status, String::from_utf8_lossy(&output.stderr).into_owned())
}

fn skip(reason: &str) {
    println!("SKIP: {reason}");
}

#[test]
fn qemu_refuses_an_image_that_we_write() {
    for qemu_reads in [false, true] {
        let image = image();
        let (_ours, outcome) = lock(&image.path, false);
        outcome.expect("nobody else has it");
        let mut qemu = match qemu(&image.path, qemu_reads) {
            Ok(qemu) => qemu,
            Err(reason) => return skip(&reason),
        };
        assert!(!wait_until_up(&mut qemu), "QEMU shares the image with a writer");
        let (status, stderr) = quit(qemu);
        assert!(!status.success() && stderr.contains("lock"), "{status}: {stderr}");
    }
}

#[test]
fn qemu_refuses_to_write_an_image_that_we_read() {
    let image = image();
    let (_ours, outcome) = lock(&image.path, true);
    outcome.expect("nobody else has it");
    let mut qemu = match qemu(&image.path, false) {
        Ok(qemu) => qemu,
        Err(reason) => return skip(&reason),
    };
    assert!(!wait_until_up(&mut qemu), "QEMU writes what we read");
    let (status, stderr) = quit(qemu);
    assert!(!status.success() && stderr.contains("lock"), "{status}: {stderr}");
}

#[test]
fn we_refuse_an_image_that_qemu_writes_and_name_its_process() {
    let image = image();
    let mut qemu = match qemu(&image.path, false) {
        Ok(qemu) => qemu,
        Err(reason) => return skip(&reason),
    };
    let pid = qemu.id();
    assert!(wait_until_up(&mut qemu), "QEMU starts: {}", quit(qemu).1);
    // The lab's own QEMU is run by its loader, and has the loader's name.
    let name = std::fs::read_to_string(format!("/proc/{pid}/comm")).unwrap();
    for read_only in [false, true] {
        let (_ours, outcome) = lock(&image.path, read_only);
        let text = outcome.expect_err("QEMU has it").to_string();
        assert!(text.contains(&format!("in use by {} (process {pid})", name.trim())), "{text}");
    }
    assert!(quit(qemu).0.success());
    let (_ours, outcome) = lock(&image.path, false);
    outcome.expect("QEMU is gone");
}

#[test]
fn we_and_qemu_read_an_image_together() {
    let image = image();
    let mut qemu = match qemu(&image.path, true) {
        Ok(qemu) => qemu,
        Err(reason) => return skip(&reason),
    };
    assert!(wait_until_up(&mut qemu), "QEMU starts: {}", quit(qemu).1);
    let (_ours, reads) = lock(&image.path, true);
    let (_ours, writes) = lock(&image.path, false);
    assert!(quit(qemu).0.success());
    reads.expect("readers share");
    assert!(matches!(writes, Err(LockError::InUse { .. })), "{writes:?}");
}
