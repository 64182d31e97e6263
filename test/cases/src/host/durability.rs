// SPDX-License-Identifier: Apache-2.0
//! Durability of data: the number of flushes that the disk below receives.

use crate::case::cases;
use crate::host::env::{Env, Plane};
use crate::host::fixture::{
    Disk, Dm, DmKind, FileSystem, NullBlkOptions, image_on, null_blk, wait_until,
};
use crate::host::target::{self, Target, options};
use crate::host::visibility::counters;
use anyhow::{Context, Result, ensure};
use driver::kernel::{KernelOptions, abi};
use driver::{Device, Options, Request};
use kit::outcome::{expect_io_errors, expect_log, skip_part};
use kit::set::Set::{Gating, Plain, Uring};
use kit::stat::Stat;
use kit::system::run;
use rustix::time::{ClockId, Timespec, clock_getres, clock_gettime};
use std::os::fd::AsRawFd;
use std::path::PathBuf;
use std::time::Duration;
use virtio_spec::blk::{F_CONFIG_WCE, F_FLUSH, S_IOERR, S_OK};
use virtio_spec::features::bit;

cases! { Host;
    "durability-block-device", Gating,
        "when the disk below is told to flush its cache, and when not",
        block_device;
    "durability-file", Plain,
        "when the disk below an image is told to flush its cache, and when not",
        file;
    "durability-block-device-uring", Uring,
        "when the io_uring plane tells the disk below to flush its cache, and when not",
        |env| block_device(&env.on(Plane::Uring));
    "durability-file-uring", Uring,
        "when the io_uring plane tells the disk below an image to flush its cache, and when not",
        |env| file(&env.on(Plane::Uring));
    "durability-waits", Plain,
        "writes that a file system ends only when the disk has them do not keep the queue's worker",
        waits;
    "durability-lost-write", Plain,
        "after a sync of an image that failed every FLUSH fails, on either plane",
        lost_write;
    "durability-failed-range", Plain,
        "a durable DISCARD of an image that fails without a sync loses nothing, and FLUSHes succeed",
        failed_range;
}

/// A disk with a volatile cache that needs a flush, even for a FUA write.
const CACHED: NullBlkOptions =
    NullBlkOptions { cache_mib: 16, fua: false, ..NullBlkOptions::USUAL };
/// Writes of each kind.
const WRITES: u64 = 10;
/// Rounds of writes to the page cache.
const ROUNDS: u32 = 50;

/// The first write of a clock tick changes the file's times, which blocks. No other write before
/// the next tick blocks, and none may be handed to the workqueue.
fn cached_writes_are_not_handed_on(device: &mut Device) -> Result<()> {
    let (mut proofs, mut at_once) = (0, 0);
    for round in 0..ROUNDS {
        // Writeback by the file system would keep pages locked.
        device.flush()?;
        let (before, begin) = (handed_on(device)?, last_tick());
        write_all(device, 2)?;
        let most = ticks_since(begin)? + 1;
        let count = handed_on(device)? - before;
        ensure!(count <= most, "round {round}: {count} of {WRITES} cached writes were handed on");
        proofs += u32::from(most <= WRITES / 2);
        // Of writes at once, several may be the first of a tick that begins meanwhile.
        let (before, begin) = (handed_on(device)?, last_tick());
        device.write(0, &[2; 4096])?;
        write_at_once(device, 2)?;
        if last_tick() == begin {
            let count = handed_on(device)? - before;
            ensure!(count <= 1, "round {round}: {count} writes at once were handed on");
            at_once += 1;
        }
    }
    println!(
        "{proofs} of {ROUNDS} rounds with few ticks of the clock, {at_once} with none at once"
    );
    if proofs == 0 {
        skip_part(format!("{WRITES} writes always took half as many ticks of the clock or more"));
    }
    Ok(())
}

/// Time of the clock's last tick, which is the time that files get.
fn last_tick() -> Timespec {
    clock_gettime(ClockId::RealtimeCoarse)
}

/// The number of ticks since an earlier one.
fn ticks_since(earlier: Timespec) -> Result<u64> {
    let passed = Duration::try_from(last_tick() - earlier).context("the clock went back")?;
    let tick = Duration::try_from(clock_getres(ClockId::RealtimeCoarse))?;
    // A tick is slightly longer or shorter than its nominal time.
    Ok(((passed + tick / 2).as_nanos() / tick.as_nanos()) as u64)
}

/// Counts the flushes of a block device, by its directory in sysfs.
struct Flushes(PathBuf);

