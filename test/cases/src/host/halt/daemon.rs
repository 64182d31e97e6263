// SPDX-License-Identifier: Apache-2.0
//! Errors of the storage that halt a disk of the daemon, whose queues run in the kernel.

use crate::case::cases;
use crate::host::daemon::Daemon;
use crate::host::env::{Env, Plane};
use crate::host::failure::{Shrunk, fill};
use crate::host::fixture::{
    Disk, Dm, DmKind, FileSystem, NullBlkOptions, image, null_blk, wait_until,
};
use crate::host::target::{self, options};
use anyhow::{Context, Result, ensure};
use driver::{Device, Options, Request};
use kit::set::Set::Plain;
use serde_json::Value;
use std::collections::HashMap;
use virtio_spec::blk::{S_IOERR, S_OK};

cases! { Host;
    "daemon-halt", Plain,
        "a halted disk in the kernel loses no request over pauses, switches, logs and resumes",
        daemon;
    "daemon-halt-stop", Plain,
        "a front-end that stops a queue of a halted disk in the kernel gets its requests back",
        stopped;
    "daemon-halt-lost", Plain,
        "a front-end or a daemon that goes leaves the requests of a halted disk in the region",
        lost;
    "daemon-halt-removed", Plain,
        "a resume is refused if the kernel cannot have the disk any more, which stays halted",
        removed;
    "daemon-halt-space", Plain,
        "a file system without space halts its disk in the kernel, with --on-error enospc",
        space;
    "daemon-halt-rule", Plain,
        "the effect of errors and the time limit change while the kernel serves the disk",
        rule;
    "daemon-halt-reads", Plain,
        "errors of reads and of other requests have effects of their own, over changes, switches and an upgrade",
        apart;
    "daemon-halt-smaller", Plain,
        "a block device that becomes smaller halts its disk on both planes, until it has its size again",
        |env| env.on_both_planes(smaller);
}

const QUEUES: u16 = 2;
/// A message that the protocol does not have.
const UNKNOWN: u32 = 9999;
/// Sector and byte of the data that a kept read gets.
const WRITTEN: (u64, u8) = (4000, 1);
/// Requests of a queue.
const REQUESTS: u64 = 8;

fn status(daemon: &Daemon) -> Result<Value> {
    Ok(serde_json::from_str(&daemon.control(&["--json", "status"])?)?)
}

fn wait_for_halts(daemon: &Daemon, halts: u64) -> Result<()> {
    wait_until("the halt", || {
        let told = status(daemon)?;
        Ok((told["halts"] == halts && !told["halted"].is_null()).then_some(()))
    })
}

fn nothing_is_answered(device: &mut Device) -> Result<()> {
    for queue in 0..usize::from(QUEUES) {
        ensure!(device.queue(queue).try_collect()?.is_none(), "queue {queue} answers");
    }
    Ok(())
}

/// A disk that fails on demand, its daemon, and the guest with its requests in flight.
struct Rig {
    device: Device,
    daemon: Daemon,
    dm: Dm,
    _disk: Disk,
    /// Sector and byte of each write.
    sent: HashMap<(usize, u16), (u64, u8)>,
}

impl Rig {
    fn new(env: &Env, inflight: bool) -> Result<Self> {
        let (below, _) = null_blk(NullBlkOptions::USUAL)?;
        let (disk, dm) = Dm::over(below, "halting", DmKind::Linear)?;
        let options = Options { inflight, num_queues: QUEUES, ..options() };
        let stop = ["--on-error", "stop", "--io-timeout", "3600"];
        let (device, daemon) =
            target::serve_by_daemon(&env.on(Plane::Kernel), &disk, &options, &stop)?;
        Ok(Rig { device, daemon, dm, _disk: disk, sent: HashMap::new() })
    }

