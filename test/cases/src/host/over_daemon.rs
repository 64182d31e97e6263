// SPDX-License-Identifier: Apache-2.0
//! The kernel plane through the daemon: a change of the data plane under load, and the daemon's
//! death.

use crate::case::cases;
use crate::host::daemon::Daemon;
use crate::host::disks::{SLOW, disk_like, holding, slow_and_cached, usual};
use crate::host::env::{Env, Plane};
use crate::host::fixture::{Disk, FileSystem, image, wait_until};
use crate::host::integrity::{Setup, disk_of, tell, with_flags};
use crate::host::load::{Done, Spec, allow_lost_calls, under_load};
use crate::host::target::{self, Target, options};
use crate::host::{integrity, module, requests};
use anyhow::{Context, Result, bail, ensure};
use driver::kernel::abi;
use driver::{Device, Options, Request};
use kit::rng::Rng;
use kit::set::Set::{Full, Plain, Uring};
use kit::system::sha256;
use std::path::PathBuf;
use std::time::{Duration, Instant};
use virtio_spec::blk::S_OK;

cases! { Host;
    "daemon-requests", Plain,
        "every request type, layout and error on null_blk, by way of the daemon's kernel plane",
        |env| requests::all(&env.over_daemon(), usual());
    "daemon-requests-uring", Uring,
        "the same by way of the daemon's io_uring plane",
        |env| requests::all(&env.on(Plane::Uring), usual());
    "daemon-requests-ext4", Full,
        "the same on an image on ext4",
        |env| requests::all(&env.over_daemon(), image(FileSystem::Ext4, true));
    "daemon-integrity", Plain,
        "two queues, every sector verified, by way of the daemon's kernel plane",
        |env| integrity::run(&env.over_daemon(), usual(), Setup::usual(200));
    "daemon-switch", Plain,
        "a running disk moves between the kernel and the io_uring plane under load, and its metrics count on",
        |env| switch_planes(env, usual(), Setup::usual(6));
    "daemon-module-exchange", Plain,
        "the module is unloaded and loaded again below a running disk, which the io_uring plane serves meanwhile",
        |env| exchange_module(env, usual(), Setup::usual(2));
    "daemon-images", Plain,
        "a disk leaves the kernel plane for a snapshot and for a backup, and returns after the commit and the backup, under load",
        |env| change_images(env, image(FileSystem::Ext4, true), Setup::usual(1));
    "daemon-clone", Plain,
        "a disk on XFS is cloned under load while the kernel plane serves it, and stays there",
        |env| clone_disk(env, image(FileSystem::Xfs, true), Setup::usual(2));
    "daemon-clone-long", Full,
        "the same ten times",
        |env| clone_disk(env, image(FileSystem::Xfs, true), Setup::usual(10));
    "daemon-mirror", Plain,
        "a disk leaves the kernel plane for a mirror, goes on in other images, and returns, under load",
        |env| move_disk(env, image(FileSystem::Ext4, true), Setup::usual(1));
    "daemon-mirror-long", Full,
        "the same ten times",
        |env| move_disk(env, image(FileSystem::Ext4, true), Setup::usual(10));
    "daemon-metrics", Plain,
        "metrics count each request once while a queue of the kernel plane stops and starts beside another",
        |env| toggle_queue(env, usual());
    "daemon-switch-ext4", Full,
        "the same on an image on ext4, many times",
        |env| switch_planes(env, image(FileSystem::Ext4, true), Setup::usual(50));
    "daemon-sigkill", Plain,
        "the daemon is killed under load; a successor takes up what was in flight",
        |env| kill_daemons(env, 6);
    "daemon-sigkill-uring", Uring,
        "the daemon is killed under load while it runs the queues itself; a successor takes up what was in flight",
        |env| kill_daemons(&env.on(Plane::Uring), 4);
    "daemon-sigkill-slow", Plain,
        "the daemon is killed while an image on ext4 on a slow disk is written by way of the page cache",
        |env| kill_slow(env, Setup::usual(3));
    "daemon-sigkill-slow-uring", Uring,
        "the same while it runs the queues itself",
        |env| kill_slow(&env.on(Plane::Uring), Setup::usual(3));
    "daemon-sigkill-50", Full,
        "the same fifty times, on a disk that takes a millisecond",
        |env| kill_slow_disk(env, 50);
}