impl Flushes {
    /// The number of flushes during `act`.
    fn of(&self, act: impl FnOnce() -> Result<()>) -> Result<u64> {
        let before = Stat::of(&self.0)?.flushes;
        act()?;
        Ok(Stat::of(&self.0)?.flushes - before)
    }
}

/// Counts flushes on a block device.
pub(crate) fn block_device(env: &Env) -> Result<()> {
    let (disk, _) = null_blk(CACHED)?;
    let flushes = Flushes(disk.sysfs()?);
    check(env, &disk, &flushes)
}

/// Counts flushes on an image, with and without the page cache.
pub(crate) fn file(env: &Env) -> Result<()> {
    for direct in [true, false] {
        let (below, _) = null_blk(NullBlkOptions { mib: 512, ..CACHED })?;
        let flushes = Flushes(below.sysfs()?);
        let disk = image_on(FileSystem::Ext4, below, direct)?;
        check(env, &disk, &flushes).with_context(|| format!("direct {direct}"))?;
    }
    Ok(())
}

/// The workqueue waits for the disk below, and the queue's worker does not.
pub(crate) fn waits(env: &Env) -> Result<()> {
    let (below, _) = null_blk(NullBlkOptions { mib: 512, ..CACHED })?;
    let disk = image_on(FileSystem::Xfs, below, false)?;
    let all = options().features;
    let mut back = device(env, &disk, 0, all)?;
    write_all(&mut back, 1)?;
    cached_writes_are_not_handed_on(&mut back)?;
    drop(back);
    let count = slow(&mut device(env, &disk, abi::OPT_WRITE_THROUGH, all)?, 3)?;
    ensure!(count == WRITES, "{count} of {WRITES} durable writes were handed on");
    let directory = disk.path.parent().context("an image has a directory")?;
    run("mount", &["-o", "remount,sync", &directory.to_string_lossy()])?;
    let count = slow(&mut device(env, &disk, 0, all)?, 4)?;
    ensure!(count == WRITES, "{count} of {WRITES} writes on a sync mount were handed on");
    Ok(())
}

/// A write to the page cache is lost below the image. The kernel reports it once; the disk must
/// remember it, also after its file is attached again, and after the daemon's own plane takes over.
pub(crate) fn lost_write(env: &Env) -> Result<()> {
    expect_io_errors();
    expect_log("EXT4-fs");
    let lost = |env: &Env, after: &dyn Fn(&mut Target, &Disk) -> Result<()>| {
        let (below, _) = null_blk(NullBlkOptions { mib: 512, ..NullBlkOptions::USUAL })?;
        let (below, dm) = Dm::over(below, "losing", DmKind::Linear)?;
        let disk = image_on(FileSystem::Ext4WithoutJournal, below, false)?;
        let mut target = target(env, &disk, 0, options().features)?;
        target.device.write(0, &[1; 4096])?;
        flush_ends(&mut target.device, S_OK).context("before the loss")?;
        target.device.write(0, &[2; 4096])?;
        dm.become_kind(DmKind::Error)?;
        flush_ends(&mut target.device, S_IOERR).context("while the disk fails")?;
        dm.become_kind(DmKind::Linear)?;
        flush_ends(&mut target.device, S_IOERR).context("after the disk came back")?;
        after(&mut target, &disk)
    };
    lost(&env.on(Plane::Direct), &|target, disk| {
        let kernel = target.device.session().kernel().context("a kernel device")?.device();
        let failure = kernel.failure()?;
        let kinds = failure.kinds;
        ensure!(kinds & abi::FAILURE_SYNC != 0, "the owner is told of {kinds:#x}");
        let of_flushes = (failure.count, failure.sector);
        ensure!(of_flushes == (2, u64::MAX), "count and sector of two FLUSHes: {of_flushes:?}");
        kernel.set_backend(0, Some(disk.open()?.as_raw_fd()))?;
        flush_ends(&mut target.device, S_IOERR).context("after the file was attached again")
    })?;
    lost(&env.on(Plane::Kernel), &|target, _| {
        let daemon = target.daemon.as_ref().context("there is no daemon")?;
        let told = || Ok(daemon.lines_with("a sync failed").into_iter().next());
        wait_until("the daemon's line", told)?;
        daemon.control(&["switch", "uring"])?;
        flush_ends(&mut target.device, S_IOERR).context("on the daemon's own plane")?;
        let daemon = target.daemon.as_ref().context("there is no daemon")?;
        ensure!(daemon.control(&["switch", "kernel"]).is_err(), "the kernel would forget it");
        Ok(())
    })
}

