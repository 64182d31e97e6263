// SPDX-License-Identifier: Apache-2.0
//! Hostile rings: one queue gets malformed chains without end. Meanwhile the device serves another
//! queue and touches nothing outside of guest memory. Afterwards it serves the hostile queue again.

mod chains;

use crate::case::cases;
use crate::host::disks::usual;
use crate::host::env::{Env, Plane};
use crate::host::fixture::{Disk, FileSystem, image};
use crate::host::integrity::disk_of;
use crate::host::target::{self, Target, options};
use crate::host::visibility::fdinfo_of;
use anyhow::{Context, Result, anyhow, ensure};
use chains::Chains;
use driver::kernel::regions_of;
use driver::{Device, GuestMemory, Options, Queue, Request, RequestQueue};
use kit::rng::Rng;
use kit::set::Set::{Full, Gating, Plain, Uring};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};
use virtio_spec::blk::S_OK;
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

cases! { Host;
    "hostile-rings", Plain,
        "malformed chains on one queue while another one is served; the queue serves again after",
        |env| run(env, usual(), 10_000, false);
    "hostile-rings-raced", Gating,
        "malformed chains that a second thread changes while the device reads them",
        |env| run(env, usual(), 10_000, true);
    "hostile-rings-uring", Uring,
        "malformed chains that a second thread changes while the daemon's own threads read them",
        |env| run(&env.on(Plane::Uring), usual(), 4_000, true);
    "hostile-rings-file", Full,
        "malformed chains, raced, on an image",
        |env| run(env, image(FileSystem::Ext4, true), 100_000, true);
    "hostile-rings-million", Full,
        "a million malformed chains, raced",
        |env| run(env, usual(), 1_000_000, true);
}

/// Descriptors of the hostile queue.
const SIZE: u16 = 128;
/// Index of the hostile queue; queue 0 is the honest one.
const INDEX: usize = 1;
/// Guest-physical address of the region that the hostile queue may use.
const REGION: u64 = 1 << 32;
/// Size of the region.
const REGION_BYTES: u64 = 16 << 20;
/// Bytes at both ends of the region that the device does not know of.
const CANARY_BYTES: u64 = 1 << 20;
/// Content of these bytes.
const CANARY: u8 = 0xc5;
/// Time after which a batch may be stuck.
const BATCH_TIME: Duration = Duration::from_millis(50);
/// Times that the honest queue is served while a stuck queue does nothing.
const LOOKS: u32 = 3;
/// Batches that may be stuck, as by an index of the ring that a chain has overwritten: these, and one of four.
const STUCK_MAX: u64 = 16;
/// Batches between two requests on the honest queue.
const HONEST_EVERY: u64 = 64;

/// A device with an honest and a hostile queue.
struct Arena {
    device: Device,
    memory: Arc<GuestMemory>,
    queue: Queue,
    err: EventFd,
    faults: u64,
    used: u64,
    /// Number of batches that the device did not process to the end.
    stuck: u64,
    daemon: Option<crate::host::daemon::Daemon>,
}

/// Runs `count` malformed chains; with `race`, another thread changes them continuously.
pub(crate) fn run(env: &Env, disk: Result<Disk>, count: u64, race: bool) -> Result<()> {
    let disk = disk_of(env, disk)?;
    let count = env.rounds(count);
    println!("on {disk}: {count} chains, raced {race}");
    for event_idx in [false, true] {
        let mut arena = Arena::new(env, &disk, event_idx)?;
        arena.attack(env.seed(), count / 2, race)?;
        let Arena { used, faults, stuck, .. } = arena;
        println!(
            "event index {event_idx}: {used} used, {faults} ring faults, {stuck} stuck batches"
        );
        ensure!(arena.faults > 0 && arena.used > 0, "the device has seen nothing of it");
        arena.check_canaries()?;
        arena.serves_again().context("after the attack")?;
    }
    Ok(())
}

/// A device whose queues have one thread, as those of the kernel's device.
fn serve_by_one_thread(env: &Env, disk: &Disk, options: &Options) -> Result<Target> {
    if env.plane == Plane::Direct {
        return target::serve(env, disk, options);
    }
    let (device, daemon) = target::serve_by_daemon(env, disk, options, &["--threads", "1"])?;
    Ok(Target { device, daemon: Some(daemon) })
}

