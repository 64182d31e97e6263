// SPDX-License-Identifier: Apache-2.0
//! The view of an administrator: counters in fdinfo, and trace events in the order of the stages.

use crate::case::cases;
use crate::host::disks::usual;
use crate::host::env::Env;
use crate::host::fixture::{Disk, NullBlkOptions, STALLED_TAGS, null_blk, wait_until};
use crate::host::integrity::disk_of;
use crate::host::target::{self, Target, options};
use anyhow::{Context, Result, bail, ensure};
use driver::{Device, Options, Request, Session};
use kit::outcome::skip;
use kit::set::Set::{Full, Gating, Plain};
use std::collections::HashMap;
use std::os::fd::{AsFd, AsRawFd, RawFd};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;
use virtio_spec::blk::{RangeSegment, S_IOERR, S_OK, S_UNSUPP};

cases! { Host;
    "fdinfo", Gating,
        "the counters in fdinfo are those of the requests that were made",
        |env| fdinfo(env, usual());
    "trace-events", Gating,
        "one request is seen at each stage, in order",
        |env| trace_events(env, usual());
    "fdinfo-stalled", Full,
        "who reads the counters while the worker waits for a disk can be killed",
        killed_while_it_looks;
    "fdinfo-drain", Plain,
        "the counters can be read while a drain waits for a disk",
        readable_during_a_drain;
}

/// The stages of a request, which are also the names of the events.
const STAGES: [&str; 6] = ["chain", "request", "submit", "completion", "used", "notify"];

fn direct(env: &Env, disk: Result<Disk>, options: &Options) -> Result<(Device, Disk)> {
    let disk = disk_of(env, disk)?;
    let Target { mut device, .. } = target::serve(env, &disk, options)?;
    ensure!(device.session().kernel().is_some(), "this case is for the kernel's device");
    Ok((device, disk))
}

/// Text of the kernel device's fdinfo.
pub(crate) fn fdinfo_of(session: &mut Session) -> Result<String> {
    let kernel = session.kernel().context("this case is for the kernel's device")?;
    let path = format!("/proc/self/fdinfo/{}", kernel.device().as_fd().as_raw_fd());
    Ok(std::fs::read_to_string(path)?)
}

/// Data bytes that the kernel device has in flight now.
pub(crate) fn inflight_bytes(session: &mut Session) -> Result<u64> {
    let text = fdinfo_of(session)?;
    let value = text.lines().find_map(|line| line.strip_prefix("inflight_bytes:"));
    let value = value.with_context(|| format!("no inflight_bytes in: {text}"))?;
    value.trim().parse().with_context(|| format!("inflight_bytes is '{value}'"))
}

/// Counters of the first queue of a kernel device.
pub(crate) fn counters(device: &mut Device) -> Result<HashMap<String, u64>> {
    let text = fdinfo_of(device.session())?;
    let line = text.lines().find_map(|line| line.strip_prefix("queue0:"));
    let line = line.with_context(|| format!("no line about queue 0 in: {text}"))?;
    let pairs = line.split_whitespace().filter_map(|word| word.split_once('='));
    pairs.map(|(name, value)| Ok((name.to_owned(), value.parse()?))).collect()
}

