// SPDX-License-Identifier: Apache-2.0
//! A served disk and its driver, on the data plane of the case.

use crate::host::daemon::Daemon;
use crate::host::env::{Env, Plane};
use crate::host::fixture::Disk;
use anyhow::{Context, Result, ensure};
use driver::kernel::{KernelDevice, KernelOptions, abi};
use driver::{Device, Options};
use kit::outcome::skip;
use std::path::Path;
use std::time::Duration;

/// Limit of every wait for the device; far above the needs of emulation and KASAN.
pub(crate) const LIMIT: Duration = Duration::from_secs(60);
/// The answer to GET_ID.
pub(crate) const SERIAL: &str = "a serial number";

/// Driver options that suit every case: split rings, and a long timeout.
pub(crate) fn options() -> Options {
    Options { limit: LIMIT, ..Options::default() }
}

/// A served disk.
pub(crate) struct Target {
    /// The driver.
    pub(crate) device: Device,
    /// The daemon, if one serves the disk.
    pub(crate) daemon: Option<Daemon>,
}

/// Skips the case if the module is missing.
pub(crate) fn need_module() -> Result<()> {
    let path = KernelDevice::PATH;
    match Path::new(path).try_exists().with_context(|| path.to_owned())? {
        true => Ok(()),
        false => Err(skip(format!("no {path}: the module is not loaded"))),
    }
}

/// Serves `disk` on the plane of the environment.
pub(crate) fn serve(env: &Env, disk: &Disk, options: &Options) -> Result<Target> {
    serve_with(env, disk, options, &KernelOptions::default())
}

/// Like [`serve`], with options of the kernel device; a daemon gets those that it supports.
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
    let daemon = Daemon::start(env, disk, options.num_queues, kernel.options.flags, &[])?;
    Ok(Target { device: device_of(&daemon, options)?, daemon: Some(daemon) })
}

/// Serves `disk` by a daemon with further options.
pub(crate) fn serve_by_daemon(
    env: &Env,
    disk: &Disk,
    options: &Options,
    more: &[&str],
) -> Result<(Device, Daemon)> {
    let daemon = Daemon::start(env, disk, options.num_queues, 0, more)?;
    Ok((device_of(&daemon, options)?, daemon))
}

fn device_of(daemon: &Daemon, options: &Options) -> Result<Device> {
    Device::from_stream(daemon.connect()?, options)
        .context("the device behind the daemon does not come up")
}

/// Checks that a new device on `disk` works.
pub(crate) fn check_serves(env: &Env, disk: &Disk) -> Result<()> {
    let mut target = serve(env, disk, &options())?;
    let data = kit::rng::Rng::new(7).bytes(64 << 10);
    target.device.write(0, &data)?;
    target.device.flush()?;
    let mut read = vec![0; data.len()];
    target.device.read(0, &mut read)?;
    ensure!(read == data, "it reads other bytes than it wrote");
    Ok(())
}
