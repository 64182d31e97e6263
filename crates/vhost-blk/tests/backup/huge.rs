// SPDX-License-Identifier: Apache-2.0
//! Backups of disks that are larger than any storage.

use crate::common::run;
use crate::rig::Rig;
use crate::{MIB, parts_of};
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use tempfile::TempDir;

const TIB: u64 = 1 << 40;
/// Bound on the memory for the backups of the large disk.
const GROWTH_KIB: u64 = 64 << 10;

/// A directory in memory, where a file may have any size.
fn directory() -> TempDir {
    tempfile::tempdir_in("/dev/shm").unwrap()
}

fn sparse(directory: &Path, bytes: u64) -> PathBuf {
    let path = directory.join("image");
    File::create(&path).unwrap().set_len(bytes).unwrap();
    path
}

fn add(rig: &Rig, name: &str, image: &Path, format: &str) {
    let disk = format!("{name} --blk-file {} --format {format}", image.display());
    rig.ok(&format!("add {disk} --socket-path {name}.sock --data-plane uring --num-queues 1"));
}

/// The memory for a backup is of a bounded size: a tenant may give a disk any size.
#[test]
fn a_backup_of_a_disk_that_is_too_large_is_refused_and_the_daemon_goes_on() {
    let (rig, directory) = (Rig::new(), directory());
    let raw = sparse(directory.path(), 1 << 60);
    let qcow2 = rig.path("image");
    let text = qcow2.to_str().unwrap();
    let create = ["create", "--format", "qcow2", "--cluster-size", "2M", text, "1048576T"];
    assert!(run(create).status.success());
    add(&rig, "raw", &raw, "raw");
    add(&rig, "qcow2", &qcow2, "qcow2");
    for name in ["raw", "qcow2"] {
        let to = directory.path().join("copy");
        for options in ["", "--verify", "--format qcow2", "--bitmap b"] {
            let told = rig.refused(&format!("backup {name} --to {} {options}", to.display()), 1);
            assert!(told.contains("; take a snapshot"), "{told}");
            assert!(!to.exists() && parts_of(directory.path()).is_empty());
        }
        rig.guest(name).write((1 << 51) - 8, &[1; 4096]).unwrap();
    }
}

#[test]
fn a_large_disk_is_copied_in_larger_units() {
    let (rig, directory) = (Rig::new(), directory());
    let bytes = 9 * TIB + 512;
    let path = sparse(directory.path(), bytes);
    let image = File::options().write(true).open(&path).unwrap();
    let places = [0, 64 << 10, TIB + 3 * MIB, 9 * TIB];
    for (at, byte) in places.into_iter().zip(1..) {
        image.write_all_at(&[byte; 512], at).unwrap();
    }
    add(&rig, "a", &path, "raw");
    let to = directory.path().join("copy");
    let before = peak_kib(&rig);
    rig.ok(&format!("backup a --to {} --bitmap b --verify", to.display()));
    let copy = File::open(&to).unwrap();
    assert_eq!(copy.metadata().unwrap().len(), bytes);
    let mut found = [0; 512];
    for (at, byte) in places.into_iter().zip(1..) {
        copy.read_exact_at(&mut found, at).unwrap();
        assert_eq!(found, [byte; 512], "{at}");
    }
    // An incremental one.
    rig.guest("a").write(2 * TIB / 512, &[9; 512]).unwrap();
    let next = directory.path().join("next");
    let told = rig.json(&format!("backup a --to {} --incremental b --verify", next.display()));
    assert_eq!(told["copied_bytes"], 128 << 10, "{told}");
    let grown = peak_kib(&rig) - before;
    println!("{grown} KiB for the backups");
    assert!(grown < GROWTH_KIB, "{grown} KiB");
}

/// A look at all holes before each turn would take hundreds of times as long: a turn takes 4 GiB of them, and a
/// question 512 MiB.
#[test]
fn a_large_qcow2_disk_without_data_is_copied_in_one_look_at_its_holes() {
    const LAST: u64 = 4 * TIB / 512 - 8;
    let rig = Rig::new();
    let path = rig.path("image");
    let create = ["create", "--format", "qcow2", path.to_str().unwrap(), "4T"];
    assert!(run(create).status.success());
    add(&rig, "a", &path, "qcow2");
    rig.guest("a").write(LAST, &[7; 4096]).unwrap();
    rig.ok("backup a --to copy --format qcow2");
    let copy = rig.path("copy");
    add(&rig, "b", &copy, "qcow2");
    let mut found = [0; 4096];
    rig.guest("b").read(LAST, &mut found).unwrap();
    assert_eq!(found, [7; 4096]);
}

/// The largest resident memory of the daemon so far.
fn peak_kib(rig: &Rig) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{}/status", rig.daemon.id())).unwrap();
    let peak = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).unwrap();
    peak.split_whitespace().next().unwrap().parse().unwrap()
}
