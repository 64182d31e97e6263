// SPDX-License-Identifier: Apache-2.0
//! A queue that runs on a thread of the io_uring data plane.

mod end;
mod kept;
mod noted;

use crate::coalesce::Coalescer;
use crate::completion_batch::CompletionBatch;
use crate::event::QueueId;
use crate::eventfd_watch::signal;
use crate::health::Health;
use crate::latency::{Clock, Nanos, Operation};
use crate::limits::Share;
use crate::mail::NewCall;
use crate::plane::{AtStop, Coalesce, QueueSetup, QueueState};
use crate::region::{QueueRegion, log_no_room, log_resubmits};
use crate::request_table::{RequestTable, Taken};
use crate::stall::{StallChange, StallWatch};
use crate::stats::QueueStats;
use crate::throttle::Throttle;
use crate::trace::QueueTrace;
use std::collections::VecDeque;
use std::fs::File;
use std::sync::Arc;
use std::sync::mpsc::Sender;
use std::time::Duration;
use virtio_blk::{Completion, DiskView, Kind, Refused, Request};
use virtio_spec::blk;
use virtqueue::chain::StatusByte;
use virtqueue::{InflightChain, RingFault, VirtQueue};

/// Bytes in flight of one queue, of data and of ranges, at which it takes no further chain. A stop
/// waits for at most this plus one request.
const INFLIGHT_BYTES_MAX: u64 = 512 << 20;

/// A queue that runs; its thread owns it.
pub(crate) struct RunningQueue {
    pub(crate) id: QueueId,
    /// See `worker/parking.rs`.
    pub(crate) is_active: bool,
    /// The queue became active, or took or returned a chain, since the thread last looked for idle
    /// queues.
    pub(crate) recent: bool,
    pub(crate) virtqueue: VirtQueue,
    pub(crate) requests: RequestTable,
    pub(crate) disk: DiskView,
    pub(crate) kick: Option<File>,
    call: Option<File>,
    pub(crate) stats: QueueStats,
    /// A poll of the kick eventfd is outstanding.
    pub(crate) kick_armed: bool,
    /// Polls of the kick eventfd that ended since the last taken chain.
    pub(crate) kick_rearms: u32,
    /// Pushed and unpublished chains.
    pub(crate) batch: CompletionBatch,
    calls: Coalescer,
    /// The driver is asked for kicks.
    pub(crate) armed: bool,
    /// The storage has room for a request of this queue, as the thread last looked.
    pub(crate) has_room: bool,
    /// A ring fault occurred: the queue takes no further chain.
    pub(crate) faulted: bool,
    /// The control plane waits for the queue to drain.
    pub(crate) stopping: Option<Sender<QueueState>>,
    /// Treatment of kept requests at a stop.
    pub(crate) kept_at_stop: AtStop,
    health: Arc<Health>,
    /// The disk was halted when the thread last looked.
    halted: bool,
    stall: StallWatch,
    /// The state for the limits of the disk.
    pub(crate) throttle: Throttle,
    /// Operation and time of taking of each pushed and unpublished request.
    unpublished: Vec<(Operation, Nanos)>,
    trace: QueueTrace,
    /// Bytes of the requests in flight: [`Kind::inflight_bytes`].
    inflight_bytes: u64,
    err: Option<File>,
    region: Option<QueueRegion>,
    /// Chains that a previous daemon left in flight, or that failed and halted the disk; the queue
    /// takes them before any other.
    resubmit: VecDeque<InflightChain>,
    /// Number of chains at the front of `resubmit` that came from the in-flight region.
    recovering: usize,
    index: u16,
}