/// A DISCARD of a part of a block has to read the block first. If that fails nothing was synced, so
/// nothing was lost.
pub(crate) fn failed_range(env: &Env) -> Result<()> {
    expect_io_errors();
    expect_log("EXT4-fs");
    let (below, _) = null_blk(NullBlkOptions { mib: 512, ..NullBlkOptions::USUAL })?;
    let (below, dm) = Dm::over(below, "failing", DmKind::Linear)?;
    let disk = image_on(FileSystem::Ext4WithoutJournal, below, false)?;
    let env = env.on(Plane::Direct);
    let mut target = target(&env, &disk, abi::OPT_WRITE_THROUGH, options().features)?;
    target.device.write(0, &[1; 4096])?;
    std::fs::write("/proc/sys/vm/drop_caches", "3")?;
    dm.become_kind(DmKind::Error)?;
    let discarded = target.device.discard(1, 1);
    dm.become_kind(DmKind::Linear)?;
    ensure!(discarded.is_err(), "the DISCARD did not fail");
    let kernel = target.device.session().kernel().context("a kernel device")?.device();
    let kinds = kernel.failure()?.kinds;
    ensure!(kinds == abi::FAILURE_IO, "the owner is told of {kinds:#x}");
    flush_ends(&mut target.device, S_OK)
}

fn flush_ends(device: &mut Device, status: u8) -> Result<()> {
    let layout = device.layout();
    let got = device.queue(0).execute(&Request::flush(), &layout)?.status;
    ensure!(got == Some(status), "a FLUSH ended with {got:?}, not {status}");
    Ok(())
}

/// The number of [`WRITES`] concurrent writes that the workqueue did.
fn slow(device: &mut Device, value: u8) -> Result<u64> {
    let before = handed_on(device)?;
    write_at_once(device, value)?;
    Ok(handed_on(device)? - before)
}

/// The number of requests that the workqueue has done.
pub(crate) fn handed_on(device: &mut Device) -> Result<u64> {
    counters(device)?.get("slow").copied().context("no count of what the workqueue did")
}

fn write_at_once(device: &mut Device, value: u8) -> Result<()> {
    let layout = device.layout();
    let queue = device.queue(0);
    for n in 0..WRITES {
        queue.submit(&Request::write(n * 8, &[value; 4096]), &layout)?;
    }
    for _ in 0..WRITES {
        let status = queue.collect()?.1.status;
        ensure!(status == Some(S_OK), "a write ended with {status:?}");
    }
    Ok(())
}

fn target(env: &Env, disk: &Disk, flags: u32, features: u64) -> Result<Target> {
    let kernel =
        KernelOptions { options: abi::BlkOptions::with_flags(flags), ..KernelOptions::default() };
    target::serve_with(env, disk, &Options { features, ..options() }, &kernel)
}

fn device(env: &Env, disk: &Disk, flags: u32, features: u64) -> Result<Device> {
    Ok(target(env, disk, flags, features)?.device)
}

/// Writes the same blocks each time. The first writes allocate space in a file, for which file
/// systems flush; later writes do not.
fn write_all(device: &mut Device, value: u8) -> Result<()> {
    (0..WRITES).try_for_each(|n| device.write(n * 8, &[value; 4096])).map_err(Into::into)
}

fn check(env: &Env, disk: &Disk, flushes: &Flushes) -> Result<()> {
    println!("on {disk}");
    let all = options().features;
    let Target { device: mut back, daemon } = target(env, disk, 0, all)?;
    write_all(&mut back, 1)?;
    back.flush()?;
    let count = flushes.of(|| write_all(&mut back, 2))?;
    // A file system flushes now and then for its own reasons.
    ensure!(count < WRITES / 2, "{count} flushes for {WRITES} writes in write-back mode");
    for n in 0..3_u8 {
        let count = flushes.of(|| {
            back.write(0, &[n; 4096])?;
            Ok(back.flush()?)
        })?;
        ensure!(count >= 1, "a FLUSH did not reach the disk");
    }
    drop((back, daemon));
    durable(target(env, disk, abi::OPT_WRITE_THROUGH, all)?, flushes)
        .context("write-through mode")?;
    let without = all & !bit(F_FLUSH) & !bit(F_CONFIG_WCE);
    durable(target(env, disk, 0, without)?, flushes).context("FLUSH was not negotiated")
}

fn durable(mut target: Target, flushes: &Flushes) -> Result<()> {
    let device = &mut target.device;
    for n in 0..WRITES {
        let count = flushes.of(|| Ok(device.write(n * 8, &[3; 4096])?))?;
        ensure!(count >= 1, "{count} flushes for write {n}");
    }
    let count = flushes.of(|| Ok(device.write_zeroes(0, 8, 0)?))?;
    ensure!(count >= 1, "{count} flushes for a WRITE_ZEROES");
    Ok(())
}
