// SPDX-License-Identifier: Apache-2.0
//! The load: one client thread a queue, each keeping `depth` requests in flight.

use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail};
use clap::ValueEnum;
use driver::{Area, Device, Options, Queue, Segment, Session};
use hdrhistogram::Histogram;
use serde::Serialize;
use std::sync::atomic::Ordering;
use virtio_spec::blk::{F_RO, S_OK, SECTOR_BYTES, T_IN, T_OUT};
use virtio_spec::features::{F_EVENT_IDX, F_INDIRECT_DESC, bit};

use crate::cpu;

/// Header, status and padding of one request: a cache line of its own.
const SLOT_BYTES: usize = 64;
const STATUS_OFFSET: usize = 16;
/// Empty polls between two looks at the clock.
const POLLS_PER_CLOCK: u32 = 1 << 14;
/// A server that returns nothing for this long has failed.
const SILENCE_LIMIT: Duration = Duration::from_secs(10);
/// Latencies are kept to three digits up to this bound.
const LATENCY_NS_MAX: u64 = 60_000_000_000;

/// What the client does when the used ring is empty.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum Mode {
    /// Arm calls and sleep on the call eventfd.
    Event,
    /// Poll the used ring, calls suppressed.
    Spin,
}

/// Random reads or random writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum Op {
    /// Random reads.
    Randread,
    /// Random writes.
    Randwrite,
}

/// How requests lie in the ring.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum Chains {
    /// Indirect tables where negotiated, as Linux guests do.
    Auto,
    /// Descriptors in the ring.
    Direct,
}

/// One point of measurement.
#[derive(Clone, Debug, Serialize)]
pub struct Load {
    /// Reads or writes.
    pub op: Op,
    /// Bytes of each request.
    pub block_bytes: u32,
    /// Requests in flight on each queue.
    pub depth: u16,
    /// What the client does when it has to wait.
    pub mode: Mode,
    /// Queues, each with a client thread.
    pub queues: u16,
    /// Descriptors of each queue.
    pub queue_size: u16,
    /// Packed rings.
    pub packed: bool,
    /// Direct or indirect chains.
    pub chains: Chains,
    /// CPUs of the client threads, taken in turn; none: not pinned.
    pub cpus: Vec<usize>,
}

/// What a run gave.
#[derive(Clone, Debug)]
pub struct Outcome {
    /// Completed requests.
    pub ios: u64,
    /// From the first submission to the last completion.
    pub elapsed: Duration,
    /// Latency of each request.
    pub latency_ns: Histogram<u64>,
    /// Time that the client's threads were ready to run and something else had their CPU.
    pub waited: Duration,
}

impl Outcome {
    /// Requests a second.
    pub fn iops(&self) -> f64 {
        self.ios as f64 / self.elapsed.as_secs_f64()
    }
}

/// A connected client; the server sees one front-end.
pub struct Client {
    workers: Vec<Worker>,
    // Kept open: the daemon stops the queues when the connection ends.
    _session: Session,
}

impl Client {
    /// Connects and lays all requests out.
    pub fn connect(socket: &str, load: &Load) -> Result<Self> {
        let slot_bytes = SLOT_BYTES + load.block_bytes.next_multiple_of(4096) as usize;
        // Slots, then ring and indirect tables (64 bytes a descriptor each, amply).
        let queue_bytes =
            usize::from(load.depth) * slot_bytes + usize::from(load.queue_size) * 128 + (64 << 10);
        let memory_bytes = (usize::from(load.queues) * queue_bytes).next_multiple_of(2 << 20);
        let options = Options {
            num_queues: load.queues,
            queue_size: load.queue_size,
            packed: load.packed,
            indirect: load.chains == Chains::Auto,
            regions: vec![(0, memory_bytes as u64)],
            scratch_bytes: 0,
            ..Options::default()
        };
        let mut device = Device::connect(socket, &options)
            .with_context(|| format!("cannot set up a device on {socket}"))?;
        let capacity_bytes = device.capacity_sectors()? * SECTOR_BYTES;
        let features = device.features();
        if load.op == Op::Randwrite && features & bit(F_RO) != 0 {
            bail!("{socket} serves a read-only disk: writes cannot be measured");
        }
        let blocks = capacity_bytes / u64::from(load.block_bytes);
        if blocks == 0 {
            bail!("{socket} serves {capacity_bytes} bytes, less than one block");
        }
        let (session, queues) = device.into_parts();
        let workers = queues
            .into_iter()
            .enumerate()
            .map(|(i, queue)| Worker::new(queue.into_queue(), load, features, blocks, i as u64))
            .collect::<Result<_>>()?;
        Ok(Self { workers, _session: session })
    }

