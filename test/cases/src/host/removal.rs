// SPDX-License-Identifier: Apache-2.0
//! The disk is removed, or fails, under load: every request ends, with S_IOERR if necessary, and
//! the device continues with another disk.

use crate::case::cases;
use crate::host::abi::fails;
use crate::host::disks::{POLLED, SLOW, USUAL};
use crate::host::env::Env;
use crate::host::fixture::{Disk, Dm, DmKind, NullBlkOptions, null_blk, scsi_debug, wait_for};
use crate::host::integrity::{Setup, tell, with_flags};
use crate::host::load::{Handles, Spec, allow_errors, under_load};
use crate::host::target::{self, Target};
use anyhow::{Context, Result, bail, ensure};
use driver::Request;
use driver::kernel::{KernelDevice, abi, errno_of};
use kit::null_blk::Instance;
use kit::set::Set::{Full, Gating, Plain};
use kit::system::run;
use std::os::fd::AsRawFd;
use std::os::unix::fs::MetadataExt;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};
use virtio_spec::blk::S_IOERR;

cases! { Host;
    "removal-null-blk", Gating,
        "null_blk goes away under load: requests end with IOERR",
        |env| null_blk_goes(env, Setup::usual(0), USUAL);
    "removal-null-blk-slow", Full,
        "the same with requests in flight for a millisecond",
        |env| null_blk_goes(env, Setup::usual(0), SLOW);
    "removal-null-blk-polled", Full,
        "the same with polled completions",
        |env| null_blk_goes(env, with_flags(abi::OPT_IOPOLL, 0), POLLED);
    "removal-scsi", Gating,
        "a SCSI disk is deleted under load; its driver can be unloaded",
        |env| scsi_goes(env, Setup::usual(0));
    "removal-dm", Full,
        "a device-mapper device is removed by force under load",
        |env| mapper_goes(env, Setup::usual(0));
    "removal-replaced", Gating,
        "after its disk went away a device serves another one",
        replaced_after_removal;
    "removal-number", Gating,
        "the descriptor of a disk that is gone does not attach the one that has its number now",
        |_| number_given_anew();
    "removal-attach", Plain,
        "a disk comes and goes while it is attached and detached",
        goes_while_attached;
    "dm-error", Plain,
        "a device-mapper table fails everything for a while under load",
        |env| mapper_fails_for_a_while(env, Setup::usual(0));
    "dm-flakey", Full,
        "dm-flakey fails every other second under load",
        |env| mapper_flakes(env, Setup::usual(0), 6);
}

/// Requests on each queue between two checks.
const STEP: u64 = 10;

/// Loads `disk` and calls `act` during the load.
fn with_load(
    env: &Env,
    disk: &Disk,
    setup: Setup,
    act: impl FnOnce(&mut Handles, &[Spec]) -> Result<()>,
) -> Result<u64> {
    println!("on {disk}, {setup:?}");
    let specs = setup.specs(env, disk);
    let options = setup.options(&specs);
    let Target { device, daemon: _daemon } =
        target::serve_with(env, disk, &options, &setup.kernel())?;
    let done = under_load(device, specs.clone(), |handles| {
        handles.wait_for_progress(STEP)?;
        act(handles, &specs)
    })?;
    tell(&done);
    Ok(done.iter().map(|done| done.errors).sum())
}

/// null_blk is switched off; its driver can be unloaded while the device is open.
pub(crate) fn null_blk_goes(env: &Env, setup: Setup, options: NullBlkOptions) -> Result<()> {
    let (disk, instance) = null_blk(options)?;
    let errors = with_load(env, &disk, setup, |handles, specs| {
        allow_errors(specs, true);
        instance.power(false)?;
        handles.wait_for_progress(STEP).context("after the removal")?;
        unbound(handles)?;
        instance.remove()?;
        unload("null_blk")
    })?;
    ensure!(errors > 0, "no request has noticed the removal");
    Ok(())
}

/// Checks that the module has released the disk.
fn unbound(handles: &mut Handles) -> Result<()> {
    let Some(kernel) = handles.session.kernel() else { return Ok(()) };
    ensure!(kernel.device().info()?.flags & abi::INFO_DEAD != 0, "it does not say that it is dead");
    // The open descriptor of this process would keep the driver in use.
    kernel.close_backend();
    Ok(())
}