/// Requests on each queue between two changes.
const STEP: u64 = 5;

/// A disk that a daemon serves, and its loads.
fn begin(
    env: &Env,
    disk: Result<Disk>,
    setup: &Setup,
) -> Result<(Disk, Device, Daemon, Vec<Spec>)> {
    let disk = disk_of(env, disk)?;
    println!("on {disk}, {setup:?}");
    let specs = setup.specs(env, &disk);
    let Target { device, daemon } = target::serve(env, &disk, &setup.options(&specs))?;
    Ok((disk, device, daemon.context("there is no daemon")?, specs))
}

/// The queues of a running disk move between the planes and back.
pub(crate) fn switch_planes(env: &Env, disk: Result<Disk>, setup: Setup) -> Result<()> {
    let env = &Env { plane: Plane::Kernel, ..env.clone() };
    let (_disk, device, daemon, specs) = begin(env, disk, &setup)?;
    let mut requests = 0;
    let done = under_load(device, specs, |handles| {
        for round in 0..env.rounds(setup.requests) {
            let plane = if round % 2 == 0 { "uring" } else { "kernel" };
            handles.wait_for_progress(STEP).with_context(|| format!("before round {round}"))?;
            daemon.control(&["switch", plane]).with_context(|| format!("round {round}"))?;
            let status = daemon.control(&["status"])?;
            ensure!(status.contains(plane), "after a switch to {plane} the daemon says: {status}");
            let now = daemon.total("queue_completed_requests_total")?;
            ensure!(now >= requests + STEP, "{requests} requests, and {now} after a switch");
            requests = now;
            check_trace(&daemon, &status).context(plane)?;
        }
        handles.wait_for_progress(STEP).context("after the last switch")
    })?;
    tell(&done);
    check_totals(&daemon, &done)
}

/// A running disk leaves the module while another one of its kind is loaded.
fn exchange_module(env: &Env, disk: Result<Disk>, setup: Setup) -> Result<()> {
    let env = &Env { plane: Plane::Kernel, ..env.clone() };
    let (_disk, device, daemon, specs) = begin(env, disk, &setup)?;
    let done = under_load(device, specs, |handles| {
        for round in 0..env.rounds(setup.requests) {
            handles.wait_for_progress(STEP).with_context(|| format!("before round {round}"))?;
            daemon.control(&["switch", "uring"])?;
            module::reload(env).with_context(|| format!("round {round}"))?;
            daemon.control(&["switch", "kernel"])?;
        }
        handles.wait_for_progress(STEP).context("after the last exchange")
    })?;
    tell(&done);
    check_totals(&daemon, &done)
}

/// A disk on the kernel plane goes on in an overlay and in its image again, and is copied.
pub(crate) fn change_images(env: &Env, disk: Result<Disk>, setup: Setup) -> Result<()> {
    target::need_module()?;
    let env = &env.on(Plane::Auto);
    let (disk, device, daemon, specs) = begin(env, disk, &setup)?;
    let beside = |name: &str| disk.path.with_file_name(name).display().to_string();
    let [overlay, plain, copy, next] =
        ["overlay.qcow2", "plain.img", "copy.img", "next.qcow2"].map(beside);
    let done = under_load(device, specs, |handles| {
        for round in 0..env.rounds(setup.requests) {
            for (words, plane) in [
                (&["snapshot", "--to", &overlay][..], "uring"),
                (&["commit"], "kernel"),
                (&["backup", "--to", &plain], "kernel"),
                (&["backup", "--to", &copy, "--bitmap", "b"], "uring"),
                (&["backup", "--to", &next, "--incremental", "b"], "uring"),
            ] {
                let what = || format!("round {round}: {words:?}");
                handles.wait_for_progress(STEP).with_context(what)?;
                let start = Instant::now();
                daemon.control(words).with_context(what)?;
                println!("{} took {:?}", what(), start.elapsed());
                let status = daemon.control(&["status"])?;
                let runs = format!("data plane  {plane} (");
                ensure!(status.contains(&runs), "{}: the daemon says: {status}", what());
            }
            let told = daemon.control(&["switch", "kernel"]).map_err(|error| format!("{error:#}"));
            let Err(told) = told else { bail!("round {round}: the kernel notes no changes") };
            ensure!(told.contains("remove the bitmaps of the disk first"), "round {round}: {told}");
            daemon.control(&["bitmaps", "--remove", "b"])?;
            on_kernel(&daemon).with_context(|| format!("round {round}: without bitmaps"))?;
            for file in [&overlay, &plain, &copy, &next] {
                std::fs::remove_file(file)?;
            }
        }
        handles.wait_for_progress(STEP).context("after the last backup")
    })?;
    tell(&done);
    check_totals(&daemon, &done)
}

