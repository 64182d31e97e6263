// SPDX-License-Identifier: Apache-2.0
//! Data integrity under load: several queues and workers, requests from 512 bytes to 4 MiB.

use crate::case::cases;
use crate::host::disks::{
    BLOCKS_4096, FEW_TAGS, POLLED, SLOW, SPLIT, USUAL, disk_like, mapped, mapped_on, usual,
};
use crate::host::env::{Env, Plane};
use crate::host::fixture::{Disk, FileSystem, NullBlkOptions, brd, image};
use crate::host::load::{Done, Spec, memory_for, under_load};
use crate::host::module;
use crate::host::target::{self, Target, options};
use crate::host::visibility;
use anyhow::{Context, Result, ensure};
use driver::Options;
use driver::kernel::{KernelOptions, Workers, abi};
use kit::probe::{Place, Probe};
use kit::set::Set::{Full, Gating, Plain, Uring};

cases! { Host;
    "integrity-null-blk", Gating,
        "two queues and workers, mixed sizes to 4 MiB, every sector verified, on null_blk",
        |env| run(env, usual(), Setup::usual(300));
    "integrity-null-blk-4096", Full,
        "the same with blocks of 4096 bytes",
        |env| run(env, disk_like(BLOCKS_4096), Setup::usual(2000));
    "integrity-many-queues", Full,
        "eight queues on three workers, kicks and calls by flags instead of indices",
        |env| run(env, usual(), Setup { queues: 8, workers: 3, no_event_idx: true, ..Setup::usual(600) });
    "integrity-brd", Full,
        "the load on a RAM disk, which completes at once",
        |env| run(env, brd(), Setup::usual(2000));
    "integrity-busy-loop", Full,
        "the load with busy polling",
        |env| run(env, usual(), Setup { busyloop_us: 200, ..Setup::usual(2000) });
    "integrity-poll-queues", Gating,
        "the load with completions that are polled for on null_blk's poll queues",
        |env| run(env, disk_like(POLLED), with_flags(abi::OPT_IOPOLL, 200));
    "integrity-poll-queues-flush", Plain,
        "polled completions and flushes on a disk with four tags for all, and a cache",
        |env| run(env, disk_like(FEW_TAGS), with_flags(abi::OPT_IOPOLL, 100));
    "integrity-poll-queues-dm", Plain,
        "polled completions by way of dm, of requests that the disk below has to split",
        |env| run(env, mapped_on(disk_like(SPLIT)), with_flags(abi::OPT_IOPOLL, 100));
    "integrity-poll-queues-uring", Uring,
        "reads and writes by the daemon's polling ring, beside flushes and zeroes by interrupts; no poll with --iopoll off",
        |env| polled_by_daemon(&env.on(Plane::Uring), Setup::usual(100));
    "integrity-pinned", Gating,
        "the load with guest memory pinned once",
        |env| run(env, usual(), with_flags(abi::OPT_PIN_MEMORY, 200));
    "integrity-huge-pages", Plain,
        "the load with guest memory of huge pages, on each plane",
        |env| on_huge_pages(env, usual, Setup::usual(60));
    "integrity-bounded", Plain,
        "no more bytes are in flight than the module's bound, one large request excepted",
        |env| bounded(env, || disk_like(SLOW), Setup::usual(150));
    "integrity-write-through", Full,
        "the load in write-through mode on a disk with a volatile cache",
        |env| run(
            env,
            disk_like(NullBlkOptions { cache_mib: 8, ..USUAL }),
            with_flags(abi::OPT_WRITE_THROUGH, 1000),
        );
    "integrity-slow-disk", Full,
        "the load on a disk that takes a millisecond, so that queues are deep",
        |env| run(env, disk_like(SLOW), Setup::usual(1000));
    "integrity-dm", Full,
        "the load on a device-mapper device",
        |env| run(env, mapped(), Setup::usual(2000));
    "integrity-ext4-direct", Plain,
        "the load on an image on ext4, opened with O_DIRECT",
        |env| run(env, image(FileSystem::Ext4, true), Setup::usual(200));
    "integrity-ext4-cached", Gating,
        "the load on an image on ext4, by way of the page cache",
        |env| run(env, image(FileSystem::Ext4, false), Setup::usual(200));
    "integrity-xfs-direct", Full,
        "the load on an image on XFS, opened with O_DIRECT",
        |env| run(env, image(FileSystem::Xfs, true), Setup::usual(1000));
    "integrity-xfs-cached", Full,
        "the load on an image on XFS, by way of the page cache",
        |env| run(env, image(FileSystem::Xfs, false), Setup::usual(1000));
    "integrity-xfs-fragments", Full,
        "large reads of an image on XFS whose extents change all the time: a read that meets a lock on its way is done again",
        |env| run(env, image(FileSystem::Xfs, true), Setup { fragments: true, ..Setup::usual(20_000) });
    "integrity-long", Full,
        "the load on null_blk for much longer",
        |env| run(env, usual(), Setup::usual(20_000));
}