/// Executes known requests, and checks the counters.
pub(crate) fn fdinfo(env: &Env, disk: Result<Disk>) -> Result<()> {
    let (mut device, disk) = direct(env, disk, &options())?;
    let layout = device.layout();
    let end = disk.sectors();
    let range = |sector, num_sectors| RangeSegment { sector, num_sectors, flags: 0 };
    let requests = [
        (Request::write(0, &[1; 8192]), S_OK),
        (Request::write(16, &[1; 4096]), S_OK),
        (Request::read(0, 12288), S_OK),
        (Request::flush(), S_OK),
        (Request::discard(&[range(64, 8), range(128, 16)]), S_OK),
        (Request::discard(&[range(end, 8)]), S_IOERR),
        (Request::get_id(), S_OK),
        (Request::read(end, 4096), S_IOERR),
        (Request::new(0x7777, 0, &[], 512), S_UNSUPP),
    ];
    for (request, status) in &requests {
        let got = device.queue(0).execute(request, &layout)?.status;
        ensure!(got == Some(*status), "status {got:?} instead of {status}");
    }
    let counters = counters(&mut device)?;
    let expected = [
        ("chains", 9),
        ("completed", 9),
        ("refused", 3),
        ("failed", 0),
        ("failed_io", 0),
        ("failed_no_space", 0),
        ("failed_read_only", 0),
        ("failed_removed", 0),
        ("failed_timeout", 0),
        ("polls", 0),
        ("poll_ns", 0),
        ("coalescing", 0),
        ("dropped", 0),
        ("inflight", 0),
        ("read_bytes", 12288),
        ("write_bytes", 12288),
        ("discards", 1),
        ("discarded_bytes", 24 * 512),
    ];
    for (name, value) in expected {
        let got = counters.get(name).copied();
        ensure!(got == Some(value), "{name} is {got:?}, not {value}: {counters:?}");
    }
    for name in ["kicks", "calls", "turns", "batch"] {
        ensure!(counters.get(name).is_some_and(|&count| count > 0), "no {name}: {counters:?}");
    }
    Ok(())
}

/// Trace events that are enabled until dropped.
struct Events(PathBuf);

impl Events {
    fn on() -> Result<Self> {
        let roots = ["/sys/kernel/tracing", "/sys/kernel/debug/tracing"];
        let root = roots.map(Path::new).into_iter().find(|root| root.join("trace").exists());
        let root = root.ok_or_else(|| skip("tracefs is not mounted"))?.to_owned();
        let directory = root.join("events/vhost_blk");
        ensure!(directory.exists(), "the module has no trace events");
        for stage in STAGES {
            let event = directory.join(format!("vhost_blk_{stage}"));
            ensure!(event.exists(), "there is no event for the stage {stage}");
        }
        std::fs::write(root.join("trace"), "")?;
        std::fs::write(directory.join("enable"), "1")?;
        Ok(Self(root))
    }

    fn trace(&self) -> Result<String> {
        Ok(std::fs::read_to_string(self.0.join("trace"))?)
    }
}

impl Drop for Events {
    fn drop(&mut self) {
        if let Err(why) = std::fs::write(self.0.join("events/vhost_blk/enable"), "0") {
            eprintln!("clean-up: {why}");
        }
    }
}

/// A request passes the stages, and each stage is traced once.
pub(crate) fn trace_events(env: &Env, disk: Result<Disk>) -> Result<()> {
    let (mut device, _disk) = direct(env, disk, &options())?;
    let layout = device.layout();
    device.write(0, &[1; 4096])?;
    // The module has told all stages of the write when the queue can be read.
    counters(&mut device)?;
    let events = Events::on()?;
    let read = device.queue(0).execute(&Request::read(0, 4096), &layout)?;
    ensure!(read.status == Some(S_OK), "the read ended with {:?}", read.status);
    // The call reaches the driver before its event is written.
    let last = format!("vhost_blk_{}:", STAGES[STAGES.len() - 1]);
    let trace = wait_until("the event of the last stage", || {
        Ok(Some(events.trace()?).filter(|trace| trace.contains(&last)))
    })?;
    check_order(&trace)?;
    // A malformed request is traced at the same stages, except for the submission.
    let half = Request { readable: vec![0; 8], writable_len: 513 };
    let refused = device.queue(0).execute(&half, &layout)?;
    ensure!(refused.status == Some(S_IOERR), "half a header ended with {:?}", refused.status);
    let requests = events.trace()?.matches("vhost_blk_request:").count();
    ensure!(requests == 2, "{requests} events of requests instead of 2:\n{}", events.trace()?);
    Ok(())
}

fn check_order(trace: &str) -> Result<()> {
    let seen: Vec<&str> = trace
        .lines()
        .filter(|line| !line.starts_with('#'))
        .filter_map(|line| STAGES.into_iter().find(|s| line.contains(&format!("vhost_blk_{s}:"))))
        .collect();
    ensure!(seen == STAGES, "the stages were seen as {seen:?}:\n{trace}");
    Ok(())
}

