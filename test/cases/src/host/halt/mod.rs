// SPDX-License-Identifier: Apache-2.0
//! Errors of the storage that halt a device, as its owner sees them.

mod daemon;

use crate::case::cases;
use crate::host::abi::fails;
use crate::host::fixture::{Disk, Dm, DmKind, NullBlkOptions, null_blk, wait_until};
use crate::host::target::{need_module, options};
use crate::host::visibility::counters;
use anyhow::{Context, Result, ensure};
use driver::kernel::abi::{self, BlkOptions};
use driver::kernel::{KernelDevice, KernelOptions};
use driver::{Device, Request};
use kit::set::Set::{Gating, Plain};
use kit::system::{run, run_quietly};
use virtio_spec::blk::{RangeSegment, S_IOERR, S_OK, T_FLUSH, T_OUT};

cases! { Host;
    "halt-kept", Gating,
        "a halted device takes nothing, and keeps the chains of failed requests over the stop",
        |_| kept();
    "halt-policy", Gating,
        "only errors of the owner's choice halt; a flush that fails is answered, and halts",
        |_| policy();
    "halt-reads", Gating,
        "errors of reads and of other requests halt by flags of their own, which change meanwhile",
        |_| reads();
    "halt-order", Gating,
        "the owner halts a device that has not failed, and ends that by a stop",
        |_| order();
    "halt-removed", Gating,
        "a device whose disk is removed keeps all requests",
        |_| removed();
    "halt-read-only", Gating,
        "a device whose disk becomes read-only keeps writes, and answers reads",
        |_| read_only();
    "halt-smaller", Plain,
        "a device whose disk becomes smaller keeps requests beyond its end, and answers the others",
        |_| smaller();
}

/// A disk that works. Unlike a linear one, it can become one that fails flushes, too.
const WORKING: DmKind = DmKind::Flakey { up: 3600, down: 0 };
const FAILING: DmKind = DmKind::Flakey { up: 0, down: 3600 };
/// First sector of the requests that fail.
const SECTOR: u64 = 64;

fn kernel(device: &mut Device) -> Result<&KernelDevice> {
    Ok(device.session().kernel().context("a kernel device")?.device())
}

fn open(disk: &Disk, flags: u32) -> Result<Device> {
    let options_of_kernel =
        KernelOptions { options: BlkOptions::with_flags(flags), ..KernelOptions::default() };
    Ok(Device::open_kernel(disk.open()?, &options(), &options_of_kernel)?)
}

/// A device over a disk that fails on demand. The device must be dropped first.
fn failing(flags: u32) -> Result<(Disk, Dm, Device)> {
    need_module()?;
    // Flushes reach a disk with a cache only.
    let (below, _) = null_blk(NullBlkOptions { cache_mib: 4, ..NullBlkOptions::USUAL })?;
    let (disk, dm) = Dm::over(below, "halting", WORKING)?;
    let device = open(&disk, flags)?;
    Ok((disk, dm, device))
}

/// Checks that a write at [`SECTOR`], or a flush, which has no sector, has halted the device.
fn halted_by(device: &mut Device, (kind, bytes): (u32, u64), errno: i32) -> Result<()> {
    let failure = kernel(device)?.failure()?;
    ensure!(failure.kinds & abi::FAILURE_HALTED != 0, "no halt: {failure:?}");
    ensure!(failure.kinds & !abi::FAILURE_HALTED != 0, "no failure: {failure:?}");
    let about = (failure.halt_type, failure.halt_error, failure.halt_sector, failure.halt_bytes);
    let sector = if kind == T_OUT { SECTOR } else { u64::MAX };
    ensure!(about == (kind, errno as u32, sector, bytes), "{failure:?}");
    let again = kernel(device)?.failure()?;
    ensure!(again.kinds & abi::FAILURE_HALTED == 0, "the halt is told twice: {again:?}");
    Ok(())
}

fn nothing_is_answered(device: &mut Device) -> Result<()> {
    ensure!(device.queue(0).try_collect()?.is_none(), "a request was answered");
    Ok(())
}

/// Waits until the queue has kept a request and has none in flight.
fn wait_for_kept(device: &mut Device) -> Result<()> {
    wait_until("a kept request", || {
        let counters = counters(device)?;
        Ok((counters["kept"] > 0 && counters["inflight"] == 0).then_some(()))
    })
}

