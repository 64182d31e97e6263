// SPDX-License-Identifier: Apache-2.0
//! The disk goes away, or fails, under load: every request ends, with S_IOERR where it must, and
//! the device goes on with another disk.

use crate::env::Env;
use crate::fixture::{Disk, Dm, DmKind, NullBlkOptions, null_blk, scsi_debug};
use crate::integrity::{Setup, tell};
use crate::load::{Handles, Spec, under_load};
use crate::target::{self, Target};
use anyhow::{Context, Result, ensure};
use driver::Request;
use driver::kernel::abi;
use lab_case::system::run;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;
use virtio_spec::blk::S_IOERR;

/// Requests on each queue between two looks.
const STEP: u64 = 10;

fn allow_errors(specs: &[Spec], allow: bool) {
    specs.iter().for_each(|spec| spec.errors_allowed.store(allow, Relaxed));
}

/// Loads `disk` and does `act` to it.
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

/// The module has let the disk go.
fn unbound(handles: &mut Handles) -> Result<()> {
    let Some(kernel) = handles.session.kernel() else { return Ok(()) };
    ensure!(kernel.device().info()?.flags & abi::INFO_DEAD != 0, "it does not say that it is dead");
    // This process's own descriptor would keep the driver in use.
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

/// The last reference is dropped by a work item: not at once.
fn unload(module: &str) -> Result<()> {
    let mut outcome = Ok(());
    for _ in 0..100 {
        outcome = run("modprobe", &["-r", module]).map(drop);
        if outcome.is_ok() {
            break;
        }
        std::thread::sleep(Duration::from_millis(50));
    }
    outcome.with_context(|| format!("{module} stays in use although its disk is gone"))
}

/// A device-mapper table becomes one of errors and good again.
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
            // What failed is written anew sooner or later; no new request may fail.
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

/// dm-flakey: good and bad seconds in turn.
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

/// The disk goes, and another one takes its place in the running device.
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
