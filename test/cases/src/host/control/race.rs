// SPDX-License-Identifier: Apache-2.0
//! Two threads repeat one call that pauses, stops or changes a queue, beside a driver that kicks
//! continuously and keeps requests in flight.

use super::{STEP, kernel};
use crate::case::cases;
use crate::host::env::Env;
use crate::host::fixture::{Disk, NullBlkOptions, dm_linear_pair, null_blk};
use crate::host::integrity::tell;
use crate::host::load::{Handles, Spec, memory_for, under_load};
use crate::host::target::{LIMIT, need_module, options};
use anyhow::{Context, Result, anyhow, ensure};
use driver::kernel::abi::{self, BlkOptions, BlkShare, SharedDebt, SharedLimits, VringAddr};
use driver::kernel::{KernelDevice, KernelOptions, Workers, errno_of, regions_of};
use driver::{Device, GuestMemory, Options};
use kit::rng::Rng;
use kit::set::Set::{Full, Gating};
use std::fs::File;
use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::atomic::{AtomicBool, AtomicU64};
use std::time::{Duration, Instant};
use virtio_spec::features::{VHOST_F_LOG_ALL, bit};
use vmm_sys_util::eventfd::EventFd;

/// Seconds for which a call is repeated, with event index and without.
const RACE_SECONDS: u64 = 3;
/// Seconds of the long cases.
const RACE_LONG_SECONDS: u64 = 60;

cases! { Host;
    "race-memory-table", Gating,
        "two threads set the memory table without end beside kicks and requests",
        |env| race(env, Call::MemoryTable, RACE_SECONDS);
    "race-options", Gating,
        "two threads change options that pause the queues, beside kicks and requests",
        |env| race(env, Call::Options, RACE_SECONDS);
    "race-backend", Gating,
        "two threads swap the backend without end beside kicks and requests",
        |env| race(env, Call::Backend, RACE_SECONDS);
    "race-queue", Gating,
        "two threads stop and start queues without end beside kicks and requests",
        |env| race(env, Call::Queue, RACE_SECONDS);
    "race-vring", Gating,
        "two threads change kicks, calls, busy-loop time and addresses beside kicks and requests",
        |env| race(env, Call::Vring, RACE_SECONDS);
    "race-log", Gating,
        "two threads switch the dirty log on and off beside kicks and requests",
        |env| race(env, Call::Log, RACE_SECONDS);
    "race-limits", Gating,
        "two threads change between shared limits and own ones beside kicks and requests",
        |env| race(env, Call::Limits, RACE_SECONDS);
    "race-memory-table-long", Full,
        "race-memory-table for a minute each",
        |env| race(env, Call::MemoryTable, RACE_LONG_SECONDS);
    "race-options-long", Full,
        "race-options for a minute each",
        |env| race(env, Call::Options, RACE_LONG_SECONDS);
    "race-backend-long", Full,
        "race-backend for a minute each",
        |env| race(env, Call::Backend, RACE_LONG_SECONDS);
    "race-queue-long", Full,
        "race-queue for a minute each",
        |env| race(env, Call::Queue, RACE_LONG_SECONDS);
    "race-vring-long", Full,
        "race-vring for a minute each",
        |env| race(env, Call::Vring, RACE_LONG_SECONDS);
    "race-log-long", Full,
        "race-log for a minute each",
        |env| race(env, Call::Log, RACE_LONG_SECONDS);
    "race-limits-long", Full,
        "race-limits for a minute each",
        |env| race(env, Call::Limits, RACE_LONG_SECONDS);
}

/// Number of queues, each with a worker.
const QUEUES: u16 = 2;
/// Sectors of each queue's part of the disk.
const PART: u64 = 512;
/// Bytes of the largest request: small requests keep the workers in the loop.
const REQUEST_BYTES: usize = 4096;
/// Number of threads that make the call.
const CALLERS: u64 = 2;
/// Least calls of each of them beside the kicks.
const CALLS_MIN: u64 = 10;
/// Calls of each of them afterwards.
const CALLS_QUIET: u64 = 50;

/// The repeated call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Call {
    /// `VHOST_SET_MEM_TABLE` with an unchanged table.
    MemoryTable,
    /// `VHOST_BLK_SET_OPTIONS` with other flags that pause the queues.
    Options,
    /// `VHOST_BLK_SET_BACKEND` with another name of the same disk.
    Backend,
    /// `VHOST_BLK_SET_QUEUE`: stop and start.
    Queue,
    /// `VHOST_SET_VRING_*`.
    Vring,
    /// `VHOST_F_LOG_ALL`, the used ring's log flag and the log itself.
    Log,
    /// `VHOST_BLK_SHARE_LIMITS`, and a change of the shared limits.
    Limits,
}

