// SPDX-License-Identifier: Apache-2.0
//! A file that gets the name of another one while that is opened has no part in it.

use crate::PATIENCE;
use crate::chain::{self, follow_by};
use crate::check::check;
use crate::{AllowBacking, Qcow2Disk, Qcow2Error, Qcow2Options};
use backend::conformance::{MakeEngine, Rig, SyncEngine, TestEngine};
use backend::file::place;
use backend::mark::{self, InUse};
use backend::{Disk, FileOptions};
use std::fs::{self, File};
use std::path::Path;
use std::process::Command;
use tempfile::TempDir;

/// Images of 8 MiB over `base.raw` by these names, each with a first cluster of its own byte.
fn images(images: &[(&str, u8)]) -> TempDir {
    let directory = tempfile::tempdir().expect("a directory");
    fs::write(directory.path().join("base.raw"), vec![9; 8 << 20]).expect("a base");
    let run = |program: &str, args: &[&str]| {
        let ran = Command::new(program).current_dir(directory.path()).args(args).status();
        assert!(ran.expect("qemu-utils run; scripts/setup.sh installs them").success());
    };
    for (name, byte) in images {
        run("qemu-img", &["create", "-qf", "qcow2", "-b", "base.raw", "-F", "raw", name, "8M"]);
        let write = format!("write -q -P {byte} 0 64k");
        run("qemu-io", &["-f", "qcow2", "-c", &write, name]);
    }
    directory
}

fn exchange(directory: &Path, name: &str, other: &str) {
    fs::rename(directory.join(name), directory.join("moved")).expect("it moves");
    fs::rename(directory.join(other), directory.join(name)).expect("the other one gets its name");
}

#[test]
fn a_disk_works_on_the_image_that_it_has_locked() {
    let directory = images(&[("a.qcow2", 1)]);
    let (directory, name) = (directory.path(), directory.path().join("a.qcow2"));
    fs::write(directory.join("other"), "no image").expect("another file");
    // Leaked clusters are looked for.
    mark::set_in_use(&File::open(&name).expect("it opens"), InUse::Sound).expect("a mark");
    let file = FileOptions { lock: Some(PATIENCE), ..FileOptions::default() };
    let allow_backing = AllowBacking::SameDir;
    let options = Qcow2Options { file, allow_backing, ..Qcow2Options::default() };
    let exchanged = || exchange(directory, "a.qcow2", "other");
    let disk = Qcow2Disk::open_after(&name, &options, &mut { exchanged }).expect("it opens");
    assert_eq!(disk.notices(), [""; 0]);
    let engine: MakeEngine = Box::new(|| Box::new(SyncEngine::new()) as Box<dyn TestEngine>);
    let mut rig = Rig::of(&disk, &engine);
    assert_eq!(rig.read(0, 4096), [1; 4096]);
    rig.write(1 << 20, &[3; 4096]);
    disk.sync().expect("a sync");
    disk.close_within(PATIENCE, PATIENCE);
    drop((rig, disk));
    assert_eq!(fs::read(&name).expect("the other file"), b"no image");
    let moved = File::open(directory.join("moved")).expect("it opens");
    let report = check(&directory.join("moved"), &moved).expect("a report");
    assert_eq!((report.errors, report.leaks, report.allocated_clusters), (0, 0, 2));
    assert_eq!(mark::in_use(&moved).expect("no mark"), None);
}

/// As the target of a mirror or a commit, and the source of a copy, open their chains.
#[test]
fn a_chain_has_the_files_that_were_opened_for_it() {
    let directory = images(&[("a.qcow2", 1), ("b.qcow2", 2)]);
    let directory = directory.path();
    let mut files = Vec::new();
    let opened =
        follow_by(&directory.join("a.qcow2"), true, AllowBacking::SameDir, &mut |number, path| {
            files.push(File::open(path).expect("it opens"));
            let name = path.file_name().expect("a name").to_str().expect("text");
            fs::write(directory.join("other"), vec![7; 8 << 20]).expect("another base");
            exchange(directory, name, ["b.qcow2", "other"][number]);
            Ok(place(&files[number]))
        });
    let access = chain::open(&opened.expect("a chain"), false, None).expect("it opens").access;
    for (at, byte) in [(0, 1), (1 << 20, 9)] {
        let mut found = vec![0; 4096];
        access.read(&mut found[..], at).expect("content");
        assert_eq!(found, [byte; 4096]);
    }
}

/// The name of the backing file becomes a link between the look at it and its opening.
#[test]
fn a_backing_file_that_becomes_a_link_to_another_directory_is_refused() {
    let (directory, elsewhere) = (images(&[("a.qcow2", 1)]), images(&[]));
    let (directory, secret) = (directory.path(), elsewhere.path().join("base.raw"));
    let mut files = Vec::new();
    let opened =
        follow_by(&directory.join("a.qcow2"), true, AllowBacking::SameDir, &mut |number, path| {
            if number == 1 {
                fs::remove_file(path).expect("a backing file");
                std::os::unix::fs::symlink(&secret, path).expect("a link");
            }
            files.push(File::open(path).expect("it opens"));
            Ok(place(&files[number]))
        });
    let refused = opened.expect_err("a file of another directory");
    assert!(matches!(refused, Qcow2Error::Backing { .. }), "{refused}");
}
