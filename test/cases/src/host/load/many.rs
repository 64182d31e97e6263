// SPDX-License-Identifier: Apache-2.0
//! A load on every queue of a device, each on its own thread, during operations on the device.

use super::{Done, Load, Spec};
use crate::host::target::LIMIT;
use anyhow::{Context, Result, anyhow, ensure};
use driver::{Area, Device, GuestMemory, InflightRegion, Options, Place, RequestQueue, Session};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::atomic::{AtomicBool, AtomicU64};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use vmm_sys_util::eventfd::EventFd;

/// Bytes for the rings and indirect tables of a queue of 256 descriptors.
const RING_BYTES: usize = 2 << 20;

/// Guest memory for loads.
pub(crate) fn memory_for(specs: &[Spec]) -> Vec<(u64, u64)> {
    let bytes: usize = specs.iter().map(|spec| spec.bytes() + RING_BYTES).sum();
    vec![(0, bytes.next_multiple_of(2 << 20) as u64)]
}

/// Handles for operations on a device whose queues are loaded.
pub(crate) struct Handles {
    /// The VMM's side.
    pub(crate) session: Session,
    /// Guest memory.
    pub(crate) memory: Arc<GuestMemory>,
    /// Kick eventfd of each queue.
    pub(crate) kicks: Vec<EventFd>,
    /// Call eventfd of each queue.
    pub(crate) calls: Vec<EventFd>,
    /// Used ring of each queue.
    pub(crate) used: Vec<Area>,
    /// Descriptor table, avail ring and used ring of each queue, as guest-physical addresses.
    pub(crate) addresses: Vec<[u64; 3]>,
    /// Descriptors of each queue.
    pub(crate) queue_size: u16,
    inflight: Option<InflightRegion>,
    progress: Vec<Arc<AtomicU64>>,
    failed: Arc<AtomicBool>,
}

impl Handles {
    fn new(
        session: Session,
        memory: Arc<GuestMemory>,
        queues: &mut [RequestQueue],
    ) -> Result<Self> {
        let queue_size = queues[0].queue().size();
        let mut handles = Self {
            session,
            memory,
            kicks: Vec::new(),
            calls: Vec::new(),
            used: Vec::new(),
            addresses: Vec::new(),
            queue_size,
            inflight: None,
            progress: Vec::new(),
            failed: Arc::new(AtomicBool::new(false)),
        };
        for queue in queues {
            let queue = queue.queue();
            handles.kicks.push(queue.kick_fd().try_clone()?);
            handles.calls.push(queue.call_fd().try_clone()?);
            let addresses = queue.addresses();
            handles.used.push(handles.memory.area(addresses[2], 4));
            handles.addresses.push(addresses);
            handles.progress.push(Arc::new(AtomicU64::new(0)));
        }
        Ok(handles)
    }

    /// Waits until every queue has completed `count` more requests, or a load has failed.
    pub(crate) fn wait_for_progress(&self, count: u64) -> Result<()> {
        let done = || self.progress.iter().map(|done| done.load(Relaxed)).collect::<Vec<_>>();
        let before = done();
        let (mut last, mut end) = (before.clone(), Instant::now() + LIMIT);
        while last.iter().zip(&before).any(|(now, before)| *now < before + count) {
            ensure!(!self.failed.load(Relaxed), "a load failed");
            ensure!(Instant::now() < end, "the load does not go on: {last:?}");
            std::thread::sleep(Duration::from_millis(1));
            let now = done();
            if now != last {
                (last, end) = (now, Instant::now() + LIMIT);
            }
        }
        Ok(())
    }

    /// Number of requests that all queues have completed.
    pub(crate) fn completed(&self) -> u64 {
        self.progress.iter().map(|done| done.load(Relaxed)).sum()
    }