/// Time after which a waiting reader is killed.
const PATIENCE: Duration = Duration::from_millis(300);
/// Number of rounds: on a slow machine, a single round proves nothing.
const STALLS: u32 = 4;

/// A reader of a queue whose worker waits for a disk can be killed.
pub(crate) fn killed_while_it_looks(env: &Env) -> Result<()> {
    let (disk, _) = null_blk(NullBlkOptions::STALLED)?;
    let (mut device, _disk) = direct(env, Ok(disk), &options())?;
    let fd = device.session().kernel().context("checked before")?.device().as_fd().as_raw_fd();
    for round in 0..STALLS {
        let seen = stall(&mut device, fd).with_context(|| format!("round {round}"))?;
        println!("round {round}: {seen:?}");
        if matches!(seen, Seen::Killed) {
            return Ok(());
        }
    }
    bail!("no reader that waited was gone before the disk had answered")
}

/// Time of the disk during a drain; a reader that waited as well would see only the drain's end.
const DRAINED: Duration = Duration::from_secs(5);

/// The counters of a stopping queue can be read before the queue has stopped.
pub(crate) fn readable_during_a_drain(env: &Env) -> Result<()> {
    let slow = NullBlkOptions {
        irqmode: 2,
        completion_ns: DRAINED.as_nanos() as u64,
        ..NullBlkOptions::USUAL
    };
    let (disk, _) = null_blk(slow)?;
    let (mut device, _disk) = direct(env, Ok(disk), &options())?;
    let layout = device.layout();
    device.queue(0).submit(&Request::read(0, 4096), &layout)?;
    let session = device.session();
    let kernel = session.kernel().context("checked before")?.device().try_clone()?;
    wait_until("the request to be in flight", || {
        Ok(fdinfo_of(session)?.contains("inflight=1").then_some(()))
    })?;
    let stopper = std::thread::spawn(move || kernel.set_queue(0, false));
    let seen = wait_for_stop(session)?;
    stopper.join().map_err(|_| anyhow::anyhow!("the stop panicked"))??;
    ensure!(seen.contains("inflight=1"), "nothing was seen before the end of the drain: {seen}");
    device.queue(0).collect()?;
    Ok(())
}

/// Waits until the first queue stops or has stopped; returns its line of the counters.
pub(crate) fn wait_for_stop(session: &mut Session) -> Result<String> {
    wait_until("the queue to stop", || {
        let text = fdinfo_of(session)?;
        let line = text.lines().find(|line| line.starts_with("queue0:")).unwrap_or_default();
        Ok((!line.contains("running")).then(|| line.to_owned()))
    })
}

/// Outcome of a reader.
#[derive(Debug)]
enum Seen {
    /// It waited, and exited when it was killed.
    Killed,
    /// It did not wait, because it read before the worker waited.
    Served,
    /// It exited only after the first request was complete.
    Late,
}

/// Starts a reader while the queue's worker waits for a tag.
fn stall(device: &mut Device, fd: RawFd) -> Result<Seen> {
    let layout = device.layout();
    let queue = device.queue(0);
    for number in 0..2 * STALLED_TAGS {
        // Gaps between the requests prevent a merge into one request, which needs a single tag.
        queue.submit(&Request::read(16 * number, 4096), &layout)?;
    }
    let mut reader = Command::new("cat")
        .arg(format!("/proc/{}/fdinfo/{fd}", std::process::id()))
        .stdout(Stdio::null())
        .spawn()?;
    std::thread::sleep(PATIENCE);
    let waited = reader.try_wait()?.is_none();
    reader.kill()?;
    reader.wait()?;
    let in_time = queue.try_collect()?.is_none();
    for _ in 0..2 * STALLED_TAGS - u64::from(!in_time) {
        queue.collect()?;
    }
    Ok(match (waited, in_time) {
        (false, _) => Seen::Served,
        (true, true) => Seen::Killed,
        (true, false) => Seen::Late,
    })
}
