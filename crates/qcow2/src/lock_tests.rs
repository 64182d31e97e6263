// SPDX-License-Identifier: Apache-2.0
//! The lock of an image ends when nothing writes to it any more.

use crate::PATIENCE;
use crate::chain::follow_by;
use crate::storage::Log;
use crate::{AllowBacking, Qcow2Disk, Qcow2Options};
use backend::conformance::{MakeEngine, Request, Rig, SyncEngine, TestEngine};
use backend::mark::{self, InUse as Mark};
use backend::{File, FileOptions, IoKind};
use std::fs;
use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant};

const CLUSTER: u64 = 64 << 10;

fn options(patience: Duration) -> Qcow2Options {
    let file = FileOptions { lock: Some(patience), ..FileOptions::default() };
    Qcow2Options { file, ..Qcow2Options::default() }
}

/// Opens the image as [`Qcow2Disk::open`], and records its changes.
fn open_logged(path: &Path, log: &Log) -> Qcow2Disk {
    let options = options(PATIENCE);
    let file = File::open(path, options.of_files()).expect("it opens");
    let links = follow_by(path, true, AllowBacking::Off, &mut |_, _| Ok(file.place()));
    let (links, files) = (links.expect("a chain"), vec![Arc::new(file)]);
    let disk = Qcow2Disk::logged(path, files, &links, &options, Some(Arc::clone(log)));
    let mut disk = disk.expect("it opens");
    disk.begin_use(Mark::Sound).expect("a mark");
    disk
}

/// The lock of the log stops the commit, as storage that hangs does.
#[test]
fn an_image_stays_locked_and_marked_while_its_thread_is_in_a_commit() {
    let directory = tempfile::tempdir().expect("a directory");
    let create = ["create", "-qf", "qcow2", "a.qcow2", "8M"];
    let made = Command::new("qemu-img").current_dir(directory.path()).args(create).status();
    assert!(made.expect("qemu-img runs; scripts/setup.sh installs it").success());
    let path = directory.path().join("a.qcow2");
    let log = Log::default();
    let disk = open_logged(&path, &log);
    let engine: MakeEngine = Box::new(|| Box::new(SyncEngine::new()) as Box<dyn TestEngine>);
    let mut rig = Rig::of(&disk, &engine);
    rig.write(0, &vec![1; 4 * CLUSTER as usize]);
    disk.unmap_discarded(PATIENCE).expect("nothing is left to do");
    let commit = log.lock().expect("no thread panics");
    assert_eq!(rig.run(&mut Request::command(IoKind::Discard, 0, CLUSTER)), Ok(()));
    drop((rig, disk));
    let refused = Qcow2Disk::open(&path, &options(Duration::ZERO)).err();
    let why = refused.expect("the thread may still write").to_string();
    assert!(why.contains("in use"), "{why}");
    drop(commit);
    let image = fs::File::open(&path).expect("it opens");
    let begin = Instant::now();
    let again = Qcow2Disk::open(&path, &options(PATIENCE)).expect("the thread ends");
    assert!(begin.elapsed() < PATIENCE);
    again.close_within(PATIENCE, PATIENCE);
    drop(again);
    assert_eq!(mark::in_use(&image).expect("a mark or none"), None);
}