    fn submit(&mut self, queue: usize, number: u64) -> Result<()> {
        let sector = queue as u64 * 1000 + number * 8;
        let byte = 1 + queue as u8 * 100 + number as u8;
        let layout = self.device.layout();
        let request = Request::write(sector, &[byte; 4096]);
        let id = self.device.queue(queue).submit(&request, &layout)?;
        ensure!(self.sent.insert((queue, id), (sector, byte)).is_none(), "id {id} twice");
        Ok(())
    }

    /// Reads what [`apart`] has written.
    fn submit_read(&mut self, queue: usize) -> Result<()> {
        let layout = self.device.layout();
        let id = self.device.queue(queue).submit(&Request::read(WRITTEN.0, 4096), &layout)?;
        ensure!(self.sent.insert((queue, id), WRITTEN).is_none(), "id {id} twice");
        Ok(())
    }

    /// Fills both queues.
    fn fill(&mut self) -> Result<()> {
        for queue in 0..usize::from(QUEUES) {
            (0..REQUESTS).try_for_each(|number| self.submit(queue, number))?;
        }
        Ok(())
    }

    /// Makes the storage fail, and fills both queues.
    fn halt(&mut self) -> Result<()> {
        self.device.write(4000, &[1; 4096])?;
        self.dm.become_kind(DmKind::Error)?;
        self.fill()?;
        wait_for_halts(&self.daemon, 1)?;
        let told = status(&self.daemon)?;
        ensure!(told["data_plane"] == "kernel", "{told}");
        let reason = told["halted"]["reason"].to_string();
        ensure!(reason.contains("a write of 4096 bytes at sector"), "{reason}");
        self.is_keeping().context("at the halt")
    }

    /// Checks that requests are kept, and none is answered.
    fn is_keeping(&mut self) -> Result<()> {
        wait_until("a kept request", || {
            Ok((self.daemon.total("queue_kept_requests")? > 0).then_some(()))
        })?;
        nothing_is_answered(&mut self.device)
    }

    /// Mends the storage, resumes the disk, and collects all requests, which succeed. Reads the data.
    fn mend(&mut self) -> Result<()> {
        self.dm.become_kind(DmKind::Linear)?;
        for queue in 0..usize::from(QUEUES) {
            self.submit(queue, REQUESTS)?;
        }
        nothing_is_answered(&mut self.device)?;
        self.daemon.control(&["resume"])?;
        let mut written = Vec::new();
        for queue in 0..usize::from(QUEUES) {
            while self.sent.keys().any(|(of, _)| *of == queue) {
                let (id, done) = self.device.queue(queue).collect()?;
                ensure!(done.status == Some(S_OK), "status {:?}", done.status);
                let sent = self.sent.remove(&(queue, id));
                written.push(sent.context("a request ends twice")?);
            }
        }
        for (sector, byte) in written {
            let mut data = [0; 4096];
            self.device.read(sector, &mut data)?;
            ensure!(data == [byte; 4096], "sector {sector} has {}", data[0]);
        }
        ensure!(status(&self.daemon)?["halted"].is_null(), "it is still halted");
        ensure!(self.daemon.total("queue_kept_requests")? == 0, "requests are kept");
        Ok(())
    }

    /// Takes the answers that are there: errors. Returns their number.
    fn collect_errors(&mut self, queue: usize) -> Result<u64> {
        let mut answered = 0;
        while let Some((id, done)) = self.device.queue(queue).try_collect()? {
            ensure!(done.status == Some(S_IOERR), "status {:?}", done.status);
            self.sent.remove(&(queue, id)).context("a request ends twice")?;
            answered += 1;
        }
        Ok(answered)
    }
}

