// SPDX-License-Identifier: Apache-2.0
//! Images whose tables name each other: none of their tables is written by a guest.

mod common;

use backend::conformance::{Request, Rig};
use backend::{Disk, IoKind};
use common::{MIB, folder, image, open, options, qemu, qemu_ok, rig};
use qcow2::{AllowBacking, Qcow2Disk};
use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use tempfile::TempDir;

const CLUSTER: u64 = 4096;
const PLACE: u64 = 0x00ff_ffff_ffff_fe00;
/// Bytes of the disk that one L2 table has.
const BY_TABLE: u64 = 2 * MIB;

/// The positions of the tables of an image.
struct Tables {
    l1: u64,
    refcounts: u64,
    block: u64,
    /// The L2 tables, by their number.
    l2: Vec<u64>,
}

fn word(path: &Path, at: u64) -> u64 {
    let mut found = [0; 8];
    File::open(path).and_then(|file| file.read_exact_at(&mut found, at)).expect("a word");
    u64::from_be_bytes(found)
}

fn patch(path: &Path, at: u64, bytes: &[u8]) {
    let file = File::options().write(true).open(path).expect("the image opens");
    file.write_all_at(bytes, at).expect("it is written");
}

impl Tables {
    fn of(path: &Path) -> Tables {
        let (l1, refcounts) = (word(path, 40), word(path, 48));
        let l2 = (0..4).map(|entry| word(path, l1 + entry * 8) & PLACE).collect();
        Tables { l1, refcounts, block: word(path, refcounts) & PLACE, l2 }
    }

    fn all(&self) -> [u64; 6] {
        [0, self.l1, self.refcounts, self.block, self.l2[0], self.l2[1]]
    }
}

/// A disk of 8 MiB with a cluster in each of its first two L2 tables, which have this byte.
fn two_tables() -> (TempDir, PathBuf) {
    let folder = folder();
    let path = image(&folder, 8, "cluster_size=4k");
    let mut first = rig(&open(&path).expect("it opens"));
    first.write(0, &[1; CLUSTER as usize]);
    first.write(BY_TABLE, &[2; CLUSTER as usize]);
    drop(first);
    (folder, path)
}

#[test]
fn an_image_whose_tables_are_counted_as_free_is_read_only() {
    for number in 0..6 {
        let (folder, path) = two_tables();
        let tables = Tables::of(&path);
        let at = tables.all()[number];
        patch(&path, tables.block + at / CLUSTER * 2, &[0; 2]);
        let before = fs::read(&path).expect("the image");
        let text = open(&path).map(|_| "opened").expect_err("it is refused").to_string();
        assert!(text.contains("is counted as free") && text.contains("--read-only"), "{text}");
        assert!(fs::read(&path).expect("the image") == before, "{number}: it was written");
        let mut read_only = options(AllowBacking::Off, true);
        read_only.file.read_only = true;
        let disk = Qcow2Disk::open(&path, &read_only).expect("it opens");
        assert_eq!(rig(&disk).read(BY_TABLE, 512), [2; 512]);
        drop(disk);
        qemu("qemu-img", folder.path(), &["check", "-q", "-r", "all", "a.qcow2"]);
        assert_eq!(rig(&open(&path).expect("it is repaired")).read(0, 512), [1; 512]);
    }
}

#[test]
fn an_image_with_two_tables_in_one_cluster_is_read_only() {
    for number in 1..5 {
        let (_folder, path) = two_tables();
        let tables = Tables::of(&path);
        let entry = tables.all()[number] | 1 << 63;
        patch(&path, tables.l1 + 8, &entry.to_be_bytes());
        let text = open(&path).map(|_| "opened").expect_err("it is refused").to_string();
        assert!(text.contains("has two of its tables"), "{number}: {text}");
    }
}

/// Writes, zeroes and discards around the cluster at `at`.
fn change(rig: &mut Rig, at: u64) -> [bool; 3] {
    let zeroes = IoKind::WriteZeroes { unmap: true };
    [
        rig.run(&mut Request::write(at, &[7; 512], &[512], 0)).is_ok(),
        rig.run(&mut Request::command(zeroes, at, CLUSTER)).is_ok(),
        rig.run(&mut Request::write(at + CLUSTER, &[7; 512], &[512], 0)).is_ok(),
    ]
}