/// Bytes of the largest request.
const REQUEST_MAX: usize = 4 << 20;
/// Sectors of each queue's part of the disk: 16 MiB.
const PART: u64 = 32 << 10;

/// The usual set-up with the given `abi::OPT_*` flags.
pub(crate) fn with_flags(flags: u32, requests: u64) -> Setup {
    Setup { flags, ..Setup::usual(requests) }
}

/// Set-up of the device.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Setup {
    /// Number of queues.
    pub(crate) queues: u16,
    /// Worker threads besides the device's own; 0: only that one.
    pub(crate) workers: u32,
    /// Flags `abi::OPT_*`.
    pub(crate) flags: u32,
    /// Busy-loop time in microseconds.
    pub(crate) busyloop_us: u32,
    /// Requests per queue.
    pub(crate) requests: u64,
    /// Does not negotiate EVENT_IDX.
    pub(crate) no_event_idx: bool,
    /// Uses large reads beside small writes and zeroed ranges.
    pub(crate) fragments: bool,
    /// Keeps one request at a time in flight on each queue.
    pub(crate) single: bool,
    /// Uses huge pages for guest memory.
    pub(crate) huge_pages: bool,
}

impl Setup {
    /// Two queues with one worker each.
    pub(crate) fn usual(requests: u64) -> Self {
        Self { queues: 2, workers: 2, requests, ..Self::default() }
    }

    /// Options of the kernel device.
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
                let mut spec = Spec::new(sectors, disk.unit(), REQUEST_MAX, env.seed() + n);
                if self.single {
                    spec.rooms.truncate(1);
                }
                Spec { fragments, ..spec }
            })
            .collect()
    }

    /// Options of the driver.
    pub(crate) fn options(&self, specs: &[Spec]) -> Options {
        Options {
            num_queues: self.queues,
            queue_size: 256,
            event_idx: !self.no_event_idx,
            regions: memory_for(specs),
            huge_pages: self.huge_pages,
            scratch_bytes: 4096,
            ..options()
        }
    }
}

/// The disk that the command line gives, or the one that the case made.
pub(crate) fn disk_of(env: &Env, made: Result<Disk>) -> Result<Disk> {
    match Disk::given(env)? {
        Some(given) => Ok(given),
        None => made,
    }
}

/// Prints the totals of the loads.
pub(crate) fn tell(done: &[Done]) {
    for (queue, done) in done.iter().enumerate() {
        let Done { requests, errors, verified } = done;
        println!("queue {queue}: {requests} requests, {errors} errors, {verified} bytes verified");
    }
}

/// Loads every queue and verifies all data.
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

/// The function by which null_blk is polled.
const POLL: Place = Place { name: "poll", function: "null_blk:null_poll" };