/// A SCSI disk is deleted; scsi_debug can be unloaded while the device is open.
pub(crate) fn scsi_goes(env: &Env, setup: Setup) -> Result<()> {
    let disk = scsi_debug()?;
    let delete = disk.sysfs()?.join("device/delete");
    let errors = with_load(env, &disk, setup, |handles, specs| {
        allow_errors(specs, true);
        std::fs::write(&delete, "1").context("cannot delete the SCSI disk")?;
        handles.wait_for_progress(STEP).context("after the removal")?;
        unbound(handles)?;
        unload("scsi_debug")
    })?;
    ensure!(errors > 0, "no request has noticed the removal");
    Ok(())
}

/// Unloads a module. A work item drops the last reference some time later.
fn unload(module: &str) -> Result<()> {
    let begun = Instant::now();
    let mut outcome = run("modprobe", &["-r", module]);
    while outcome.is_err() && begun.elapsed() < target::LIMIT {
        std::thread::sleep(Duration::from_millis(50));
        outcome = run("modprobe", &["-r", module]);
    }
    outcome.map(drop).with_context(|| format!("{module} stays in use although its disk is gone"))
}

/// A device-mapper table is replaced by an error table, and then restored.
pub(crate) fn mapper_fails_for_a_while(env: &Env, setup: Setup) -> Result<()> {
    let (below, _) = null_blk(NullBlkOptions::default())?;
    let (disk, dm) = Dm::over(below, "failing", DmKind::Linear)?;
    let errors = with_load(env, &disk, setup, |handles, specs| {
        for _ in 0..env.rounds(3) {
            allow_errors(specs, true);
            dm.become_kind(DmKind::Error)?;
            handles.wait_for_progress(STEP).context("while it fails")?;
            dm.become_kind(DmKind::Linear)?;
            handles.wait_for_progress(STEP).context("after it failed")?;
            // The load rewrites failed sectors sooner or later; no new request may fail.
            allow_errors(specs, false);
            handles.wait_for_progress(STEP).context("when it works again")?;
        }
        Ok(())
    })?;
    ensure!(errors > 0, "no request has failed");
    Ok(())
}

/// A device-mapper device is removed by force.
pub(crate) fn mapper_goes(env: &Env, setup: Setup) -> Result<()> {
    let (below, _) = null_blk(NullBlkOptions::default())?;
    let (disk, dm) = Dm::over(below, "going", DmKind::Linear)?;
    let errors = with_load(env, &disk, setup, |handles, specs| {
        allow_errors(specs, true);
        dm.remove_by_force();
        handles.wait_for_progress(STEP).context("after the removal")
    })?;
    ensure!(errors > 0, "no request has noticed the removal");
    Ok(())
}

/// dm-flakey: the disk works and fails for some seconds in turn.
pub(crate) fn mapper_flakes(env: &Env, setup: Setup, seconds: u64) -> Result<()> {
    let (below, _) = null_blk(NullBlkOptions::default())?;
    let (disk, dm) = Dm::over(below, "flaky", DmKind::Linear)?;
    let errors = with_load(env, &disk, setup, |handles, specs| {
        allow_errors(specs, true);
        dm.become_kind(DmKind::Flakey { up: 1, down: 1 })?;
        std::thread::sleep(Duration::from_secs(env.rounds(seconds)));
        handles.wait_for_progress(STEP).context("while it is flaky")?;
        dm.become_kind(DmKind::Linear)?;
        handles.wait_for_progress(STEP).context("after it was flaky")?;
        allow_errors(specs, false);
        handles.wait_for_progress(STEP).context("when it works again")
    })?;
    ensure!(errors > 0, "no request has failed");
    Ok(())
}