impl RunningQueue {
    pub(crate) fn new(
        id: QueueId,
        setup: QueueSetup,
        mut virtqueue: VirtQueue,
        copies: bool,
        (coalesce, poll_max): (Coalesce, Duration),
        share: Arc<Share>,
    ) -> Self {
        let layout = setup.ring.layout;
        let QueueSetup { index, disk, kick, call, err, region, health, kept, counted, .. } = setup;
        let wanted = region.is_some();
        let opened =
            region.and_then(|region| QueueRegion::open(&region, layout, index, &mut virtqueue));
        if wanted && opened.is_none() {
            log_no_room(index);
        }
        let (region, left) = opened.unzip();
        let mut resubmit = VecDeque::from(left.unwrap_or_default());
        let recovering = resubmit.len();
        if !kept.is_empty() {
            virtqueue.resume((setup.ring.base >> 16) as u16, &kept);
            resubmit.extend(kept);
        } else if !resubmit.is_empty() {
            log_resubmits(index, resubmit.len());
        }
        let chains = (resubmit.len() as u64).saturating_sub(counted);
        RunningQueue {
            id,
            is_active: false,
            recent: false,
            requests: RequestTable::new(virtqueue.size()),
            virtqueue,
            disk,
            kick,
            call,
            stats: QueueStats { chains, ..QueueStats::default() },
            kick_armed: false,
            kick_rearms: 0,
            batch: CompletionBatch::new(copies),
            calls: Coalescer::new(coalesce, poll_max),
            armed: true,
            has_room: true,
            faulted: false,
            stopping: None,
            kept_at_stop: AtStop::Resubmit,
            halted: health.is_halted(),
            stall: StallWatch::new(health.io_timeout()),
            health,
            throttle: Throttle::new(share),
            unpublished: Vec::with_capacity(64),
            trace: QueueTrace::default(),
            inflight_bytes: 0,
            err,
            region,
            resubmit,
            recovering,
            index,
        }
    }

    /// Stage *chain*: takes a chain into a free entry of the request table.
    #[inline]
    pub(crate) fn take(&mut self, clock: &mut Clock) -> Option<Taken> {
        let (is_new, is_traced) = (self.resubmit.is_empty(), self.health.is_traced());
        if is_traced {
            clock.recent(); // cache a time that precedes the read of the ring
        }
        let taken = match is_new {
            true => self.take_next(),
            false => self.take_resubmitted(),
        };
        let Some(mut taken) = taken else {
            if is_traced {
                self.note_none(clock);
            }
            return None;
        };
        taken.at = clock.recent();
        if is_traced {
            self.note_taken(&taken, is_new);
        }
        Some(taken)
    }

    #[inline]
    fn take_next(&mut self) -> Option<Taken> {
        let (virtqueue, region) = (&mut self.virtqueue, &mut self.region);
        let taken = self.requests.take(|chain| {
            let head = virtqueue.take(chain)?;
            if let (Some(head), Some(region)) = (&head, region) {
                region.taken(head, chain);
                if region.is_lost() {
                    return Err(RingFault::MemoryLost);
                }
            }
            Ok::<_, RingFault>(head)
        });
        match taken {
            Ok(Some(taken)) => {
                self.stats.chains += 1;
                self.recent = true;
                self.kick_rearms = 0;
                Some(taken)
            }
            Ok(None) => None,
            Err(fault) => {
                self.fault(&fault);
                None
            }
        }
    }

    #[cold]
    fn take_resubmitted(&mut self) -> Option<Taken> {
        let (virtqueue, region, resubmit) =
            (&mut self.virtqueue, &mut self.region, &mut self.resubmit);
        let taken = self.requests.take(|chain| {
            let Some(inflight) = resubmit.pop_front() else { return Ok(None) };
            let head = virtqueue.take_resubmitted(&inflight, chain)?;
            if let Some(region) = region {
                region.taken_resubmitted(&head);
            }
            Ok::<_, RingFault>(Some(head))
        });
        match taken {
            Ok(taken) => {
                if taken.is_some() && self.recovering > 0 {
                    self.recovering -= 1;
                    self.stats.recovered += 1;
                }
                taken
            }
            Err(fault) => {
                self.fault(&fault);
                None
            }
        }
    }

    /// Stage *request*: copies and checks the header. Later stages trust the copy.
    #[inline]
    pub(crate) fn parse(&mut self, taken: &Taken) -> Result<Request, Refused> {
        let entry = self.requests.entry(taken.index());
        let parsed = Request::parse(&mut entry.chain, &self.disk, &mut entry.ranges);
        let kind = parsed.as_ref().ok().map(|request| request.kind);
        self.inflight_bytes += kind.map_or(0, Kind::inflight_bytes);
        self.stats.throttled += u64::from(self.throttle.charge(kind.map_or(0, Kind::limit_bytes)));
        parsed
    }

    /// Looks at the limits and the health of the disk. The thread calls this before it takes chains.
    #[inline]
    pub(crate) fn look_at_disk(&mut self, clock: &mut Clock) {
        self.halted = self.health.is_halted();
        if !self.health.is_traced() && self.trace.arrivals.is_known() {
            self.trace.arrivals.forget();
        }
        if self.stall.is_on() {
            self.look_for_stall(clock);
        }
        self.stats.throttled += u64::from(self.throttle.look());
    }

