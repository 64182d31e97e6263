// SPDX-License-Identifier: Apache-2.0
//! The kernel plane by way of the daemon: its switch under load, and its death.

use crate::env::{Env, Plane};
use crate::fixture::Disk;
use crate::integrity::{Setup, disk_of, tell};
use crate::load::under_load;
use crate::target::{self, Target};
use anyhow::{Context, Result, bail, ensure};
use driver::Options;
use lab_case::rng::Rng;
use std::time::Duration;

/// Requests on each queue between two changes.
const STEP: u64 = 5;

/// The queues of a running disk move from plane to plane and back.
pub(crate) fn switch_planes(env: &Env, disk: Result<Disk>, setup: Setup) -> Result<()> {
    let env = &Env { plane: Plane::Kernel, ..env.clone() };
    let disk = disk_of(env, disk)?;
    println!("on {disk}, {setup:?}");
    let specs = setup.specs(env, &disk);
    let Target { device, daemon } = target::serve(env, &disk, &setup.options(&specs))?;
    let Some(daemon) = daemon else { bail!("there is no daemon") };
    let done = under_load(device, specs, |handles| {
        for round in 0..env.rounds(setup.requests) {
            let plane = if round % 2 == 0 { "uring" } else { "kernel" };
            handles.wait_for_progress(STEP).with_context(|| format!("before round {round}"))?;
            daemon.control(&["switch", plane]).with_context(|| format!("round {round}"))?;
            let status = daemon.control(&["status"])?;
            ensure!(status.contains(plane), "after a switch to {plane} the daemon says: {status}");
        }
        handles.wait_for_progress(STEP).context("after the last switch")
    })?;
    tell(&done);
    Ok(())
}

/// SIGKILL for the daemon under load, again and again; a successor takes up what was in flight.
pub(crate) fn kill_daemon(env: &Env, disk: Result<Disk>, setup: Setup) -> Result<()> {
    let env = &env.over_daemon();
    let disk = disk_of(env, disk)?;
    println!("on {disk}, {setup:?}");
    let mut specs = setup.specs(env, &disk);
    specs.iter_mut().for_each(|spec| spec.calls_may_be_lost = true);
    let options = Options { inflight: true, ..setup.options(&specs) };
    let Target { device, daemon } = target::serve(env, &disk, &options)?;
    ensure!(device.inflight().is_some(), "the daemon has no in-flight region");
    let Some(mut daemon) = daemon else { bail!("there is no daemon") };
    let mut rng = Rng::new(env.seed() ^ 3);
    let done = under_load(device, specs, |handles| {
        for round in 0..env.rounds(setup.requests) {
            handles.wait_for_progress(STEP).with_context(|| format!("before kill {round}"))?;
            std::thread::sleep(Duration::from_micros(rng.below(20_000)));
            daemon.replace().with_context(|| format!("kill {round}"))?;
            handles.reconnect(daemon.connect()?).with_context(|| format!("after kill {round}"))?;
        }
        handles.wait_for_progress(STEP).context("after the last kill")
    })?;
    tell(&done);
    ensure!(daemon.is_alive(), "the last daemon died");
    Ok(())
}