/// Runs the load on a daemon that polls a disk with a volatile cache, and on one that may not.
fn polled_by_daemon(env: &Env, setup: Setup) -> Result<()> {
    for (iopoll, polls) in [("auto", true), ("on", true), ("off", false)] {
        let disk = disk_like(NullBlkOptions { cache_mib: 8, ..POLLED })?;
        println!("on {disk}, {setup:?}, --iopoll {iopoll}");
        let specs = setup.specs(env, &disk);
        let (options, more) = (setup.options(&specs), ["--iopoll", iopoll]);
        let (device, _daemon) = target::serve_by_daemon(env, &disk, &options, &more)?;
        let probe = Probe::start(POLL)?;
        let go_on = env.rounds(setup.requests);
        tell(&under_load(device, specs, |handles| handles.wait_for_progress(go_on))?);
        let hits = probe.hits()?;
        println!("null_blk was polled {hits} times");
        ensure!((hits > 0) == polls, "--iopoll {iopoll}: null_blk was polled {hits} times");
    }
    Ok(())
}

/// Most data bytes of a request in the load of [`bounded`].
const BOUNDED_REQUEST: usize = 256 << 10;
/// Largest charge of such a request: whole pages for each of its six segments.
const BOUNDED_CHARGE: u64 = BOUNDED_REQUEST as u64 + 12 * 4096;
/// Requests in flight on each queue: as many as fit into its 256 descriptors.
const BOUNDED_DEPTH: usize = 30;

/// Runs the load with a bound on the bytes in flight: first below the largest request, which may
/// exceed the bound if it is alone; then below the demand of the queues, which the same load
/// without the bound shows.
pub(crate) fn bounded(env: &Env, made: fn() -> Result<Disk>, setup: Setup) -> Result<()> {
    {
        let _below_a_request = module::Parameter::set("inflight_bytes_max", 256 << 10)?;
        run(env, made(), setup)?;
    }
    for bound in [512 << 10, 1 << 20] {
        // A refused request is counted for a moment, at most one per queue.
        let most = bound + u64::from(setup.queues) * BOUNDED_CHARGE;
        let free = peak(env, made(), setup).context("without a bound")?;
        ensure!(free > most, "{free} bytes in flight without a bound: too few for this case");
        let _bound = module::Parameter::set("inflight_bytes_max", bound)?;
        let peak = peak(env, made(), setup).with_context(|| format!("bound {bound}"))?;
        println!("{peak} bytes in flight with the bound {bound}, {free} without");
        ensure!(peak <= most, "{peak} bytes in flight, the bound is {bound}");
        ensure!(peak >= bound / 2, "{peak} bytes in flight: the bound {bound} was never reached");
    }
    Ok(())
}

/// The largest number of bytes in flight during a deep load.
fn peak(env: &Env, disk: Result<Disk>, setup: Setup) -> Result<u64> {
    let disk = disk?;
    let mut specs = setup.specs(env, &disk);
    for spec in &mut specs {
        spec.rooms = vec![BOUNDED_REQUEST; BOUNDED_DEPTH];
        // Few segments, each of which is charged as whole pages.
        spec.indirect = false;
    }
    let options = setup.options(&specs);
    let Target { device, .. } = target::serve_with(env, &disk, &options, &setup.kernel())?;
    let mut peak = 0;
    let done = under_load(device, specs, |handles| {
        // The debug kernel takes half a second for a look.
        for _ in 0..env.rounds(setup.requests / 3) {
            handles.wait_for_progress(1)?;
            peak = peak.max(visibility::inflight_bytes(&mut handles.session)?);
        }
        Ok(())
    })?;
    tell(&done);
    Ok(peak)
}

/// Runs the load with guest memory of huge pages, on each plane.
pub(crate) fn on_huge_pages(env: &Env, made: fn() -> Result<Disk>, setup: Setup) -> Result<()> {
    const RESERVED: &str = "/proc/sys/vm/nr_hugepages";
    let setup = Setup { huge_pages: true, ..setup };
    std::fs::write(RESERVED, "32").context(RESERVED)?;
    let outcome = [Plane::Direct, Plane::Kernel, Plane::Uring].into_iter().try_for_each(|plane| {
        run(&env.on(plane), made(), setup).with_context(|| format!("{plane:?}"))
    });
    std::fs::write(RESERVED, "0").context(RESERVED)?;
    outcome
}
