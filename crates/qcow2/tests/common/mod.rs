// SPDX-License-Identifier: Apache-2.0
//! Images made by `qemu-img`, for the tests of the crate.
#![allow(dead_code)] // each test program uses some of it

use backend::conformance::{Rig, SyncEngine, TestEngine};
use qcow2::check::Report;
use qcow2::{AllowBacking, Qcow2Disk, Qcow2Error, Qcow2Options};
use std::borrow::Borrow;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::time::Duration;
use tempfile::TempDir;

pub(crate) const MIB: u64 = 1 << 20;
/// Far more than anything takes.
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);

/// Runs a program of qemu-utils. `scripts/setup.sh` installs them.
pub(crate) fn qemu(program: &str, directory: &Path, args: &[&str]) -> Output {
    let ran = Command::new(program).current_dir(directory).args(args).output();
    ran.unwrap_or_else(|why| panic!("{program}: {why}; install qemu-utils (scripts/setup.sh)"))
}

/// As [`qemu`], and panics if the program fails.
pub(crate) fn qemu_ok(program: &str, directory: &Path, args: &[&str]) -> String {
    let ran = qemu(program, directory, args);
    let text = String::from_utf8_lossy(&ran.stdout).into_owned();
    assert!(
        ran.status.success(),
        "{program} {args:?}: {text}{}",
        String::from_utf8_lossy(&ran.stderr)
    );
    text
}

/// A directory on a real file system.
pub(crate) fn directory() -> TempDir {
    let program = std::env::current_exe().expect("this program has a path");
    TempDir::new_in(program.parent().expect("it lies in a directory")).expect("a directory")
}

/// A directory in memory if there is one: a sync takes most of the time elsewhere.
pub(crate) fn quick_directory() -> TempDir {
    TempDir::new_in("/dev/shm").unwrap_or_else(|_| directory())
}

/// An empty image of `mib` MiB.
pub(crate) fn image(directory: &TempDir, mib: u64, options: &str) -> PathBuf {
    let size = format!("{mib}M");
    qemu_ok(
        "qemu-img",
        directory.path(),
        &["create", "-q", "-f", "qcow2", "-o", options, "a.qcow2", &size],
    );
    directory.path().join("a.qcow2")
}

pub(crate) fn options(allow_backing: AllowBacking, direct: bool) -> Qcow2Options {
    let mut options = Qcow2Options { allow_backing, ..Qcow2Options::default() };
    options.file.direct = direct;
    options
}

pub(crate) fn open(path: &Path) -> Result<Qcow2Disk, Qcow2Error> {
    Qcow2Disk::open(path, &options(AllowBacking::SameDir, true))
}

/// Ends a disk. Its drop alone gives up after a second, which a sync may take on a busy machine.
pub(crate) fn end(disk: impl Borrow<Qcow2Disk>) {
    disk.borrow().close_within(PATIENCE, PATIENCE);
}

/// A lane of the disk.
pub(crate) fn rig(disk: &Qcow2Disk) -> Rig {
    Rig::of(disk, &(Box::new(|| Box::new(SyncEngine::new()) as Box<dyn TestEngine>) as _))
}

/// `qemu-img check` finds no error, and our own check agrees; leaked clusters are allowed.
pub(crate) fn check(path: &Path) -> Result<(), String> {
    let directory = path.parent().expect("a file in a directory");
    let ran =
        qemu("qemu-img", directory, &["check", "-U", "-f", "qcow2", &path.display().to_string()]);
    match ran.status.code() {
        Some(theirs @ (0 | 3)) => {
            let file = File::open(path).map_err(|why| why.to_string())?;
            let ours = qcow2::check::check(path, &file).map_err(|why| why.to_string())?;
            match code(&ours) == theirs {
                true => Ok(()),
                false => Err(format!("{theirs} by QEMU, {ours:#?}")),
            }
        }
        code => Err(format!(
            "{code:?}: {}{}",
            String::from_utf8_lossy(&ran.stdout),
            String::from_utf8_lossy(&ran.stderr)
        )),
    }
}