fn kept() -> Result<()> {
    let (_disk, dm, mut device) = failing(abi::OPT_KEEP_FAILED)?;
    let layout = device.layout();
    fails("queue 64", kernel(&mut device)?.kept(64), libc::ENOBUFS)?;
    device.write(8, &[1; 4096])?;
    dm.become_kind(FAILING)?;
    let ids = (0..4)
        .map(|n| device.queue(0).submit(&Request::write(SECTOR + 8 * n, &[2; 4096]), &layout))
        .collect::<Result<Vec<u16>, _>>()?;
    wait_for_kept(&mut device)?;
    halted_by(&mut device, (T_OUT, 4096), libc::EIO)?;
    nothing_is_answered(&mut device)?;
    dm.become_kind(WORKING)?;
    device.queue(0).submit(&Request::read(8, 4096), &layout)?;
    let chains = counters(&mut device)?["chains"];
    ensure!(chains == 1, "{chains} chains were taken and not given back");
    kernel(&mut device)?.set_queue(0, false)?;
    let mut kept = kernel(&mut device)?.kept(0)?;
    let base = kernel(&mut device)?.vring_base(0)?;
    ensure!(usize::try_from(base)? == 1 + kept.len(), "base {base} with {kept:?}");
    // They failed in any order, but were taken in this one.
    kept.sort_unstable();
    let mut first = ids[..kept.len()].to_vec();
    first.sort_unstable();
    ensure!(kept == first, "{kept:?} are kept, not {first:?}");
    nothing_is_answered(&mut device)?;
    // The next run forgets them, and is not halted.
    kernel(&mut device)?.set_queue(0, true)?;
    ensure!(kernel(&mut device)?.kept(0)?.is_empty(), "chains of an earlier run");
    wait_until("the rest", || Ok(device.queue(0).try_collect()?)).map(drop)
}

/// Takes the right to write to a disk away, until the drop.
struct SetReadOnly(String);

impl SetReadOnly {
    fn new(disk: &Disk) -> Result<Self> {
        let path = disk.path.to_string_lossy().into_owned();
        run("blockdev", &["--setro", &path])?;
        Ok(Self(path))
    }
}

impl Drop for SetReadOnly {
    fn drop(&mut self) {
        run_quietly("blockdev", &["--setrw", &self.0]);
    }
}

fn read_only() -> Result<()> {
    need_module()?;
    let (disk, _) = null_blk(NullBlkOptions::USUAL)?;
    for (flags, keeps) in [(abi::OPT_KEEP_FAILED, true), (abi::OPT_KEEP_NO_SPACE, false)] {
        let mut device = open(&disk, flags)?;
        device.write(8, &[1; 4096])?;
        let _read_only = SetReadOnly::new(&disk)?;
        device.read(8, &mut [0; 4096])?;
        let write = Request::write(SECTOR, &[2; 4096]);
        if !keeps {
            fails_for_the_driver(&mut device, &write)?;
            continue;
        }
        let layout = device.layout();
        let id = device.queue(0).submit(&write, &layout)?;
        wait_for_kept(&mut device)?;
        // It ends before its bytes are counted.
        halted_by(&mut device, (T_OUT, 0), libc::EROFS)?;
        nothing_is_answered(&mut device)?;
        kernel(&mut device)?.set_queue(0, false)?;
        ensure!(kernel(&mut device)?.kept(0)? == [id], "the write is not kept");
    }
    Ok(())
}

fn smaller() -> Result<()> {
    need_module()?;
    let (below, _) = null_blk(NullBlkOptions::USUAL)?;
    let (disk, dm) = Dm::over(below, "smaller", DmKind::Linear)?;
    let sectors = disk.sectors();
    let (read, write) = (Request::read(sectors - 8, 4096), Request::write(sectors - 8, &[2; 4096]));
    for (flags, request, keeps) in [
        (abi::OPT_KEEP_FAILED, &read, Some(libc::EIO)),
        (abi::OPT_KEEP_FAILED, &write, Some(libc::ENOSPC)),
        (abi::OPT_KEEP_NO_SPACE, &write, Some(libc::ENOSPC)),
        (abi::OPT_KEEP_NO_SPACE, &read, None),
        (0, &write, None),
    ] {
        let mut device = open(&disk, flags)?;
        device.write(sectors - 8, &[1; 4096])?;
        dm.become_linear(sectors / 2)?;
        lacks_its_end(&mut device, request, sectors, keeps)
            .with_context(|| format!("flags {flags:#x}, {request:?}"))?;
        drop(device);
        dm.become_linear(sectors)?;
    }
    Ok(())
}