impl Arena {
    fn new(env: &Env, disk: &Disk, event_idx: bool) -> Result<Self> {
        let regions = vec![(0, 16 << 20), (REGION, REGION_BYTES)];
        let options =
            Options { num_queues: 2, event_idx, regions, scratch_bytes: 2 << 20, ..options() };
        let Target { mut device, daemon } = serve_by_one_thread(env, disk, &options)?;
        let memory = device.memory().only_region(1);
        let edges = [REGION, REGION + REGION_BYTES - CANARY_BYTES];
        for gpa in edges {
            memory.write(gpa, &vec![CANARY; CANARY_BYTES as usize]);
        }
        memory.alloc(CANARY_BYTES as usize, 4096);
        let queue = Queue::new(&memory, SIZE, false, event_idx)?;
        device.session().stop_queue(INDEX)?;
        let regions = device.memory().clone();
        if let Some(kernel) = device.session().kernel() {
            let mut table = regions_of(&regions);
            table[1].gpa += CANARY_BYTES;
            table[1].user += CANARY_BYTES;
            table[1].size -= 2 * CANARY_BYTES;
            kernel.device().set_mem_table(&table)?;
        }
        let err = EventFd::new(EFD_NONBLOCK)?;
        Ok(Self { device, memory, queue, err, faults: 0, used: 0, stuck: 0, daemon })
    }

    fn attack(&mut self, seed: u64, count: u64, race: bool) -> Result<()> {
        let mut rng = Rng::new(seed);
        let chains = Chains::new(&self.memory, &mut self.queue);
        let stop = Arc::new(AtomicBool::new(false));
        let racer = race.then(|| {
            let (chains, stop, mut rng) = (chains.clone(), stop.clone(), Rng::new(seed ^ 0xace));
            std::thread::spawn(move || {
                while !stop.load(Relaxed) {
                    (0..16).for_each(|_| chains.scribble(&mut rng));
                    std::thread::yield_now();
                }
            })
        });
        let (mut sent, mut batch) = (0, 0);
        let mut outcome = Ok(());
        while sent < count && outcome.is_ok() {
            let heads = 1 + rng.below(u64::from(SIZE) / 3) as u16;
            let seen = self.batch(&mut rng, &chains, heads, batch);
            match seen.with_context(|| format!("batch {batch}, seed {seed}")) {
                Ok(seen) => sent += seen,
                Err(why) => outcome = Err(why),
            }
            batch += 1;
            if outcome.is_ok() && self.stuck > STUCK_MAX + batch / 4 {
                outcome = Err(anyhow!("{} of {batch} batches were stuck", self.stuck));
            }
        }
        stop.store(true, Relaxed);
        racer.map_or(Ok(()), |racer| racer.join()).expect("the racer does not panic");
        outcome
    }

    /// Runs one batch of chains; returns a lower bound of the chains that the device has seen. A queue that
    /// does not process them can be stopped, and the honest one goes on.
    fn batch(&mut self, rng: &mut Rng, chains: &Chains, heads: u16, batch: u64) -> Result<u64> {
        let faults = self.faults;
        self.restart(batch)?;
        chains.fill(rng, heads);
        self.queue.kick();
        let is_stuck = self.wait_for_end(heads)?;
        // The chains can make the device write anything into the ring.
        let used = u64::from(self.queue.split().used_idx().min(heads));
        self.used += used;
        if is_stuck {
            self.stuck += 1;
            self.device.session().stop_queue(INDEX).context("stop of a stuck queue")?;
            self.honest().context("the honest queue beside a stuck one")?;
        }
        if batch.is_multiple_of(HONEST_EVERY) {
            self.honest().context("the honest queue")?;
        }
        Ok(used + self.faults - faults)
    }