/// Backups of a disk on the kernel plane share its space, and it does not leave the plane. Its later writes to
/// shared blocks go elsewhere.
pub(crate) fn clone_disk(env: &Env, disk: Result<Disk>, setup: Setup) -> Result<()> {
    target::need_module()?;
    let env = &Env { plane: Plane::Kernel, ..env.clone() };
    let (disk, device, daemon, specs) = begin(env, disk, &setup)?;
    let cloned = |name: &str| -> Result<PathBuf> {
        let copy = disk.path.with_file_name(name);
        let words = ["backup", "--reflink", "always", "--to", &copy.display().to_string()];
        let told = daemon.control(&words).with_context(|| format!("{words:?}"))?;
        ensure!(told.contains("shares its space"), "{words:?}: {told}");
        let status = daemon.control(&["status"])?;
        ensure!(status.contains("data plane  kernel ("), "{words:?}: the daemon says: {status}");
        Ok(copy)
    };
    let mut before: Option<(PathBuf, String)> = None;
    let done = under_load(device, specs, |handles| {
        for round in 0..env.rounds(setup.requests) {
            handles.wait_for_progress(STEP).with_context(|| format!("before round {round}"))?;
            if let Some((copy, content)) = before.take() {
                ensure!(sha256(&copy)? == content, "round {round}: the clone has changed");
                std::fs::remove_file(copy)?;
            }
            let copy = cloned(&format!("copy-{round}"))?;
            let content = sha256(&copy)?;
            before = Some((copy, content));
        }
        handles.wait_for_progress(STEP).context("after the last clone")
    })?;
    let last = cloned("last")?;
    ensure!(sha256(&last)? == sha256(&disk.path)?, "the last clone is no copy of the disk");
    tell(&done);
    check_totals(&daemon, &done)
}

/// A disk on the kernel plane moves to another image of the same file system, and to a qcow2 image.
pub(crate) fn move_disk(env: &Env, disk: Result<Disk>, setup: Setup) -> Result<()> {
    target::need_module()?;
    let env = &env.on(Plane::Auto);
    let (disk, device, daemon, specs) = begin(env, disk, &setup)?;
    let mut before = disk.path.clone();
    let done = under_load(device, specs, |handles| {
        for round in 0..env.rounds(setup.requests) {
            for format in ["qcow2", "raw"] {
                let to = disk.path.with_file_name(format!("moved-{round}.{format}"));
                let to_text = to.display().to_string();
                let what = || format!("round {round}: {format}");
                handles.wait_for_progress(STEP).with_context(what)?;
                let mirror = ["mirror", "--to", &to_text, "--format", format];
                daemon.control(&mirror).with_context(what)?;
                if format == "qcow2" {
                    let told = daemon.control(&["status"])?;
                    ensure!(told.contains("data plane  uring ("), "{}: {told}", what());
                    daemon.control(&["mirror", "--cancel"]).with_context(what)?;
                    on_kernel(&daemon).with_context(|| format!("{}: cancelled", what()))?;
                    daemon.control(&mirror).with_context(what)?;
                }
                handles.wait_for_progress(STEP).with_context(what)?;
                let told = daemon.control(&["mirror", "--complete"]).with_context(what)?;
                println!("{}: {}", what(), told.lines().next().unwrap_or_default());
                let status = daemon.control(&["status"])?;
                ensure!(status.contains(&to_text), "{}: the daemon says: {status}", what());
                // The load reads what it wrote: nothing may come from the old image any more.
                std::fs::remove_file(&before)?;
                before = to;
            }
        }
        on_kernel(&daemon).context("after the last move")?;
        daemon.control(&["switch", "uring"])?;
        let to = disk.path.with_file_name("last.raw").display().to_string();
        daemon.control(&["mirror", "--to", &to, "--complete"])?;
        let status = daemon.control(&["status"])?;
        ensure!(status.contains("data plane  uring ("), "the operator has moved it: {status}");
        handles.wait_for_progress(STEP).context("after the last move")
    })?;
    tell(&done);
    check_totals(&daemon, &done)
}

