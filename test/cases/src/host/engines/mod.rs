// SPDX-License-Identifier: Apache-2.0
//! Block devices of storage engines beyond one machine: connections fail, servers restart, devices
//! grow, under a verified load on both planes.

mod nbd;
mod nvme;
mod raid;

use crate::host::daemon::Daemon;
use crate::host::env::Env;
use crate::host::fixture::Disk;
use crate::host::integrity::{Setup, tell};
use crate::host::load::{Done, Handles, Spec, under_load};
use crate::host::target;
use anyhow::Result;
use std::sync::atomic::Ordering::Relaxed;

/// Requests on each queue between two changes.
const STEP: u64 = 5;

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

/// Lets requests of the loads fail, or not any more.
fn allow_errors(specs: &[Spec], allowed: bool) {
    specs.iter().for_each(|spec| spec.errors_allowed.store(allowed, Relaxed));
}
