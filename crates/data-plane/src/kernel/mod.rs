// SPDX-License-Identifier: Apache-2.0
//! The kernel data plane: programs `/dev/vhost-blk` with the set-up of queues, and gets the
//! position of their rings back when they stop.
//!
//! The first queue that starts opens the device, and the last one that stops closes it. State that
//! changes only while all queues are stopped (guest memory, features, dirty log) therefore needs no
//! update, and no state of a front-end outlives its queues.
//!
//! This module takes no chain. It reads indices of a ring only before its queue starts.

mod abi;
mod address;
mod compat;
mod counters;
mod device;
mod failures;
mod halt;
mod memlock;
mod run;
mod shared;
mod stalls;
mod traces;
mod workers;

pub use device::DEVICE_PATH;

use crate::error::{self, KernelError, QueueStartError};
use crate::error_rules::{ErrorPolicies, ErrorRules};
use crate::limits::{Limits, Share};
use crate::plane::{AtStop, Coalesce, DataPlane, IoPoll, QueueReport, QueueSetup, QueueState};
use backend::Disk;
use device::VhostBlk;
use run::Run;
use std::fs::File;
use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};
use vhost::VhostBackend;
use virtqueue::{GuestMemory, Layout, VirtQueue};

/// Options of the kernel data plane.
#[derive(Clone, Debug)]
pub struct KernelOptions {
    /// The module's device node, usually [`DEVICE_PATH`].
    pub path: PathBuf,
    /// Number of workers; queues are distributed over them.
    pub workers: usize,
    /// CPUs to pin the workers to, in turn; empty: no worker is pinned.
    pub cpus: Vec<usize>,
    /// Maximum time to poll a ring before the kernel asks for kicks again; zero: no polling.
    pub poll_max: Duration,
    /// Pin guest memory.
    pub pin_memory: bool,
    /// Coalescing of calls. It needs polling.
    pub coalesce: Coalesce,
    /// Chains that a queue takes before it looks for completions, and completions that it publishes
    /// together, at most 64; `None`: the module decides.
    pub batch_size: Option<usize>,
    /// Use the block device's poll queues.
    pub iopoll: IoPoll,
    /// Maximum data segments of a request that the device offers.
    pub seg_max: u32,
    /// Number of queues of the device.
    pub num_queues: u16,
    /// Maximum descriptors of a queue.
    pub queue_size_max: u16,
    /// Limits of the disk.
    pub limits: Limits,
    /// The disk has a time limit for requests in flight.
    pub watches_time: bool,
    /// Errors of the storage that halt the disk.
    pub errors: ErrorPolicies,
}

/// Checks that the kernel can run the queues of `disk` now. Attaches the storage briefly.
///
/// # Errors
/// [`KernelError`]; its text names the cause and the remedy.
pub fn check_kernel(disk: Arc<dyn Disk>, options: KernelOptions) -> Result<(), KernelError> {
    KernelPlane::new(disk, options).check()
}

/// The kernel data plane of one disk.
pub(crate) struct KernelPlane {
    disk: Arc<dyn Disk>,
    options: KernelOptions,
    /// The part of the disk in the limits of its group; `None`: it has its own.
    shared: Option<Arc<Share>>,
    /// The open device while queues run.
    run: Option<Run>,
    /// The time at which a request may be taken again, if the last run ended in debt: a driver that
    /// resets its device pays the debt.
    debt_until: Option<Instant>,
}

impl KernelPlane {
    pub(crate) fn new(disk: Arc<dyn Disk>, options: KernelOptions) -> Self {
        KernelPlane { disk, options, shared: None, run: None, debt_until: None }
    }

    /// Replaces the disk. No queue may run.
    pub(crate) fn set_disk(&mut self, disk: Arc<dyn Disk>) {
        assert!(self.run.is_none(), "no queue of the disk runs");
        self.disk = disk;
    }

    /// Replaces the limits of the disk; forgives the debt of the old ones.
    pub(crate) fn set_limits(&mut self, limits: &Limits) -> Result<(), KernelError> {
        if let Some(run) = &mut self.run {
            run.set_limits(limits)?;
        }
        self.options.limits = *limits;
        self.debt_until = None;
        Ok(())
    }

    /// Replaces the rules for errors. No queue may run.
    pub(crate) fn set_error_rules(&mut self, rules: ErrorRules) {
        self.options.errors = rules.policies;
        self.options.watches_time = rules.io_timeout.is_some();
    }

    /// Halts the running queues: they take no further chain.
    pub(crate) fn halt(&mut self) {
        if let Some(run) = &mut self.run {
            run.halt();
        }
    }

