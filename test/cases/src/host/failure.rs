// SPDX-License-Identifier: Apache-2.0
//! Failures of the disk, as the device's owner and the daemon's user see them.

use crate::case::cases;
use crate::host::daemon::Daemon;
use crate::host::env::Env;
use crate::host::fixture::{
    Disk, Dm, DmKind, FileSystem, NullBlkOptions, image, null_blk, wait_until,
};
use crate::host::target::{self, Target, need_module, options};
use anyhow::{Context, Result, ensure};
use driver::kernel::{KernelDevice, KernelOptions, abi};
use driver::{Device, Request};
use kit::set::Set::{Gating, Plain};
use rustix::fs::{FallocateFlags, fallocate};
use std::fs::File;
use std::os::fd::AsRawFd;
use std::path::Path;
use virtio_spec::blk::{S_IOERR, S_OK};
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

cases! { Host;
    "failure-event", Gating,
        "the owner is told that its disk fails, or was removed, and how",
        event;
    "failure-log", Gating,
        "the daemon logs a failing disk in one line",
        daemons_log;
    "failure-smaller", Plain,
        "a request beyond the end of a disk that became smaller is counted and told by both planes",
        |env| env.on_both_planes(smaller);
}

/// First sector of the requests that fail.
const SECTOR: u64 = 64;

fn kernel(device: &mut Device) -> Result<&KernelDevice> {
    Ok(device.session().kernel().context("a kernel device")?.device())
}

/// Writes to [`SECTOR`]; the request must end with `status`.
fn write(device: &mut Device, status: u8) -> Result<()> {
    let layout = device.layout();
    let got = device.queue(0).execute(&Request::write(SECTOR, &[1; 4096]), &layout)?.status;
    ensure!(got == Some(status), "a write ended with {got:?}, not {status}");
    Ok(())
}

/// Number of signals of the event since the last call.
fn signals(event: &EventFd) -> u64 {
    event.read().unwrap_or(0)
}

/// The owner is notified once of each kind of failure, and never without a failure.
pub(crate) fn event(_env: &Env) -> Result<()> {
    need_module()?;
    io_errors().context("I/O errors")?;
    removal().context("a removal")?;
    no_space().context("no space")
}

fn io_errors() -> Result<()> {
    let (below, _) = null_blk(NullBlkOptions::default())?;
    let (disk, dm) = Dm::over(below, "failing", DmKind::Linear)?;
    let mut device = Device::open_kernel(disk.open()?, &options(), &KernelOptions::default())?;
    let event = EventFd::new(EFD_NONBLOCK)?;
    kernel(&mut device)?.set_failure_event(Some(event.as_raw_fd()))?;
    write(&mut device, S_OK)?;
    let layout = device.layout();
    let beyond = Request::read(disk.sectors(), 4096);
    let refused = device.queue(0).execute(&beyond, &layout)?.status;
    ensure!(refused == Some(S_IOERR), "a read beyond the end ended with {refused:?}");
    let failure = kernel(&mut device)?.failure()?;
    ensure!(signals(&event) == 0 && failure.kinds == 0, "nothing has failed: {failure:?}");

    dm.become_kind(DmKind::Error)?;
    write(&mut device, S_IOERR)?;
    ensure!(signals(&event) == 1, "no event");
    write(&mut device, S_IOERR)?;
    ensure!(signals(&event) == 0, "an event for each failure");
    let failure = kernel(&mut device)?.failure()?;
    let told = (failure.kinds, failure.count, failure.sector, failure.error);
    ensure!(told == (abi::FAILURE_IO, 2, SECTOR, libc::EIO as u32), "{failure:?}");
    ensure!(kernel(&mut device)?.failure()?.kinds == 0, "it is told twice");

    kernel(&mut device)?.set_failure_event(None)?;
    write(&mut device, S_IOERR)?;
    ensure!(signals(&event) == 0, "an event that was taken away");
    kernel(&mut device)?.set_failure_event(Some(event.as_raw_fd()))?;
    ensure!(signals(&event) == 1, "no event for what had failed before it was set");
    dm.become_kind(DmKind::Linear)?;
    write(&mut device, S_OK)
}

fn removal() -> Result<()> {
    let (disk, instance) = null_blk(NullBlkOptions::default())?;
    let mut device = Device::open_kernel(disk.open()?, &options(), &KernelOptions::default())?;
    let event = EventFd::new(EFD_NONBLOCK)?;
    kernel(&mut device)?.set_failure_event(Some(event.as_raw_fd()))?;
    instance.power(false)?;
    wait_until("the event", || Ok((signals(&event) == 1).then_some(())))?;
    let failure = kernel(&mut device)?.failure()?;
    let told = (failure.kinds, failure.count, failure.sector, failure.error);
    ensure!(told == (abi::FAILURE_REMOVED, 0, u64::MAX, libc::ENODEV as u32), "{failure:?}");
    Ok(())
}