#[test]
fn a_guest_writes_to_no_table_that_an_entry_names_as_its_data() {
    for number in 1..8 {
        let (folder, path) = two_tables();
        let tables = Tables::of(&path);
        let first = word(&path, tables.l2[0]) & PLACE;
        // The last ones: the cluster of another entry, in the other table and in its own.
        let place =
            [&tables.all()[..], &[first, word(&path, tables.l2[1]) & PLACE]].concat()[number];
        let entry = tables.l2[1] + if number == 7 { 8 } else { 0 };
        let at = BY_TABLE + if number == 7 { CLUSTER } else { 0 };
        patch(&path, entry, &(place | 1 << 63).to_be_bytes());
        let before = fs::read(&path).expect("the image");
        let disk = open(&path).expect("it opens");
        let mut lane = rig(&disk);
        // The first table is sound; its clusters are written.
        lane.write(0, &[3; 512]);
        assert_eq!(change(&mut lane, at), [false; 3], "{number}");
        assert_eq!(change(&mut lane, 0), [true; 3], "{number}");
        assert!(lane.run(&mut Request::read(at, &[512], 0)).is_ok(), "{number}: reads go on");
        lane.write(2 * BY_TABLE, &[4; 512]);
        disk.sync().expect("a sync");
        drop((lane, disk));
        let after = fs::read(&path).expect("the image");
        assert!(after[..24] == before[..24], "{number}: the header");
        let same = |at: u64, entries: usize| {
            let range = at as usize..at as usize + entries * 8;
            assert!(after[range.clone()] == before[range], "{number}: the table at {at}");
        };
        same(tables.l1, 2);
        same(tables.refcounts, 1);
        same(tables.l2[1], 512);
        let report = qemu("qemu-img", folder.path(), &["check", "a.qcow2"]);
        let text = String::from_utf8_lossy(&report.stdout).into_owned();
        assert!(report.status.code() != Some(1), "{number}: {text}");
    }
}

/// A cluster that an entry names, and that is counted as free, would be reused for other data or for a table.
#[test]
fn a_cluster_with_data_is_not_reused_whatever_its_count_is() {
    for is_table in [false, true] {
        let (_folder, path) = two_tables();
        let tables = Tables::of(&path);
        let data = word(&path, tables.l2[0]) & PLACE;
        patch(&path, tables.block + data / CLUSTER * 2, &[0; 2]);
        let disk = open(&path).expect("it opens");
        let mut lane = rig(&disk);
        assert_eq!(lane.read(0, 512), [1; 512]);
        // The first one allocates the free cluster, as a table or as data.
        let at = if is_table { 3 * BY_TABLE } else { CLUSTER };
        let wrote = lane.run(&mut Request::write(at, &[9; 512], &[512], 0));
        assert!(wrote.is_err(), "{is_table}");
        assert_eq!(lane.read(0, CLUSTER as usize), [1; CLUSTER as usize], "{is_table}");
        drop((lane, disk));
        let after = fs::read(&path).expect("the image");
        assert!(after[data as usize..][..CLUSTER as usize] == [1; CLUSTER as usize]);
    }
}

/// The image has a zero cluster that has kept its place: its claim is no obstacle.
#[test]
fn a_zero_cluster_with_a_place_is_written_there() {
    let (folder, path) = two_tables();
    let run = |command: &str| {
        qemu_ok("qemu-io", folder.path(), &["-f", "qcow2", "-c", command, "a.qcow2"]);
    };
    run("write -z 0 4k");
    let entry = word(&path, Tables::of(&path).l2[0]);
    assert!(entry & PLACE != 0 && entry & 1 == 1, "{entry:#x}: QEMU keeps the place");
    let disk = open(&path).expect("it opens");
    let mut lane = rig(&disk);
    lane.write(512, &[5; 512]);
    assert_eq!(lane.read(0, 1536), [[0; 512], [5; 512], [0; 512]].concat());
    drop((lane, disk));
    assert_eq!(word(&path, Tables::of(&path).l2[0]) & PLACE, entry & PLACE);
    assert_eq!(common::check(&path), Ok(()));
}
