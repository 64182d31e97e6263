// SPDX-License-Identifier: Apache-2.0
//! The trace of slow requests, as the module records them and as the daemon tells them. No time has
//! an upper bound.

use crate::case::cases;
use crate::host::daemon::Trace;
use crate::host::env::{Env, Plane};
use crate::host::fixture::{Dm, DmKind, NullBlkOptions, null_blk, wait_until};
use crate::host::module;
use crate::host::target::{self, Target, need_module, options};
use crate::host::visibility::counters;
use anyhow::{Context, Result, ensure};
use driver::kernel::abi::{self, BlkOptions, BlkTraced};
use driver::kernel::{KernelDevice, KernelOptions};
use driver::{Device, Request};
use kit::set::Set::{Gating, Plain};
use serde_json::Value;
use std::os::fd::AsRawFd;
use std::time::{Duration, Instant};
use virtio_spec::blk::{S_IOERR, S_OK, T_DISCARD, T_FLUSH, T_IN, T_OUT};
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

cases! { Host;
    "trace-records", Gating,
        "the module records slow requests with the time of each stage, and no others",
        |_| records();
    "trace-ring", Gating,
        "the record of a request has its time in the ring at most, in which an idle driver does not count",
        |_| in_the_ring();
    "trace-lost", Gating,
        "records outlive their queue; newer ones replace the oldest ones, which are counted; a reset forgets all",
        |_| lost();
    "trace-limit", Gating,
        "the record of a request has the wait for a limit right before it",
        |_| limited();
    "daemon-trace", Plain,
        "traces of several clients lose no request while the disk moves between the planes",
        over_planes;
}

/// Time that the slow disk takes.
const DELAY: Duration = Duration::from_millis(30);
/// The clock of the records may be slower than that of the disk's timer.
const LEAST: Duration = Duration::from_millis(29);
/// Time of a slow request.
const BOUND: Duration = Duration::from_millis(20);
const HOUR: Duration = Duration::from_secs(3600);

fn slow() -> NullBlkOptions {
    let completion_ns = DELAY.as_nanos() as u64;
    NullBlkOptions { irqmode: 2, completion_ns, ..NullBlkOptions::USUAL }
}

fn kernel(device: &mut Device) -> Result<&KernelDevice> {
    Ok(device.session().kernel().context("a kernel device")?.device())
}

fn trace(device: &mut Device, slower_than: Duration, event: &EventFd) -> Result<()> {
    let bound = slower_than.as_nanos() as u64;
    Ok(kernel(device)?.set_trace(bound, Some(event.as_raw_fd()))?)
}

/// The next record. The driver may see a request before it is recorded.
fn next(device: &mut Device) -> Result<BlkTraced> {
    let is_valid = |record: &BlkTraced| record.flags & abi::TRACED_VALID != 0;
    wait_until("a record", || Ok(Some(kernel(device)?.traced()?).filter(is_valid)))
}

/// Checks what the next record is about.
fn is_next(device: &mut Device, kind: u32, sector: u64, bytes: u64) -> Result<BlkTraced> {
    let record = next(device)?;
    let told = (record.queue, record.kind, record.sector, record.bytes, record.lost);
    ensure!(told == (0, kind, sector, bytes, 0), "{record:?}, not {kind} at {sector}");
    Ok(record)
}

/// Stops the first queue. All of its requests are recorded then.
fn stop(device: &mut Device) -> Result<()> {
    Ok(kernel(device)?.set_queue(0, false)?)
}

