// SPDX-License-Identifier: Apache-2.0
//! A started queue as its thread owns it.

use crate::batch::Batch;
use crate::inflight::Inflight;
use crate::plane::{QueueStart, QueueStopped};
use crate::region::QueueRegion;
use std::collections::VecDeque;
use std::fmt::Display;
use std::fs::File;
use std::io::Write;
use std::sync::mpsc::Sender;
use virtio_blk::{Completion, DiskView, Kind, Refused, Request};
use virtqueue::chain::StatusByte;
use virtqueue::{Resubmit, VirtQueue};

/// What a queue did while it was started.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct QueueStats {
    /// Chains taken.
    pub chains: u64,
    /// Of these, answered without being carried out.
    pub refused: u64,
    /// Kicks received.
    pub kicks: u64,
    /// Calls sent.
    pub calls: u64,
}

/// A started queue.
pub(crate) struct RunningQueue {
    pub(crate) ring: VirtQueue,
    pub(crate) inflight: Inflight,
    pub(crate) disk: DiskView,
    pub(crate) kick: Option<File>,
    pub(crate) call: Option<File>,
    pub(crate) stats: QueueStats,
    /// A poll of the kick eventfd is outstanding.
    pub(crate) kick_armed: bool,
    /// Polls of it that ended since a chain was taken last.
    pub(crate) kick_rearms: u32,
    /// Chains pushed and not yet published.
    pub(crate) batch: Batch,
    /// Kicks are asked for.
    pub(crate) armed: bool,
    /// The ring is broken: take nothing more.
    pub(crate) faulted: bool,
    /// The control plane waits for the queue to drain.
    pub(crate) stopping: Option<Sender<QueueStopped>>,
    err: Option<File>,
    region: Option<QueueRegion>,
    /// Chains that an earlier daemon left in flight; taken before any other.
    resubmit: VecDeque<Resubmit>,
    index: u16,
}

impl RunningQueue {
    pub(crate) fn new(start: QueueStart, slow_start: bool) -> Self {
        let QueueStart { index, mut ring, layout, disk, kick, call, err, region } = start;
        let wanted = region.is_some();
        let opened = region.and_then(|region| QueueRegion::open(&region, layout, index, &mut ring));
        if wanted && opened.is_none() {
            tracing::warn!(
                queue = index,
                "the in-flight region has no room for this queue: it is not kept"
            );
        }
        let (region, left) = opened.unzip();
        let resubmit = VecDeque::from(left.unwrap_or_default());
        if !resubmit.is_empty() {
            let chains = resubmit.len();
            tracing::info!(queue = index, chains, "takes up what an earlier daemon left in flight");
        }
        RunningQueue {
            inflight: Inflight::new(ring.size()),
            ring,
            disk,
            kick,
            call,
            stats: QueueStats::default(),
            kick_armed: false,
            kick_rearms: 0,
            batch: Batch::new(slow_start),
            armed: true,
            faulted: false,
            stopping: None,
            err,
            region,
            resubmit,
            index,
        }
    }

    /// Stage *chain*: takes a chain into a free entry of the in-flight table.
    #[inline]
    pub(crate) fn take(&mut self) -> Option<u16> {
        if !self.resubmit.is_empty() {
            return self.take_again();
        }
        let entry = self.inflight.next_free()?;
        match self.ring.take(&mut entry.chain) {
            Ok(Some(head)) => {
                self.stats.chains += 1;
                self.kick_rearms = 0;
                if let Some(region) = &mut self.region {
                    region.taken(&head, &entry.chain);
                }
                Some(self.inflight.claim(head))
            }
            Ok(None) => None,
            Err(fault) => {
                self.fault(&fault);
                None
            }
        }
    }

    #[cold]
    fn take_again(&mut self) -> Option<u16> {
        let entry = self.inflight.next_free()?;
        let again = self.resubmit.pop_front()?;
        match self.ring.take_again(&again, &mut entry.chain) {
            Ok(head) => {
                self.stats.chains += 1;
                if let Some(region) = &mut self.region {
                    region.taken_again(&head);
                }
                Some(self.inflight.claim(head))
            }
            Err(fault) => {
                self.fault(&fault);
                None
            }
        }
    }

    /// Stage *request*: header copied and checked, from here on trusted.
    #[inline]
    pub(crate) fn parse(&mut self, index: u16) -> Result<(), Refused> {
        let entry = self.inflight.entry(index);
        let request = Request::parse(&mut entry.chain, &self.disk, &mut entry.ranges)?;
        entry.request = Some(request);
        Ok(())
    }