fn no_space() -> Result<()> {
    let disk = image(FileSystem::Ext4, true)?;
    let mut device = Device::open_kernel(disk.open()?, &options(), &KernelOptions::default())?;
    let event = EventFd::new(EFD_NONBLOCK)?;
    kernel(&mut device)?.set_failure_event(Some(event.as_raw_fd()))?;
    let filler = disk.path.with_file_name("filler");
    fill(&filler)?;
    write(&mut device, S_IOERR)?;
    ensure!(signals(&event) == 1, "no event");
    let failure = kernel(&mut device)?.failure()?;
    let told = (failure.kinds, failure.count, failure.sector, failure.error);
    ensure!(told == (abi::FAILURE_NO_SPACE, 1, SECTOR, libc::ENOSPC as u32), "{failure:?}");
    std::fs::remove_file(filler)?;
    wait_until("space", || Ok(write(&mut device, S_OK).ok()))
}

/// Fills a file system completely.
pub(crate) fn fill(path: &Path) -> Result<()> {
    let file = File::create(path)?;
    let mut at = 0;
    for order in (12..30).rev() {
        while fallocate(&file, FallocateFlags::empty(), at, 1 << order).is_ok() {
            at += 1 << order;
        }
    }
    file.sync_all().context("the file that takes all space")
}

/// The daemon logs many failures in one line, and continues.
pub(crate) fn daemons_log(env: &Env) -> Result<()> {
    need_module()?;
    let (below, _) = null_blk(NullBlkOptions::default())?;
    let (disk, dm) = Dm::over(below, "failing", DmKind::Linear)?;
    let Target { mut device, daemon } = target::serve(&env.over_daemon(), &disk, &options())?;
    let daemon = daemon.context("there is no daemon")?;
    write(&mut device, S_OK)?;
    ensure!(daemon.lines_with("the disk fails").is_empty(), "{:?}", daemon.lines_with("disk"));
    dm.become_kind(DmKind::Error)?;
    for _ in 0..20 {
        write(&mut device, S_IOERR)?;
    }
    let found = || Ok(daemon.lines_with("the disk fails").into_iter().next());
    let line = wait_until("the daemon's line", found)?;
    ensure!(line.contains("I/O errors") && line.contains(&format!("sector {SECTOR}")), "{line}");
    dm.become_kind(DmKind::Linear)?;
    write(&mut device, S_OK)?;
    // The first failure, and the failures within the second after it.
    let lines = daemon.lines_with("the disk fails");
    ensure!(lines.len() < 20, "a line for each failure: {lines:?}");
    Ok(())
}

/// A served disk whose device has become smaller. Its last 4 KiB were written before.
pub(crate) struct Shrunk {
    pub(crate) daemon: Daemon,
    pub(crate) device: Device,
    pub(crate) dm: Dm,
    /// Sectors that the driver knows.
    pub(crate) sectors: u64,
    _disk: Disk,
}

impl Shrunk {
    /// Serves a disk with these options of the daemon, and takes half of it away.
    pub(crate) fn serve(env: &Env, more: &[&str]) -> Result<Self> {
        let (below, _) = null_blk(NullBlkOptions::USUAL)?;
        let (disk, dm) = Dm::over(below, "smaller", DmKind::Linear)?;
        let sectors = disk.sectors();
        let (mut device, daemon) = target::serve_by_daemon(env, &disk, &options(), more)?;
        device.write(sectors - 8, &[1; 4096])?;
        dm.become_linear(sectors / 2)?;
        Ok(Shrunk { daemon, device, dm, sectors, _disk: disk })
    }
}

fn smaller(env: &Env) -> Result<()> {
    let mut shrunk = Shrunk::serve(env, &[])?;
    let (device, daemon, sectors) = (&mut shrunk.device, &shrunk.daemon, shrunk.sectors);
    let layout = device.layout();
    // The disk never had the first one.
    let beyond = Request::read(sectors - 4, 4096);
    for request in
        [beyond, Request::read(sectors - 8, 4096), Request::write(sectors - 8, &[2; 4096])]
    {
        let status = device.queue(0).execute(&request, &layout)?.status;
        ensure!(status == Some(S_IOERR), "{request:?} ended with {status:?}");
    }
    let counted = ["queue_refused_requests_total", "queue_failed_requests_total"];
    let counted = (daemon.total(counted[0])?, daemon.total(counted[1])?);
    ensure!(counted == (1, 2), "{counted:?} requests were refused and have failed");
    wait_until(
        "the failures",
        || Ok((daemon.total("storage_failures_total")? == 2).then_some(())),
    )?;
    ensure!(!daemon.lines_with("the disk fails").is_empty(), "no line in the log");
    Ok(())
}
