// SPDX-License-Identifier: Apache-2.0
//! Commands of an operator to a daemon under load: resize, pause and limits, on both planes.

use crate::case::cases;
use crate::host::daemon::Daemon;
use crate::host::env::{Env, Plane};
use crate::host::fixture::{Disk, FileSystem, grow_loop, image, loop_of, wait_until};
use crate::host::integrity::{Setup, tell};
use crate::host::load::{Handles, under_load};
use crate::host::target::{self, Target, options};
use anyhow::{Context, Result, bail, ensure};
use driver::{Device, Request};
use kit::set::Set::{Plain, Uring};
use std::time::{Duration, Instant};
use virtio_spec::blk::S_OK;

cases! { Host;
    "daemon-resize", Plain,
        "an image and a loop device grow under load on the kernel plane; the growth of the device is noticed",
        |env| resize(&env.over_daemon());
    "daemon-resize-uring", Uring,
        "the same on the io_uring plane",
        |env| resize(&env.on(Plane::Uring));
    "daemon-pause", Plain,
        "a disk is paused and resumed under load on the kernel plane, and moved to the other plane meanwhile",
        |env| pause(&env.over_daemon());
    "daemon-pause-uring", Uring,
        "a disk is paused and resumed under load on the io_uring plane",
        |env| pause(&env.on(Plane::Uring));
    "daemon-limit", Plain,
        "a disk of the kernel plane keeps its limits, and a driver that resets its queues pays its debt",
        |env| limit(&env.over_daemon());
    "daemon-limit-uring", Uring,
        "the same on the io_uring plane",
        |env| limit(&env.on(Plane::Uring));
}

/// Requests on each queue between two commands.
const STEP: u64 = 5;
const MIB: u64 = 1 << 20;
const DISK_MIB: u64 = 64;

/// A way to enlarge the storage to a number of bytes.
type Grow = fn(&Disk, &crate::host::daemon::Daemon, u64) -> Result<()>;

fn resize(env: &Env) -> Result<()> {
    let by_command: Grow =
        |_, daemon, bytes| daemon.control(&["resize", &bytes.to_string()]).map(drop);
    let by_itself: Grow = |disk, _, bytes| grow_loop(&disk.path, bytes);
    for (disk, grow) in [
        (image(FileSystem::Ext4, true)?, by_command),
        (image(FileSystem::Ext4, false)?, by_command),
        (loop_of(512, DISK_MIB)?, by_itself),
    ] {
        println!("on {disk}");
        grows(env, &disk, grow).with_context(|| disk.path.display().to_string())?;
    }
    Ok(())
}

/// Waits until the daemon has noticed the new size of the disk, and asks it for the guest's view.
pub(crate) fn wait_for_size(handles: &mut Handles, daemon: &Daemon, bytes: u64) -> Result<()> {
    wait_until("the daemon to have the new size", || {
        let status = daemon.control(&["status"])?;
        Ok(status.contains(&format!("{bytes} bytes")).then_some(()))
    })?;
    let sectors = u64::from_le(handles.session.config()?.capacity);
    ensure!(sectors * 512 == bytes, "the configuration space has {sectors} sectors");
    Ok(())
}

fn grows(env: &Env, disk: &Disk, grow: Grow) -> Result<()> {
    let setup = Setup::usual(3);
    let specs = setup.specs(env, disk);
    let Target { device, daemon } = target::serve(env, disk, &setup.options(&specs))?;
    let Some(daemon) = daemon else { bail!("there is no daemon") };
    let mut bytes = disk.bytes;
    let done = under_load(device, specs, |handles| {
        for round in 0..env.rounds(setup.requests) {
            handles.wait_for_progress(STEP).with_context(|| format!("before round {round}"))?;
            bytes += MIB;
            grow(disk, &daemon, bytes).with_context(|| format!("round {round}"))?;
            wait_for_size(handles, &daemon, bytes)?;
        }
        handles.wait_for_progress(STEP).context("after the last growth")
    })?;
    tell(&done);
    let mut device = Device::from_stream(daemon.connect()?, &options())?;
    let (last, data) = (bytes / 512 - 8, vec![0x5a; 4096]);
    device.write(last, &data)?;
    device.flush()?;
    let mut read = vec![0; 4096];
    device.read(last, &mut read)?;
    ensure!(read == data, "the last block has other bytes than were written");
    ensure!(device.write(last + 8, &data).is_err(), "a write beyond the end succeeded");
    let refused = daemon.control(&["resize", "1M"]);
    ensure!(refused.is_err(), "the disk was cut: {refused:?}");
    Ok(())
}