fn rule(env: &Env) -> Result<()> {
    let mut rig = Rig::new(env, false)?;
    rig.daemon.control(&["set-errors", "--on-error", "report"])?;
    rig.dm.become_kind(DmKind::Error)?;
    rig.fill()?;
    for queue in 0..usize::from(QUEUES) {
        let mut answered = 0;
        wait_until("an error for each request", || {
            answered += rig.collect_errors(queue)?;
            Ok((answered == REQUESTS).then_some(()))
        })?;
    }
    let told = status(&rig.daemon)?;
    ensure!(told["halts"] == 0 && told["data_plane"] == "kernel", "{told}");
    rig.daemon.control(&["set-errors", "--on-error", "stop"])?;
    rig.fill()?;
    wait_for_halts(&rig.daemon, 1)?;
    rig.is_keeping().context("with the new rule")?;
    rig.mend()?;
    rig.daemon.control(&["set-errors", "--io-timeout", "0.2"])?;
    rig.dm.suspend()?;
    rig.submit(0, 0)?;
    let stalled = |daemon: &Daemon| daemon.total("stalled_queues");
    wait_until("the stall", || Ok((stalled(&rig.daemon)? > 0).then_some(())))?;
    rig.dm.resume()?;
    let (_, done) = rig.device.queue(0).collect()?;
    ensure!(done.status == Some(S_OK), "status {:?}", done.status);
    wait_until("its end", || Ok((stalled(&rig.daemon)? == 0).then_some(())))
}

/// The rules by which all but reads halt the disk.
const OTHERS_HALT: [&str; 5] = ["set-errors", "--on-error", "stop", "--on-read-error", "report"];
/// The rules by which reads alone halt it.
const READS_HALT: [&str; 5] = ["set-errors", "--on-error", "report", "--on-read-error", "stop"];

fn apart(env: &Env) -> Result<()> {
    let mut rig = Rig::new(env, false)?;
    rig.device.write(WRITTEN.0, &[WRITTEN.1; 4096])?;
    // Each with the plane and with the kind that halts after it.
    let steps: [(&[&str], &str, bool); 7] = [
        (&OTHERS_HALT, "kernel", false),
        (&READS_HALT, "kernel", true),
        (&["switch", "uring"], "uring", true),
        (&OTHERS_HALT, "uring", false),
        (&["switch", "kernel"], "kernel", false),
        (&["upgrade"], "kernel", false),
        (&READS_HALT, "kernel", true),
    ];
    for (number, (order, plane, read_halts)) in (1..).zip(steps) {
        rig.daemon.control(order)?;
        halts_by_one_kind(&mut rig, read_halts, number)
            .with_context(|| format!("step {number}, {order:?}"))?;
        let told = status(&rig.daemon)?;
        ensure!(told["data_plane"] == plane, "after {order:?}: {told}");
    }
    Ok(())
}

/// Checks that a read is reported and a write halts, or the other way; then mends the disk.
fn halts_by_one_kind(rig: &mut Rig, read_halts: bool, halts: u64) -> Result<()> {
    rig.dm.become_kind(DmKind::Error)?;
    let reported = match read_halts {
        true => Request::write(WRITTEN.0 + 8, &[3; 4096]),
        false => Request::read(WRITTEN.0, 4096),
    };
    let layout = rig.device.layout();
    let answer = rig.device.queue(1).execute(&reported, &layout)?.status;
    ensure!(answer == Some(S_IOERR), "status {answer:?}");
    let told = status(&rig.daemon)?;
    ensure!(told["halted"].is_null() && told["halts"] == halts - 1, "{told}");
    match read_halts {
        true => rig.submit_read(0)?,
        false => rig.submit(0, 0)?,
    }
    wait_for_halts(&rig.daemon, halts)?;
    let reason = status(&rig.daemon)?["halted"]["reason"].to_string();
    ensure!(reason.contains(if read_halts { "a read of" } else { "a write of" }), "{reason}");
    rig.is_keeping()?;
    rig.mend()
}

fn daemon(env: &Env) -> Result<()> {
    let orders: [(bool, &[&str]); 6] = [
        (false, &[]),
        (false, &["switch uring"]),
        (false, &["switch uring", "switch kernel"]),
        (false, &["pause", "log", "upgrade"]),
        (true, &[]),
        (true, &["pause", "switch uring", "log", "switch kernel"]),
    ];
    for (inflight, order) in orders {
        through(env, inflight, order)
            .with_context(|| format!("{order:?}, in-flight region {inflight}"))?;
    }
    Ok(())
}

