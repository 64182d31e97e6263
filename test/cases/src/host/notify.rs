// SPDX-License-Identifier: Apache-2.0
//! Kicks and calls: none is lost, at any time. The requests need no disk. One or two at a time are
//! in flight, with pauses that sometimes match the time after which the device sleeps.

use crate::case::cases;
use crate::host::disks::usual;
use crate::host::env::Env;
use crate::host::fixture::{Disk, Dm, DmKind, NullBlkOptions, null_blk, wait_until};
use crate::host::integrity::disk_of;
use crate::host::target::{self, LIMIT, Target, options};
use crate::host::visibility::counters;
use anyhow::{Context, Result, ensure};
use driver::kernel::{KernelOptions, abi};
use driver::{Device, Options, Request};
use kit::rng::Rng;
use kit::set::Set::{Full, Gating, Plain};
use std::time::{Duration, Instant};
use virtio_spec::blk::S_OK;

cases! { Host;
    "notify", Plain,
        "no kick and no call is lost, whenever it comes",
        |env| none_is_lost(env, usual(), 0, 8_000);
    "notify-busy-loop", Plain,
        "no kick and no call is lost while the device polls before it sleeps",
        |env| none_is_lost(env, usual(), 50, 3_000);
    "notify-coalesced", Plain,
        "no kick and no call is lost while calls are held, and calls of many requests come together",
        coalesced;
    "notify-unwanted", Gating,
        "calls that the driver does not want are counted apart from those that it gets",
        unwanted;
    "notify-batches", Plain,
        "batches of a fixed size: no kick and no call is lost, and no call answers more requests",
        batches;
    "notify-trials", Plain,
        "the module tries sizes of batches under load: nothing is lost, and one request at a time starts no trial",
        trials;
    "notify-long", Full,
        "no kick and no call is lost, many more times",
        |env| none_is_lost(env, usual(), 0, 100_000);
}

/// Longest pause, in iterations of an empty loop.
const PAUSE_MAX: u64 = 6000;

/// Runs `count` requests in each combination: with event index and without, asleep and polling.
pub(crate) fn none_is_lost(
    env: &Env,
    disk: Result<Disk>,
    busyloop_us: u32,
    count: u64,
) -> Result<()> {
    let disk = disk_of(env, disk)?;
    each(env, &disk, &KernelOptions { busyloop_us, ..KernelOptions::default() }, count)
}

/// The same with held calls; then bursts until some calls have come together.
fn coalesced(env: &Env) -> Result<()> {
    let disk = disk_of(env, usual())?;
    let held = abi::BlkOptions::with_flags(abi::OPT_COALESCE);
    let kernel = KernelOptions { busyloop_us: 50, options: held, ..KernelOptions::default() };
    each(env, &disk, &kernel, 3_000)?;
    let Target { mut device, daemon: _daemon } =
        target::serve_with(env, &disk, &options(), &kernel)?;
    let end = Instant::now() + LIMIT;
    while counters(&mut device)?.get("coalesced").is_none_or(|count| *count == 0) {
        ensure!(Instant::now() < end, "no call has come with another one");
        burst(&mut device)?;
    }
    Ok(())
}

/// Batches of one and of several requests, changed while the queue runs. The disk answers many
/// requests at once.
fn batches(env: &Env) -> Result<()> {
    let small = KernelOptions { options: batch_of(1), ..KernelOptions::default() };
    each(env, &disk_of(env, usual())?, &small, 1_000)?;
    let (below, _) = null_blk(NullBlkOptions::USUAL)?;
    let (disk, dm) = Dm::over(below, "gathered", DmKind::Linear)?;
    let mut device = Device::open_kernel(disk.open()?, &options(), &small)?;
    for size in [1, 4, 2, 1] {
        set_options(&mut device, batch_of(size))?;
        for round in 0..ROUNDS {
            let calls = calls_of_burst(&mut device, &dm, BURST / u64::from(size));
            calls.with_context(|| format!("batches of {size}, round {round}"))?;
        }
    }
    set_options(&mut device, abi::BlkOptions::with_flags(0))?;
    let before = due(&mut device)?;
    // The module answers these requests itself, so it ends a whole batch at once on any machine.
    burst(&mut device)?;
    let calls = due(&mut device)? - before;
    ensure!(calls <= BURST / 2, "{calls} calls for {BURST} requests without a fixed size");
    Ok(())
}

