// SPDX-License-Identifier: Apache-2.0
//! A disk whose storage does not answer, and another disk of the same data-plane thread. The guest of the
//! other one must not notice.

use crate::case::cases;
use crate::host::env::Env;
use crate::host::fixture::{
    Disk, Drbd, FileSystem, Iscsi, NbdExport, NbdOptions, NvmeTcp, SessionState, image, wait_until,
};
use crate::host::groups::Daemon;
use crate::host::integrity::{Setup, tell};
use crate::host::load::{Handles, Spec, under_load};
use anyhow::{Context, Result, ensure};
use driver::Device;
use kit::outcome::expect_io_errors;
use kit::set::Set::{Full, Uring};
use kit::system::run;
use std::sync::Mutex;
use std::time::Duration;

cases! { Host;
    "engine-nbd-neighbour-uring", Uring,
        "NBD without a connection on the io_uring plane: another disk of the same thread goes on, and the metrics answer",
        |env| nbd(env, "uring");
    "engine-nbd-neighbour", Full,
        "the same on the kernel plane",
        |env| nbd(env, "kernel");
    "engine-nvme-neighbour-uring", Full,
        "NVMe/TCP without a path on the io_uring plane: another disk of the same thread goes on",
        |env| nvme(env, "uring");
    "engine-multipath-neighbour-uring", Full,
        "device-mapper multipath that queues without a path on the io_uring plane: another disk of the same thread goes on",
        |env| multipath(env, "uring");
    "engine-drbd-neighbour-uring", Full,
        "suspended DRBD on the io_uring plane: another disk of the same thread goes on",
        |env| drbd(env, "uring");
    "frozen-neighbour-uring", Uring,
        "an image on a frozen file system on the io_uring plane: another disk of the same thread goes on",
        |env| frozen(env, "uring");
    "frozen-neighbour", Full,
        "the same on the kernel plane",
        |env| frozen(env, "kernel");
}

/// Requests in flight of each queue: together more than the kernel threads of a data-plane thread.
const DEPTH: usize = 24;
/// Bytes of the largest request.
const REQUEST_MAX: usize = 8 << 10;
/// Sectors of a queue's part of the disk.
const PART: u64 = 4 << 10;
/// Requests of each queue of the other disk during the outage, many of which need a kernel thread.
const NEIGHBOUR: u64 = 100;
/// Requests that must wait for the storage: more than the usual kernel threads of a data-plane thread.
const WAITING: u64 = 20;
/// Time without a completion after which the storage is taken not to answer.
const STAND_STILL: Duration = Duration::from_secs(2);
/// Seconds for which requests of NVMe/TCP wait for a path: more than the outage.
const LOSS_NEVER: u32 = 600;

/// The load of the queues of a disk.
fn specs(setup: &Setup, env: &Env, disk: &Disk) -> Vec<Spec> {
    let of_queue = |(n, spec): (u64, Spec)| Spec {
        sectors: n * PART..(n + 1) * PART,
        rooms: vec![REQUEST_MAX; DEPTH],
        aligned: true,
        ..spec
    };
    (0..).zip(setup.specs(env, disk)).map(of_queue).collect()
}