fn obey(rig: &mut Rig, order: &str) -> Result<()> {
    let words: Vec<&str> = order.split(' ').collect();
    match order {
        "log" => drop(rig.device.start_log()?),
        // The requests are kept in the program.
        "upgrade" => {
            let outcome = rig.daemon.control(&words);
            ensure!(outcome.is_err_and(|why| format!("{why:#}").contains("halted")), "no refusal");
        }
        _ => drop(rig.daemon.control(&words)?),
    }
    rig.is_keeping()
}

fn through(env: &Env, inflight: bool, orders: &[&str]) -> Result<()> {
    let mut rig = Rig::new(env, inflight)?;
    rig.halt()?;
    for order in orders {
        obey(&mut rig, order).with_context(|| format!("at {order}"))?;
    }
    // The storage still fails.
    rig.daemon.control(&["resume"])?;
    wait_for_halts(&rig.daemon, 2)?;
    rig.is_keeping().context("at the second halt")?;
    rig.mend()?;
    let told = status(&rig.daemon)?;
    let plane = if orders.last() == Some(&"switch uring") { "uring" } else { "kernel" };
    ensure!(told["data_plane"] == plane, "{told}");
    let lines = rig.daemon.lines_with("the disk is halted");
    ensure!(lines.len() == 2, "not a line for each halt: {lines:?}");
    // It halts in the kernel again.
    rig.dm.become_kind(DmKind::Error)?;
    rig.submit(1, 0)?;
    wait_for_halts(&rig.daemon, 3)?;
    rig.is_keeping().context("at the third halt")?;
    rig.mend()
}

fn stopped(env: &Env) -> Result<()> {
    for inflight in [false, true] {
        for parked in [false, true] {
            let mut rig = Rig::new(env, inflight)?;
            rig.halt()?;
            if parked {
                rig.daemon.control(&["pause"])?;
            }
            let position = rig.device.session().stop_queue(0)?;
            let answered = rig.collect_errors(0)?;
            // A request had succeeded before.
            ensure!(u64::from(position) == 1 + answered, "position {position}, {answered} answers");
            rig.device.start_queue(0)?;
            nothing_is_answered(&mut rig.device)?;
            rig.mend().with_context(|| format!("parked {parked}, region {inflight}"))?;
        }
    }
    Ok(())
}

fn lost(env: &Env) -> Result<()> {
    for kill in [false, true] {
        for inflight in [false, true] {
            if kill && !inflight {
                continue; // They are lost, as all requests in flight.
            }
            leave(env, kill, inflight)
                .with_context(|| format!("kill {kill}, region {inflight}"))?;
        }
    }
    Ok(())
}

fn leave(env: &Env, kill: bool, inflight: bool) -> Result<()> {
    let mut rig = Rig::new(env, inflight)?;
    rig.halt()?;
    match kill {
        true => rig.daemon.replace()?,
        // The daemon ends the connection.
        false => {
            rig.device.session().raw().message(UNKNOWN, &[], &[])?;
            wait_until("the end of the connection", || {
                Ok((status(&rig.daemon)?["front_end_connected"] == false).then_some(()))
            })?;
        }
    }
    if !inflight {
        let answered = rig.collect_errors(0)? + rig.collect_errors(1)?;
        ensure!(answered > 0, "no request got an error");
    }
    let socket = rig.daemon.socket().to_owned();
    rig.device.reconnect(&socket)?;
    if kill {
        // The next daemon tries them again, and halts, too.
        wait_for_halts(&rig.daemon, 1)?;
    }
    match inflight {
        true => rig.is_keeping()?,
        false => nothing_is_answered(&mut rig.device)?,
    }
    rig.mend()
}

