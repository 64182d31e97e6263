// SPDX-License-Identifier: Apache-2.0
//! A place that a copier has found, and not read yet, is given to no other data.

use crate::PATIENCE;
use crate::merge::Merge;
use crate::{AllowBacking, Qcow2Disk, Qcow2Options};
use backend::conformance::{MakeEngine, Request, Rig, SyncEngine, TestEngine};
use backend::{FileOptions, IoKind};
use std::fs;
use std::io::ErrorKind;
use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;
use tempfile::TempDir;

const CLUSTER: u64 = 64 << 10;
const MIB: u64 = 1 << 20;

/// A disk in an overlay of 8 MiB over a raw file. Its first cluster is full of the byte 1.
fn disk() -> (TempDir, Arc<Qcow2Disk>, Rig) {
    let directory = overlay(CLUSTER);
    let (disk, mut rig) = open(&directory);
    rig.write(0, &vec![1; CLUSTER as usize]);
    (directory, disk, rig)
}

/// A directory with the overlay and its base.
fn overlay(cluster_bytes: u64) -> TempDir {
    let directory = tempfile::tempdir().expect("a directory");
    fs::write(directory.path().join("base.raw"), vec![9; 8 << 20]).expect("a base");
    let option = format!("cluster_size={cluster_bytes}");
    let create = ["create", "-qf", "qcow2", "-o", &option, "-b", "base.raw", "-F", "raw"];
    let mut command = Command::new("qemu-img");
    command.current_dir(directory.path()).args(create).args(["a.qcow2", "8M"]);
    assert!(command.status().expect("qemu-img runs; scripts/setup.sh installs it").success());
    directory
}

fn open(directory: &TempDir) -> (Arc<Qcow2Disk>, Rig) {
    let file = FileOptions { lock: Some(PATIENCE), ..FileOptions::default() };
    let allow_backing = AllowBacking::SameDir;
    let options = Qcow2Options { file, allow_backing, ..Qcow2Options::default() };
    let disk = Qcow2Disk::open(&directory.path().join("a.qcow2"), &options).expect("it opens");
    let engine: MakeEngine = Box::new(|| Box::new(SyncEngine::new()) as Box<dyn TestEngine>);
    let rig = Rig::of(&disk, &engine);
    (Arc::new(disk), rig)
}

/// Takes the flag COPIED from the entry of the first cluster.
fn clear_copied(path: &Path) {
    let mut image = fs::read(path).expect("an image");
    let place = |image: &[u8], at: usize| {
        let entry = u64::from_be_bytes(image[at..at + 8].try_into().expect("an entry"));
        (entry & 0x00ff_ffff_ffff_fe00) as usize
    };
    let l2_at = place(&image, place(&image, 40));
    assert_eq!(image[l2_at] >> 7, 1, "the flag COPIED");
    image[l2_at] &= 0x7f;
    fs::write(path, &image).expect("a file");
}

/// Discards the first cluster, and makes the thread of the disk give its place to other data, unless the
/// place has a user.
fn give_away(disk: &Qcow2Disk, rig: &mut Rig) {
    assert_eq!(rig.run(&mut Request::command(IoKind::Discard, 0, CLUSTER)), Ok(()));
    let outcome = disk.unmap_discarded(Duration::from_millis(100));
    rig.write(MIB, &vec![2; CLUSTER as usize]);
    let why = outcome.expect_err("the copier holds no place").kind();
    assert_eq!(why, ErrorKind::TimedOut);
}

#[test]
fn a_reader_of_a_backup_holds_the_place_that_it_is_about_to_read() {
    let (_directory, disk, mut rig) = disk();
    let mut reader = disk.reader().expect("a reader");
    let read = reader.read_after(0..CLUSTER, &mut || give_away(&disk, &mut rig));
    assert!(!read.expect("data").contains(&2), "it has read other data");
    disk.unmap_discarded(PATIENCE).expect("the cluster leaves");
    assert_eq!(disk.unmapped_bytes(), CLUSTER);
}

#[test]
fn a_commit_holds_the_place_that_it_is_about_to_copy() {
    let (directory, disk, mut rig) = disk();
    let base = directory.path().join("base.raw");
    let merge = Merge::open(Arc::clone(&disk), &base, false, AllowBacking::SameDir);
    let mut merge = merge.expect("it opens");
    let copied = merge.copy_after(&mut (0..CLUSTER), CLUSTER, &mut || give_away(&disk, &mut rig));
    assert_eq!(copied.expect("a copy"), CLUSTER);
    assert!(!fs::read(&base).expect("the base").contains(&2), "it has copied other data");
    disk.unmap_discarded(PATIENCE).expect("the cluster leaves");
    assert_eq!(disk.unmapped_bytes(), CLUSTER);
}

#[test]
fn a_commit_copies_a_cluster_without_the_flag_copied_as_it_was_before_a_write_that_moves_it() {
    let directory = overlay(2 * MIB);
    let (disk, mut rig) = open(&directory);
    rig.write(0, &vec![1; 2 * MIB as usize]);
    drop((disk, rig));
    clear_copied(&directory.path().join("a.qcow2"));
    let (disk, mut rig) = open(&directory);
    let base = directory.path().join("base.raw");
    let merge = Merge::open(Arc::clone(&disk), &base, false, AllowBacking::SameDir);
    let mut merge = merge.expect("it opens");
    let mut write = || rig.write(3 << 19, &[2; 4096]);
    merge.copy_after(&mut (0..2 * MIB), MIB, &mut write).expect("a copy");
    let content = fs::read(&base).expect("the base");
    assert!(content[..MIB as usize].iter().all(|&byte| byte == 1), "it has copied other data");
}
