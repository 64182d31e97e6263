// SPDX-License-Identifier: Apache-2.0
//! Kicks and calls: none is lost, whenever it comes. Requests that need no disk, one or two at a time,
//! with pauses that are sometimes just as long as the device takes to go to sleep.

use crate::env::Env;
use crate::fixture::Disk;
use crate::integrity::disk_of;
use crate::target::{self, LIMIT, Target, options};
use anyhow::{Context, Result, ensure};
use driver::kernel::KernelOptions;
use driver::{Device, Options, Request};
use lab_case::rng::Rng;
use std::time::Instant;
use virtio_spec::blk::S_OK;

/// Longest pause, in turns of an empty loop.
const PAUSE_MAX: u64 = 6000;

/// `count` requests each, with event index and without, asleep and polling.
pub(crate) fn none_is_lost(
    env: &Env,
    disk: Result<Disk>,
    busyloop_us: u32,
    count: u64,
) -> Result<()> {
    let disk = disk_of(env, disk)?;
    let kernel = KernelOptions { busyloop_us, ..KernelOptions::default() };
    let mut rng = Rng::new(env.seed());
    for event_idx in [true, false] {
        let options = Options { event_idx, ..options() };
        let Target { mut device, daemon: _daemon } =
            target::serve_with(env, &disk, &options, &kernel)?;
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

/// The driver polls the used ring: a kick that the device misses leaves the request in the ring.
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

/// The driver sleeps: a call that the device omits leaves it asleep.
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
