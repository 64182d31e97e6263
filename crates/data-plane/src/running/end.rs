// SPDX-License-Identifier: Apache-2.0
//! The end of a queue: a ring fault, the drain, and the state that goes to the control plane.

use super::RunningQueue;
use crate::eventfd_watch::signal;
use crate::plane::{Choices, QueueState};
use crate::stall::StallChange;
use std::collections::VecDeque;
use std::fmt::Display;

impl RunningQueue {
    /// Handles a ring fault: takes no further chain, and completes the requests in flight.
    #[cold]
    pub(crate) fn fault(&mut self, fault: &dyn Display) {
        log_fault(self.index, fault);
        self.end_taking();
    }

    /// Stops the queue for a front-end that has blocked an eventfd, and all later ones of the disk.
    #[cold]
    pub(crate) fn block(&mut self) {
        self.health.block();
        if !self.faulted {
            crate::log_once_per_second!(
                error,
                queue = self.index,
                "the front-end has blocked a call eventfd: the queue stops, and so do later ones of the \
                 disk, until it is removed and added again, or the daemon restarts"
            );
            self.end_taking();
        }
    }

    /// Takes no further chain, and tells the control plane.
    fn end_taking(&mut self) {
        self.faulted = true;
        self.resubmit.clear();
        if let Some(err) = &mut self.err {
            let _ = signal(err);
        }
    }

    /// Returns whether no request is in flight and no poll of the kick eventfd is outstanding.
    pub(crate) fn is_drained(&self) -> bool {
        let resubmitted = self.resubmit.is_empty() || self.halted;
        self.requests.is_empty() && resubmitted && !self.kick_armed
    }

    /// The state for the control plane. The thread adds its own choices.
    pub(crate) fn state(&self) -> QueueState {
        QueueState {
            base: self.virtqueue.base(),
            stats: self.stats,
            inflight: self.requests.in_flight().into(),
            choices: Choices { batch_size: 0, coalescing: self.calls.is_chosen() },
            faulted: self.faulted,
            kept: self.resubmit.len() as u64,
            left: Vec::new(),
        }
    }

    /// The state at the end of the stop.
    pub(crate) fn final_state(&mut self) -> QueueState {
        if self.stall.check(None, 0) == Some(StallChange::Ended) {
            self.health.record_recovery(self.index);
        }
        let state = self.state();
        // The region records the chains.
        let left = if self.region.is_some() { VecDeque::new() } else { self.resubmit.split_off(0) };
        QueueState { left: left.into(), ..state }
    }
}

/// Logs a ring fault. A guest can reset its device and break the ring again in a loop, and its queues
/// do not outlive a reset: the limit is that of the process.
#[cold]
fn log_fault(queue: u16, fault: &dyn Display) {
    crate::log_once_per_second!(
        error,
        queue,
        %fault,
        "ring fault: the queue is stopped; reset the device to go on"
    );
}