/// Records have the stages of slow requests; other requests have none.
fn records() -> Result<()> {
    need_module()?;
    let (below, _) = null_blk(slow())?;
    let (disk, dm) = Dm::over(below, "traced", DmKind::Linear)?;
    let mut device = Device::open_kernel(disk.open()?, &options(), &KernelOptions::default())?;
    let layout = device.layout();
    let event = EventFd::new(EFD_NONBLOCK)?;
    device.write(8, &[1; 4096]).context("no trace yet")?;
    trace(&mut device, HOUR, &event)?;
    device.write(16, &[1; 4096]).context("a request within the bound")?;
    // The module has judged it when the queue can be read.
    counters(&mut device)?;
    trace(&mut device, BOUND, &event)?;
    device.get_id().context("a request without storage")?;
    let beyond = device.queue(0).execute(&Request::read(disk.sectors(), 4096), &layout)?.status;
    ensure!(beyond == Some(S_IOERR), "a read beyond the end ended with {beyond:?}");
    device.write(24, &[1; 8192])?;
    let record = is_next(&mut device, T_OUT, 24, 8192)?;
    ensure!(record.storage_ns >= LEAST.as_nanos() as u64, "{record:?}");
    ensure!(record.limit_ns == 0 && record.flags == abi::TRACED_VALID, "{record:?}");
    ensure!(event.read().ok() == Some(1), "no signal, or more than one");
    device.read(32, &mut [0; 512])?;
    is_next(&mut device, T_IN, 32, 512)?;

    trace(&mut device, Duration::from_nanos(1), &event)?;
    device.flush()?;
    is_next(&mut device, T_FLUSH, u64::MAX, 0)?;
    device.discard(40, 8)?;
    is_next(&mut device, T_DISCARD, u64::MAX, 4096)?;
    dm.become_kind(DmKind::Error)?;
    let failed = device.queue(0).execute(&Request::write(48, &[1; 512]), &layout)?.status;
    ensure!(failed == Some(S_IOERR), "a write ended with {failed:?}");
    let record = is_next(&mut device, T_OUT, 48, 512)?;
    ensure!(record.flags == abi::TRACED_VALID | abi::TRACED_FAILED, "{record:?}");
    dm.become_kind(DmKind::Linear)?;

    kernel(&mut device)?.set_trace(0, None)?;
    device.write(56, &[1; 512]).context("no trace any more")?;
    dm.hold(|| {
        device.queue(0).submit(&Request::write(64, &[1; 512]), &layout)?;
        let in_flight = || Ok((counters(&mut device)?.get("inflight") == Some(&1)).then_some(()));
        wait_until("the request in flight", in_flight)?;
        trace(&mut device, Duration::from_nanos(1), &event)
    })?;
    device.queue(0).collect()?;
    let record = is_next(&mut device, T_OUT, 64, 512).context("of before the trace")?;
    let whole = (record.ring_ns, record.limit_ns, record.submit_ns, record.used_ns);
    ensure!(whole == (u64::MAX, 0, 0, 0) && record.storage_ns > 0, "{record:?}");
    stop(&mut device)?;
    ensure!(kernel(&mut device)?.traced()?.flags == 0, "a record more");
    Ok(())
}

/// The module keeps a number of records, and counts those that it loses.
fn lost() -> Result<()> {
    const LOST: u64 = 10;
    need_module()?;
    let (disk, _) = null_blk(NullBlkOptions::USUAL)?;
    let mut device = Device::open_kernel(disk.open()?, &options(), &KernelOptions::default())?;
    let kept = u64::from(abi::BLK_TRACED_MAX);
    let event = EventFd::new(EFD_NONBLOCK)?;
    trace(&mut device, Duration::from_nanos(1), &event)?;
    for sector in 0..kept + LOST {
        device.write(sector, &[1; 512])?;
    }
    stop(&mut device)?;
    ensure!(event.read().ok() == Some(1), "no signal, or more than one");
    let first = kernel(&mut device)?.traced()?;
    ensure!((first.sector, first.lost) == (LOST, LOST), "the oldest record: {first:?}");
    for sector in LOST + 1..kept + LOST {
        is_next(&mut device, T_OUT, sector, 512)?;
    }
    ensure!(kernel(&mut device)?.traced()?.flags == 0, "a record more");
    kernel(&mut device)?.set_queue(0, true)?;
    for sector in 0..kept + LOST {
        device.write(sector, &[1; 512])?;
    }
    stop(&mut device)?;
    trace(&mut device, Duration::from_nanos(1), &event)?;
    ensure!(event.read().ok() == Some(2), "a signal for the first record, and one for an owner");
    device.session().reset_device()?;
    let forgotten = kernel(&mut device)?.traced()?;
    ensure!((forgotten.flags, forgotten.lost) == (0, 0), "{forgotten:?}");
    Ok(())
}