/// The disk is on the kernel plane.
fn on_kernel(daemon: &Daemon) -> Result<()> {
    let status = daemon.control(&["status"])?;
    ensure!(status.contains("data plane  kernel ("), "the daemon says: {status}");
    Ok(())
}

/// A trace shows requests.
fn check_trace(daemon: &Daemon, status: &str) -> Result<()> {
    let name = status.lines().find_map(|line| line.strip_prefix("name ")).context("no name")?;
    let trace = ["trace", name.trim(), "--slower-than", "0.001", "--count", "1"];
    let line = daemon.control(&trace)?;
    ensure!(line.contains(" storage="), "a trace shows {line}");
    Ok(())
}

/// Stops and starts a queue of the kernel plane while the other one runs.
pub(crate) fn toggle_queue(env: &Env, disk: Result<Disk>) -> Result<()> {
    let env = &Env { plane: Plane::Kernel, ..env.clone() };
    let disk = disk_of(env, disk)?;
    println!("on {disk}");
    let options = Options { num_queues: 2, ..options() };
    let Target { mut device, daemon } = target::serve(env, &disk, &options)?;
    let Some(daemon) = daemon else { bail!("there is no daemon") };
    let layout = device.layout();
    let mut sent = 0;
    for round in 0..5 {
        for queue in 0..2 {
            let done = device.queue(queue).execute(&Request::read(0, 4096), &layout)?;
            ensure!(
                done.status == Some(S_OK),
                "round {round}: queue {queue} says {:?}",
                done.status
            );
            sent += 1;
        }
        device.session().enable(1, false)?;
        device.session().enable(1, true)?;
        for (metric, expected) in [
            ("queue_requests_total", sent),
            ("queue_completed_requests_total", sent),
            ("queue_read_bytes_total", sent * 4096),
            ("queue_inflight_requests", 0),
        ] {
            let total = daemon.total(metric)?;
            ensure!(total == expected, "round {round}: {metric} is {total}, not {expected}");
        }
    }
    Ok(())
}

/// Compares the daemon's totals with the requests of the driver. The load has no GET_ID, whose latency
/// is not counted.
fn check_totals(daemon: &Daemon, done: &[Done]) -> Result<()> {
    let sent: u64 = done.iter().map(|done| done.requests).sum();
    let totals =
        ["queue_requests_total", "queue_completed_requests_total", "queue_latency_seconds_count"];
    for metric in totals {
        let total = daemon.total(metric)?;
        ensure!(total == sent, "{metric} is {total}, and the driver sent {sent}");
    }
    Ok(())
}

/// Kills daemons on a fast disk, where requests are often complete at the moment of a kill, and on slow ones.
fn kill_daemons(env: &Env, rounds: u64) -> Result<()> {
    kill_daemon(env, usual(), Setup::usual(rounds))?;
    kill_slow_disk(env, rounds)
}

/// Kills daemons on a disk that takes a millisecond for each request, and on one that holds some.
fn kill_slow_disk(env: &Env, rounds: u64) -> Result<()> {
    kill_daemon(env, disk_like(SLOW), Setup::usual(rounds))?;
    kill_with_writes(env, false)
}

/// Kills daemons on an image in the page cache of a slow disk, and on one whose disk holds some requests.
fn kill_slow(env: &Env, setup: Setup) -> Result<()> {
    kill_daemon(env, slow_and_cached(), setup)?;
    kill_with_writes(env, true)
}