    /// Waits until a batch has ended, by a fault of the ring or by its last used entry. Returns whether it is stuck
    /// before that.
    fn wait_for_end(&mut self, heads: u16) -> Result<bool> {
        let (end, mut look) = (Instant::now() + target::LIMIT, Instant::now() + BATCH_TIME);
        loop {
            if self.err.read().is_ok() {
                self.faults += 1;
                return Ok(false);
            }
            if self.queue.split().used_idx() >= heads {
                return Ok(false);
            }
            if Instant::now() > look {
                if self.is_stuck().context("a look at a batch that takes long")? {
                    return Ok(true);
                }
                ensure!(Instant::now() < end, "a batch does not end: {}", self.position()?);
                look = Instant::now() + BATCH_TIME;
            }
            std::thread::yield_now();
        }
    }

    /// Returns whether the hostile queue has nothing in flight, and stands still while its thread, which is that of
    /// the honest queue, serves that. A thread that waits for a CPU serves neither.
    fn is_stuck(&mut self) -> Result<bool> {
        let before = self.position()?;
        for _ in 0..LOOKS {
            self.honest().context("the honest queue beside a late one")?;
        }
        Ok(before.contains(" inflight=0 ") && self.position()? == before)
    }

    /// The used index of the hostile queue, and its requests in flight. The module also counts all that it does.
    fn position(&mut self) -> Result<String> {
        let used = self.queue.split().used_idx();
        if let Some(daemon) = &self.daemon {
            // The honest queue has none.
            let inflight = daemon.total("queue_inflight_requests")?;
            return Ok(format!("used={used} inflight={inflight} "));
        }
        let text = fdinfo_of(self.device.session())?;
        let name = format!("queue{INDEX}:");
        let counters = text.lines().find(|line| line.starts_with(&name));
        Ok(format!("used={used} {}", counters.with_context(|| format!("no {name} in: {text}"))?))
    }

    /// Stops the hostile queue, empties its ring, and starts it again.
    fn restart(&mut self, batch: u64) -> Result<()> {
        let session = self.device.session();
        session.stop_queue(INDEX).context("stop")?;
        self.queue.split().reset();
        // The first batch sets up the whole queue, later ones only the state that a stop changes.
        if batch == 0 || session.kernel().is_none() {
            session.set_up_queue(INDEX, &self.queue)?;
        } else {
            session.set_vring_base(INDEX, 0)?;
        }
        session.replace_err(INDEX, &self.err)?;
        session.enable(INDEX, true).context("start")
    }

    /// Runs requests on the honest queue.
    fn honest(&mut self) -> Result<()> {
        let layout = self.device.layout();
        for request in [Request::flush(), Request::read(0, 4096)] {
            let status = self.device.queue(0).execute(&request, &layout)?.status;
            ensure!(status == Some(S_OK), "status {status:?}");
        }
        Ok(())
    }

    fn check_canaries(&self) -> Result<()> {
        if self.daemon.is_some() {
            return Ok(()); // the daemon knows all memory
        }
        for gpa in [REGION, REGION + REGION_BYTES - CANARY_BYTES] {
            let area = self.memory.area(gpa, CANARY_BYTES as usize);
            let bytes = area.to_vec(0, area.len());
            let changed = bytes.iter().position(|&byte| byte != CANARY);
            ensure!(changed.is_none(), "memory outside of the table was written: {changed:?}");
        }
        Ok(())
    }

    /// Checks that the attacked queue, and a new one, serve honest requests.
    fn serves_again(&mut self) -> Result<()> {
        self.restart(0)?;
        let memory = self.device.memory().only_region(0);
        let event_idx = self.device.features()
            & virtio_spec::features::bit(virtio_spec::features::F_EVENT_IDX)
            != 0;
        let queue = Queue::new(&memory, SIZE, false, event_idx)?;
        let mut fresh = RequestQueue::new(queue, 1 << 20, target::LIMIT);
        let session = self.device.session();
        session.stop_queue(INDEX)?;
        session.set_up_queue(INDEX, fresh.queue())?;
        session.enable(INDEX, true)?;
        let data = Rng::new(1).bytes(64 << 10);
        let layout = self.device.layout();
        let written = fresh.execute(&Request::write(0, &data), &layout)?;
        ensure!(written.status == Some(S_OK), "a write: {:?}", written.status);
        let read = fresh.execute(&Request::read(0, data.len()), &layout)?;
        ensure!(read.status == Some(S_OK) && read.data == data, "a read brings other bytes");
        self.honest()
    }
}
