// SPDX-License-Identifier: Apache-2.0
//! The daemon's own test suite with its queues on the kernel plane.
//!
//! `scripts/suite.sh` copies the suite's programs, as cargo builds them, into the directory of the
//! other programs, with the name of the test after `suite-`. The programs read plane and disk from
//! the environment (`docs/testing.md`).

use crate::case::cases;
use crate::host::disks::{SLOW, disk_like, mapped_on};
use crate::host::env::Env;
use crate::host::fixture::{Disk, FileSystem, image, loop_of};
use anyhow::{Context, Result, ensure};
use kit::outcome::skip;
use kit::set::Set::Full;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Size of the disk that the daemon's own tests expect.
const SUITE_MIB: u64 = 16;

cases! { Host;
    "suite-loop", Full,
        "the daemon's own test suite with queues on the kernel plane, on a loop device",
        |env| on_block_device(env, loop_of(512, SUITE_MIB));
    "suite-dm", Full,
        "the same on a device-mapper device",
        |env| on_block_device(env, mapped_on(loop_of(512, SUITE_MIB)));
    "suite-ext4", Full,
        "the same on image files on ext4",
        |env| on_images(env, FileSystem::Ext4);
    "suite-xfs", Full,
        "the same on image files on XFS",
        |env| on_images(env, FileSystem::Xfs);
    "suite-restart", Full,
        "the suite's killed daemons, on a disk that takes a millisecond",
        |env| restart(env, disk_like(SLOW));
}

/// The test of killed daemons, which needs a slow disk.
const RESTART: &str = "suite-restart";

/// Runs the whole suite on image files in a file system.
pub(crate) fn on_images(env: &Env, kind: FileSystem) -> Result<()> {
    let image = image(kind, true)?;
    let directory = image.path.parent().context("an image lies in a directory")?;
    run(env, directory, |name| name != RESTART)
}

/// Runs the whole suite on a block device.
pub(crate) fn on_block_device(env: &Env, disk: Result<Disk>) -> Result<()> {
    run(env, &disk?.path, |name| name != RESTART)
}

/// Runs the test of killed daemons on a slow disk.
pub(crate) fn restart(env: &Env, disk: Result<Disk>) -> Result<()> {
    run(env, &disk?.path, |name| name == RESTART)
}

fn run(env: &Env, disk: &Path, wanted: impl Fn(&str) -> bool) -> Result<()> {
    let programs: Vec<PathBuf> = programs(&env.bin)?
        .into_iter()
        .filter(|path| path.file_name().is_some_and(|name| wanted(&name.to_string_lossy())))
        .collect();
    if programs.is_empty() {
        return Err(skip("the suite's programs were not built: scripts/suite.sh does"));
    }
    let mut failed = Vec::new();
    for program in &programs {
        println!("== {} on {}", program.display(), disk.display());
        // One test at a time, because all use the same disk. The output of a passed test shows its
        // skipped parts.
        let status = Command::new(program)
            .args(["--test-threads=1", "--show-output"])
            .env("VHOST_BLK_TEST_PLANE", "kernel")
            .env("VHOST_BLK_TEST_DISK", disk)
            .env("VHOST_BLK_TEST_PROGRAM", env.bin.join("vhost-blk"))
            .status()
            .with_context(|| format!("cannot run {}", program.display()))?;
        if !status.success() {
            failed.push(program.display().to_string());
        }
    }
    ensure!(
        failed.is_empty(),
        "of {} programs these failed: {}",
        programs.len(),
        failed.join(", ")
    );
    Ok(())
}

fn programs(directory: &Path) -> Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(directory).with_context(|| directory.display().to_string())? {
        let entry = entry?;
        if entry.file_name().to_string_lossy().starts_with("suite-") {
            found.push(entry.path());
        }
    }
    found.sort();
    Ok(found)
}