/// Bytes that are written to each sector before and after a kill.
const BEFORE: u8 = 1;
const HELD: u8 = 2;
/// A sector for each queue.
const SECTORS: [u64; 2] = [0, 64];

/// Kills a daemon whose storage holds a write of each queue. The successor carries them out.
fn kill_with_writes(env: &Env, is_cached: bool) -> Result<()> {
    let env = &env.over_daemon();
    let (disk, dm) = holding(is_cached)?;
    println!("on {disk}, which holds writes");
    let options = Options { inflight: true, num_queues: SECTORS.len() as u16, ..options() };
    // A write then needs the disk below an image, too.
    let kernel = with_flags(abi::OPT_WRITE_THROUGH, 0).kernel();
    let Target { mut device, daemon } = target::serve_with(env, &disk, &options, &kernel)?;
    let mut daemon = daemon.context("there is no daemon")?;
    for sector in SECTORS {
        device.write(sector, &[BEFORE; 4096])?;
    }
    dm.hold(|| {
        start_writes(&mut device, &daemon)?;
        daemon.kill_held()
    })?;
    daemon.replace_held()?;
    device.reconnect(daemon.socket())?;
    for queue in 0..SECTORS.len() {
        let status = device.queue(queue).collect()?.1.status;
        ensure!(status == Some(S_OK), "the write on queue {queue} ended with {status:?}");
    }
    let recovered = daemon.total("queue_recovered_requests_total")?;
    ensure!(recovered == SECTORS.len() as u64, "{recovered} requests were recovered");
    for sector in SECTORS {
        let mut data = [0; 4096];
        device.read(sector, &mut data)?;
        ensure!(data == [HELD; 4096], "sector {sector} has {}", data[0]);
    }
    Ok(())
}

/// Starts a write on each queue, and waits until all are in flight.
fn start_writes(device: &mut Device, daemon: &Daemon) -> Result<()> {
    let layout = device.layout();
    for (queue, sector) in SECTORS.into_iter().enumerate() {
        device.queue(queue).submit(&Request::write(sector, &[HELD; 4096]), &layout)?;
    }
    wait_until("the writes in flight", || {
        let inflight = daemon.total("queue_inflight_requests")?;
        Ok((inflight == SECTORS.len() as u64).then_some(()))
    })
}

/// Kills the daemon with SIGKILL repeatedly, under load; its successor replays the requests in
/// flight. Each other call arrives.
fn kill_daemon(env: &Env, disk: Result<Disk>, setup: Setup) -> Result<()> {
    let env = &env.over_daemon();
    let disk = disk_of(env, disk)?;
    println!("on {disk}, {setup:?}");
    let specs = setup.specs(env, &disk);
    let options = Options { inflight: true, ..setup.options(&specs) };
    let Target { device, daemon } = target::serve(env, &disk, &options)?;
    ensure!(device.inflight().is_some(), "the daemon has no in-flight region");
    let Some(mut daemon) = daemon else { bail!("there is no daemon") };
    let mut rng = Rng::new(env.seed() ^ 3);
    let (rounds, mut recovered) = (env.rounds(setup.requests), 0);
    let done = under_load(device, specs.clone(), |handles| {
        for round in 0..rounds {
            handles.wait_for_progress(STEP).with_context(|| format!("before kill {round}"))?;
            std::thread::sleep(Duration::from_micros(rng.below(20_000)));
            allow_lost_calls(&specs, true);
            daemon.replace().with_context(|| format!("kill {round}"))?;
            handles.reconnect(daemon.connect()?).with_context(|| format!("after kill {round}"))?;
            allow_lost_calls(&specs, false);
            handles.wait_for_progress(STEP).with_context(|| format!("after kill {round}"))?;
            recovered += daemon.total("queue_recovered_requests_total")?;
        }
        Ok(())
    })?;
    tell(&done);
    println!("{recovered} requests were in flight at {rounds} kills");
    ensure!(daemon.is_alive(), "the last daemon died");
    Ok(())
}
