// SPDX-License-Identifier: Apache-2.0
//! A disk brought up behind a driver, by whoever is to run the queues.

use crate::daemon::Daemon;
use crate::env::{Env, Plane};
use crate::fixture::Disk;
use anyhow::{Context, Result, ensure};
use driver::kernel::{KernelDevice, KernelOptions, abi};
use driver::{Device, Options};
use lab_case::outcome::skip;
use std::path::Path;
use std::time::Duration;

/// Bound of every wait for the device; far beyond what emulation and KASAN need.
pub(crate) const LIMIT: Duration = Duration::from_secs(60);
/// The answer to GET_ID.
pub(crate) const SERIAL: &str = "a serial number";

/// Options of the driver that suit every case: split rings, patience.
pub(crate) fn options() -> Options {
    Options { limit: LIMIT, ..Options::default() }
}

/// A disk that is served.
pub(crate) struct Target {
    /// The driver.
    pub(crate) device: Device,
    /// Who serves, where it is a daemon.
    pub(crate) daemon: Option<Daemon>,
}

/// Skips the case where there is no module.
pub(crate) fn need_module() -> Result<()> {
    if !Path::new(KernelDevice::PATH).exists() {
        return Err(skip(format!("no {}: the module is not loaded", KernelDevice::PATH)));
    }
    Ok(())
}

/// Serves `disk` as the surroundings say.
pub(crate) fn serve(env: &Env, disk: &Disk, options: &Options) -> Result<Target> {
    serve_with(env, disk, options, &KernelOptions::default())
}

/// As [`serve`], with options of the kernel's device; a daemon gets those that it has.
pub(crate) fn serve_with(
    env: &Env,
    disk: &Disk,
    options: &Options,
    kernel: &KernelOptions,
) -> Result<Target> {
    if env.plane == Plane::Direct {
        need_module()?;
        let read_only = kernel.options.flags & abi::OPT_READ_ONLY != 0;
        let backend = disk.open_as(disk.direct, read_only)?;
        let device = Device::open_kernel(backend, options, kernel)
            .context("the kernel's device does not come up")?;
        return Ok(Target { device, daemon: None });
    }
    let daemon = Daemon::start(env, disk, options.num_queues, kernel.options.flags)?;
    let device = Device::from_stream(daemon.connect()?, options)
        .context("the device behind the daemon does not come up")?;
    Ok(Target { device, daemon: Some(daemon) })
}

/// Whether a new device on `disk` serves.
pub(crate) fn check_serves(env: &Env, disk: &Disk) -> Result<()> {
    let mut target = serve(env, disk, &options())?;
    let data = lab_case::rng::Rng::new(7).bytes(64 << 10);
    target.device.write(0, &data)?;
    target.device.flush()?;
    let mut read = vec![0; data.len()];
    target.device.read(0, &mut read)?;
    ensure!(read == data, "it reads other bytes than it wrote");
    Ok(())
}