/// Time of a burst that may abandon a trial: a part of the module's `VHOST_BLK_WINDOW_NS_MAX`.
const GAP: Duration = Duration::from_millis(25);

/// Time with gaps, below the limit of a case.
const GAPS_MAX: Duration = Duration::from_secs(240);

/// Bursts until trials of the size have ended; then one request at a time.
fn trials(env: &Env) -> Result<()> {
    const TRIALS: u64 = 3;
    const ALONE: u64 = 2_000;
    let disk = disk_of(env, usual())?;
    let Target { mut device, daemon: _daemon } =
        target::serve_with(env, &disk, &options(), &KernelOptions::default())?;
    let begin = Instant::now();
    let mut end = begin + LIMIT;
    while counted(&mut device, "batch_trials")? < TRIALS {
        let now = Instant::now();
        ensure!(now < end, "no trials in {LIMIT:?} without a gap");
        ensure!(now < begin + GAPS_MAX, "no trials in {GAPS_MAX:?} with gaps");
        for _ in 0..16 {
            let burst_begin = Instant::now();
            burst(&mut device)?;
            if burst_begin.elapsed() > GAP {
                end = Instant::now() + LIMIT;
            }
        }
    }
    let size = counted(&mut device, "batch")?;
    ensure!([2, 4, 8, 64].contains(&size), "batches of {size}");
    let mut rng = Rng::new(env.seed());
    // The first window has some of the bursts.
    polled(&mut device, &mut rng, ALONE)?;
    let before = counted(&mut device, "batch_trials")?;
    polled(&mut device, &mut rng, env.rounds(ALONE))?;
    let ended = counted(&mut device, "batch_trials")? - before;
    ensure!(ended == 0, "{ended} trials with one request at a time");
    set_options(&mut device, batch_of(7))?;
    let fixed = counted(&mut device, "batch")?;
    ensure!(fixed == 7, "batches of {fixed} in place of 7");
    Ok(())
}

fn batch_of(batch: u32) -> abi::BlkOptions {
    abi::BlkOptions { batch, ..abi::BlkOptions::with_flags(abi::OPT_BATCH) }
}

fn set_options(device: &mut Device, options: abi::BlkOptions) -> Result<()> {
    let kernel = device.session().kernel().context("a kernel device")?;
    kernel.device().set_options(options).context("new options")
}

fn counted(device: &mut Device, name: &str) -> Result<u64> {
    counters(device)?.get(name).copied().with_context(|| format!("the module counts {name}"))
}

/// Publications with a call, and without one because the driver wants none, at one moment.
fn calls_and_unwanted(device: &mut Device) -> Result<(u64, u64)> {
    let counters = counters(device)?;
    let of =
        |name| counters.get(name).copied().with_context(|| format!("the module counts {name}"));
    Ok((of("calls")?, of("suppressed")?))
}

fn due(device: &mut Device) -> Result<u64> {
    let (calls, unwanted) = calls_and_unwanted(device)?;
    Ok(calls + unwanted)
}

/// Calls and unwanted calls once `publications` are counted: the driver sees a completion before
/// the module decides about its call.
fn counts_after(device: &mut Device, publications: u64) -> Result<(u64, u64)> {
    wait_until("the module counts the last publication", || {
        let (calls, unwanted) = calls_and_unwanted(device)?;
        let counted = calls + unwanted;
        ensure!(counted <= publications, "{counted} publications of {publications}");
        Ok((counted == publications).then_some((calls, unwanted)))
    })
}

/// Calls of a driver that polls, and of one that sleeps, with event index and without.
fn unwanted(env: &Env) -> Result<()> {
    const REQUESTS: u64 = 50;
    let disk = disk_of(env, usual())?;
    for event_idx in [true, false] {
        let options = Options { event_idx, ..options() };
        let Target { mut device, daemon: _daemon } =
            target::serve_with(env, &disk, &options, &KernelOptions::default())?;
        let layout = device.layout();
        // The first call comes in any case: the ring does not tell the position of the last one.
        device.queue(0).execute(&Request::get_id(), &layout)?;
        let before = counts_after(&mut device, 1)?;
        polled(&mut device, &mut Rng::new(2), REQUESTS)?;
        let after = counts_after(&mut device, 1 + REQUESTS)?;
        let more = (after.0 - before.0, after.1 - before.1);
        ensure!(more == (0, REQUESTS), "polled, event index {event_idx}: {more:?}");
        for _ in 0..REQUESTS {
            device.queue(0).execute(&Request::get_id(), &layout)?;
        }
        let calls = counts_after(&mut device, 1 + 2 * REQUESTS)?.0 - after.0;
        ensure!(calls > 0 && calls <= REQUESTS, "asleep, event index {event_idx}: {calls} calls");
    }
    Ok(())
}