    /// Continues with the daemon's successor, as QEMU does after a reconnect.
    pub(crate) fn reconnect(&mut self, stream: UnixStream) -> Result<()> {
        let features = self.session.features();
        let mut session = Session::from_stream(stream)?;
        session.negotiate_protocol(Options::default().protocol_features)?;
        ensure!(session.negotiate_features(features)? == features, "other features than before");
        if let Some(region) = &self.inflight {
            session.set_inflight(region)?;
        }
        self.session = session;
        self.set_up_again()
    }

    /// Sets up memory, backend and all queues again, each queue from its used index on.
    pub(crate) fn set_up_again(&mut self) -> Result<()> {
        let memory = self.memory.clone();
        self.session.share_memory(&memory, false)?;
        self.session.attach()?;
        for queue in 0..self.used.len() {
            let base = self.used_idx(queue).into();
            self.set_up_queue(queue, base)?;
        }
        Ok(())
    }

    /// Sets up one queue again, from `base` on, and starts it.
    fn set_up_queue(&mut self, queue: usize, base: u32) -> Result<()> {
        let place = Place {
            size: self.queue_size,
            base,
            memory: &self.memory,
            addresses: self.addresses[queue],
            kick: &self.kicks[queue],
            call: &self.calls[queue],
            err: None,
        };
        self.session.set_up_place(queue, &place)?;
        Ok(self.session.enable(queue, true)?)
    }

    /// Sets the addresses of a queue, with or without the flag that logs its used ring.
    pub(crate) fn set_addresses(&mut self, queue: usize, log: bool) -> Result<()> {
        let (memory, addresses) = (self.memory.clone(), self.addresses[queue]);
        let log = log.then_some(addresses[2]);
        Ok(self.session.set_ring_addresses(queue, self.queue_size, &memory, addresses, log)?)
    }

    /// The used index in the ring, from which a successor of the device continues.
    pub(crate) fn used_idx(&self, queue: usize) -> u16 {
        self.used[queue].load_u16(2, std::sync::atomic::Ordering::Acquire)
    }
}

/// Loads all queues while `act` runs. In the end verifies all data that was written. Returns the
/// totals of each queue.
pub(crate) fn under_load(
    mut device: Device,
    specs: Vec<Spec>,
    act: impl FnOnce(&mut Handles) -> Result<()>,
) -> Result<Vec<Done>> {
    let memory = device.memory().clone();
    let inflight = device.take_inflight();
    let (session, mut queues) = device.into_parts();
    let mut handles = Handles::new(session, memory.clone(), &mut queues)?;
    handles.inflight = inflight;
    let stop = Arc::new(AtomicBool::new(false));
    let threads: Vec<_> = queues
        .into_iter()
        .zip(specs)
        .enumerate()
        .map(|(index, (queue, spec))| {
            let load = Load::new(queue.into_queue(), &memory, spec);
            let (stop, progress) = (stop.clone(), handles.progress[index].clone());
            let failed = handles.failed.clone();
            std::thread::spawn(move || work(load, &stop, &progress, &failed))
        })
        .collect();
    let acted = act(&mut handles);
    stop.store(true, Relaxed);
    let mut done = Vec::new();
    for (index, thread) in threads.into_iter().enumerate() {
        let name = || format!("load on queue {index}");
        match join(thread).with_context(name) {
            Ok(one) => done.push(one),
            // The first failure of a load tells more than its consequences.
            Err(why) => return Err(why),
        }
    }
    acted?;
    Ok(done)
}

fn join(thread: JoinHandle<Result<Done>>) -> Result<Done> {
    thread.join().unwrap_or_else(|_| Err(anyhow!("it panicked")))
}

fn work(
    mut load: Load,
    stop: &AtomicBool,
    progress: &AtomicU64,
    failed: &AtomicBool,
) -> Result<Done> {
    let outcome = load.prepare().context("preparation").and_then(|()| {
        load.run(|done| {
            progress.store(done.requests, Relaxed);
            !stop.load(Relaxed)
        })
    });
    if outcome.is_err() {
        failed.store(true, Relaxed);
    }
    outcome.map(|()| load.done())
}
