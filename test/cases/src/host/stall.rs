// SPDX-License-Identifier: Apache-2.0
//! Storage that does not answer, as the module and the daemon tell it. No time has an upper bound.

use crate::case::cases;
use crate::host::abi::fails;
use crate::host::daemon::Daemon;
use crate::host::env::{Env, Plane};
use crate::host::fixture::{Dm, DmKind, NullBlkOptions, STALL, STALLED_TAGS, null_blk, wait_until};
use crate::host::groups;
use crate::host::module;
use crate::host::target::{self, need_module, options};
use crate::host::visibility::{counters, wait_for_stop};
use anyhow::{Context, Result, anyhow, bail, ensure};
use driver::kernel::{KernelDevice, KernelOptions};
use driver::{Device, RawChannel, Request};
use kit::set::Set::{Gating, Plain};
use serde_json::{Value, json};
use std::io::{ErrorKind, PipeReader, Read};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::time::Duration;
use virtio_spec::blk::S_OK;

cases! { Host;
    "stall-age", Gating,
        "the module tells the age of the oldest request in flight, also during a drain",
        |_| age();
    "stall-locked", Plain,
        "the age is told while a worker that waits for the disk keeps its queue locked",
        |_| locked();
    "stall-message", Gating,
        "a device whose last descriptor is lost in a message does not keep others from being closed while its storage hangs",
        |_| lost_in_message();
    "daemon-stall", Gating,
        "the daemon tells that the storage of a queue in the kernel does not answer, and its end",
        daemon;
    "daemon-given-up", Plain,
        "a disk whose storage does not answer leaves its name by force on each plane, and goes when it answers",
        given_up;
}

/// On a slow machine, a single round proves nothing.
const ROUNDS: u32 = 4;

fn kernel(device: &mut Device) -> Result<&KernelDevice> {
    Ok(device.session().kernel().context("a kernel device")?.device())
}

fn oldest(device: &mut Device) -> Result<Option<Duration>> {
    Ok(kernel(device)?.oldest(0)?)
}

/// The driver may see a request before the module has ended it.
fn wait_for_none(device: &mut Device) -> Result<()> {
    wait_until("no request in flight", || Ok(oldest(device)?.is_none().then_some(())))
}

fn collect(device: &mut Device) -> Result<()> {
    let (_, done) = device.queue(0).collect()?;
    ensure!(done.status == Some(S_OK), "status {:?}", done.status);
    Ok(())
}

fn age() -> Result<()> {
    need_module()?;
    let (below, _) = null_blk(NullBlkOptions::USUAL)?;
    let (disk, dm) = Dm::over(below, "stalled", DmKind::Linear)?;
    let mut device = Device::open_kernel(disk.open()?, &options(), &KernelOptions::default())?;
    let layout = device.layout();
    fails("queue 64", kernel(&mut device)?.oldest(64), libc::ENOBUFS)?;
    ensure!(oldest(&mut device)?.is_none(), "the age of no request");
    device.write(8, &[1; 4096])?;
    wait_for_none(&mut device)?;

    dm.suspend()?;
    device.queue(0).submit(&Request::write(64, &[1; 512]), &layout)?;
    let first = wait_until("the request in flight", || oldest(&mut device))?;
    device.queue(0).submit(&Request::read(128, 512), &layout)?;
    wait_until("two requests in flight", || {
        Ok((counters(&mut device)?.get("inflight") == Some(&2)).then_some(()))
    })?;
    let second = oldest(&mut device)?.context("no request with two in flight")?;
    ensure!(second > first, "{second:?} is the age of the younger request, not above {first:?}");

    let own = kernel(&mut device)?.try_clone()?;
    let stopper = std::thread::spawn(move || own.set_queue(0, false));
    wait_for_stop(device.session())?;
    let third = oldest(&mut device)?.context("no request during the drain")?;
    ensure!(third > second, "{third:?} after {second:?}");
    ensure!(!stopper.is_finished(), "the queue stopped with requests in flight");
    dm.resume()?;
    stopper.join().map_err(|_| anyhow!("the stop panicked"))??;
    ensure!(oldest(&mut device)?.is_none(), "the age of a request of a stopped queue");
    collect(&mut device)?;
    collect(&mut device)
}

fn locked() -> Result<()> {
    need_module()?;
    let (disk, _) = null_blk(NullBlkOptions::STALLED)?;
    let mut device = Device::open_kernel(disk.open()?, &options(), &KernelOptions::default())?;
    let layout = device.layout();
    for round in 0..ROUNDS {
        for number in 0..2 * STALLED_TAGS {
            // Gaps between the requests prevent a merge into one request, which needs a single tag.
            device.queue(0).submit(&Request::read(16 * number, 4096), &layout)?;
        }
        // By then the worker waits for a tag, and goes on when the disk answers.
        wait_until("a request in flight for a while", || {
            Ok(oldest(&mut device)?.filter(|age| *age >= STALL / 3))
        })?;
        let in_time = device.queue(0).try_collect()?.is_none();
        for _ in 0..2 * STALLED_TAGS - u64::from(!in_time) {
            collect(&mut device)?;
        }
        println!("round {round}: in time {in_time}");
        if in_time {
            return Ok(());
        }
    }
    bail!("no age was told before the disk had answered")
}

