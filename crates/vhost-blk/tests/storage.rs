// SPDX-License-Identifier: Apache-2.0
//! Storage that is full, fails, shrinks or is very large, as a guest sees it.

mod common;

use common::{Daemon, program};
use driver::{Device, Error, Options};
use kit::mount;
use mount::{LossyDevice, Mount, loop_device, may_not_mount, run};
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::time::Duration;
use virtio_spec::blk::S_IOERR;

const MIB: u64 = 1 << 20;
const TIB: u64 = 1 << 40;
/// Sectors of a MiB.
const SECTORS: u64 = MIB / 512;

/// A daemon for `disk` on the io_uring plane, and a guest on it.
fn served(disk: &Path, options: &[&str]) -> (tempfile::TempDir, Daemon, Device) {
    let directory = tempfile::tempdir().unwrap();
    let socket = directory.path().join("disk.sock");
    let mut command = program();
    command.args(["serve", "--data-plane", "uring", "--num-queues", "1", "--blk-file"]);
    command.arg(disk).arg("--socket-path").arg(&socket).args(options);
    let daemon = Daemon::start(&mut command, &socket);
    let options = Options { limit: Duration::from_secs(60), ..Options::default() };
    let guest = Device::connect(&socket, &options).unwrap();
    (directory, daemon, guest)
}

fn is_ioerr(result: Result<(), Error>) -> bool {
    match result {
        Ok(()) => false,
        Err(Error::Status(Some(S_IOERR))) => true,
        Err(other) => panic!("{other}"),
    }
}

#[track_caller]
fn reads_as(guest: &mut Device, sector: u64, byte: u8) {
    let mut data = vec![0; 4096];
    guest.read(sector, &mut data).unwrap();
    assert!(data.iter().all(|&found| found == byte), "sector {sector} holds {}", data[0]);
}

/// Writes whole MiBs until the file system has no room; goes on after a file beside the image is
/// deleted.
fn full_and_free_again(mount: &Mount, format: &str, direct: &str) {
    let (image, filler) = (mount.path("image"), mount.path("filler"));
    run(&["qemu-img", "create", "-qf", format, image.to_str().unwrap(), "256M"]);
    std::fs::write(&filler, vec![1; 8 << 20]).unwrap();
    let (_directory, mut daemon, mut guest) =
        served(&image, &["--format", format, "--direct", direct]);
    let data = vec![7; MIB as usize];
    let mut at = 0;
    while !is_ioerr(guest.write(at * SECTORS, &data)) {
        at += 1;
        assert!(at < 256, "a file system of less than that took 256 MiB");
    }
    assert!(at > 0, "it is full from the start");
    let line = daemon.log_line("the disk fails");
    assert!(line.contains("No space left on device") && line.contains("sector="), "{line}");
    // The next write is refused too. Existing data stays, and can be overwritten.
    assert!(is_ioerr(guest.write(at * SECTORS, &data)));
    reads_as(&mut guest, (at - 1) * SECTORS, 7);
    guest.write(0, &vec![8; 4096]).unwrap();
    reads_as(&mut guest, 0, 8);
    guest.flush().unwrap();
    std::fs::remove_file(&filler).unwrap();
    for n in at..at + 4 {
        guest.write(n * SECTORS, &data).unwrap();
    }
    guest.flush().unwrap();
    reads_as(&mut guest, (at + 3) * SECTORS + SECTORS - 8, 7);
    daemon.signal(libc::SIGTERM);
    assert_eq!(daemon.wait().code(), Some(0));
    let read = format!("read -P 7 {} 4k", at * MIB);
    run(&["qemu-io", "-rf", format, "-c", &read, image.to_str().unwrap()]);
    if format == "qcow2" {
        run(&["qemu-img", "check", "-qf", format, image.to_str().unwrap()]);
    }
}

#[test]
fn a_sparse_image_on_a_full_tmpfs_refuses_writes_until_there_is_room() {
    if !may_not_mount() {
        full_and_free_again(&Mount::tmpfs(24), "raw", "off");
    }
}

#[test]
fn a_qcow2_image_on_a_full_file_system_refuses_writes_until_there_is_room() {
    if !may_not_mount() {
        full_and_free_again(&Mount::tmpfs(24), "qcow2", "off");
        full_and_free_again(&Mount::ext4(48), "qcow2", "on");
    }
}

#[test]
fn a_sparse_image_on_a_full_ext4_refuses_writes_until_there_is_room() {
    if !may_not_mount() {
        full_and_free_again(&Mount::ext4(48), "raw", "on");
    }
}

/// A loop device whose file has no room fails the writeback of the page cache and reports the error
/// once: the acknowledged data is lost, even if the next writeback succeeds.
#[test]
fn after_an_fsync_that_failed_every_flush_fails() {
    if may_not_mount() {
        return;
    }
    let disk = LossyDevice::new();
    let place = tempfile::tempdir().unwrap();
    let control = place.path().join("control.sock");
    let control_path = control.to_str().unwrap();
    let options = ["--direct", "off", "--control-path", control_path];
    let (_directory, mut daemon, mut guest) = served(&disk.device.path, &options);
    guest.write(0, &vec![1; 4096]).unwrap();
    guest.flush().unwrap();
    disk.lose();
    guest.write(SECTORS, &vec![2; MIB as usize]).unwrap();
    assert!(is_ioerr(guest.flush()), "a write without room is durable");
    disk.mend();
    for n in 0..3 {
        guest.write(n * 8, &vec![3; 4096]).unwrap();
        assert!(is_ioerr(guest.flush()), "FLUSH {n} forgets that writes were lost");
    }
    // A new program would not know of the failure.
    let refused =
        common::run(["ctl", "--control-path", control_path, "upgrade"].map(PathBuf::from));
    let line = common::one_line(&refused, 1);
    assert!(line.contains("a sync of the disk has failed"), "{line}");
    assert!(is_ioerr(guest.flush()), "a refused upgrade forgets that writes were lost");
    daemon.signal(libc::SIGTERM);
    assert_eq!(daemon.wait().code(), Some(0));
}