/// Repeats `call` for some seconds, with event index and without.
pub(crate) fn race(env: &Env, call: Call, seconds: u64) -> Result<()> {
    need_module()?;
    let (disk, _) = null_blk(NullBlkOptions::USUAL)?;
    let disks: Vec<Disk> =
        if call == Call::Backend { dm_linear_pair(disk)?.into() } else { vec![disk] };
    for event_idx in [false, true] {
        race_on(env, call, seconds, &disks, event_idx)
            .with_context(|| format!("{call:?}, event index {event_idx}"))?;
    }
    Ok(())
}

fn race_on(env: &Env, call: Call, seconds: u64, disks: &[Disk], event_idx: bool) -> Result<()> {
    let specs: Vec<_> = (0..u64::from(QUEUES))
        .map(|n| {
            Spec::new(n * PART..(n + 1) * PART, disks[0].unit(), REQUEST_BYTES, env.seed() + n)
        })
        .collect();
    let options = Options {
        num_queues: QUEUES,
        event_idx,
        regions: memory_for(&specs),
        scratch_bytes: 4096,
        ..options()
    };
    let workers = Workers::Extra(QUEUES.into());
    let kernel_options = KernelOptions { workers, ..KernelOptions::default() };
    let device = Device::open_kernel(disks[0].open()?, &options, &kernel_options)?;
    let limit = Duration::from_secs(env.rounds(seconds));
    let done = under_load(device, specs, |handles| {
        handles.wait_for_progress(STEP).context("before the calls")?;
        let callers = callers(env, call, disks, handles)?;
        let calls = beside_kicks(&handles.kicks, callers, limit)?;
        println!("{call:?}, event index {event_idx}: {calls:?} calls");
        ensure!(calls.iter().all(|&count| count >= CALLS_MIN), "too few calls for a race");
        handles.wait_for_progress(STEP).context("after the calls")
    })?;
    tell(&done);
    Ok(())
}

fn callers(env: &Env, call: Call, disks: &[Disk], handles: &mut Handles) -> Result<Vec<Caller>> {
    let memory = handles.memory.clone();
    let log = GuestMemory::new(&[(0, 1 << 20)])?;
    let features = handles.session.features();
    (0..CALLERS)
        .map(|n| {
            let device = kernel(handles)?.device().try_clone()?;
            device.set_log_base(log.regions()[0].user_address())?;
            Ok(Caller {
                call,
                device,
                backends: disks.iter().map(Disk::open).collect::<Result<_>>()?,
                memory: memory.clone(),
                log: log.clone(),
                features,
                addresses: handles.addresses.clone(),
                kicks: clones(&handles.kicks)?,
                calls: clones(&handles.calls)?,
                // Never freed: after an error the device may go on with it.
                limits: Box::leak(Box::default()),
                debt: Box::leak(Box::default()),
                rng: Rng::new(env.seed() ^ (n + 1)),
                count: Arc::default(),
            })
        })
        .collect()
}

fn clones(events: &[EventFd]) -> Result<Vec<EventFd>> {
    Ok(events.iter().map(EventFd::try_clone).collect::<std::io::Result<_>>()?)
}

/// Runs all callers for `limit`, and until each has made [`CALLS_MIN`] calls, while a thread kicks all queues, and then
/// for some calls without that thread: a queue that misses a kick by one of these stays silent. Returns the number of
/// calls of each caller beside the kicks.
fn beside_kicks(kicks: &[EventFd], callers: Vec<Caller>, limit: Duration) -> Result<Vec<u64>> {
    let (stop, is_quiet) = (AtomicBool::new(false), AtomicBool::new(false));
    let (stop, is_quiet) = (&stop, &is_quiet);
    std::thread::scope(|scope| {
        let kicker = scope.spawn(|| -> std::io::Result<()> {
            while !stop.load(Relaxed) {
                kicks.iter().try_for_each(|kick| kick.write(1))?;
            }
            Ok(())
        });
        let counts: Vec<_> = callers.iter().map(|caller| Arc::clone(&caller.count)).collect();
        let callers: Vec<_> =
            callers.into_iter().map(|caller| scope.spawn(move || caller.run(is_quiet))).collect();
        std::thread::sleep(limit);
        // Slow machines need more time for this number, up to the limit of each wait.
        let started = Instant::now();
        let are_few = || counts.iter().any(|count| count.load(Relaxed) < CALLS_MIN);
        while are_few() && started.elapsed() < LIMIT {
            std::thread::sleep(Duration::from_millis(10));
        }
        stop.store(true, Relaxed);
        let kicked = kicker.join();
        is_quiet.store(true, Relaxed);
        let ended: Vec<_> = callers.into_iter().map(|caller| caller.join()).collect();
        kicked.map_err(|_| anyhow!("the kicking thread panicked"))??;
        ended.into_iter().map(|count| count.map_err(|_| anyhow!("a caller panicked"))?).collect()
    })
}