    /// Runs all queues for a time, each on a thread, and adds up.
    pub fn run(&mut self, duration: Duration, cpus: &[usize]) -> Result<Outcome> {
        let (sender, results) = mpsc::channel();
        let count = self.workers.len();
        for (i, mut worker) in self.workers.drain(..).enumerate() {
            let sender = sender.clone();
            let cpu = (!cpus.is_empty()).then(|| cpus[i % cpus.len()]);
            thread::spawn(move || {
                let outcome = cpu::pin_this_thread(cpu).and_then(|()| worker.run(duration));
                // The receiver is gone only after a time-out, when nobody wants the result.
                let _ = sender.send((worker, outcome));
            });
        }
        let mut total: Option<Outcome> = None;
        for _ in 0..count {
            let (worker, outcome) = results
                .recv_timeout(duration + SILENCE_LIMIT)
                .map_err(|_| anyhow!("the server stopped returning requests"))?;
            self.workers.push(worker);
            let outcome = outcome?;
            match &mut total {
                None => total = Some(outcome),
                Some(total) => {
                    total.ios += outcome.ios;
                    total.waited += outcome.waited;
                    total.elapsed = total.elapsed.max(outcome.elapsed);
                    total.latency_ns.add(&outcome.latency_ns)?;
                }
            }
        }
        self.workers.sort_by_key(|worker| worker.index);
        total.context("no queues")
    }
}

struct Worker {
    index: u64,
    queue: Queue,
    slots: Area,
    data: u64,
    data_stride: u64,
    /// Slot of each chain id in flight.
    slot_of: Vec<u16>,
    started: Vec<Instant>,
    load: Load,
    indirect: bool,
    event_idx: bool,
    blocks: u64,
    random: u64,
}

impl Worker {
    fn new(queue: Queue, load: &Load, features: u64, blocks: u64, index: u64) -> Result<Self> {
        let indirect = features & bit(F_INDIRECT_DESC) != 0;
        let descriptors = if indirect { 1 } else { 3 };
        if u32::from(load.depth) * descriptors > u32::from(load.queue_size) {
            bail!("depth {} does not fit queue size {}", load.depth, load.queue_size);
        }
        let depth = usize::from(load.depth);
        let memory = queue.memory().clone();
        let data_stride = u64::from(load.block_bytes.next_multiple_of(4096));
        let data = memory.alloc_area(depth * data_stride as usize, 4096);
        // Touch every page and give writes something that does not compress.
        let pattern: Vec<u8> = (0..data.len()).map(|i| (i * 131 / 8) as u8).collect();
        data.write(0, &pattern);
        let slots = memory.alloc_area(depth * SLOT_BYTES, SLOT_BYTES);
        let kind = if load.op == Op::Randread { T_IN } else { T_OUT };
        for slot in 0..depth {
            slots.store_u64(slot * SLOT_BYTES, kind.into(), Ordering::Relaxed);
        }
        Ok(Self {
            index,
            slots,
            data: data.gpa(),
            data_stride,
            slot_of: vec![0; load.queue_size.into()],
            started: vec![Instant::now(); depth],
            load: load.clone(),
            indirect,
            event_idx: features & bit(F_EVENT_IDX) != 0,
            blocks,
            random: 0x9e37_79b9_7f4a_7c15 ^ (index + 1).wrapping_mul(0xbf58_476d_1ce4_e5b9),
            queue,
        })
    }