/// `keeps`: the error that halts the device.
fn lacks_its_end(
    device: &mut Device,
    request: &Request,
    sectors: u64,
    keeps: Option<i32>,
) -> Result<()> {
    device.read(8, &mut [0; 4096])?;
    // The disk never had this one.
    fails_for_the_driver(device, &Request::write(sectors - 4, &[1; 4096]))?;
    let Some(errno) = keeps else {
        fails_for_the_driver(device, request)?;
        let counted = counters(device)?;
        ensure!((counted["refused"], counted["failed"]) == (1, 1), "{counted:?}");
        let failure = kernel(device)?.failure()?;
        ensure!((failure.count, failure.sector) == (1, sectors - 8), "{failure:?}");
        return Ok(());
    };
    let layout = device.layout();
    let id = device.queue(0).submit(request, &layout)?;
    wait_for_kept(device)?;
    let failure = kernel(device)?.failure()?;
    let about = (failure.halt_error, failure.halt_sector, failure.halt_bytes);
    ensure!(about == (errno as u32, sectors - 8, 4096), "{failure:?}");
    nothing_is_answered(device)?;
    kernel(device)?.set_queue(0, false)?;
    ensure!(kernel(device)?.kept(0)? == [id], "the request is not kept");
    Ok(())
}

fn fails_for_the_driver(device: &mut Device, request: &Request) -> Result<()> {
    let layout = device.layout();
    let status = device.queue(0).execute(request, &layout)?.status;
    ensure!(status == Some(S_IOERR), "status {status:?}");
    Ok(())
}

fn policy() -> Result<()> {
    for flags in [0, abi::OPT_KEEP_NO_SPACE | abi::OPT_HALT_AT_FLUSH] {
        other_errors(flags).with_context(|| format!("flags {flags:#x}"))?;
    }
    flushes(true).context("a flush that halts")?;
    flushes(false).context("a flush that does not halt")
}

/// Errors that are not those of the owner's choice.
fn other_errors(flags: u32) -> Result<()> {
    let (_disk, dm, mut device) = failing(flags)?;
    dm.become_kind(FAILING)?;
    for _ in 0..2 {
        fails_for_the_driver(&mut device, &Request::write(SECTOR, &[1; 4096]))?;
    }
    fails_for_the_driver(&mut device, &Request::flush())?;
    let kinds = kernel(&mut device)?.failure()?.kinds;
    ensure!(kinds == abi::FAILURE_IO, "{kinds:#x}");
    Ok(())
}

fn flushes(halts: bool) -> Result<()> {
    let more = if halts { abi::OPT_HALT_AT_FLUSH } else { 0 };
    let (_disk, dm, mut device) = failing(abi::OPT_KEEP_FAILED | more)?;
    dm.become_kind(FAILING)?;
    fails_for_the_driver(&mut device, &Request::flush())?;
    if !halts {
        return fails_for_the_driver(&mut device, &Request::flush());
    }
    halted_by(&mut device, (T_FLUSH, 0), libc::EIO)?;
    dm.become_kind(WORKING)?;
    takes_nothing(&mut device, 1)
}

/// The flags of a device whose reads alone halt it.
const READS_HALT: u32 = abi::OPT_READS_APART | abi::OPT_READS_KEEP_FAILED | abi::OPT_HALT_AT_FLUSH;
/// The flags of a device that all but reads halt.
const OTHERS_HALT: u32 = abi::OPT_READS_APART | abi::OPT_KEEP_FAILED;

