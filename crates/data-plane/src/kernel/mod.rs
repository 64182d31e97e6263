// SPDX-License-Identifier: Apache-2.0
//! The data plane in the kernel: programs `/dev/vhost-blk` with what the control plane knows, and
//! takes queues back with the exact position of their rings.
//!
//! The device is opened when the first queue starts and closed when the last one stops: what
//! changes only while all queues are stopped (guest memory, features, dirty log) needs no other
//! care, and nothing of a front-end outlives its queues.
//!
//! What is absent: requests. No ring is read here.

mod abi;
mod address;
mod device;
mod error;
mod suits;
mod workers;

pub(crate) mod counters;
mod run;

pub use device::DEVICE_PATH;
pub use error::KernelError;

use crate::planes::QueueSpec;
use crate::{IoPoll, QueueStopped};
use backend::Disk;
use device::VhostBlk;
use run::Run;
use std::fs::File;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;
use vhost::VhostBackend;

/// How the kernel runs the queues.
#[derive(Clone, Debug)]
pub struct KernelOptions {
    /// The module's device node; [`DEVICE_PATH`] as a rule.
    pub path: PathBuf,
    /// Number of workers; queues are spread over them.
    pub workers: usize,
    /// CPUs to pin the workers to, in turn; empty: none is pinned.
    pub cpus: Vec<usize>,
    /// Longest time to look at a ring before kicks are asked for again; zero: not at all.
    pub poll_max: Duration,
    /// Pin guest memory once.
    pub pin_memory: bool,
    /// Poll the block device's poll queues.
    pub iopoll: IoPoll,
    /// Most data segments of a request that the device offers.
    pub seg_max: u32,
    /// Largest queue that a front-end may set up.
    pub queue_size_max: u16,
}

/// Whether the kernel could run the queues of `disk` now; the storage is attached for a moment.
///
/// # Errors
/// Why not, and what to do about it.
pub fn kernel_suits(disk: Arc<dyn Disk>, options: KernelOptions) -> Result<(), KernelError> {
    KernelPlane::new(disk, options).probe()
}

/// The kernel's data plane of one disk.
pub(crate) struct KernelPlane {
    disk: Arc<dyn Disk>,
    options: KernelOptions,
    /// While queues run.
    run: Option<Run>,
}

impl KernelPlane {
    pub(crate) fn new(disk: Arc<dyn Disk>, options: KernelOptions) -> Self {
        KernelPlane { disk, options, run: None }
    }

    /// Whether the kernel could run this disk's queues now: attaches the storage for a moment.
    pub(crate) fn probe(&self) -> Result<(), KernelError> {
        if u32::from(self.options.queue_size_max) > abi::QUEUE_SIZE_MAX {
            return Err(KernelError::Unsuited(format!(
                "--queue-size is {}, and the kernel takes queues of up to {} descriptors; \
                 lower it",
                self.options.queue_size_max,
                abi::QUEUE_SIZE_MAX
            )));
        }
        let storage = self.disk.kernel_file().map_err(|why| KernelError::Unsuited(why.into()))?;
        let device = VhostBlk::open(&self.options.path)?;
        device.set_owner().map_err(error::of_core("VHOST_SET_OWNER"))?;
        device.attach(storage)?;
        suits::disk(&device.info()?, &self.disk.info(), self.options.seg_max)
    }

    /// Starts a queue at `spec.setup.base`. Nothing of it is left when this fails.
    pub(crate) fn start_queue(&mut self, spec: &QueueSpec) -> Result<(), KernelError> {
        let run = match self.run.take() {
            Some(run) => self.run.insert(run),
            None => self.run.insert(Run::begin(&*self.disk, &self.options, spec)?),
        };
        let started = run.start_queue(&self.options, spec);
        if started.is_err() && run.is_idle() {
            self.run = None;
        }
        started
    }

    /// Takes a queue back: what is in flight completes first.
    pub(crate) fn stop_queue(&mut self, index: u16) -> QueueStopped {
        let run = self.run.as_mut().expect("a started queue keeps its run");
        let stopped = run.stop_queue(index);
        if run.is_idle() {
            self.run = None;
        }
        stopped
    }

    /// Replaces the call eventfd of a running queue.
    pub(crate) fn set_call(&mut self, index: u16, call: Option<File>) -> Result<(), KernelError> {
        self.run.as_mut().map_or(Ok(()), |run| run.set_call(index, call))
    }

    /// The cache mode has changed.
    pub(crate) fn cache_mode_changed(&mut self) -> Result<(), KernelError> {
        self.run.as_mut().map_or(Ok(()), Run::cache_mode_changed)
    }

    /// What the kernel counted, for the whole device and for each queue, while queues run.
    pub(crate) fn counters(&self) -> Vec<(String, String)> {
        self.run.as_ref().map(Run::counters).unwrap_or_default()
    }
}
