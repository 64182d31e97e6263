// SPDX-License-Identifier: Apache-2.0
//! A chain whose files an earlier program has opened.

mod common;

use backend::conformance::Request;
use backend::file::place;
use backend::{Disk, IoKind, mark};
use common::{MIB, directory, image, options, qemu_ok, quick_directory, rig};
use qcow2::{AllowBacking, Qcow2Disk, Qcow2Error, Qcow2Options};
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, memfd_create};
use std::fs::{self, File};
use std::io::Write;
use std::path::PathBuf;
use std::time::Duration;
use tempfile::TempDir;

/// An overlay of 8 MiB over a raw file full of sevens; its path.
fn overlay(directory: &TempDir) -> PathBuf {
    fs::write(directory.path().join("base"), vec![7; MIB as usize]).expect("a base");
    let words = ["create", "-qf", "qcow2", "-b", "base", "-F", "raw", "top", "8M"];
    qemu_ok("qemu-img", directory.path(), &words);
    directory.path().join("top")
}

/// The files of a disk, as a program passes them to the next one.
fn passed(disk: &Qcow2Disk) -> Vec<File> {
    disk.files().iter().map(|file| file.share().expect("a descriptor is left")).collect()
}

fn places(files: &[File]) -> Vec<PathBuf> {
    files.iter().map(place).collect()
}

fn same_dir() -> Qcow2Options {
    options(AllowBacking::SameDir, true)
}

fn told<T>(outcome: Result<T, Qcow2Error>) -> String {
    outcome.map(|_| "taken").expect_err("it is refused").to_string()
}

#[test]
fn an_examination_changes_nothing_and_tells_what_an_open_tells() {
    let directory = directory();
    let path = image(&directory, 8, "cluster_size=64k");
    let before = fs::read(&path).expect("the image");
    assert!(!before.len().is_multiple_of(64 << 10), "an open for writing would not extend it");
    let files = [File::options().read(true).write(true).open(&path).expect("it opens")];
    let told = Qcow2Disk::examine(&path, &places(&files), &same_dir()).expect("a good image");
    assert!(fs::read(&path).expect("the image") == before);
    let opened = Qcow2Disk::open(&path, &same_dir()).expect("it opens");
    assert_eq!(format!("{told:?}"), format!("{:?}", opened.info()));
}

#[test]
fn a_chain_without_names_is_served_from_its_open_files() {
    let directory = directory();
    let path = overlay(&directory);
    let first = Qcow2Disk::open(&path, &same_dir()).expect("it opens");
    rig(&first).write(2 * MIB, &[2; 4096]);
    first.settle(Duration::from_secs(60)).expect("the tables are durable");
    let files = passed(&first);
    fs::remove_file(directory.path().join("base")).expect("it is removed");
    fs::rename(&path, directory.path().join("moved")).expect("it is renamed");
    let facts = Qcow2Disk::examine(&path, &places(&files), &same_dir()).expect("a good chain");
    assert_eq!(facts.capacity_sectors, 8 * MIB / 512);
    let second = Qcow2Disk::adopt(&path, files, false, &same_dir()).expect("it is taken over");
    let mut rig = rig(&second);
    assert_eq!(rig.read(4096, 4096), [7; 4096]);
    assert_eq!(rig.read(2 * MIB, 4096), [2; 4096]);
    assert_eq!(rig.read(4 * MIB, 4096), [0; 4096]);
    rig.write(4 * MIB, &[4; 4096]);
    assert_eq!(rig.read(4 * MIB, 4096), [4; 4096]);
    drop((rig, second));
    let moved = directory.path().join("moved");
    let report = qcow2::check::check(&moved, &File::open(&moved).expect("it opens"));
    assert_eq!(report.expect("a report").errors, 0);
}