/// A thread that makes the call.
struct Caller {
    call: Call,
    device: KernelDevice,
    backends: Vec<File>,
    memory: Arc<GuestMemory>,
    log: Arc<GuestMemory>,
    features: u64,
    addresses: Vec<[u64; 3]>,
    kicks: Vec<EventFd>,
    calls: Vec<EventFd>,
    limits: &'static SharedLimits,
    debt: &'static SharedDebt,
    rng: Rng,
    /// Calls beside the kicks.
    count: Arc<AtomicU64>,
}

impl Caller {
    /// Makes calls until no thread kicks needlessly, and some more. Returns the number of the former.
    fn run(mut self, is_quiet: &AtomicBool) -> Result<u64> {
        while !is_quiet.load(Relaxed) {
            self.once().with_context(|| format!("call {:?}", self.count))?;
            self.count.fetch_add(1, Relaxed);
        }
        for n in 0..CALLS_QUIET {
            self.once().with_context(|| format!("call {n} without needless kicks"))?;
        }
        if self.call == Call::Limits {
            self.device.share_limits(BlkShare::default())?;
        }
        Ok(self.count.load(Relaxed))
    }

    fn once(&mut self) -> Result<()> {
        let queue = self.rng.below(QUEUES.into()) as u32;
        match self.call {
            Call::MemoryTable => self.device.set_mem_table(&regions_of(&self.memory))?,
            Call::Options => {
                let flags = *self.rng.pick(&[0, abi::OPT_IOPOLL, abi::OPT_PIN_MEMORY]);
                let coalesce = *self.rng.pick(&[0, abi::OPT_COALESCE, abi::OPT_COALESCE_AUTO]);
                self.device.set_options(BlkOptions::with_flags(flags | coalesce))?;
            }
            Call::Backend => {
                let backend = self.rng.pick(&self.backends).as_raw_fd();
                self.device.set_backend(0, Some(backend))?;
            }
            Call::Queue => {
                self.device.set_queue(queue, false)?;
                self.device.set_queue(queue, true)?;
            }
            Call::Vring => self.vring(queue)?,
            Call::Log => self.log(queue)?,
            Call::Limits => {
                let iops = *self.rng.pick(&[0, 1, 1000, 100_000]);
                self.limits.set(iops, 0, self.rng.below(1 << 30));
                self.debt.forgive();
                let share = *self.rng.pick(&[BlkShare::default(), self.limits.share(self.debt)]);
                self.device.share_limits(share)?;
            }
        }
        Ok(())
    }

    /// Makes one of the changes that a VMM can make, or at least request, on a running queue.
    fn vring(&mut self, queue: u32) -> Result<()> {
        let (kick, call) = (&self.kicks[queue as usize], &self.calls[queue as usize]);
        match self.rng.below(6) {
            0 => {
                self.device.set_kick(queue, None)?;
                self.device.set_kick(queue, Some(kick.as_raw_fd()))?;
            }
            1 => {
                self.device.set_call(queue, None)?;
                self.device.set_call(queue, Some(call.as_raw_fd()))?;
                // A VMM passes on calls that came during the change.
                call.write(1)?;
            }
            2 => self.device.set_busyloop(queue, *self.rng.pick(&[0, 20, 200]))?,
            3 => self.set_addresses(queue, false)?,
            4 => {
                self.device.set_err(queue, Some(call.as_raw_fd()))?;
                self.device.set_err(queue, None)?;
            }
            _ => {
                for outcome in
                    [self.device.set_vring_num(queue, 8), self.device.set_vring_base(queue, 0)]
                {
                    let errno = outcome.as_ref().err().and_then(errno_of);
                    ensure!(errno == Some(libc::EBUSY), "of a running queue: {outcome:?}");
                }
            }
        }
        Ok(())
    }

    fn log(&mut self, queue: u32) -> Result<()> {
        let all = if self.rng.one_in(2) { bit(VHOST_F_LOG_ALL) } else { 0 };
        self.device.set_log_base(self.log.regions()[0].user_address())?;
        self.device.set_features(self.features | all)?;
        let log = self.rng.one_in(2);
        self.set_addresses(queue, log)
    }

    /// Sets the queue's current addresses, with or without logging of its used ring.
    fn set_addresses(&self, queue: u32, log: bool) -> Result<()> {
        let [desc, avail, used] = self.addresses[queue as usize];
        let at = |gpa| self.memory.user_address(gpa);
        let (desc, avail) = (at(desc), at(avail));
        let flags = log.into();
        let addr = VringAddr { index: queue, flags, desc, used: at(used), avail, log: used };
        Ok(self.device.set_vring_addr(addr)?)
    }
}
