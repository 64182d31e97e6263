// SPDX-License-Identifier: Apache-2.0
//! Firmware boots from the served disk, and writes to it: SeaBIOS a boot sector, OVMF a script of
//! the UEFI shell on a FAT file system.

mod common;

use std::fs::File;
use std::iter;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::time::Duration;

use common::{LAB, build_daemon};
use kit::process::{OwnedChild, StopWith};
use kit::sched;
use lab::firmware;
use lab::guest::smp;
use lab::server::{Server, ServerCommand};

const DISK_BYTES: usize = 1 << 20;
const SECTOR: usize = 512;
const PATIENCE: Duration = Duration::from_secs(90);
const SAID: &str = "booted from the served disk";

/// Reads sector 2 of the disk (counted from 1), writes it to sector 3, and prints it on the first
/// serial port.
const BOOT_CODE: [u8; 53] = [
    0x31, 0xc0, 0x8e, 0xd8, 0x8e, 0xc0, // ax, ds, es = 0
    0xb8, 0x01, 0x02, 0xbb, 0x00, 0x7e, 0xb9, 0x02, 0x00, 0xb6, 0x00, 0xcd, 0x13, // read
    0x72, 0x1d, // an error: halt
    0xb8, 0x01, 0x03, 0xbb, 0x00, 0x7e, 0xb9, 0x03, 0x00, 0xb6, 0x00, 0xcd, 0x13, // write
    0x72, 0x0e, // an error: halt
    0xbe, 0x00, 0x7e, // si = what was read
    0xac, 0x84, 0xc0, 0x74, 0x06, 0xba, 0xf8, 0x03, 0xee, 0xeb, 0xf5, // print up to a zero
    0xf4, 0xeb, 0xfd, // halt
];

fn boot_sector_disk() -> Vec<u8> {
    let mut disk = vec![0; DISK_BYTES];
    disk[..BOOT_CODE.len()].copy_from_slice(&BOOT_CODE);
    disk[510..512].copy_from_slice(&[0x55, 0xaa]);
    disk[SECTOR..SECTOR + SAID.len()].copy_from_slice(SAID.as_bytes());
    disk
}

/// FAT12 with one sector for each cluster, one FAT of six sectors, a root directory of one sector,
/// and in it `startup.nsh`, which UEFI's shell runs.
fn fat_disk(script: &str) -> Vec<u8> {
    let mut disk = vec![0; DISK_BYTES];
    let mut put = |at: usize, bytes: &[u8]| disk[at..at + bytes.len()].copy_from_slice(bytes);
    put(0, b"\xeb\x3c\x90LAB     ");
    put(11, &[0x00, 0x02, 1, 1, 0, 1, 16, 0, 0x00, 0x08, 0xf8, 6, 0, 32, 0, 2, 0]);
    put(36, &[0x80, 0, 0x29, 1, 2, 3, 4]);
    put(43, b"LAB        FAT12   ");
    put(510, &[0x55, 0xaa]);
    // The media byte, the end of chain, and one cluster that is a whole file.
    put(SECTOR, &[0xf8, 0xff, 0xff, 0xff, 0x0f]);
    let root = 7 * SECTOR;
    put(root, b"STARTUP NSH\x20");
    put(root + 26, &2_u16.to_le_bytes());
    put(root + 28, &(script.len() as u32).to_le_bytes());
    put(8 * SECTOR, script.as_bytes());
    disk
}

/// Boots from `disk` until the serial port has said the words; returns the disk as it is then.
fn boot(disk: &[u8], firmware: Option<&Path>) -> Vec<u8> {
    let directory = tempfile::tempdir_in(LAB.cache.dir()).unwrap();
    let (image, serial) = (directory.path().join("disk"), directory.path().join("serial"));
    std::fs::write(&image, disk).unwrap();
    let server = Server::start(&ServerCommand::daemon(&build_daemon()), &image, 1).unwrap();
    let mut words = format!(
        "-nodefaults -no-user-config -no-reboot -display none -accel tcg -smp {} \
         -machine q35,memory-backend=memory -m 256M \
         -object memory-backend-memfd,id=memory,size=256M,share=on \
         -chardev socket,id=disk,path={} -device vhost-user-blk-pci,chardev=disk,bootindex=0 \
         -serial file:{}",
        smp(1),
        server.socket().display(),
        serial.display()
    );
    if let Some(path) = firmware {
        let path = path.display();
        words += &format!(" -drive if=pflash,format=raw,readonly=on,file={path}");
    }
    let words: Vec<String> = iter::once(LAB.base.qemu.program())
        .chain(words.split_whitespace().map(str::to_owned))
        .collect();
    let log = directory.path().join("qemu");
    let mut qemu = OwnedChild::spawn(&words, &log, StopWith::Kill).unwrap();
    let patience = sched::Patience::new(qemu.id(), PATIENCE);
    let read = |path: &Path| {
        String::from_utf8_lossy(&std::fs::read(path).unwrap_or_default()).into_owned()
    };
    while !read(&serial).contains(SAID) {
        assert!(
            !patience.is_over() && qemu.try_wait().unwrap().is_none(),
            "no boot: {}\n{}\n{}",
            read(&serial),
            read(&log),
            server.log()
        );
        std::thread::sleep(Duration::from_millis(50));
    }
    qemu.kill_hard().unwrap();
    server.stop().unwrap();
    let mut found = vec![0; DISK_BYTES];
    File::open(&image).unwrap().read_exact_at(&mut found, 0).unwrap();
    found
}

#[test]
fn seabios_boots_from_the_served_disk() {
    let disk = boot(&boot_sector_disk(), None);
    assert_eq!(&disk[2 * SECTOR..2 * SECTOR + SAID.len()], SAID.as_bytes());
}

#[test]
fn ovmf_boots_from_the_served_disk() {
    let ovmf = firmware::ovmf(&LAB.cache).unwrap_or_else(|error| panic!("{error:#}"));
    // Written to a file first, so that the words come from the disk again; the shell must not show
    // its commands, which have them, too.
    let script = format!("@echo -off\r\necho {SAID} > fs0:\\said\r\ntype fs0:\\said\r\n");
    let disk = boot(&fat_disk(&script), Some(&ovmf));
    let mut entries = disk[7 * SECTOR..8 * SECTOR].chunks(32);
    assert!(entries.any(|entry| entry.starts_with(b"SAID    ")), "no new file in the directory");
}