#[test]
fn another_chain_than_the_open_one_is_refused() {
    let directory = directory();
    let path = overlay(&directory);
    let disk = Qcow2Disk::open(&path, &same_dir()).expect("it opens");
    let words = "is not the one that is open; ";
    for (part, words) in [(0..1, words), (1..2, "not a qcow2 image")] {
        let files: Vec<File> = passed(&disk).drain(part).collect();
        let why = told(Qcow2Disk::examine(&path, &places(&files), &same_dir()));
        assert!(why.contains(words), "{why}");
        let why = told(Qcow2Disk::adopt(&path, files, false, &same_dir()));
        assert!(why.contains(words), "{why}");
    }
    let mut files = passed(&disk);
    files.push(File::open(&path).expect("it opens"));
    let why = told(Qcow2Disk::adopt(&path, files, false, &same_dir()));
    assert!(why.contains(words), "{why}");
    let why = told(Qcow2Disk::adopt(&path, Vec::new(), false, &same_dir()));
    assert!(why.contains(words), "{why}");
    let off = options(AllowBacking::Off, true);
    let why = told(Qcow2Disk::adopt(&path, passed(&disk), false, &off));
    assert!(why.contains("is not allowed; give --allow-backing"), "{why}");
    // The path has to name the image if that is wanted.
    let files = passed(&disk);
    fs::rename(&path, directory.path().join("moved")).expect("it is renamed");
    fs::write(&path, "another one").expect("a file");
    let why = told(Qcow2Disk::adopt(&path, files, true, &same_dir()));
    assert!(why.contains("another file is at this path now"), "{why}");
}

#[test]
fn tables_that_cannot_be_written_never_settle() {
    let directory = directory();
    fs::write(directory.path().join("base.raw"), vec![9; 8 << 20]).expect("a base");
    let base = directory.path().join("base.raw").display().to_string();
    let create = ["create", "-qf", "qcow2", "-b", &base, "-F", "raw", "a.qcow2", "8M"];
    qemu_ok("qemu-img", directory.path(), &create);
    let bytes = fs::read(directory.path().join("a.qcow2")).expect("the image");
    let mut file = File::from(memfd_create("image", MemfdFlags::ALLOW_SEALING).expect("memory"));
    file.write_all(&bytes).expect("a copy");
    let path = &places(std::slice::from_ref(&file))[0];
    let disk = Qcow2Disk::open(path, &options(AllowBacking::Any, true)).expect("it opens");
    let limit = Duration::from_secs(60);
    rig(&disk).write(MIB, &[1; 4096]);
    disk.settle(limit).expect("the tables are durable");
    // From now on each write fails.
    fcntl_add_seals(&file, SealFlags::WRITE).expect("a seal");
    let mut request = Request::write(2 * MIB, &[2; 4096], &[4096], 0);
    rig(&disk).run(&mut request).expect_err("no data is written");
    disk.settle(limit).expect("no table has changed");
    let zeroes = IoKind::WriteZeroes { unmap: false };
    let mut request = Request::command(zeroes, 2 * MIB, MIB);
    rig(&disk).run(&mut request).expect_err("no table is written");
    disk.settle(limit).expect_err("the tables are durable");
    assert!(disk.top().has_failed_sync());
}

/// The thread of the disk may end later, and must not hold the lock until then. It may hold it for a sync that takes
/// more than a second, which one of memory does not.
#[test]
fn a_dropped_disk_has_released_its_lock_and_removed_its_mark() {
    let directory = quick_directory();
    let path = image(&directory, 8, "cluster_size=64k");
    let mut options = options(AllowBacking::Off, true);
    options.file.lock = Some(Duration::ZERO);
    for number in 0..200 {
        let opened = Qcow2Disk::open(&path, &options);
        let disk = opened.unwrap_or_else(|why| panic!("opening {number}: {why}"));
        drop(disk);
        // Some kernels have no attributes in memory.
        let left = mark::in_use(&File::open(&path).expect("it opens")).ok().flatten();
        assert_eq!(left, None, "opening {number}");
    }
}
