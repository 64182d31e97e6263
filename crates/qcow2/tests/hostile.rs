// SPDX-License-Identifier: Apache-2.0
//! Images whose tables name each other: none of their tables is written by a guest.

mod common;

use backend::conformance::{Request, Rig};
use backend::file::identity_of;
use backend::{Disk, IoKind};
use common::{MIB, directory, image, open, options, qemu, qemu_ok, rig};
use qcow2::target::Target;
use qcow2::{AllowBacking, Qcow2Disk, Qcow2Options};
use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use tempfile::TempDir;

const CLUSTER: u64 = 4096;
const PLACE: u64 = 0x00ff_ffff_ffff_fe00;
const COMPRESSED: u64 = 1 << 62;
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
    let directory = directory();
    let path = image(&directory, 8, "cluster_size=4k");
    let mut first = rig(&open(&path).expect("it opens"));
    first.write(0, &[1; CLUSTER as usize]);
    first.write(BY_TABLE, &[2; CLUSTER as usize]);
    drop(first);
    (directory, path)
}

/// A mirror, or a commit, goes on in the image that it has written.
#[test]
fn a_disk_trusts_the_clusters_that_the_writer_of_its_image_has_seen() {
    for is_told in [true, false] {
        let (_directory, path) = two_tables();
        let identity = identity_of(&fs::metadata(&path).expect("the image"));
        let mut target = Target::open(&path, identity, true, AllowBacking::Off).expect("it opens");
        target.write(4 * MIB, &[3; CLUSTER as usize]).expect("it is written");
        target.sync().expect("a sync");
        let known = target.known().expect("all tables were looked at");
        drop(target);
        // No lane looks at this entry, which names the refcount table, if the clusters are known.
        let tables = Tables::of(&path);
        let wrong = tables.refcounts | 1 << 63;
        patch(&path, tables.l2[0] + 8 * (MIB / CLUSTER), &wrong.to_be_bytes());
        let known = is_told.then_some(known);
        let options = Qcow2Options { known, ..options(AllowBacking::Off, true) };
        let disk = Qcow2Disk::open(&path, &options).expect("it opens");
        let outcome = rig(&disk).run(&mut Request::write(6 * MIB, &[4; 4096], &[4096], 0));
        assert_eq!(outcome.is_ok(), is_told, "{outcome:?}");
    }
}

#[test]
fn an_image_whose_tables_are_counted_as_free_is_read_only() {
    for number in 0..6 {
        let (directory, path) = two_tables();
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
        qemu("qemu-img", directory.path(), &["check", "-q", "-r", "all", "a.qcow2"]);
        assert_eq!(rig(&open(&path).expect("it is repaired")).read(0, 512), [1; 512]);
    }
}

#[test]
fn an_image_with_two_tables_in_one_cluster_is_read_only() {
    for number in 1..5 {
        let (_directory, path) = two_tables();
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

/// Patches entries of L2 tables, and changes the disk: it gets no change, and is read as before.
fn gets_no_change(patches: impl Fn(&Tables, [u64; 2]) -> Vec<(u64, u64)>, name: &str) {
    for first in [0, BY_TABLE, 2 * BY_TABLE] {
        let (_directory, path) = two_tables();
        let tables = Tables::of(&path);
        let data = [0, 1].map(|number| word(&path, tables.l2[number]) & PLACE);
        for (entry, place) in patches(&tables, data) {
            let flag = if place & COMPRESSED == 0 { 1 << 63 } else { 0 };
            patch(&path, entry, &(place | flag).to_be_bytes());
        }
        let before = fs::read(&path).expect("the image");
        let disk = open(&path).expect("it opens");
        let mut lane = rig(&disk);
        // No question has needed another table so far.
        for at in [first, 0, BY_TABLE, BY_TABLE + CLUSTER, 3 * BY_TABLE] {
            assert_eq!(change(&mut lane, at), [false; 3], "{name}: {first} {at}");
        }
        for at in [0, BY_TABLE] {
            assert!(lane.run(&mut Request::read(at, &[512], 0)).is_ok(), "{name}: reads go on");
        }
        assert!(disk.resize(Some(16 * MIB)).is_err(), "{name}");
        disk.sync().expect("a sync");
        drop((lane, disk));
        assert!(fs::read(&path).expect("the image") == before, "{name}: {first}: it was written");
    }
}

#[test]
fn a_guest_writes_to_no_table_that_an_entry_names_as_its_data() {
    for number in 1..6 {
        let names = |tables: &Tables, _| vec![(tables.l2[1], tables.all()[number])];
        gets_no_change(names, &format!("table {number}"));
    }
}

/// Between two tables, within one, and beside a table in whose part of the disk nothing happens.
#[test]
fn an_image_with_two_entries_for_one_cluster_gets_no_change() {
    gets_no_change(|tables, data| vec![(tables.l2[1], data[0])], "the second table");
    gets_no_change(|tables, data| vec![(tables.l2[0], data[1])], "the first table");
    gets_no_change(|tables, data| vec![(tables.l2[1] + 8, data[1])], "its own table");
    gets_no_change(|tables, data| vec![(tables.l2[1] + 8, data[0])], "another entry");
    let compressed =
        |tables: &Tables, data: [u64; 2]| vec![(tables.l2[1] + 8, data[0] | COMPRESSED)];
    gets_no_change(compressed, "compressed data");
}

/// The copy has the content of before in both places.
#[test]
fn a_copy_of_an_image_with_two_entries_for_one_cluster_is_written() {
    let (directory, path) = two_tables();
    let tables = Tables::of(&path);
    patch(&path, tables.l2[1], &(word(&path, tables.l2[0])).to_be_bytes());
    let copy = ["convert", "-O", "qcow2", "a.qcow2", "b.qcow2"];
    qemu_ok("qemu-img", directory.path(), &copy);
    let disk = open(&directory.path().join("b.qcow2")).expect("it opens");
    let mut lane = rig(&disk);
    assert_eq!(change(&mut lane, 0), [true; 3]);
    assert_eq!(lane.read(BY_TABLE, 512), [1; 512]);
}

#[test]
fn an_image_with_an_entry_behind_its_end_gets_no_change() {
    gets_no_change(|tables, _| vec![(tables.l2[1] + 8, 1 << 40)], "behind the end");
}

/// A cluster that an entry names, and that is counted as free, would be reused for other data or for a table.
#[test]
fn a_cluster_with_data_is_not_reused_whatever_its_count_is() {
    for is_table in [false, true] {
        let (_directory, path) = two_tables();
        let tables = Tables::of(&path);
        let data = word(&path, tables.l2[0]) & PLACE;
        patch(&path, tables.block + data / CLUSTER * 2, &[0; 2]);
        let disk = open(&path).expect("it opens");
        let mut lane = rig(&disk);
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
    let (directory, path) = two_tables();
    let run = |command: &str| {
        qemu_ok("qemu-io", directory.path(), &["-f", "qcow2", "-c", command, "a.qcow2"]);
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
