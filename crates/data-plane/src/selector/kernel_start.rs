// SPDX-License-Identifier: Apache-2.0
//! Starts queues on the kernel plane, which carries out no request that was left of an earlier run:
//! those of a previous daemon, and those that failed and halted the disk. The io_uring plane does.
//!
//! A queue that starts while the disk is halted is *parked*: the io_uring plane has it, with the
//! requests that it keeps, and takes nothing. The control plane starts it again after the halt.

use super::{PlaneKind, PlaneSelector, QueueHandle};
use crate::error::QueueStartError;
use crate::plane::{AtStop, DataPlane, QueueSetup, QueueState};
use crate::region::{QueueRegion, log_no_room};
use crate::stats::QueueStats;
use virtqueue::{InflightChain, Layout, VirtQueue};

/// Requests that [`PlaneSelector::start_queue`] completed itself, on the io_uring plane.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Recovered {
    /// Their counters, which the plane of the queue does not have.
    pub stats: QueueStats,
    /// The position of the queue behind them.
    pub base: u32,
    /// Requests that failed again: [`QueueState::left`].
    pub left: Vec<InflightChain>,
    /// Number of the requests that failed again: [`QueueState::kept`].
    pub kept: u64,
}

/// The outcome of [`PlaneSelector::start_queue`].
#[derive(Debug)]
#[must_use]
pub struct Started {
    /// The running queue.
    pub result: Result<QueueHandle, QueueStartError>,
    /// The requests that the start completed itself, also if it failed.
    pub recovered: Option<Recovered>,
}

impl PlaneSelector {
    /// Starts a queue in the kernel, or parks it. Returns the plane that has it. Stores the
    /// requests that it completes itself in `recovered`.
    pub(super) fn start_in_kernel(
        &mut self,
        mut setup: QueueSetup,
        recovered: &mut Option<Recovered>,
    ) -> Result<PlaneKind, QueueStartError> {
        if !setup.health.is_halted()
            && let Some(stopped) = self.recover(&mut setup)?
        {
            if stopped.faulted {
                self.faulted.insert(setup.index, stopped);
                return Ok(PlaneKind::Kernel);
            }
            let QueueState { base, stats, left, kept, .. } = stopped;
            setup.ring.base = base;
            setup.kept.clone_from(&left);
            setup.counted = kept;
            *recovered = Some(Recovered { stats, base, left, kept });
        }
        if setup.health.is_halted() {
            if let Some(kernel) = &mut self.kernel {
                kernel.halt();
            }
            self.uring.start_queue(setup)?;
            return Ok(PlaneKind::Uring);
        }
        self.plane_mut(PlaneKind::Kernel).start_queue(setup)?;
        Ok(PlaneKind::Kernel)
    }

    /// Carries out the requests that were left of a queue, and moves `setup` behind those that are
    /// complete: the kernel records chains in the in-flight region, but recovers none from it.
    /// Returns the state of the queue then; `None`: there were none.
    fn recover(&mut self, setup: &mut QueueSetup) -> Result<Option<QueueState>, QueueStartError> {
        let mut virtqueue = VirtQueue::start(&setup.ring)?;
        let mut left = setup.kept.len();
        if let Some(region) = setup.region.as_ref().filter(|_| setup.ring.layout == Layout::Split) {
            match QueueRegion::open(region, Layout::Split, setup.index, &mut virtqueue) {
                Some((_, recorded)) => {
                    left += recorded.len();
                    setup.ring.base = virtqueue.base();
                }
                None => {
                    log_no_room(setup.index);
                    setup.region = None;
                }
            }
        }
        if left == 0 {
            return Ok(None);
        }
        self.uring.start_queue(setup.try_clone()?)?;
        let stopped = self.uring.stop_queues(&[setup.index], AtStop::Resubmit);
        Ok(stopped.into_iter().next())
    }

    /// Ends requests that a stopped queue of the kernel keeps: the io_uring plane answers them.
    /// Returns the state of the queue then.
    ///
    /// # Errors
    /// [`QueueStartError`]; the requests get no answer.
    pub fn end_kept(
        &mut self,
        setup: QueueSetup,
        at_stop: AtStop,
    ) -> Result<QueueState, QueueStartError> {
        let index = setup.index;
        self.uring.start_queue(setup)?;
        let stopped = self.uring.stop_queues(&[index], at_stop);
        Ok(stopped.into_iter().next().expect("one state for one queue"))
    }
}
