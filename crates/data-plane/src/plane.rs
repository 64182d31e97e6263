// SPDX-License-Identifier: Apache-2.0
//! The interface of a data plane, and the types that cross it.

use crate::error::{KernelError, QueueStartError};
use crate::health::Health;
use crate::region::InflightRegion;
use crate::stats::QueueStats;
use std::fmt;
use std::fs::File;
use std::io;
use std::sync::Arc;
use virtio_blk::DiskView;
use virtqueue::{GuestMemory, InflightChain, RingSetup};

/// A data plane: runs the queues of one disk.
///
/// Queues are identified by their index in the device. Between [`DataPlane::start_queue`] and
/// [`DataPlane::stop_queues`] the plane owns the queue, and nothing changes its set-up except
/// [`DataPlane::set_call`].
pub(crate) trait DataPlane {
    /// Checks that the plane can run the disk's queues now.
    fn check(&self) -> Result<(), KernelError>;

    /// Replaces guest memory (`None`: removes it). No queue may run.
    fn set_memory(&mut self, memory: Option<Arc<GuestMemory>>);

    /// Starts a queue. Nothing of it runs if this fails.
    fn start_queue(&mut self, setup: QueueSetup) -> Result<(), QueueStartError>;

    /// Stops the running queues `indices`: first none of them takes a further chain, then their
    /// requests in flight complete, except those that a halted disk keeps. The time is that of the
    /// slowest queue. Returns their states in the same order.
    fn stop_queues(&mut self, indices: &[u16], at_stop: AtStop) -> Vec<QueueState>;

    /// Replaces the call eventfd of a running queue without waiting for its I/O.
    fn set_call(&mut self, index: u16, call: Option<File>) -> Result<(), KernelError>;

    /// Applies a change of the cache mode, which [`DiskView`] shares.
    fn cache_mode_changed(&mut self) -> Result<(), KernelError>;

    /// Name and value of each counter of the device, while queues run.
    fn device_counters(&self) -> io::Result<Vec<(String, String)>>;

    /// A running queue as it is now. `device` is the result of [`DataPlane::device_counters`].
    fn queue_report(&self, index: u16, device: &[(String, String)]) -> QueueReport;
}

/// The two data planes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PlaneKind {
    /// The kernel module, through `/dev/vhost-blk`.
    Kernel,
    /// The io_uring threads of the daemon.
    Uring,
}

impl fmt::Display for PlaneKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            PlaneKind::Kernel => "kernel",
            PlaneKind::Uring => "uring",
        })
    }
}

/// Use of an `IOPOLL` ring for reads and writes: the kernel polls the device's poll queues instead
/// of taking its interrupts, and the thread does not sleep while I/O is in flight.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum IoPoll {
    /// If the device has poll queues and, on the io_uring plane, trials show that it pays.
    Auto,
    /// Always; the disk does not start if the device has no poll queues.
    On,
    /// Never.
    #[default]
    Off,
}

/// Coalescing of calls: a call waits for more requests while the driver gives new chains.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Coalesce {
    /// If trials show that it pays.
    Auto,
    /// Always.
    On,
    /// Never.
    Off,
}

/// The complete set-up of a queue, for either data plane.
#[derive(Debug)]
pub struct QueueSetup {
    /// Index of the queue in the device.
    pub index: u16,
    /// The ring and its first position.
    pub ring: RingSetup,
    /// Negotiated features.
    pub features: u64,
    /// The disk as the driver sees it.
    pub disk: DiskView,
    /// Kick eventfd. `None`: the data plane polls the ring.
    pub kick: Option<File>,
    /// Call eventfd. `None`: the driver polls the ring.
    pub call: Option<File>,
    /// Eventfd to signal at a ring fault.
    pub err: Option<File>,
    /// Region that records the chains in flight.
    pub region: Option<Arc<InflightRegion>>,
    /// The health of the disk.
    pub health: Arc<Health>,
    /// Requests that the previous start of the queue has left: [`QueueState::left`].
    pub kept: Vec<InflightChain>,
    /// Number of kept chains that an earlier start has counted; they are not counted again.
    pub counted: u64,
}

