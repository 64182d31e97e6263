// SPDX-License-Identifier: Apache-2.0
//! Images made by `qemu-img`, for the tests of the crate.
#![allow(dead_code)] // each test program uses some of it

use qcow2::{AllowBacking, Qcow2Disk, Qcow2Error, Qcow2Options};
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use tempfile::TempDir;

pub(crate) const MIB: u64 = 1 << 20;

/// Runs a program of qemu-utils. `scripts/setup.sh` installs them.
pub(crate) fn qemu(program: &str, folder: &Path, args: &[&str]) -> Output {
    let ran = Command::new(program).current_dir(folder).args(args).output();
    ran.unwrap_or_else(|why| panic!("{program}: {why}; install qemu-utils (scripts/setup.sh)"))
}

/// As [`qemu`], and panics if the program fails.
pub(crate) fn qemu_ok(program: &str, folder: &Path, args: &[&str]) -> String {
    let ran = qemu(program, folder, args);
    let text = String::from_utf8_lossy(&ran.stdout).into_owned();
    assert!(
        ran.status.success(),
        "{program} {args:?}: {text}{}",
        String::from_utf8_lossy(&ran.stderr)
    );
    text
}

/// A folder on a real file system.
pub(crate) fn folder() -> TempDir {
    let program = std::env::current_exe().expect("this program has a path");
    TempDir::new_in(program.parent().expect("it lies in a folder")).expect("a folder")
}

/// An empty image of `mib` MiB.
pub(crate) fn image(folder: &TempDir, mib: u64, options: &str) -> PathBuf {
    let size = format!("{mib}M");
    qemu_ok(
        "qemu-img",
        folder.path(),
        &["create", "-q", "-f", "qcow2", "-o", options, "a.qcow2", &size],
    );
    folder.path().join("a.qcow2")
}

pub(crate) fn options(allow_backing: AllowBacking, direct: bool) -> Qcow2Options {
    let mut options = Qcow2Options { allow_backing, ..Qcow2Options::default() };
    options.file.direct = direct;
    options
}

pub(crate) fn open(path: &Path) -> Result<Qcow2Disk, Qcow2Error> {
    Qcow2Disk::open(path, &options(AllowBacking::SameDir, true))
}

/// `qemu-img check` finds no error; leaked clusters are allowed.
pub(crate) fn check(path: &Path) -> Result<(), String> {
    let folder = path.parent().expect("a file in a folder");
    let ran =
        qemu("qemu-img", folder, &["check", "-U", "-f", "qcow2", &path.display().to_string()]);
    match ran.status.code() {
        Some(0 | 3) => Ok(()),
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
    let folder = path.parent().expect("a file in a folder");
    qemu_ok("qemu-img", folder, &["convert", "-U", "-f", "qcow2", "-O", "raw", &from, &to]);
    std::fs::read(raw).expect("the converted image")
}