/// Gathers requests in flight, lets the disk answer them, and returns the calls. There must be
/// `least`; the last one may come after its request.
fn calls_of_burst(device: &mut Device, dm: &Dm, least: u64) -> Result<u64> {
    let before = due(device)?;
    dm.suspend()?;
    // Gaps between the requests prevent a merge.
    submit(device, |number| Request::read(16 * number, 4096))?;
    wait_until("all requests in flight", || {
        Ok((counted(device, "inflight")? == BURST).then_some(()))
    })?;
    dm.resume()?;
    collect(device)?;
    let end = Instant::now() + LIMIT;
    loop {
        let calls = due(device)? - before;
        ensure!(calls <= BURST, "{calls} calls for {BURST} requests");
        if calls >= least {
            return Ok(calls);
        }
        ensure!(Instant::now() < end, "{calls} calls for {BURST} requests, {least} are due");
    }
}

/// Requests of a burst.
const BURST: u64 = 32;

/// Bursts with each size of batches.
const ROUNDS: u32 = 5;

/// Many requests at once.
fn burst(device: &mut Device) -> Result<()> {
    submit(device, |_| Request::get_id())?;
    collect(device)
}

fn submit(device: &mut Device, request: impl Fn(u64) -> Request) -> Result<()> {
    let layout = device.layout();
    let queue = device.queue(0);
    for number in 0..BURST {
        queue.add(&request(number), &layout)?;
    }
    queue.queue().publish();
    queue.queue().kick_if_asked();
    Ok(())
}

fn collect(device: &mut Device) -> Result<()> {
    for _ in 0..BURST {
        let (_, completion) = device.queue(0).collect()?;
        ensure!(completion.status == Some(S_OK), "status {:?}", completion.status);
    }
    Ok(())
}

fn each(env: &Env, disk: &Disk, kernel: &KernelOptions, count: u64) -> Result<()> {
    let mut rng = Rng::new(env.seed());
    for event_idx in [true, false] {
        let options = Options { event_idx, ..options() };
        let Target { mut device, daemon: _daemon } =
            target::serve_with(env, disk, &options, kernel)?;
        let count = env.rounds(count);
        polled(&mut device, &mut rng, count)
            .with_context(|| format!("polled, event index {event_idx}"))?;
        asleep(&mut device, &mut rng, count)
            .with_context(|| format!("asleep, event index {event_idx}"))?;
    }
    Ok(())
}

fn pause(rng: &mut Rng) {
    let most = if rng.one_in(2) { PAUSE_MAX } else { PAUSE_MAX / 30 };
    for _ in 0..rng.below(most) {
        std::hint::spin_loop();
    }
}

/// The driver polls the used ring, so a kick that the device misses leaves the request in the ring.
fn polled(device: &mut Device, rng: &mut Rng, count: u64) -> Result<()> {
    let layout = device.layout();
    let queue = device.queue(0);
    for n in 0..count {
        queue.queue().suppress_calls();
        queue.submit(&Request::get_id(), &layout)?;
        let end = Instant::now() + LIMIT;
        let mut polls = 0_u32;
        loop {
            if let Some((_, completion)) = queue.try_collect()? {
                ensure!(completion.status == Some(S_OK), "status {:?}", completion.status);
                break;
            }
            polls = polls.wrapping_add(1);
            let late = polls.is_multiple_of(1024) && Instant::now() > end;
            ensure!(!late, "request {n} stays in the ring: its kick was lost");
            std::hint::spin_loop();
        }
        pause(rng);
    }
    Ok(())
}

/// The driver sleeps, so a call that the device omits leaves it asleep.
fn asleep(device: &mut Device, rng: &mut Rng, count: u64) -> Result<()> {
    let layout = device.layout();
    let queue = device.queue(0);
    for n in 0..count {
        let requests = 1 + rng.below(2);
        for _ in 0..requests {
            queue.submit(&Request::get_id(), &layout)?;
            pause(rng);
        }
        for _ in 0..requests {
            let (_, completion) = queue.collect().with_context(|| format!("round {n}"))?;
            ensure!(completion.status == Some(S_OK), "status {:?}", completion.status);
        }
    }
    Ok(())
}