/// The wait for a limit is a stage of its own.
fn limited() -> Result<()> {
    need_module()?;
    let (disk, _) = null_blk(NullBlkOptions::USUAL)?;
    // Each request waits for 50 ms after the one before, less the burst.
    let limits = BlkOptions { limit_iops: 20, limit_burst_ms: 10, ..BlkOptions::with_flags(0) };
    let with = KernelOptions { options: limits, ..KernelOptions::default() };
    let mut device = Device::open_kernel(disk.open()?, &options(), &with)?;
    let (layout, event) = (device.layout(), EventFd::new(EFD_NONBLOCK)?);
    trace(&mut device, Duration::from_nanos(1), &event)?;
    for n in 0..8 {
        device.queue(0).submit(&Request::read(n, 512), &layout)?;
    }
    for _ in 0..8 {
        let (_, done) = device.queue(0).collect()?;
        ensure!(done.status == Some(S_OK), "status {:?}", done.status);
    }
    let all: Vec<BlkTraced> = (0..8).map(|_| next(&mut device)).collect::<Result<_>>()?;
    let wait = Duration::from_millis(39).as_nanos() as u64;
    ensure!(all[0].limit_ns == 0, "the first request waited: {:?}", all[0]);
    let waited = all.iter().filter(|record| record.limit_ns >= wait).count();
    // The driver may be slow, and a chain come after the wait.
    ensure!(waited > 0, "no request waited: {all:?}");
    kernel(&mut device)?.set_options(BlkOptions::with_flags(0))?;
    device.read(0, &mut [0; 512])?;
    let record = next(&mut device)?;
    ensure!(record.limit_ns == 0, "without a limit: {record:?}");
    Ok(())
}

/// A request waits in the ring for bytes in flight; another one comes after a pause of the driver.
fn in_the_ring() -> Result<()> {
    const IDLE: Duration = Duration::from_secs(2);
    need_module()?;
    let (below, _) = null_blk(NullBlkOptions::USUAL)?;
    let (disk, dm) = Dm::over(below, "traced", DmKind::Linear)?;
    let mut device = Device::open_kernel(disk.open()?, &options(), &KernelOptions::default())?;
    let (layout, event) = (device.layout(), EventFd::new(EFD_NONBLOCK)?);
    trace(&mut device, Duration::from_nanos(1), &event)?;
    // The first look at the ring may find this one: then its time is not known.
    device.write(0, &[1; 4096])?;
    is_next(&mut device, T_OUT, 0, 4096)?;
    let bound = module::Parameter::set("inflight_bytes_max", 4096)?;
    let waited = dm.hold(|| {
        for sector in [8, 16] {
            device.queue(0).submit(&Request::write(sector, &[1; 4096]), &layout)?;
        }
        let begin = Instant::now();
        std::thread::sleep(DELAY);
        Ok(begin.elapsed().as_nanos() as u64)
    })?;
    for _ in 0..2 {
        device.queue(0).collect()?;
    }
    drop(bound);
    is_next(&mut device, T_OUT, 8, 4096)?;
    let record = is_next(&mut device, T_OUT, 16, 4096)?;
    // The clock of the records may be slower.
    ensure!((waited * 9 / 10..u64::MAX).contains(&record.ring_ns), "{waited} ns: {record:?}");
    std::thread::sleep(IDLE);
    let begin = Instant::now();
    device.write(24, &[1; 4096])?;
    let waited = begin.elapsed().as_nanos() as u64;
    let record = is_next(&mut device, T_OUT, 24, 4096)?;
    // The clock of the records may be faster.
    let is_idle = record.ring_ns > waited * 10 / 9;
    ensure!(!is_idle, "the driver was idle, {waited} ns: {record:?}");
    kernel(&mut device)?.set_trace(0, None)?;
    device.write(32, &[1; 4096])?;
    std::thread::sleep(IDLE);
    trace(&mut device, Duration::from_nanos(1), &event)?;
    device.write(40, &[1; 4096])?;
    let record = is_next(&mut device, T_OUT, 40, 4096)?;
    let is_known = record.ring_ns != u64::MAX;
    ensure!(!is_known, "the trace is younger than the wait for a kick: {record:?}");
    Ok(())
}