    fn look_for_stall(&mut self, clock: &mut Clock) {
        let now = clock.recent();
        if !self.stall.is_due(now) {
            return;
        }
        match self.stall.check(self.requests.oldest(), now) {
            Some(StallChange::Began(age)) => self.health.record_stall(self.index, age),
            Some(StallChange::Ended) => self.health.record_recovery(self.index),
            None => {}
        }
    }

    /// Time until the queue must look for a stall or its end; `None`: no request is in flight.
    pub(crate) fn stall_check_in(&self, now: Nanos) -> Option<Duration> {
        self.stall.due_in(now).filter(|_| self.watches_io())
    }

    /// Returns whether the thread must look at the age of the requests in flight.
    pub(crate) fn watches_io(&self) -> bool {
        self.stall.is_on() && (self.stall.is_stalled() || !self.requests.is_empty())
    }

    /// The rest of the time that the queue waits for a limit; `None`: it waits for none.
    pub(crate) fn throttled_for(&self) -> Option<Duration> {
        self.throttle.wait()
    }

    /// Returns whether the thread must look at the queue again after some time, without a kick.
    pub(crate) fn waits_for_time(&self) -> bool {
        self.is_kickless() || !self.throttle.is_open() || self.calls.is_holding()
    }

    /// Returns whether the queue takes chains without a kick eventfd.
    pub(crate) fn is_kickless(&self) -> bool {
        self.kick.is_none() && self.may_take()
    }

    /// Stage *completion* of a refused request.
    #[cold]
    pub(crate) fn refuse(&mut self, taken: Taken, refused: Refused) {
        self.stats.refused += 1;
        let status_addr = refused.status.as_ref().and_then(StatusByte::guest_addr);
        let written_bytes = refused.write();
        if let (Some(log), Some(addr)) = (self.virtqueue.log(), status_addr) {
            log.mark(addr, 1);
        }
        self.push_used(taken, written_bytes);
    }

    /// Returns whether the queue may take chains now. A stop waits for chains to resubmit, so no limit
    /// delays those.
    #[inline]
    pub(crate) fn may_take(&self) -> bool {
        let wanted =
            self.stopping.is_none() && self.throttle.is_open() || !self.resubmit.is_empty();
        let fits = self.has_room && self.inflight_bytes < INFLIGHT_BYTES_MAX;
        !self.faulted && !self.halted && wanted && fits
    }

    /// Returns whether the queue can take a chain now. A ring that is not valid faults the queue.
    #[inline]
    pub(crate) fn look_for_work(&mut self) -> bool {
        if !self.may_take() || !self.requests.has_free() {
            return false;
        }
        match self.virtqueue.has_avail() {
            Ok(avail) => avail || !self.resubmit.is_empty(),
            Err(fault) => {
                self.fault(&fault);
                false
            }
        }
    }

    /// Stage *completion* of a request that was carried out: status byte and written length.
    #[inline]
    pub(crate) fn complete(&mut self, taken: Taken, request: Request, mut completion: Completion) {
        let Request { kind, status } = request;
        if self.virtqueue.is_lost() {
            // the data may be zeroes that replaced lost pages
            completion = Completion { code: blk::S_IOERR, data_bytes: 0 };
        }
        self.inflight_bytes -= kind.inflight_bytes();
        self.batch.moved(kind.data_bytes());
        match kind {
            _ if completion.code != blk::S_OK => self.stats.failed += 1,
            Kind::Read { bytes, .. } => self.stats.read_bytes += bytes,
            Kind::Write { bytes, .. } => self.stats.write_bytes += bytes,
            Kind::Discard { bytes, .. } => {
                self.stats.discards += 1;
                self.stats.discarded_bytes += bytes;
            }
            _ => {}
        }
        if let Some(operation) = Operation::of(kind) {
            self.unpublished.push((operation, taken.at));
            if self.health.is_traced() {
                let entry = (taken.index(), taken.at);
                self.trace.completed(entry, operation, kind, completion.code != blk::S_OK);
            }
        }
        let status_addr = status.guest_addr();
        let written_bytes = completion.write(status);
        // Mark after the write: migration may send a page between an earlier mark and the write.
        if let Some(log) = self.virtqueue.log() {
            // Only the written bytes: the buffers of a GET_ID may name all memory many times, and each page takes time.
            let mut left = kind.written_bytes();
            for &(addr, len) in self.requests.entry(taken.index()).chain.writable_ranges() {
                if left == 0 {
                    break;
                }
                log.mark(addr, len.min(left));
                left -= len.min(left);
            }
            if let Some(addr) = status_addr {
                log.mark(addr, 1);
            }
        }
        self.push_used(taken, written_bytes);
    }