/// Loses a descriptor in a message that its own socket keeps, so that a thread of the kernel closes it.
fn lose(fd: OwnedFd) -> Result<()> {
    let (sender, receiver) = UnixStream::pair()?;
    let sender = RawChannel::from_stream(sender);
    sender.send_bytes(b"lost", &[fd.as_fd(), receiver.as_fd()])?;
    // The end of the sender lets the kernel look for such messages.
    drop((fd, receiver, sender));
    Ok(())
}

/// Waits until all writers of a pipe are closed.
fn wait_for_end(mut reader: PipeReader) -> Result<()> {
    rustix::io::ioctl_fionbio(&reader, true)?;
    wait_until("the kernel to close a pipe", || match reader.read(&mut [0]) {
        Ok(0) => Ok(Some(())),
        Err(why) if why.kind() == ErrorKind::WouldBlock => Ok(None),
        other => bail!("a read of the pipe: {other:?}"),
    })
}

fn lost_in_message() -> Result<()> {
    need_module()?;
    let (below, _) = null_blk(NullBlkOptions::USUAL)?;
    let (disk, dm) = Dm::over(below, "stalled", DmKind::Linear)?;
    let references = module::references()?;
    let mut device = Device::open_kernel(disk.open()?, &options(), &KernelOptions::default())?;
    let layout = device.layout();
    dm.suspend()?;
    device.queue(0).submit(&Request::read(128, 512), &layout)?;
    wait_until("the request in flight", || oldest(&mut device))?;
    let own = kernel(&mut device)?.as_fd().try_clone_to_owned()?;
    drop(device);
    lose(own)?;
    // The kernel closes both with one work, if they come together.
    std::thread::sleep(Duration::from_millis(500));
    let (reader, writer) = std::io::pipe()?;
    lose(writer.into())?;
    let closed = wait_for_end(reader);
    let used = module::references()?;
    dm.resume()?;
    closed?;
    ensure!(used > references, "the device was closed before its storage answered");
    module::wait_for_references(references)
}

fn status(daemon: &Daemon) -> Result<Value> {
    Ok(serde_json::from_str(&daemon.control(&["--json", "status"])?)?)
}

fn daemon(env: &Env) -> Result<()> {
    let (below, _) = null_blk(NullBlkOptions::USUAL)?;
    let (disk, dm) = Dm::over(below, "stalled", DmKind::Linear)?;
    let limit = ["--io-timeout", "0.2"];
    let (mut device, daemon) =
        target::serve_by_daemon(&env.on(Plane::Kernel), &disk, &options(), &limit)?;
    let layout = device.layout();
    for stalls in 1..=2 {
        device.write(8, &[1; 4096])?;
        dm.suspend()?;
        device.queue(0).submit(&Request::write(64, &[1; 512]), &layout)?;
        wait_until("the stall", || Ok((daemon.total("stalled_queues")? > 0).then_some(())))?;
        let told = status(&daemon)?;
        let about = (&told["data_plane"], &told["stalled_queues"]);
        ensure!(about == (&json!("kernel"), &json!([0])), "{told}");
        dm.resume()?;
        collect(&mut device)?;
        wait_until("its end", || Ok((daemon.total("stalled_queues")? == 0).then_some(())))?;
        let counted = daemon.total("stalls_total")?;
        ensure!(counted == stalls, "{counted} stalls instead of {stalls}");
    }
    let lines = daemon.lines_with("the storage does not answer");
    ensure!(lines.len() == 2, "a line for each stall: {lines:?}");
    Ok(())
}

fn given_up(env: &Env) -> Result<()> {
    for plane in ["kernel", "uring"] {
        give_up(env, plane).context(plane)?;
    }
    Ok(())
}

fn give_up(env: &Env, plane: &str) -> Result<()> {
    let (below, _) = null_blk(NullBlkOptions::USUAL)?;
    let (hung, dm) = Dm::over(below, "stalled", DmKind::Linear)?;
    let (other, _) = null_blk(NullBlkOptions::USUAL)?;
    let mut daemon = groups::Daemon::start(env, &[])?;
    let serve = |disk| -> Result<Device> {
        daemon.add_on(plane, "a", disk, 1, &[])?;
        Ok(Device::from_stream(daemon.connect("a")?, &options())?)
    };
    let has_given_up = || -> Result<bool> { Ok(daemon.control(&["list"])?.contains("given_up")) };
    let mut device = serve(&hung)?;
    let layout = device.layout();
    dm.suspend()?;
    device.queue(0).submit(&Request::write(64, &[1; 512]), &layout)?;
    wait_until("the request in flight", || {
        Ok((daemon.total("queue_inflight_requests", "a")? == 1).then_some(()))
    })?;
    let told = daemon.control(&["remove", "a", "--force"])?;
    ensure!(told.starts_with("given up: "), "{told}");
    ensure!(has_given_up()?, "the list does not tell the disk");
    let mut next = serve(&other)?;
    next.write(64, &[2; 512])?;
    ensure!(device.queue(0).try_collect()?.is_none(), "the request has ended");
    dm.resume()?;
    wait_until("the end of the disk", || Ok((!has_given_up()?).then_some(())))?;
    collect(&mut device)?;
    next.write(64, &[3; 512])?;
    daemon.end()
}