/// Three writes, which may be in flight when the disk moves.
fn submit(device: &mut Device, sectors: &mut Vec<u64>) -> Result<()> {
    let layout = device.layout();
    for _ in 0..3 {
        let sector = 8 * sectors.len() as u64;
        device.queue(0).submit(&Request::write(sector, &[1; 4096]), &layout)?;
        sectors.push(sector);
    }
    Ok(())
}

fn collect(device: &mut Device) -> Result<()> {
    for _ in 0..3 {
        let (_, done) = device.queue(0).collect()?;
        ensure!(done.status == Some(S_OK), "status {:?}", done.status);
    }
    Ok(())
}

/// The sector of the next slow write.
fn told(trace: &mut Trace) -> Result<u64> {
    let request = trace.next()?.context("the trace has ended")?;
    let us = |stage: &str| request[stage].as_u64().with_context(|| request.to_string());
    let about = (&request["queue"], &request["operation"], &request["bytes"], &request["failed"]);
    let expected =
        (&Value::from(0), &Value::from("write"), &Value::from(4096), &Value::from(false));
    ensure!(about == expected, "{request}");
    ensure!(us("storage_us")? >= LEAST.as_micros() as u64, "{request}");
    let stages = us("limit_us")? + us("submit_us")? + us("storage_us")? + us("used_us")?;
    let stages = stages + request["ring_us"].as_u64().unwrap_or_default();
    // Each stage is cut to whole microseconds.
    ensure!((stages..stages + 5).contains(&us("total_us")?), "{request}");
    us("sector")
}

/// Two clients see all slow requests of a disk that moves twice, and a third one none.
fn over_planes(env: &Env) -> Result<()> {
    let (disk, _) = null_blk(slow())?;
    let Target { mut device, daemon } = target::serve(&env.on(Plane::Kernel), &disk, &options())?;
    let daemon = daemon.context("there is no daemon")?;
    let (mut all, mut other) = (daemon.trace(BOUND)?, daemon.trace(LEAST)?);
    let mut none = daemon.trace(HOUR)?;
    let mut sectors = Vec::new();
    for plane in ["uring", "kernel", "uring", "kernel"] {
        submit(&mut device, &mut sectors)?;
        daemon.control(&["switch", plane]).with_context(|| format!("to {plane}"))?;
        collect(&mut device)?;
    }
    submit(&mut device, &mut sectors)?;
    collect(&mut device)?;
    for trace in [&mut all, &mut other] {
        let mut seen = sectors.iter().map(|_| told(trace)).collect::<Result<Vec<u64>>>()?;
        seen.sort_unstable();
        ensure!(seen == sectors, "{seen:?} instead of {sectors:?}");
    }
    drop(all);
    submit(&mut device, &mut sectors)?;
    collect(&mut device)?;
    for _ in 0..3 {
        told(&mut other).context("after the end of another trace")?;
    }
    drop((device, daemon));
    let more = none.next()?;
    ensure!(more.is_none(), "a request within the bound: {more:?}");
    Ok(())
}
