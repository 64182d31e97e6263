// SPDX-License-Identifier: Apache-2.0
//! Data integrity under load: several queues and workers, requests from 512 bytes to 4 MiB.

use crate::env::Env;
use crate::fixture::Disk;
use crate::load::{Done, Spec, memory_for, under_load};
use crate::module;
use crate::target::{self, Target, options};
use anyhow::Result;
use driver::Options;
use driver::kernel::{KernelOptions, Workers, abi};

/// Largest request.
const REQUEST_MAX: usize = 4 << 20;
/// Sectors of each queue's part of the disk: 16 MiB.
const PART: u64 = 32 << 10;

/// How the device is set up.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Setup {
    /// Queues.
    pub(crate) queues: u16,
    /// Threads besides the device's own; 0: that one.
    pub(crate) workers: u32,
    /// `abi::OPT_*`.
    pub(crate) flags: u32,
    /// Busy-loop time.
    pub(crate) busyloop_us: u32,
    /// Requests of each queue.
    pub(crate) requests: u64,
    /// EVENT_IDX is not negotiated.
    pub(crate) no_event_idx: bool,
    /// Large reads beside small writes and zeroed ranges.
    pub(crate) fragments: bool,
}

impl Setup {
    /// Two queues, a worker each.
    pub(crate) fn usual(requests: u64) -> Self {
        Self { queues: 2, workers: 2, requests, ..Self::default() }
    }

    /// The kernel device's options.
    pub(crate) fn kernel(&self) -> KernelOptions {
        let workers =
            if self.workers == 0 { Workers::Shared } else { Workers::Extra(self.workers) };
        KernelOptions {
            options: abi::BlkOptions::with_flags(self.flags),
            workers,
            busyloop_us: self.busyloop_us,
            ..KernelOptions::default()
        }
    }

    /// A load for each queue.
    pub(crate) fn specs(&self, env: &Env, disk: &Disk) -> Vec<Spec> {
        let part = PART.min(disk.sectors() / u64::from(self.queues) / disk.unit() * disk.unit());
        (0..u64::from(self.queues))
            .map(|n| {
                let sectors = n * part..(n + 1) * part;
                let fragments = self.fragments;
                Spec { fragments, ..Spec::new(sectors, disk.unit(), REQUEST_MAX, env.seed() + n) }
            })
            .collect()
    }

    /// The driver's options.
    pub(crate) fn options(&self, specs: &[Spec]) -> Options {
        Options {
            num_queues: self.queues,
            queue_size: 256,
            event_idx: !self.no_event_idx,
            regions: memory_for(specs),
            scratch_bytes: 4096,
            ..options()
        }
    }
}

/// The disk of the command line, or the one that the case made.
pub(crate) fn disk_of(env: &Env, made: Result<Disk>) -> Result<Disk> {
    match Disk::given(env)? {
        Some(given) => Ok(given),
        None => made,
    }
}

/// Says what was done.
pub(crate) fn tell(done: &[Done]) {
    for (queue, done) in done.iter().enumerate() {
        let Done { requests, errors, verified } = done;
        println!("queue {queue}: {requests} requests, {errors} errors, {verified} bytes verified");
    }
}

/// Loads every queue and verifies.
pub(crate) fn run(env: &Env, disk: Result<Disk>, setup: Setup) -> Result<()> {
    let disk = disk_of(env, disk)?;
    println!("on {disk}, {setup:?}");
    let specs = setup.specs(env, &disk);
    let options = setup.options(&specs);
    let Target { device, daemon: _daemon } =
        target::serve_with(env, &disk, &options, &setup.kernel())?;
    let done =
        under_load(device, specs, |handles| handles.wait_for_progress(env.rounds(setup.requests)))?;
    tell(&done);
    Ok(())
}

/// The same while few bytes may be in flight, fewer than the largest request has.
pub(crate) fn bounded(env: &Env, disk: Result<Disk>, setup: Setup, bytes: u64) -> Result<()> {
    let _bound = module::Parameter::set("inflight_bytes_max", bytes)?;
    run(env, disk, setup)
}