impl QueueSetup {
    pub(crate) fn try_clone(&self) -> io::Result<Self> {
        let copy = |file: &Option<File>| file.as_ref().map(File::try_clone).transpose();
        Ok(QueueSetup {
            index: self.index,
            ring: self.ring.clone(),
            features: self.features,
            disk: self.disk.clone(),
            kick: copy(&self.kick)?,
            call: copy(&self.call)?,
            err: copy(&self.err)?,
            region: self.region.clone(),
            health: Arc::clone(&self.health),
            kept: self.kept.clone(),
            counted: self.counted,
        })
    }
}

/// Treatment of the requests that a halted disk keeps, at the stop of their queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AtStop {
    /// They are carried out after the next start of the queue. The in-flight region records them, or
    /// [`QueueState::left`] if there is none.
    Resubmit,
    /// The front-end is gone: they stay in the in-flight region; without one they get an error.
    LeaveInRegion,
    /// They get an error: the queue may start elsewhere, or never.
    Fail,
}

impl AtStop {
    /// Returns whether the stop itself answers the kept requests with an error. `are_recorded`: the in-flight region
    /// has them.
    pub fn fails(self, are_recorded: bool) -> bool {
        match self {
            AtStop::Resubmit => false,
            AtStop::LeaveInRegion => !are_recorded,
            AtStop::Fail => true,
        }
    }
}

/// The present choices of a data plane for a running queue.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Choices {
    /// Requests that it hands to the storage at a time: the batch size of the queue's thread.
    /// Kernel plane: the first batch after a sleep, which grows if its size is not fixed. 0: not
    /// known.
    pub batch_size: u64,
    /// Calls are held for later ones.
    pub coalescing: bool,
}

/// The state of a queue.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct QueueState {
    /// The next position to serve, in the form of vhost-user's GET_VRING_BASE.
    pub base: u32,
    /// Counters of the queue.
    pub stats: QueueStats,
    /// Requests in flight, without the kept ones.
    pub inflight: u64,
    /// The choices for it; a stopped queue has none.
    pub choices: Choices,
    /// A ring fault stopped the queue.
    pub faulted: bool,
    /// Requests that wait for the end of a halt, or were left in flight by a previous daemon.
    pub kept: u64,
    /// After a stop with [`AtStop::Resubmit`]: the requests for [`QueueSetup::kept`].
    pub left: Vec<InflightChain>,
}

impl QueueState {
    pub(crate) fn report(&self) -> QueueReport {
        QueueReport {
            stats: self.stats,
            inflight: self.inflight,
            choices: self.choices,
            faulted: self.faulted,
            kept: self.kept,
            more: Vec::new(),
        }
    }
}

/// A running queue as it is now.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct QueueReport {
    /// Counters since the start of the queue.
    pub stats: QueueStats,
    /// Requests in flight, without the kept ones.
    pub inflight: u64,
    /// The choices of the plane.
    pub choices: Choices,
    /// A ring fault stopped the queue.
    pub faulted: bool,
    /// Requests that wait for the end of a halt, or were left in flight by a previous daemon.
    pub kept: u64,
    /// Name and value of each further counter of the plane.
    pub more: Vec<(String, u64)>,
}

impl QueueReport {
    /// Name and value of everything except the latencies; `faulted` and `coalescing` are 0 or 1.
    pub fn counters(&self) -> Vec<(String, u64)> {
        let mut counts = self.stats.counters();
        counts.push(("inflight".to_owned(), self.inflight));
        counts.push(("faulted".to_owned(), self.faulted.into()));
        counts.push(("kept".to_owned(), self.kept));
        counts.push(("batch_size".to_owned(), self.choices.batch_size));
        counts.push(("coalescing".to_owned(), self.choices.coalescing.into()));
        counts.extend(self.more.iter().cloned());
        counts
    }
}
