// SPDX-License-Identifier: Apache-2.0
//! NVMe/TCP with two paths: paths fail, the target restarts, the namespace grows.

use super::{STEP, Serving, changed};
use crate::case::cases;
use crate::host::env::{Env, Plane};
use crate::host::fixture::{Ana, NvmeTcp, wait_until};
use crate::host::load::allow_errors;
use crate::host::operate::wait_for_size;
use anyhow::{Context, Result, ensure};
use kit::outcome::expect_io_errors;
use kit::set::Set::{Full, Plain, Uring};
use std::time::Duration;

cases! { Host;
    "engine-nvme-paths", Plain,
        "NVMe/TCP with two paths: each is cut, becomes inaccessible and returns under load on the kernel plane, without an I/O error",
        |env| paths(&env.over_daemon());
    "engine-nvme-paths-uring", Full,
        "the same on the io_uring plane",
        |env| paths(&env.on(Plane::Uring));
    "engine-nvme-outage", Full,
        "both paths are cut for 30 seconds, and the target restarts meanwhile, on the kernel plane: requests wait",
        |env| outage(&env.over_daemon());
    "engine-nvme-outage-uring", Full,
        "the same on the io_uring plane",
        |env| outage(&env.on(Plane::Uring));
    "engine-nvme-delayed", Full,
        "a path holds all packets on the kernel plane: requests go on over the other one, and what the path delivers after the target's keep-alive time changes no data",
        |env| delayed(&env.over_daemon());
    "engine-nvme-delayed-uring", Full,
        "the same on the io_uring plane",
        |env| delayed(&env.on(Plane::Uring));
    "engine-nvme-grow", Plain,
        "a namespace grows under load on the kernel plane, and the daemon notices it",
        |env| grow(&env.over_daemon());
    "engine-nvme-grow-uring", Uring,
        "the same on the io_uring plane",
        |env| grow(&env.on(Plane::Uring));
    "engine-nvme-lost", Full,
        "the host gives both paths up on the kernel plane: requests fail, and the daemon ends in order",
        |env| lost(&env.over_daemon());
    "engine-nvme-lost-uring", Uring,
        "the same on the io_uring plane",
        |env| lost(&env.on(Plane::Uring));
}

const MIB: u64 = 1 << 20;
/// Bytes of a small request's data.
const BLOCK: u64 = 4096;
/// Seconds without a connection after which the host gives a controller up: more than any outage.
const LOSS_NEVER: u32 = 600;
/// The same where it shall happen.
const LOSS_SOON: u32 = 3;
/// Duration of an outage of all paths.
const OUTAGE: Duration = Duration::from_secs(30);

/// The daemon's options, and the load. Expects the kernel's messages about a lost path.
fn serving() -> Serving<'static> {
    NvmeTcp::expect_lost_paths();
    Serving::default()
}

fn paths(env: &Env) -> Result<()> {
    let (disk, target) = NvmeTcp::connect(LOSS_NEVER)?;
    changed(env, &disk, &serving(), |handles, _, _| {
        for round in 0..env.rounds(4) {
            let path = (round % 2) as usize;
            let step = |what: &str| format!("round {round}, path {path} {what}");
            handles.wait_for_progress(STEP).with_context(|| step("before"))?;
            target.cut(path)?;
            target.wait_for_paths(1)?;
            handles.wait_for_progress(STEP).with_context(|| step("is cut"))?;
            target.mend(path)?;
            target.wait_for_paths(2)?;
            target.set_ana(path, Ana::Inaccessible)?;
            handles.wait_for_progress(STEP).with_context(|| step("is inaccessible"))?;
            target.set_ana(path, Ana::Optimized)?;
        }
        handles.wait_for_progress(STEP).context("after the last round")
    })
    .map(drop)
}

/// Writes that the lost path holds are older than those of the other path when they arrive. The
/// target has ended their connection by then, because it heard no keep-alive of the host.
fn delayed(env: &Env) -> Result<()> {
    let (disk, target, path) = NvmeTcp::connect_through_proxy(LOSS_NEVER)?;
    changed(env, &disk, &serving(), |handles, _, _| {
        for round in 0..env.rounds(2) {
            let step = |what: &str| format!("round {round}, {what}");
            // All requests are on the first path when it begins to hold.
            target.set_ana(1, Ana::Inaccessible)?;
            handles.wait_for_progress(STEP).with_context(|| step("on one path"))?;
            path.hold();
            target.set_ana(1, Ana::Optimized)?;
            target.wait_for_paths(1)?;
            handles.wait_for_progress(STEP).with_context(|| step("on the other path"))?;
            let bytes = path.wait_for_end()?;
            println!("round {round}: {bytes} bytes for the target are late");
            ensure!(bytes > BLOCK, "no request was held");
            path.release();
            handles.wait_for_progress(STEP).with_context(|| step("after the release"))?;
            target.wait_for_paths(2)?;
        }
        handles.wait_for_progress(STEP).context("after the last round")
    })
    .map(drop)
}

fn outage(env: &Env) -> Result<()> {
    let (disk, target) = NvmeTcp::connect(LOSS_NEVER)?;
    changed(env, &disk, &serving(), |handles, daemon, _| {
        handles.wait_for_progress(STEP).context("before the outage")?;
        (0..2).try_for_each(|path| target.cut(path))?;
        target.wait_for_paths(0)?;
        std::thread::sleep(OUTAGE);
        let waiting = daemon.total("queue_inflight_requests")?;
        ensure!(waiting > 0, "no request waits for the target");
        target.restart()?;
        (0..2).try_for_each(|path| target.mend(path))?;
        target.wait_for_paths(2)?;
        handles.wait_for_progress(STEP).context("after the outage")
    })
    .map(drop)
}

fn grow(env: &Env) -> Result<()> {
    let (disk, target) = NvmeTcp::connect(LOSS_NEVER)?;
    changed(env, &disk, &serving(), |handles, daemon, _| {
        let mut bytes = disk.bytes;
        for round in 0..env.rounds(3) {
            handles.wait_for_progress(STEP).with_context(|| format!("before round {round}"))?;
            bytes += MIB;
            target.grow(bytes)?;
            wait_for_size(handles, daemon, bytes)?;
        }
        handles.wait_for_progress(STEP).context("after the last growth")
    })
    .map(drop)
}

fn lost(env: &Env) -> Result<()> {
    expect_io_errors();
    let (disk, target) = NvmeTcp::connect(LOSS_SOON)?;
    changed(env, &disk, &serving(), |handles, daemon, specs| {
        handles.wait_for_progress(STEP).context("before the loss")?;
        allow_errors(specs, true);
        (0..2).try_for_each(|path| target.cut(path))?;
        wait_until("failed requests", || {
            Ok((daemon.total("queue_failed_requests_total")? > 0).then_some(()))
        })?;
        handles.wait_for_progress(STEP).context("after the loss")
    })
    .map(drop)
}
