// SPDX-License-Identifier: Apache-2.0
//! The tables are durable when the guest was promised that, and the reserve ends with the disk.

use crate::PATIENCE;
use crate::check::check;
use crate::{Qcow2Disk, Qcow2Options};
use backend::conformance::{MakeEngine, Request, Rig, SyncEngine, TestEngine};
use backend::mark;
use backend::{Disk, FileOptions, IoKind};
use std::fs::File;
use std::path::PathBuf;
use std::process::Command;
use tempfile::TempDir;

const MIB: u64 = 1 << 20;

/// An empty disk of 64 MiB, which is locked.
fn disk() -> (TempDir, PathBuf, Qcow2Disk, Rig) {
    let directory = tempfile::tempdir().expect("a directory");
    let create = ["create", "-qf", "qcow2", "a.qcow2", "64M"];
    let made = Command::new("qemu-img").current_dir(directory.path()).args(create).status();
    assert!(made.expect("qemu-img runs; scripts/setup.sh installs it").success());
    let path = directory.path().join("a.qcow2");
    let file = FileOptions { lock: Some(PATIENCE), ..FileOptions::default() };
    let options = Qcow2Options { file, ..Qcow2Options::default() };
    let disk = Qcow2Disk::open(&path, &options).expect("it opens");
    let engine: MakeEngine = Box::new(|| Box::new(SyncEngine::new()) as Box<dyn TestEngine>);
    let rig = Rig::of(&disk, &engine);
    (directory, path, disk, rig)
}

#[test]
fn a_flush_and_a_write_through_write_make_the_tables_durable() {
    let (_directory, _path, disk, mut rig) = disk();
    let flush = || Request::command(IoKind::Flush, 0, 0);
    let durable = |at: u64| Request::write(at, &[2; 4096], &[4096], 0).durable();
    rig.write(0, &[1; 4096]);
    assert!(disk.versions.need_sync(), "the write alone is in the file");
    assert_eq!(rig.run(&mut flush()), Ok(()));
    assert!(!disk.versions.need_sync());
    rig.write(MIB, &[1; 4096]);
    assert!(disk.versions.need_sync());
    // Its place is known, and its table is not durable.
    assert_eq!(rig.run(&mut durable(MIB)), Ok(()));
    assert!(!disk.versions.need_sync());
    assert_eq!(rig.run(&mut durable(2 * MIB)), Ok(()));
    assert!(!disk.versions.need_sync());
    rig.write(3 * MIB, &[1; 4096]);
    disk.sync().expect("a sync");
    assert!(!disk.versions.need_sync());
    rig.write(4 * MIB, &[1; 4096]);
    disk.settle(PATIENCE).expect("it settles");
    assert!(!disk.versions.need_sync());
}

#[test]
fn a_disk_that_settles_leaves_no_reserved_cluster_and_reserves_again() {
    let (_directory, path, disk, mut rig) = disk();
    let leaks = || {
        let report = check(&path, &File::open(&path).expect("it opens")).expect("a report");
        assert_eq!(report.errors, 0);
        report.leaks
    };
    for at in [0, MIB] {
        rig.write(at, &[1; 4096]);
        assert!(leaks() > 0, "clusters are reserved");
        disk.settle(PATIENCE).expect("it settles");
        assert_eq!(leaks(), 0);
    }
    rig.write(2 * MIB, &[1; 4096]);
    disk.close_within(PATIENCE, PATIENCE);
    drop((rig, disk));
    assert_eq!(leaks(), 0);
    let file = File::open(&path).expect("it opens");
    assert_eq!(mark::in_use(&file).expect("a mark or none"), None);
}
