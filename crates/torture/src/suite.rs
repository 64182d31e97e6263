// SPDX-License-Identifier: Apache-2.0
//! The daemon's own test suite with its queues on the kernel's plane.
//!
//! `scripts/suite.sh` puts the suite's programs, as cargo builds them, beside the others, named
//! `suite-` and what the test is called. They choose plane and disk by the environment
//! (`docs/testing.md`).

use crate::env::Env;
use crate::fixture::{Disk, FileSystem, image};
use anyhow::{Context, Result, ensure};
use lab_case::outcome::skip;
use std::path::{Path, PathBuf};
use std::process::Command;

/// The test of daemons that are killed: it wants a slow disk.
const RESTART: &str = "suite-restart";

/// The whole suite with its disks as image files on a file system.
pub(crate) fn on_images(env: &Env, kind: FileSystem) -> Result<()> {
    let image = image(kind, true)?;
    let folder = image.path.parent().context("an image lies in a folder")?;
    run(env, folder, |name| name != RESTART)
}

/// The whole suite on a block device.
pub(crate) fn on_block_device(env: &Env, disk: Result<Disk>) -> Result<()> {
    run(env, &disk?.path, |name| name != RESTART)
}

/// The test of daemons that are killed, on a disk that takes a while.
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
        // One test at a time, as all use the same disk; what a passed test skipped is in its output.
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

fn programs(folder: &Path) -> Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(folder).with_context(|| folder.display().to_string())? {
        let entry = entry?;
        if entry.file_name().to_string_lossy().starts_with("suite-") {
            found.push(entry.path());
        }
    }
    found.sort();
    Ok(found)
}