    /// Stage *completion* of a request that is answered without being carried out.
    #[cold]
    pub(crate) fn refuse(&mut self, index: u16, refused: Refused) {
        self.stats.refused += 1;
        let status_addr = refused.status.as_ref().and_then(StatusByte::guest_addr);
        let written_bytes = refused.write();
        if let (Some(log), Some(addr)) = (self.ring.log(), status_addr) {
            log.mark(addr, 1);
        }
        self.push_used(index, written_bytes);
    }

    /// Whether the queue may take chains now.
    #[inline]
    pub(crate) fn may_take(&self) -> bool {
        !self.faulted && (self.stopping.is_none() || !self.resubmit.is_empty())
    }

    /// Whether there is a chain to take.
    #[inline]
    pub(crate) fn has_work(&mut self) -> bool {
        if !self.may_take() || self.inflight.next_free().is_none() {
            return false;
        }
        match self.ring.has_avail() {
            Ok(avail) => avail || !self.resubmit.is_empty(),
            Err(fault) => {
                self.fault(&fault);
                false
            }
        }
    }

    /// Stage *completion*: status byte and written length of a request that was carried out.
    #[inline]
    pub(crate) fn complete(&mut self, index: u16, kind: Kind, completion: Completion) {
        let entry = self.inflight.entry(index);
        let request = entry.request.take().expect("the request was parsed");
        let status_addr = request.status.guest_addr();
        let written_bytes = completion.write(request.status);
        // Marked after it was written: a page that is marked before is sent as it was.
        if let Some(log) = self.ring.log() {
            let mut left =
                if matches!(kind, Kind::Read { .. } | Kind::GetId) { u64::MAX } else { 0 };
            for &(addr, len) in entry.chain.written() {
                log.mark(addr, len.min(left));
                left -= len.min(left);
            }
            if let Some(addr) = status_addr {
                log.mark(addr, 1);
            }
        }
        self.push_used(index, written_bytes);
    }

    /// Stage *used*: pays the debt; the driver sees it after [`RunningQueue::publish`].
    #[inline]
    pub(crate) fn push_used(&mut self, index: u16, written_bytes: u32) {
        let head = self.inflight.release(index);
        if let Some(region) = &mut self.region {
            region.pushing(&head);
        }
        self.ring.push_used(head, written_bytes);
        self.batch.pushed();
    }

    /// Stage *used*, second half: publishes everything pushed.
    #[inline]
    pub(crate) fn publish(&mut self) {
        self.batch.published();
        if let Some(region) = &mut self.region {
            region.publishing(self.ring.used_index());
        }
        self.ring.publish();
        if let Some(region) = &mut self.region {
            region.published(self.ring.used_index());
        }
    }

    /// Stage *notify*: calls the driver if it asked.
    #[inline]
    pub(crate) fn notify_if_asked(&mut self) {
        if self.ring.needs_call() {
            self.call();
        }
    }

    /// Signals the call eventfd. A full counter (EAGAIN) is a call that is already pending.
    pub(crate) fn call(&mut self) {
        if let Some(call) = &mut self.call {
            self.stats.calls += 1;
            let _ = call.write(&1u64.to_ne_bytes());
        }
    }

    /// Asks for a kick at the next chain; returns whether one came in meanwhile. To be repeated
    /// before every sleep: the event index stands for one position of the ring.
    pub(crate) fn arm(&mut self) -> bool {
        if self.may_take() {
            self.ring.arm();
            self.armed = true;
        }
        self.has_work()
    }

    /// Asks for no kicks while the thread looks at the ring anyway.
    #[inline]
    pub(crate) fn suppress(&mut self) {
        if self.armed {
            self.ring.suppress();
            self.armed = false;
        }
    }

    /// The guest broke the ring: stop taking, tell the front-end, finish what is in flight.
    #[cold]
    pub(crate) fn fault(&mut self, fault: &dyn Display) {
        tracing::error!(queue = self.index, %fault, "ring fault: the queue is stopped; reset the device to go on");
        self.faulted = true;
        self.resubmit.clear();
        if let Some(err) = &mut self.err {
            let _ = err.write(&1u64.to_ne_bytes());
        }
    }

    /// Nothing is in flight and no poll of the kick is outstanding.
    pub(crate) fn is_drained(&self) -> bool {
        self.inflight.is_empty() && self.resubmit.is_empty() && !self.kick_armed
    }

    /// What the control plane gets back.
    pub(crate) fn state(&self) -> QueueStopped {
        QueueStopped { base: self.ring.base(), stats: self.stats, faulted: self.faulted }
    }
}