    /// Makes the disk share the limits of a group in place of its own, or leave its group. `in_use`:
    /// queues start on this plane.
    pub(crate) fn share_limits(
        &mut self,
        share: Option<Arc<Share>>,
        in_use: bool,
    ) -> Result<(), KernelError> {
        match (&mut self.run, &share) {
            (Some(run), _) => run.share_limits(share.as_ref())?,
            (None, Some(share)) if in_use => shared::check(&self.owned_device()?, share)?,
            (None, _) => {}
        }
        self.shared = share;
        Ok(())
    }

    /// A device with one queue, for checks.
    fn owned_device(&self) -> Result<VhostBlk, KernelError> {
        let device = VhostBlk::open(&self.options.path)?;
        device.set_num_queues(1)?;
        device.set_owner().map_err(error::of_core("VHOST_SET_OWNER"))?;
        Ok(device)
    }
}

impl DataPlane for KernelPlane {
    /// Attaches the storage briefly.
    fn check(&self) -> Result<(), KernelError> {
        if u32::from(self.options.queue_size_max) > abi::QUEUE_SIZE_MAX {
            return Err(KernelError::Unsuited(format!(
                "--queue-size is {}, and the kernel takes queues of up to {} descriptors; \
                 lower it",
                self.options.queue_size_max,
                abi::QUEUE_SIZE_MAX
            )));
        }
        let storage = self.disk.kernel_file().map_err(|why| KernelError::Unsuited(why.into()))?;
        let device = self.owned_device()?;
        device.attach(storage)?;
        let info = device.info()?;
        compat::disk(&info, &self.disk.info(), self.options.seg_max)?;
        halt::check(&info, self.options.errors)?;
        if self.options.watches_time {
            stalls::check(&device)?;
        }
        if let Some(share) = &self.shared {
            shared::check(&device, share)?;
        }
        match self.options.limits.is_set() {
            true => run::check_limits(&device, &self.options.limits),
            false => Ok(()),
        }
    }

    /// The kernel gets guest memory with the first queue.
    fn set_memory(&mut self, _: Option<Arc<GuestMemory>>) {}

    fn start_queue(&mut self, setup: QueueSetup) -> Result<(), QueueStartError> {
        let mut ring = VirtQueue::start(&setup.ring)?;
        if setup.ring.layout == Layout::Packed {
            let why = "the guest uses packed virtqueues; set --packed off and restart its device";
            return Err(KernelError::Unsuited(why.into()).into());
        }
        let call = ring.may_wait_for_call();
        let run = match self.run.take() {
            Some(run) => self.run.insert(run),
            None => {
                let debt =
                    self.debt_until.map(|until| until.saturating_duration_since(Instant::now()));
                let debt_ms = debt.map_or(0, |debt| debt.as_millis() as u32);
                let mut run = Run::begin(&self.disk, &self.options, &setup, debt_ms)?;
                if self.shared.is_some() {
                    run.share_limits(self.shared.as_ref())?;
                }
                self.run.insert(run)
            }
        };
        let started = run.start_queue(&self.options, &setup, call);
        if started.is_err() && run.is_idle() {
            self.run = None;
        }
        Ok(started?)
    }

    /// If these are all running queues, one ioctl stops and drains them together. Requests that failed
    /// and halted the disk are in [`QueueState::left`], or in the in-flight region: the module cannot
    /// carry them out or answer them.
    fn stop_queues(&mut self, indices: &[u16], _: AtStop) -> Vec<QueueState> {
        let Some(run) = &mut self.run else { return Vec::new() };
        if run.is_all(indices.len()) {
            run.stop_all();
        }
        let stopped = run.stop_queues(indices);
        if run.is_idle() {
            let debt = Duration::from_millis(run.limit_debt_ms().into());
            self.debt_until = Some(Instant::now() + debt);
            self.run = None;
        }
        stopped
    }

    fn set_call(&mut self, index: u16, call: Option<File>) -> Result<(), KernelError> {
        self.run.as_mut().map_or(Ok(()), |run| run.set_call(index, call))
    }

    fn cache_mode_changed(&mut self) -> Result<(), KernelError> {
        self.run.as_mut().map_or(Ok(()), Run::cache_mode_changed)
    }

    fn device_counters(&self) -> io::Result<Vec<(String, String)>> {
        self.run.as_ref().map_or_else(|| Ok(Vec::new()), Run::counters)
    }

    fn queue_report(&self, index: u16, device: &[(String, String)]) -> QueueReport {
        counters::of_queue(device, index)
    }
}