    /// Stage *used*: returns the chain. The driver sees it after [`RunningQueue::publish`].
    #[inline(always)]
    fn push_used(&mut self, taken: Taken, written_bytes: u32) {
        let head = self.requests.release(taken);
        if let Some(region) = &mut self.region {
            region.pushing(&head);
        }
        self.virtqueue.push_used(head, written_bytes);
        self.stats.completed += 1;
        self.recent = true;
        self.batch.pushed();
    }

    /// Counts the latencies of the requests that were pushed. Returns whether there were some.
    #[inline]
    fn count_latencies(&mut self, clock: &mut Clock) -> bool {
        if self.unpublished.is_empty() {
            return false;
        }
        let now = clock.read();
        for &(operation, taken_at) in &self.unpublished {
            self.stats.latencies.add(operation, now.saturating_sub(taken_at));
        }
        self.unpublished.clear();
        if !self.trace.is_empty() {
            self.trace.published(self.index, now, &self.health);
        }
        true
    }

    /// Stage *used*, second half: publishes all pushed chains, and returns their number.
    #[inline]
    pub(crate) fn publish(&mut self, clock: &mut Clock) -> u64 {
        let has_counted = self.count_latencies(clock);
        let finished = self.batch.take_published();
        if finished > 0 && !has_counted {
            clock.forget(); // such turns may follow each other without a sleep
        }
        self.calls.published(finished, self.depth_before(finished));
        if let Some(region) = &mut self.region {
            region.publishing(self.virtqueue.used_index());
        }
        self.virtqueue.publish();
        if let Some(region) = &mut self.region {
            region.published(self.virtqueue.used_index());
        }
        finished
    }

    /// Number of requests that the driver waited for just before so many of them were `published`.
    #[inline]
    pub(crate) fn depth_before(&self, published: u64) -> u64 {
        u64::from(self.requests.in_flight()) + published
    }

    /// Stage *notify* after the publication of `finished` requests: calls the driver if it asked for a
    /// call, or holds the call. Returns whether a call is held: the thread must come back soon, and may
    /// not sleep.
    #[inline]
    pub(crate) fn notify_if_due(&mut self, finished: u64, clock: &mut Clock) -> bool {
        let asked = self.virtqueue.needs_call();
        if asked || self.calls.is_holding() {
            self.call_or_hold(asked, clock);
        } else {
            self.stats.suppressed += u64::from(finished > 0);
        }
        self.calls.is_holding()
    }

    fn call_or_hold(&mut self, asked: bool, clock: &mut Clock) {
        let now = if asked { clock.recent() } else { clock.read() };
        self.stats.coalesced += u64::from(asked && self.calls.is_holding());
        let progress = self.stats.chains + self.stats.completed;
        if self.calls.hold_unless_due(asked, progress, now) || self.stopping.is_some() {
            self.calls.called(now);
            self.call();
        }
    }

    /// Returns whether a front-end has blocked an eventfd of the disk.
    pub(crate) fn is_blocked(&self) -> bool {
        self.health.is_blocked()
    }

    /// Signals the call eventfd, unless a front-end has blocked one of the disk.
    pub(crate) fn call(&mut self) {
        let Some(call) = &mut self.call else { return };
        // The thread closes no descriptor of a front-end: see `NewCall`.
        if self.health.is_blocked() || signal(call).is_err() {
            return self.block();
        }
        self.stats.calls += 1;
    }

    /// Replaces the call eventfd by the new one, if there is one, and signals it: the old one may have
    /// missed a call.
    pub(crate) fn take_call(&mut self, new_call: &NewCall) {
        if new_call.take(&mut self.call) {
            self.call();
        }
    }

    /// Asks for a kick at the next chain. Returns whether a chain is already available. The event
    /// index names one position of the ring, so this is repeated after each taken chain.
    pub(crate) fn arm(&mut self) -> bool {
        if self.may_take() {
            self.virtqueue.arm();
            self.armed = true;
            self.trace.awaits_kick = self.kick.is_some() && self.requests.has_free();
        }
        self.look_for_work()
    }

    /// Asks for no kicks while the thread polls the ring.
    #[inline]
    pub(crate) fn suppress(&mut self) {
        if self.armed {
            self.virtqueue.suppress();
            self.armed = false;
        }
    }
}