fn pause(env: &Env) -> Result<()> {
    let disk = image(FileSystem::Ext4, true)?;
    let setup = Setup::usual(5);
    let specs = setup.specs(env, &disk);
    let Target { device, daemon } = target::serve(env, &disk, &setup.options(&specs))?;
    let Some(daemon) = daemon else { bail!("there is no daemon") };
    let requests = || daemon.total("queue_requests_total");
    let done = under_load(device, specs, |handles| {
        for round in 0..env.rounds(setup.requests) {
            handles.wait_for_progress(STEP).with_context(|| format!("before round {round}"))?;
            daemon.control(&["pause"]).with_context(|| format!("round {round}"))?;
            let before = requests()?;
            if env.plane == Plane::Kernel {
                let plane = if round % 2 == 0 { "uring" } else { "kernel" };
                daemon.control(&["switch", plane]).with_context(|| format!("round {round}"))?;
            }
            let status = daemon.control(&["status"])?;
            ensure!(status.contains("paused") && !status.contains("runs on"), "{status}");
            ensure!(requests()? == before, "requests were taken during the pause");
            daemon.control(&["resume"]).with_context(|| format!("round {round}"))?;
        }
        handles.wait_for_progress(STEP).context("after the last pause")
    })?;
    tell(&done);
    let sent: u64 = done.iter().map(|done| done.requests).sum();
    ensure!(requests()? == sent, "{} requests, and the driver sent {sent}", requests()?);
    Ok(())
}

/// Requests a second, and the number of requests that are measured.
const IOPS: u64 = 500;
const MEASURED: u64 = 100;

fn limit(env: &Env) -> Result<()> {
    let disk = image(FileSystem::Ext4, true)?;
    keeps_rate(env, &disk).context("rate")?;
    pays_debt(env, &disk).context("debt")
}

/// Checks that a disk is not faster than its limit.
fn keeps_rate(env: &Env, disk: &Disk) -> Result<()> {
    let setup = Setup::usual(1);
    let specs = setup.specs(env, disk);
    let Target { device, daemon } = target::serve(env, disk, &setup.options(&specs))?;
    let Some(daemon) = daemon else { bail!("there is no daemon") };
    let requests = || daemon.total("queue_requests_total");
    let done = under_load(device, specs, |handles| {
        handles.wait_for_progress(STEP).context("without a limit")?;
        daemon.control(&["limit", "--iops", &IOPS.to_string(), "--burst-seconds", "0.01"])?;
        let (start, before) = (Instant::now(), requests()?);
        handles.wait_for_progress(MEASURED).context("with a limit")?;
        let (all, took) = (requests()? - before, start.elapsed());
        let most = IOPS as f64 * (took.as_secs_f64() + 0.01) + f64::from(setup.queues);
        println!("{all} requests in {took:?}, at most {most:.0} allowed");
        ensure!(all as f64 <= most, "{all} requests in {took:?} at {IOPS} a second");
        ensure!(daemon.total("queue_limit_waits_total")? > 0, "no queue waited");
        daemon.control(&["limit", "--none"])?;
        handles.wait_for_progress(MEASURED).context("without a limit again")
    })?;
    tell(&done);
    Ok(())
}

/// Checks that neither a pause nor a stop of all queues forgives a debt, or waits for it.
fn pays_debt(env: &Env, disk: &Disk) -> Result<()> {
    let Target { mut device, daemon } = target::serve(env, disk, &options())?;
    let Some(daemon) = daemon else { bail!("there is no daemon") };
    let layout = device.layout();
    daemon.control(&["limit", "--bandwidth", "1"])?;
    let data = vec![0x5a; 1 << 20];
    device.write(0, &data)?;
    device.queue(0).submit(&Request::read(0, 4096), &layout)?;
    daemon.control(&["pause"])?;
    daemon.control(&["resume"])?;
    device.session().stop_queue(0)?;
    device.start_queue(0)?;
    std::thread::sleep(Duration::from_millis(200));
    let taken = daemon.total("queue_requests_total")?;
    ensure!(taken == 1, "{taken} requests were taken in debt");
    daemon.control(&["limit", "--iops", "100000", "--bandwidth", "off"])?;
    let done = device.queue(0).collect()?.1;
    ensure!(done.status == Some(S_OK) && done.data == data[..4096], "{:?}", done.status);
    Ok(())
}