fn reads() -> Result<()> {
    let (_disk, dm, mut device) = failing(READS_HALT)?;
    let range = [RangeSegment { sector: SECTOR, num_sectors: 8, flags: 0 }];
    let read = Request::read(SECTOR, 4096);
    let others = [
        Request::write(SECTOR, &[2; 4096]),
        Request::discard(&range),
        Request::write_zeroes(&range),
    ];
    device.write(SECTOR, &[1; 4096])?;
    for request in &others {
        set(&mut device, READS_HALT)?;
        dm.become_kind(FAILING)?;
        fails_for_the_driver(&mut device, request)?;
        fails_for_the_driver(&mut device, &Request::flush())?;
        keeps(&mut device, &read).context("a read that halts")?;
        // The queue does not run, so the next flags hold from its start on.
        set(&mut device, OTHERS_HALT)?;
        kernel(&mut device)?.set_queue(0, true)?;
        fails_for_the_driver(&mut device, &read)?;
        // The running queue gets the flags, and those before.
        set(&mut device, READS_HALT)?;
        fails_for_the_driver(&mut device, request)?;
        set(&mut device, OTHERS_HALT)?;
        keeps(&mut device, request).with_context(|| format!("{request:?} halts"))?;
        dm.become_kind(WORKING)?;
        kernel(&mut device)?.set_queue(0, true)?;
    }
    for none in [abi::OPT_READS_APART, abi::OPT_READS_APART | abi::OPT_READS_KEEP_NO_SPACE] {
        set(&mut device, none)?;
        dm.become_kind(FAILING)?;
        fails_for_the_driver(&mut device, &read)?;
        fails_for_the_driver(&mut device, &others[0])?;
        dm.become_kind(WORKING)?;
    }
    Ok(())
}

/// Checks that a request halts the device; stops its queue.
fn keeps(device: &mut Device, request: &Request) -> Result<()> {
    let layout = device.layout();
    let id = device.queue(0).submit(request, &layout)?;
    wait_for_kept(device)?;
    nothing_is_answered(device)?;
    kernel(device)?.set_queue(0, false)?;
    let kept = kernel(device)?.kept(0)?;
    ensure!(kept == [id], "{kept:?} are kept, not {id}");
    Ok(())
}

fn set(device: &mut Device, flags: u32) -> Result<()> {
    Ok(kernel(device)?.set_options(BlkOptions::with_flags(flags))?)
}

/// Checks that the worker has looked at the ring, has taken no further chain, and keeps none.
fn takes_nothing(device: &mut Device, chains: u64) -> Result<()> {
    let kicks = counters(device)?["kicks"];
    let layout = device.layout();
    device.queue(0).submit(&Request::read(8, 4096), &layout)?;
    device.queue(0).queue().kick();
    wait_until("a turn", || Ok((counters(device)?["kicks"] > kicks).then_some(())))?;
    let counters = counters(device)?;
    ensure!((counters["chains"], counters["kept"]) == (chains, 0), "{counters:?}");
    nothing_is_answered(device)
}

fn order() -> Result<()> {
    let (_disk, _dm, mut device) = failing(abi::OPT_KEEP_FAILED)?;
    device.write(8, &[1; 4096])?;
    set(&mut device, abi::OPT_KEEP_FAILED | abi::OPT_HALT)?;
    // Without the flag, the halt goes on until the queues stop.
    set(&mut device, abi::OPT_KEEP_FAILED)?;
    takes_nothing(&mut device, 1)?;
    ensure!(kernel(&mut device)?.failure()?.kinds == 0, "an order is no failure");
    set(&mut device, abi::OPT_KEEP_FAILED | abi::OPT_HALT)?;
    for _ in 0..2 {
        kernel(&mut device)?.set_queue(0, false)?;
        kernel(&mut device)?.set_queue(0, true)?;
        takes_nothing(&mut device, 0)?;
    }
    kernel(&mut device)?.set_queue(0, false)?;
    set(&mut device, abi::OPT_KEEP_FAILED)?;
    kernel(&mut device)?.set_queue(0, true)?;
    for _ in 0..3 {
        let (_, done) = device.queue(0).collect()?;
        ensure!(done.status == Some(S_OK), "status {:?}", done.status);
    }
    Ok(())
}

fn removed() -> Result<()> {
    need_module()?;
    let (disk, instance) = null_blk(NullBlkOptions::default())?;
    let mut device = open(&disk, abi::OPT_KEEP_FAILED)?;
    let layout = device.layout();
    device.write(8, &[1; 4096])?;
    instance.power(false)?;
    wait_until("the removal", || {
        let kinds = kernel(&mut device)?.failure()?.kinds;
        Ok((kinds & abi::FAILURE_REMOVED != 0).then_some(()))
    })?;
    let id = device.queue(0).submit(&Request::write(SECTOR, &[1; 4096]), &layout)?;
    wait_for_kept(&mut device)?;
    halted_by(&mut device, (T_OUT, 0), libc::ENODEV)?;
    nothing_is_answered(&mut device)?;
    kernel(&mut device)?.set_queue(0, false)?;
    ensure!(kernel(&mut device)?.kept(0)? == [id], "another chain is kept");
    nothing_is_answered(&mut device)
}
