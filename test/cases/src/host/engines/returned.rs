// SPDX-License-Identifier: Apache-2.0
//! A block device disappears below a running disk, and comes back at its path.

use super::{NO_FLUSHES, STEP, Serving, changed};
use crate::case::cases;
use crate::host::daemon::Daemon;
use crate::host::env::{Env, Plane};
use crate::host::fixture::{Cleanup, Disk, NullBlkOptions, NvmeTcp, null_blk, wait_until};
use crate::host::load::allow_errors;
use anyhow::{Context, Result, ensure};
use kit::outcome::expect_io_errors;
use kit::set::Set::{Full, Plain, Uring};
use std::path::Path;

cases! { Host;
    "engine-back", Plain,
        "a device is removed and comes back, again and again, on the kernel plane: the guest gets errors meanwhile, and none after",
        |env| report(&env.over_daemon());
    "engine-back-uring", Uring,
        "the same on the io_uring plane",
        |env| report(&env.on(Plane::Uring));
    "engine-back-halt", Plain,
        "the same with --on-error stop on the kernel plane: the guest gets no error, and no smaller device",
        |env| halt(&env.over_daemon());
    "engine-back-halt-uring", Uring,
        "the same on the io_uring plane",
        |env| halt(&env.on(Plane::Uring));
    "engine-nvme-back", Full,
        "the host gives both paths of NVMe/TCP up on the kernel plane with --on-error stop, and connects again: the disk goes on with the new device, without an error to the guest",
        |env| nvme(&env.over_daemon());
    "engine-nvme-back-uring", Full,
        "the same on the io_uring plane",
        |env| nvme(&env.on(Plane::Uring));
}

/// Seconds without a connection after which the host gives a controller up.
const LOSS_SOON: u32 = 3;

/// Waits until the device of the disk is gone, or there.
fn wait_for_gone(daemon: &Daemon, gone: bool) -> Result<()> {
    let what = if gone { "the loss of the device" } else { "the return of the device" };
    wait_until(what, || {
        let told = daemon.total("storage_gone");
        Ok(told.is_ok_and(|count| count == u64::from(gone)).then_some(()))
    })
}

fn report(env: &Env) -> Result<()> {
    expect_io_errors();
    let (disk, instance) = null_blk(NullBlkOptions::USUAL)?;
    let done = changed(env, &disk, &NO_FLUSHES, |handles, daemon, specs| {
        for round in 0..env.rounds(3) {
            let step = |what: &str| format!("round {round}, {what}");
            handles.wait_for_progress(STEP).with_context(|| step("before"))?;
            allow_errors(specs, true);
            instance.power(false)?;
            wait_for_gone(daemon, true).with_context(|| step("removed"))?;
            instance.power(true)?;
            wait_for_gone(daemon, false).with_context(|| step("back"))?;
            handles.wait_for_progress(STEP).with_context(|| step("requests of before"))?;
            allow_errors(specs, false);
            handles.wait_for_progress(STEP).with_context(|| step("after"))?;
        }
        Ok(())
    })?;
    ensure!(done.errors > 0, "the guest got no error");
    Ok(())
}

fn halt(env: &Env) -> Result<()> {
    expect_io_errors();
    let (disk, instance) = null_blk(NullBlkOptions::USUAL)?;
    let small = NullBlkOptions { mib: NullBlkOptions::USUAL.mib / 2, ..NullBlkOptions::USUAL };
    let (smaller, _) = null_blk(small)?;
    let stable = Stable::new(&disk)?;
    let named = stable.disk()?;
    let serving = Serving { options: &["--on-error", "stop"], ..NO_FLUSHES };
    let done = changed(env, &named, &serving, |handles, daemon, _| {
        for round in 0..env.rounds(3) {
            let step = |what: &str| format!("round {round}, {what}");
            handles.wait_for_progress(STEP).with_context(|| step("before"))?;
            let mut events = daemon.events()?;
            instance.power(false)?;
            events.wait_for("storage_gone").with_context(|| step("removed"))?;
            stable.turn(&smaller.path)?;
            let refused = events.wait_for("storage_refused").with_context(|| step("refused"))?;
            let why = refused["reason"].to_string();
            ensure!(why.contains("fewer than"), "{}: {why}", step("refused"));
            let resumed = daemon.control(&["resume"]);
            ensure!(resumed.is_err(), "{}: the disk resumes without its device", step("refused"));
            instance.power(true)?;
            stable.turn(&disk.path)?;
            wait_for_gone(daemon, false).with_context(|| step("back"))?;
            handles.wait_for_progress(STEP).with_context(|| step("after"))?;
            let status = daemon.control(&["status"])?;
            let plane = if env.plane == Plane::Uring { "uring" } else { "kernel" };
            ensure!(status.contains(&format!("data plane  {plane} (")), "it says: {status}");
        }
        Ok(())
    })?;
    ensure!(done.errors == 0, "{} errors", done.errors);
    Ok(())
}

fn nvme(env: &Env) -> Result<()> {
    expect_io_errors();
    NvmeTcp::expect_lost_paths();
    let (disk, target) = NvmeTcp::connect(LOSS_SOON)?;
    let stable = Stable::new(&disk)?;
    let named = stable.disk()?;
    let serving = Serving { options: &["--on-error", "stop"], ..NO_FLUSHES };
    let done = changed(env, &named, &serving, |handles, daemon, _| {
        handles.wait_for_progress(STEP).context("before the loss")?;
        (0..2).try_for_each(|path| target.cut(path))?;
        wait_for_gone(daemon, true)?;
        (0..2).try_for_each(|path| target.mend(path))?;
        // udev would turn the link of /dev/disk/by-id.
        stable.turn(&target.connect_again(LOSS_SOON)?)?;
        wait_for_gone(daemon, false)?;
        handles.wait_for_progress(STEP).context("after the return")
    })?;
    ensure!(done.errors == 0, "{} errors", done.errors);
    Ok(())
}

/// A stable name of a device.
struct Stable {
    directory: tempfile::TempDir,
}

impl Stable {
    fn new(disk: &Disk) -> Result<Self> {
        let stable = Stable { directory: tempfile::tempdir_in("/dev")? };
        stable.turn(&disk.path)?;
        Ok(stable)
    }

    /// Turns the name to another device.
    fn turn(&self, to: &Path) -> Result<()> {
        let next = self.directory.path().join("next");
        std::os::unix::fs::symlink(to, &next)?;
        Ok(std::fs::rename(next, self.directory.path().join("name"))?)
    }

    /// The device by this name.
    fn disk(&self) -> Result<Disk> {
        Disk::of_block_device(self.directory.path().join("name"), Cleanup::default())
    }
}