/// Loads `disk`, and an image beside it on the same thread. The image must go on between `lose`, after which
/// the storage of the disk does not answer, and `mend`, after which all of its requests complete.
fn beside(
    env: &Env,
    plane: &str,
    disk: &Disk,
    lose: impl FnOnce() -> Result<()> + Send,
    mend: impl FnOnce() -> Result<()> + Send,
) -> Result<()> {
    println!("on {disk}");
    let mut daemon = Daemon::start(env, &["--threads", "1"])?;
    let other = image(FileSystem::Ext4, true)?;
    let setup = Setup::usual(1);
    let device = |name: &str, disk: &Disk| -> Result<(Device, Vec<Spec>)> {
        let specs = specs(&setup, env, disk);
        daemon.add_on(plane, name, disk, setup.queues, &[])?;
        let device = Device::from_stream(daemon.connect(name)?, &setup.options(&specs))?;
        Ok((device, specs))
    };
    let (lost, of_lost) = device("lost", disk)?;
    let (neighbour, of_neighbour) = device("neighbour", &other)?;
    let mut done = Vec::new();
    let of_disk = under_load(lost, of_lost, |lost| {
        done = under_load(neighbour, of_neighbour, |neighbour| {
            lost.wait_for_progress(5).context("the disk before the loss")?;
            neighbour.wait_for_progress(5).context("the other disk before the loss")?;
            lose()?;
            let outcome = goes_on(&daemon, lost, neighbour);
            mend()?; // without that nothing can end
            outcome?;
            lost.wait_for_progress(5).context("the disk after the return")?;
            neighbour.wait_for_progress(5).context("the other disk after the return")
        })?;
        Ok(())
    })?;
    for done in [&of_disk, &done] {
        tell(done);
        ensure!(done.iter().all(|queue| queue.errors == 0), "a guest got errors");
    }
    daemon.end()
}

/// Checks that the other disk goes on while the storage of the first one does not answer.
fn goes_on(daemon: &Daemon, lost: &Handles, neighbour: &Handles) -> Result<()> {
    wait_until("requests that wait for the storage", || {
        let waiting = daemon.total("queue_inflight_requests", "lost")?;
        Ok((waiting >= WAITING).then_some(()))
    })?;
    let mut before = None;
    wait_until("a stand-still of the disk", || {
        let now = Some(lost.completed());
        std::thread::sleep(STAND_STILL);
        Ok((std::mem::replace(&mut before, now) == now).then_some(()))
    })?;
    neighbour.wait_for_progress(NEIGHBOUR).context("the other disk during the outage")?;
    ensure!(before == Some(lost.completed()), "the storage has answered");
    Ok(())
}

fn nbd(env: &Env, plane: &str) -> Result<()> {
    let (disk, export) = NbdExport::attach(&NbdOptions::default())?;
    let export = Mutex::new(export);
    let export = || export.lock().expect("no thread panics with it");
    beside(
        env,
        plane,
        &disk,
        || export().kill_all(),
        || {
            export().start(&[])?;
            export().reconnect_all()
        },
    )
}

fn nvme(env: &Env, plane: &str) -> Result<()> {
    NvmeTcp::expect_lost_paths();
    let (disk, target) = NvmeTcp::connect(LOSS_NEVER)?;
    let cut = || {
        (0..2).try_for_each(|path| target.cut(path))?;
        target.wait_for_paths(0)
    };
    beside(env, plane, &disk, cut, || {
        (0..2).try_for_each(|path| target.mend(path))?;
        target.wait_for_paths(2)
    })
}

fn multipath(env: &Env, plane: &str) -> Result<()> {
    expect_io_errors();
    let (iscsi, multipath, disk) = Iscsi::connect_multipath(1)?;
    let cut = || {
        (0..2).try_for_each(|path| iscsi.cut(path))?;
        (0..2).try_for_each(|path| multipath.wait_for_failed(path))
    };
    beside(env, plane, &disk, cut, || {
        (0..2).try_for_each(|path| {
            iscsi.mend(path)?;
            iscsi.wait_for(path, SessionState::LoggedIn)?;
            multipath.reinstate(path)
        })
    })
}

fn drbd(env: &Env, plane: &str) -> Result<()> {
    let drbd = Drbd::create()?;
    let (disk, _) = drbd.parts();
    beside(env, plane, disk, Drbd::suspend, Drbd::resume)
}

fn frozen(env: &Env, plane: &str) -> Result<()> {
    let disk = image(FileSystem::Ext4, true)?;
    let directory = disk.path.parent().context("a directory")?.to_string_lossy().into_owned();
    let freeze = |how: &str| run("fsfreeze", &[how, &directory]).map(drop);
    beside(env, plane, &disk, || freeze("--freeze"), || freeze("--unfreeze"))
}