/// The disk is removed, and another one replaces it in the running device.
pub(crate) fn replaced_after_removal(env: &Env) -> Result<()> {
    let (disk, instance) = null_blk(NullBlkOptions::default())?;
    let (other, _other) = null_blk(NullBlkOptions::default())?;
    let Target { mut device, .. } = target::serve(env, &disk, &target::options())?;
    device.write(0, &[1; 4096])?;
    instance.power(false)?;
    let layout = device.layout();
    for request in [Request::read(0, 4096), Request::write(0, &[2; 4096]), Request::flush()] {
        let completion = device.queue(0).execute(&request, &layout)?;
        let got = (completion.status, completion.written);
        ensure!(got == (Some(S_IOERR), 1), "without a disk: {got:?}");
    }
    let kernel = device.session().kernel().context("this case is for the kernel's device")?;
    let info = kernel.device().info()?;
    ensure!(info.flags & abi::INFO_DEAD != 0, "the device does not say that its disk is gone");
    kernel.swap_backend(other.open()?).context("another disk in its place")?;
    ensure!(kernel.device().info()?.flags & abi::INFO_DEAD == 0, "the new disk is called dead");
    let data = [3; 4096];
    device.write(0, &data)?;
    let mut read = [0; 4096];
    device.read(0, &mut read)?;
    ensure!(read == data, "the new disk reads other bytes");
    Ok(())
}

/// A new disk reuses the number of a removed one: the old descriptor must not attach the new disk.
pub(crate) fn number_given_anew() -> Result<()> {
    target::need_module()?;
    let (disk, instance) = null_blk(NullBlkOptions::default())?;
    let old = disk.open()?;
    let device = KernelDevice::open()?;
    device.set_owner()?;
    instance.power(false)?;
    fails("a disk that is gone", device.set_backend(0, Some(old.as_raw_fd())), libc::ENXIO)?;
    instance.power(true)?;
    wait_for(&disk.path)?;
    let numbers = (old.metadata()?.rdev(), disk.path.metadata()?.rdev());
    ensure!(numbers.0 == numbers.1, "the new disk has another number: {numbers:?}");
    fails("another disk's number", device.set_backend(0, Some(old.as_raw_fd())), libc::ENODEV)?;
    let new = disk.open()?;
    Ok(device.set_backend(0, Some(new.as_raw_fd()))?)
}

/// Longest time until the disk was removed often enough at each stage.
const LIMIT: Duration = Duration::from_secs(120);

/// A disk appears and disappears while it is attached and detached: both work, or fail with a clear
/// error; nothing leaks.
pub(crate) fn goes_while_attached(env: &Env) -> Result<()> {
    target::need_module()?;
    let (disk, instance) = null_blk(NullBlkOptions::default())?;
    let stop = AtomicBool::new(false);
    let outcome = std::thread::scope(|scope| {
        let flipping = scope.spawn(|| flip(&instance, &stop));
        let outcome = attach_and_detach(&disk, env.rounds(10));
        stop.store(true, Relaxed);
        flipping.join().expect("a thread that flips does not panic").and(outcome)
    });
    outcome?;
    instance.remove()?;
    unload("null_blk")
}

fn flip(instance: &Instance, stop: &AtomicBool) -> Result<()> {
    while !stop.load(Relaxed) {
        let begin = Instant::now();
        instance.power(false)?;
        instance.power(true)?;
        // The disk is present for as long as it was absent.
        std::thread::sleep(begin.elapsed());
    }
    Ok(())
}

/// Repeats until the disk was attached, was refused, and was removed while attached, `enough` times
/// each.
fn attach_and_detach(disk: &Disk, enough: u64) -> Result<()> {
    let device = KernelDevice::open()?;
    device.set_owner()?;
    let end = Instant::now() + LIMIT;
    let (mut attached, mut refused, mut gone) = (0, 0, 0);
    while attached.min(refused).min(gone) < enough {
        ensure!(Instant::now() < end, "{attached} attached, {refused} refused, {gone} gone");
        let Ok(file) = disk.open() else { continue };
        match device.set_backend(0, Some(file.as_raw_fd())) {
            Ok(()) => attached += 1,
            Err(why) if matches!(errno_of(&why), Some(libc::ENODEV | libc::ENXIO)) => {
                refused += 1;
                continue;
            }
            Err(why) => bail!("a disk that comes and goes: {why}"),
        }
        std::thread::sleep(Duration::from_millis(attached % 8));
        gone += u64::from(device.info()?.flags & abi::INFO_DEAD != 0);
        device.set_backend(0, None).context("detach")?;
    }
    println!("{attached} attached, {refused} refused, {gone} gone while attached");
    Ok(())
}
