// SPDX-License-Identifier: Apache-2.0
//! Block devices of storage engines beyond one machine: connections fail, servers restart, devices
//! grow, under a verified load on both planes.

mod drbd;
mod iscsi;
mod multipath;
mod nbd;
mod neighbour;
mod nvme;
mod raid;
mod rbd;
mod returned;

use crate::host::daemon::Daemon;
use crate::host::env::Env;
use crate::host::fixture::{Disk, wait_until};
use crate::host::integrity::{Setup, tell};
use crate::host::load::{Done, Handles, Spec, under_load};
use crate::host::target;
use anyhow::{Context, Result, ensure};
use serde_json::Value;
use std::process::Command;
use std::time::Duration;

/// Requests on each queue between two changes.
const STEP: u64 = 5;

/// Half of the duration of an outage of all servers.
const OUTAGE: Duration = Duration::from_secs(2);
/// Extent of a case on an engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Length {
    /// One loss and return: for each change of the project.
    Short,
    /// All of them.
    Long,
}

/// A load without FLUSH.
const NO_FLUSHES: Serving = Serving { options: &[], flushes: false };

/// The daemon's further options, and the load.
#[derive(Clone, Copy, Debug)]
struct Serving<'a> {
    options: &'a [&'a str],
    /// The load includes FLUSH requests. Once one has failed, later ones fail, too.
    flushes: bool,
}

impl Default for Serving<'_> {
    fn default() -> Self {
        Self { options: &[], flushes: true }
    }
}

/// Runs `change` while the disk, which the daemon serves, is under load. No request may fail,
/// unless the change allows it. In the end all data is verified.
fn changed(
    env: &Env,
    disk: &Disk,
    serving: &Serving,
    change: impl FnOnce(&mut Handles, &Daemon, &[Spec]) -> Result<()> + Send,
) -> Result<Done> {
    println!("on {disk}");
    let setup = Setup::usual(4);
    let mut specs = setup.specs(env, disk);
    specs.iter_mut().for_each(|spec| spec.flushes = serving.flushes);
    let options = setup.options(&specs);
    let (device, daemon) = target::serve_by_daemon(env, disk, &options, serving.options)?;
    let of_change = specs.clone();
    let done = under_load(device, specs, |handles| change(handles, &daemon, &of_change))?;
    tell(&done);
    Ok(done.into_iter().fold(Done::default(), |sum, one| Done {
        requests: sum.requests + one.requests,
        errors: sum.errors + one.errors,
        verified: sum.verified + one.verified,
    }))
}

/// Checks that requests wait during an outage. The daemon cannot tell it: a thread that submits a
/// request meanwhile waits in the kernel, and answers no question.
fn wait_out(handles: &Handles) -> Result<()> {
    std::thread::sleep(OUTAGE);
    // The driver may notice some late that were complete before. A server that answers lets it go on.
    wait_until("the stand-still without a server", || {
        let before = handles.completed();
        std::thread::sleep(OUTAGE);
        Ok((handles.completed() == before).then_some(()))
    })
}

/// Waits until the daemon, whose threads may wait in the kernel for some time, has counted any.
fn wait_for_any(daemon: &Daemon, metric: &str) -> Result<()> {
    wait_until(metric, || Ok(daemon.total(metric).is_ok_and(|count| count > 0).then_some(())))
}

/// Checks that `vhost-blk doctor` judges a check of the disk by this outcome; returns its message.
fn doctor_says(env: &Env, disk: &Disk, check: &str, wanted: &str) -> Result<String> {
    let program = env.bin.join("vhost-blk");
    let mut command = Command::new(&program);
    // It fails, because the daemon has the disk: only its words count.
    let output = command.args(["doctor", "--json", "--blk-file"]).arg(&disk.path).output()?;
    let report: Value = serde_json::from_slice(&output.stdout)?;
    let checks = report["checks"].as_array().context("no checks")?;
    let found = checks.iter().find(|found| found["check"] == check);
    let found = found.with_context(|| format!("no check {check} in {report}"))?;
    let text = |name: &str| found[name].as_str().unwrap_or_default();
    let (outcome, message) = (text("outcome"), text("message"));
    println!("doctor: {outcome}: {message}");
    ensure!(outcome == wanted, "doctor says {outcome}, not {wanted}: {message}");
    Ok(message.to_owned())
}