/// The content of the disk, as QEMU reads it.
pub(crate) fn content(path: &Path) -> Vec<u8> {
    let raw = path.with_extension("content");
    let (from, to) = (path.display().to_string(), raw.display().to_string());
    let directory = path.parent().expect("a file in a directory");
    qemu_ok("qemu-img", directory, &["convert", "-U", "-f", "qcow2", "-O", "raw", &from, &to]);
    std::fs::read(raw).expect("the converted image")
}

/// The verdict of `qemu-img check`: its exit code and its report.
fn verdict(path: &Path) -> (i32, serde_json::Value) {
    let directory = path.parent().expect("a file in a directory");
    let name = path.display().to_string();
    let ran = qemu("qemu-img", directory, &["check", "-f", "qcow2", "--output", "json", &name]);
    let told = || String::from_utf8_lossy(&ran.stderr).into_owned().into();
    let report = serde_json::from_slice(&ran.stdout).unwrap_or_else(|_| told());
    (ran.status.code().expect("it ends by itself"), report)
}

/// The exit code of a report.
pub(crate) fn code(report: &Report) -> i32 {
    match report {
        Report { errors: 1.., .. } => 2,
        Report { leaks: 1.., .. } => 3,
        _ => 0,
    }
}

/// The header says that the data is encrypted; the check needs no key.
fn needs_key(path: &Path) -> bool {
    let mut field = [0; 4];
    File::open(path).and_then(|file| file.read_exact_at(&mut field, 32)).expect("the header");
    field == [0, 0, 0, 1]
}

/// Compares our verdict with QEMU's, and returns ours: 1 if the image cannot be checked.
#[track_caller]
pub(crate) fn compare(path: &Path) -> i32 {
    let file = File::open(path).expect("the image opens");
    let ours = qcow2::check::check(path, &file);
    let (theirs, json) = verdict(path);
    let name = path.display();
    let found = match &ours {
        Ok(report) => report,
        // A header that QEMU takes, and that names impossible tables, is an error for both.
        Err(why) => {
            assert!(matches!(theirs, 1 | 2), "{name}: {theirs}, {json:#}, {why}");
            return 1;
        }
    };
    let is_agreed = match theirs {
        // QEMU gives up at damaged tables that it cannot read, and without a key.
        1 => code(found) == 2 || needs_key(path),
        theirs => code(found) == theirs,
    };
    assert!(is_agreed, "{name}: {theirs}, {json:#}, {found:#?}");
    let number = |key: &str| json[key].as_u64().unwrap_or(0);
    if found.errors == 0 && !needs_key(path) {
        assert_eq!(found.leaks, number("leaks"), "{name}: {json:#}, {found:#?}");
        assert_eq!(found.total_clusters, number("total-clusters"), "{name}: {json:#}");
        assert_eq!(found.allocated_clusters, number("allocated-clusters"), "{name}: {json:#}");
    }
    if code(found) == 0 && !needs_key(path) {
        assert_eq!(found.end_bytes, number("image-end-offset"), "{name}: {json:#}");
    }
    code(found)
}

/// Clusters in use, by our own check.
pub(crate) fn clusters(path: &Path) -> u64 {
    let file = File::open(path).expect("it opens");
    qcow2::check::check(path, &file).expect("it is checked").allocated_clusters
}

/// Leaks three clusters of 4 KiB at the end of the file, whose refcounts have 16 bits.
pub(crate) fn leak(path: &Path) {
    let image = File::options().read(true).write(true).open(path).expect("it opens");
    let clusters = image.metadata().expect("a size").len().div_ceil(4096);
    image.set_len((clusters + 3) << 12).expect("it grows");
    let read = |at| {
        let mut word = [0; 8];
        image.read_exact_at(&mut word, at).expect("a word");
        u64::from_be_bytes(word)
    };
    let block = read(read(48));
    for cluster in clusters..clusters + 3 {
        image.write_all_at(&1u16.to_be_bytes(), block + cluster * 2).expect("it is written");
    }
}