#[test]
fn an_image_truncated_under_the_daemon_loses_that_part_and_nothing_else() {
    for direct in ["on", "off"] {
        let directory = tempfile::tempdir_in("/dev/shm").unwrap();
        let image = directory.path().join("image");
        File::create(&image).unwrap().set_len(4 * MIB).unwrap();
        let (_directory, mut daemon, mut guest) = served(&image, &["--direct", direct]);
        for n in 0..4 {
            guest.write(n * SECTORS, &vec![n as u8 + 1; MIB as usize]).unwrap();
        }
        File::options().write(true).open(&image).unwrap().set_len(2 * MIB).unwrap();
        // A lost block reads as an error or zeroes, never as the content of another part.
        let mut data = vec![9; 4096];
        for sector in [2 * SECTORS, 3 * SECTORS + 8, 4 * SECTORS - 8, 2 * SECTORS - 4] {
            match guest.read(sector, &mut data) {
                Ok(()) => assert!(data[2048..].iter().all(|&byte| byte == 0), "sector {sector}"),
                Err(Error::Status(Some(S_IOERR))) => {}
                Err(other) => panic!("{other}"),
            }
        }
        reads_as(&mut guest, SECTORS, 2);
        guest.flush().unwrap();
        File::options().write(true).open(&image).unwrap().set_len(4 * MIB).unwrap();
        guest.write(3 * SECTORS, &vec![5; 4096]).unwrap();
        reads_as(&mut guest, 3 * SECTORS, 5);
        reads_as(&mut guest, 2 * SECTORS, 0);
        daemon.signal(libc::SIGTERM);
        assert_eq!(daemon.wait().code(), Some(0));
    }
}

/// Both ends and the edges of 32 bits of a disk, in sectors and in blocks of 4096 bytes.
fn is_right_everywhere(disk: &Path, bytes: u64) {
    let places = [0, 2 * TIB - 4096, 2 * TIB, 16 * TIB - 4096, 16 * TIB, bytes - 4096];
    let places: Vec<u64> = places.into_iter().filter(|at| at + 4096 <= bytes).collect();
    let (_directory, daemon, mut guest) = served(disk, &[]);
    assert_eq!(guest.capacity_sectors().unwrap(), bytes / 512);
    for (n, at) in (1..).zip(&places) {
        guest.write(at / 512, &[n; 4096]).unwrap();
    }
    guest.flush().unwrap();
    for (n, at) in (1..).zip(&places) {
        reads_as(&mut guest, at / 512, n);
        let mut found = [0; 4096];
        File::open(disk).unwrap().read_exact_at(&mut found, *at).unwrap();
        assert_eq!(found, [n; 4096], "byte {at} of the disk");
    }
    assert!(is_ioerr(guest.write(bytes / 512 - 4, &[1; 4096])), "a write beyond the end");
    guest.write_zeroes(bytes / 512 - 8, 8, 0).unwrap();
    reads_as(&mut guest, bytes / 512 - 8, 0);
    drop(daemon);
}

#[test]
fn images_of_3_and_17_tib_are_right_to_their_last_byte() {
    for bytes in [3 * TIB, 17 * TIB] {
        let directory = tempfile::tempdir_in("/dev/shm").unwrap();
        let image = directory.path().join("image");
        File::create(&image).unwrap().set_len(bytes).unwrap();
        is_right_everywhere(&image, bytes);
    }
}

#[test]
fn block_devices_of_3_and_17_tib_are_right_to_their_last_byte() {
    if may_not_mount() {
        return;
    }
    for bytes in [3 * TIB, 17 * TIB] {
        let directory = tempfile::tempdir_in("/dev/shm").unwrap();
        let file = directory.path().join("disk");
        File::create(&file).unwrap().set_len(bytes).unwrap();
        is_right_everywhere(&loop_device(&file).path, bytes);
    }
}

/// Only `--lock off` lets two writers at a file system, and a reader may look on.
#[test]
fn a_mounted_block_device_is_not_served_for_writing() {
    if may_not_mount() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let image = directory.path().join("image");
    File::create(&image).unwrap().set_len(16 * MIB).unwrap();
    run(&["mkfs.ext4", "-q", "-F", image.to_str().unwrap()]);
    let disk = loop_device(&image);
    let mount = Mount::of(&disk.path);
    let socket = directory.path().join("disk.sock");
    let mut command = program();
    command.args(["serve", "--data-plane", "uring", "--blk-file"]).arg(&disk.path);
    let output = command.arg("--socket-path").arg(&socket).output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert!(said.contains("mounted, or claimed") && said.contains("--read-only"), "{said}");
    assert!(!socket.exists());
    let output = program().args(["doctor", "--blk-file"]).arg(&disk.path).output().unwrap();
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(said.contains("mounted, or claimed"), "{said}");
    drop(served(&disk.path, &["--read-only"]));
    drop(mount);
    drop(served(&disk.path, &[]));
}