    #[inline]
    fn next_sector(&mut self) -> u64 {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        let block = (u128::from(self.random) * u128::from(self.blocks)) >> 64;
        block as u64 * (u64::from(self.load.block_bytes) / SECTOR_BYTES)
    }

    #[inline]
    fn add(&mut self, slot: u16, now: Instant) -> Result<()> {
        let at = usize::from(slot) * SLOT_BYTES;
        let sector = self.next_sector();
        self.slots.store_u64(at + 8, sector, Ordering::Relaxed);
        self.slots.store_u8(at + STATUS_OFFSET, 0xff, Ordering::Relaxed);
        let header = self.slots.gpa() + at as u64;
        let segments = [
            Segment::readable(header, 16),
            Segment {
                gpa: self.data + u64::from(slot) * self.data_stride,
                len: self.load.block_bytes,
                writable: self.load.op == Op::Randread,
            },
            Segment::writable(header + STATUS_OFFSET as u64, 1),
        ];
        let id = if self.indirect {
            self.queue.add_indirect(&segments)?
        } else {
            self.queue.add(&segments)?
        };
        self.slot_of[usize::from(id)] = slot;
        self.started[usize::from(slot)] = now;
        Ok(())
    }

    /// Keeps `depth` requests in flight until the time is over, then takes the last ones back.
    fn run(&mut self, duration: Duration) -> Result<Outcome> {
        let mut latency_ns = Histogram::new_with_bounds(1, LATENCY_NS_MAX, 3)?;
        let times = cpu::thread_times()?;
        let begin = Instant::now();
        let (mut now, mut last, mut ios, mut polls) = (begin, begin, 0, 0);
        self.quiet_calls();
        for slot in 0..self.load.depth {
            self.add(slot, now)?;
        }
        self.show();
        while self.queue.in_flight() > 0 {
            let reaped = self.reap(&mut now, begin + duration, &mut latency_ns)?;
            if reaped > 0 {
                (ios, last, polls) = (ios + reaped, now, 0);
                self.show();
            } else if self.load.mode == Mode::Spin {
                std::hint::spin_loop();
                polls += 1;
                if polls % POLLS_PER_CLOCK == 0 && last.elapsed() > SILENCE_LIMIT {
                    bail!("the server returned nothing for {SILENCE_LIMIT:?}");
                }
            } else if self.queue.arm_calls() {
                self.queue.wait_call()?;
                self.quiet_calls();
            }
        }
        let waited = cpu::thread_times()?.since(&times).waited;
        Ok(Outcome { ios, elapsed: now - begin, latency_ns, waited })
    }

    /// Takes all used chains and adds as many new ones while there is time left.
    #[inline]
    fn reap(
        &mut self,
        now: &mut Instant,
        end: Instant,
        latency: &mut Histogram<u64>,
    ) -> Result<u64> {
        let mut reaped = 0;
        while let Some(used) = self.queue.take_used()? {
            if reaped == 0 {
                *now = Instant::now();
            }
            reaped += 1;
            let slot = self.slot_of[usize::from(used.id)];
            let at = usize::from(slot) * SLOT_BYTES + STATUS_OFFSET;
            let status = self.slots.load_u8(at, Ordering::Acquire);
            if status != S_OK {
                bail!("a request ended with status {status}");
            }
            latency.saturating_record((*now - self.started[usize::from(slot)]).as_nanos() as u64);
            if *now < end {
                self.add(slot, *now)?;
            }
        }
        Ok(reaped)
    }

    #[inline]
    fn show(&mut self) {
        self.queue.publish();
        self.queue.kick_if_asked();
    }

    /// A spinning client wants no calls at all; a sleeping one none until it arms them again,
    /// which EVENT_IDX on a split ring gives by itself.
    fn quiet_calls(&mut self) {
        if self.load.mode == Mode::Spin || !self.event_idx || self.load.packed {
            self.queue.suppress_calls();
        }
    }
}
