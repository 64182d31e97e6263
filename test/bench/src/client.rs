// SPDX-License-Identifier: Apache-2.0
//! The client: one thread a queue, behind any of the transports.

use std::any::Any;
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result, anyhow, bail};
use driver::{Device, Options, Queue};
use virtio_spec::blk::{F_FLUSH, F_RO, SECTOR_BYTES};
use virtio_spec::features::bit;

use crate::cpu;
use crate::load::{Chains, Load, Op, Outcome};
use crate::vhost_scsi::ScsiSession;
use crate::wire::{Wire, memory_bytes};
use crate::worker::{Notes, SILENCE_LIMIT, Until, Worker};

/// A run of counted requests may take this long (under emulation).
const COUNTED_RUN_LIMIT: Duration = Duration::from_secs(600);

/// A connected client; the server sees one front-end.
pub struct Client {
    workers: Vec<Worker>,
    /// Queues without requests.
    idle: Vec<Worker>,
    // Kept open: the server stops the queues when the connection ends.
    _link: Box<dyn Any>,
}

impl Client {
    /// Connects and lays all requests out.
    pub fn connect(socket: &str, load: &Load) -> Result<Self> {
        let options = Options {
            num_queues: load.queues,
            queue_size: load.queue_size,
            packed: load.packed,
            indirect: load.chains == Chains::Auto,
            regions: vec![(0, memory_bytes(load, load.queues, Wire::Blk))],
            scratch_bytes: 0,
            ..Options::default()
        };
        let mut device = Device::connect(socket, &options)
            .with_context(|| format!("cannot set up a device on {socket}"))?;
        let capacity_bytes = device.capacity_sectors()? * SECTOR_BYTES;
        let features = device.features();
        if load.op.writes() && features & bit(F_RO) != 0 {
            bail!("{socket} serves a read-only disk: writes cannot be measured");
        }
        if load.op == Op::Writeflush && features & bit(F_FLUSH) == 0 {
            bail!("{socket} serves a disk without FLUSH: {} cannot be measured", load.op);
        }
        let blocks = capacity_bytes / u64::from(load.block_bytes);
        if blocks == 0 {
            bail!("{socket} serves {capacity_bytes} bytes, less than one block");
        }
        let (session, queues) = device.into_parts();
        let queues = queues.into_iter().map(|queue| queue.into_queue());
        let workers = workers(queues, load, Wire::Blk, features, blocks)?;
        Ok(Self { workers, idle: Vec::new(), _link: Box::new(session) })
    }

    /// Sets up `/dev/vhost-scsi` for the target with this name and a disk of this size.
    pub fn connect_scsi(wwpn: &str, disk_bytes: u64, load: &Load) -> Result<Self> {
        let (session, queues) = ScsiSession::open(wwpn, load)
            .with_context(|| format!("cannot set up a vhost-scsi device for {wwpn}"))?;
        let features = session.features();
        let blocks = disk_bytes / u64::from(load.block_bytes);
        let workers = workers(queues, load, Wire::Scsi, features, blocks)?;
        Ok(Self { workers, idle: Vec::new(), _link: Box::new(session) })
    }

    /// Leaves all queues but the first `busy` ones without requests from now on.
    pub fn keep_busy(&mut self, busy: usize) {
        self.idle.extend(self.workers.drain(busy.min(self.workers.len())..));
    }

    /// Runs all queues for a time, each on a thread, and adds up.
    pub fn run(&mut self, duration: Duration, cpus: &[usize]) -> Result<Outcome> {
        self.run_until(Until::Time(duration), cpus)
    }

    /// Runs all queues; gives their notes as well.
    pub(crate) fn run_noted(
        &mut self,
        until: Until,
        cpus: &[usize],
    ) -> Result<(Outcome, Vec<Notes>)> {
        self.workers.iter_mut().for_each(|worker| worker.notes = Some(Notes::default()));
        let outcome = self.run_until(until, cpus);
        let notes = self.workers.iter_mut().filter_map(|worker| worker.notes.take()).collect();
        Ok((outcome?, notes))
    }

    /// Runs all queues, each on a thread, and adds up.
    pub fn run_until(&mut self, until: Until, cpus: &[usize]) -> Result<Outcome> {
        let patience = match until {
            Until::Time(duration) => duration + SILENCE_LIMIT,
            // The workers themselves give up when nothing returns.
            Until::Ios(_) => COUNTED_RUN_LIMIT,
        };
        let (sender, results) = mpsc::channel();
        let count = self.workers.len();
        for (i, mut worker) in self.workers.drain(..).enumerate() {
            let sender = sender.clone();
            let cpu = (!cpus.is_empty()).then(|| cpus[i % cpus.len()]);
            thread::spawn(move || {
                let outcome = cpu::pin_this_thread(cpu).and_then(|()| worker.run(until));
                // The receiver is gone only after a time-out, when the result is not wanted.
                let _ = sender.send((worker, outcome));
            });
        }
        let mut total: Option<Outcome> = None;
        for _ in 0..count {
            let (worker, outcome) = results
                .recv_timeout(patience)
                .map_err(|_| anyhow!("the server stopped returning requests"))?;
            self.workers.push(worker);
            let outcome = outcome?;
            match &mut total {
                None => total = Some(outcome),
                Some(total) => {
                    total.ios += outcome.ios;
                    total.waited += outcome.waited;
                    total.busy += outcome.busy;
                    total.elapsed = total.elapsed.max(outcome.elapsed);
                    total.latency_ns.add(&outcome.latency_ns)?;
                }
            }
        }
        self.workers.sort_by_key(|worker| worker.index);
        total.context("no queues")
    }
}

fn workers(
    queues: impl IntoIterator<Item = Queue>,
    load: &Load,
    wire: Wire,
    features: u64,
    blocks: u64,
) -> Result<Vec<Worker>> {
    let queues = queues.into_iter().zip(0..);
    queues.map(|(queue, i)| Worker::new(queue, load, wire, features, blocks, i)).collect()
}