fn removed(env: &Env) -> Result<()> {
    let (disk, instance) = null_blk(NullBlkOptions::USUAL)?;
    let stop = ["--on-error", "stop"];
    let (mut device, daemon) =
        target::serve_by_daemon(&env.on(Plane::Kernel), &disk, &options(), &stop)?;
    device.write(8, &[1; 4096])?;
    instance.power(false)?;
    wait_until("the removal", || Ok(daemon.lines_with("was removed").pop()))?;
    let layout = device.layout();
    device.queue(0).submit(&Request::read(8, 4096), &layout)?;
    wait_for_halts(&daemon, 1)?;
    for _ in 0..2 {
        ensure!(daemon.control(&["resume"]).is_err(), "the kernel has a disk that was removed");
        let told = status(&daemon)?;
        ensure!(!told["halted"].is_null() && told["halts"] == 1, "{told}");
        ensure!(daemon.total("queue_kept_requests")? == 1, "the request is lost");
        ensure!(device.queue(0).try_collect()?.is_none(), "it is answered");
    }
    Ok(())
}

fn smaller(env: &Env) -> Result<()> {
    let mut shrunk = Shrunk::serve(env, &["--on-error", "stop"])?;
    let (device, daemon, last) = (&mut shrunk.device, &shrunk.daemon, shrunk.sectors - 8);
    let layout = device.layout();
    device.queue(0).submit(&Request::write(last, &[2; 4096]), &layout)?;
    wait_for_halts(daemon, 1)?;
    let reason = status(daemon)?["halted"]["reason"].to_string();
    ensure!(reason.contains(&format!("at sector {last}")), "{reason}");
    match env.plane {
        // The kernel cannot have a disk that is smaller than the guest's.
        Plane::Kernel => {
            let refused = daemon.control(&["resume"]).err().context("it is resumed")?;
            ensure!(format!("{refused:#}").contains("sectors"), "{refused:#}");
        }
        _ => {
            daemon.control(&["resume"])?;
            wait_for_halts(daemon, 2)?;
        }
    }
    ensure!(device.queue(0).try_collect()?.is_none(), "it is answered");
    shrunk.dm.become_linear(shrunk.sectors)?;
    daemon.control(&["resume"])?;
    let (_, done) = device.queue(0).collect()?;
    ensure!(done.status == Some(S_OK), "status {:?}", done.status);
    let mut data = [0; 4096];
    device.read(last, &mut data)?;
    ensure!(data == [2; 4096], "the disk has {}", data[0]);
    ensure!(status(daemon)?["halted"].is_null(), "it is still halted");
    Ok(())
}

fn space(env: &Env) -> Result<()> {
    let disk = image(FileSystem::Ext4, true)?;
    let enospc = ["--on-error", "enospc"];
    let (mut device, daemon) =
        target::serve_by_daemon(&env.on(Plane::Kernel), &disk, &options(), &enospc)?;
    let filler = disk.path.with_file_name("filler");
    fill(&filler)?;
    let layout = device.layout();
    device.queue(0).submit(&Request::write(64, &[1; 4096]), &layout)?;
    wait_for_halts(&daemon, 1)?;
    let told = status(&daemon)?;
    let reason = told["halted"]["reason"].to_string();
    ensure!(reason.contains("at sector 64") && reason.contains("No space"), "{reason}");
    daemon.control(&["resume"])?;
    wait_for_halts(&daemon, 2)?;
    ensure!(device.queue(0).try_collect()?.is_none(), "it is answered without space");
    std::fs::remove_file(&filler)?;
    wait_until("the write", || {
        daemon.control(&["resume"])?;
        Ok(device.queue(0).try_collect()?)
    })
    .and_then(|(_, done)| {
        ensure!(done.status == Some(S_OK), "status {:?}", done.status);
        Ok(())
    })?;
    let mut data = [0; 4096];
    device.read(64, &mut data)?;
    ensure!(data == [1; 4096], "the disk has {}", data[0]);
    let told = status(&daemon)?;
    ensure!(told["halted"].is_null() && told["data_plane"] == "kernel", "{told}");
    Ok(())
}
