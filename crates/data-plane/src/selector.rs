// SPDX-License-Identifier: Apache-2.0
//! Selects the data plane of a device's queues: the kernel or the daemon's io_uring threads. All
//! queues of a device run on the same plane.

mod kernel_start;
mod replacement;

pub use kernel_start::{Recovered, Started};
pub use replacement::{Prepared, ReplaceError};

use crate::error::KernelError;
use crate::error_rules::ErrorRules;
use crate::kernel::{KernelOptions, KernelPlane};
use crate::limit_change::{GroupStart, LimitChange, LimitError};
use crate::limits::Limits;
use crate::plane::{AtStop, DataPlane, PlaneKind, QueueReport, QueueSetup, QueueState};
use crate::uring_plane::UringPlane;
use backend::Disk;
use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::sync::Arc;
use virtqueue::GuestMemory;

/// The choice of the data plane by the user.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PlaneChoice {
    /// The kernel if it can run the queues, otherwise io_uring; also later.
    Auto,
    /// Always this one.
    Only(PlaneKind),
}

/// A running queue of a device.
#[derive(Debug)]
#[must_use = "a running queue must be stopped"]
pub struct QueueHandle {
    index: u16,
    plane: PlaneKind,
    /// The plane that has the queue: io_uring for a parked one, see `kernel_start.rs`.
    runs_on: PlaneKind,
}

impl QueueHandle {
    /// The data plane on which the queue was started.
    pub fn plane(&self) -> PlaneKind {
        self.plane
    }
}

/// A data plane and the reason for its selection.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Selection {
    /// The data plane.
    pub plane: PlaneKind,
    /// The reason for it.
    pub reason: String,
}

/// The selections of a [`PlaneSelector`], for the program that follows this one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Selected {
    /// The data plane of the queues.
    pub current: Selection,
    /// The data plane for the queues of the next front-end.
    pub preferred: Selection,
    /// Packed virtqueues are offered.
    pub packed: bool,
    /// The reason for the kernel plane, to which the queues return when it serves the storage again.
    pub left_kernel: Option<String>,
}

/// The data planes of one disk, and the selected one.
pub struct PlaneSelector {
    uring: UringPlane,
    kernel: Option<KernelPlane>,
    choice: PlaneChoice,
    packed: bool,
    /// The selection for the queues of the next front-end.
    preferred: Selection,
    current: Selection,
    /// As [`Selected::left_kernel`].
    left_kernel: Option<String>,
    memory: Option<Arc<GuestMemory>>,
    /// Queues that a ring fault stopped before they reached the kernel.
    faulted: BTreeMap<u16, QueueState>,
}

/// A selector without the kernel data plane.
impl From<UringPlane> for PlaneSelector {
    fn from(uring: UringPlane) -> Self {
        let choice = PlaneChoice::Only(PlaneKind::Uring);
        let reason = "there is no other".to_owned();
        Self::with(uring, None, choice, Selection { plane: PlaneKind::Uring, reason })
    }
}

impl PlaneSelector {
    /// Both planes of a disk; `uring` was started for it.
    ///
    /// # Errors
    /// [`KernelError`] if the choice is the kernel alone and it cannot run this disk.
    pub fn new(
        disk: Arc<dyn Disk>,
        uring: UringPlane,
        options: KernelOptions,
        choice: PlaneChoice,
    ) -> Result<Self, KernelError> {
        let node = options.path.display().to_string();
        let is_unsuited = disk.kernel_file().is_err();
        let mut kernel = KernelPlane::new(disk, options);
        kernel.share_limits(uring.share_of_group(), false)?;
        let check = || kernel.check();
        let suits = format!("{node} is there and suits the disk");
        let (plane, reason) = match choice {
            PlaneChoice::Auto => match check() {
                Ok(()) => (PlaneKind::Kernel, suits.clone()),
                Err(error) => (PlaneKind::Uring, error.to_string()),
            },
            PlaneChoice::Only(kind) => {
                if kind == PlaneKind::Kernel {
                    check()?;
                }
                (kind, "--data-plane says so".to_owned())
            }
        };
        let mut selector = Self::with(uring, Some(kernel), choice, Selection { plane, reason });
        if choice == PlaneChoice::Auto && is_unsuited {
            selector.left_kernel = Some(suits);
        }
        Ok(selector)
    }

    fn with(
        uring: UringPlane,
        kernel: Option<KernelPlane>,
        choice: PlaneChoice,
        preferred: Selection,
    ) -> Self {
        PlaneSelector {
            uring,
            kernel,
            choice,
            // The properties that the guest sees must not depend on the plane it starts on.
            packed: preferred.plane == PlaneKind::Uring,
            current: preferred.clone(),
            preferred,
            left_kernel: None,
            memory: None,
            faulted: BTreeMap::new(),
        }
    }

    fn plane(&self, kind: PlaneKind) -> &dyn DataPlane {
        match (kind, &self.kernel) {
            (PlaneKind::Kernel, Some(kernel)) => kernel,
            _ => &self.uring,
        }
    }

    fn plane_mut(&mut self, kind: PlaneKind) -> &mut dyn DataPlane {
        match (kind, &mut self.kernel) {
            (PlaneKind::Kernel, Some(kernel)) => kernel,
            _ => &mut self.uring,
        }
    }

    /// The data plane of new queues.
    pub fn current(&self) -> PlaneKind {
        self.current.plane
    }

    /// The reason for the current data plane.
    pub fn why(&self) -> &str {
        &self.current.reason
    }

    /// Returns whether packed virtqueues may be offered: the kernel does not support them.
    pub fn packed(&self) -> bool {
        self.packed
    }

    /// Returns whether packed virtqueues can be served, possibly after the kernel has refused them.
    pub fn can_serve_packed(&self) -> bool {
        self.current() == PlaneKind::Uring || self.may_fall_back()
    }

    /// Returns whether a queue that the kernel refuses may start on the io_uring plane.
    pub fn may_fall_back(&self) -> bool {
        self.current() == PlaneKind::Kernel && self.choice != PlaneChoice::Only(PlaneKind::Kernel)
    }

    /// Checks that queues can start on `kind` now.
    ///
    /// # Errors
    /// [`KernelError`] if it is the kernel and it cannot run this disk.
    pub fn check(&self, kind: PlaneKind) -> Result<(), KernelError> {
        if kind == PlaneKind::Kernel && self.kernel.is_none() {
            return Err(KernelError::Unsuited("this program was started without it".into()));
        }
        self.plane(kind).check()
    }

    /// Selects `kind` for new queues, for the given reason. The caller has checked `kind`. No queue
    /// may run.
    pub fn select(&mut self, kind: PlaneKind, reason: &str) {
        let current = self.current();
        if current != kind {
            let memory = self.memory.clone();
            self.plane_mut(current).set_memory(None);
            self.plane_mut(kind).set_memory(memory);
        }
        self.current = Selection { plane: kind, reason: reason.to_owned() };
    }

    /// Selects the current plane for the queues of the next front-end, too, whatever the storage is.
    pub fn prefer_current(&mut self) {
        self.preferred.clone_from(&self.current);
        self.left_kernel = None;
    }

    /// The selections.
    pub fn selected(&self) -> Selected {
        let (current, preferred) = (self.current.clone(), self.preferred.clone());
        let left_kernel = self.left_kernel.clone();
        Selected { current, preferred, packed: self.packed, left_kernel }
    }

    /// Makes the selections of the program before this one. A data plane that is not available any
    /// more is not selected. No queue may run.
    pub fn restore(&mut self, selected: Selected) {
        let Selected { current, preferred, packed, left_kernel } = selected;
        (self.packed, self.left_kernel) = (packed, left_kernel);
        match self.check(preferred.plane) {
            Ok(()) => self.preferred = preferred,
            Err(why) => tracing::warn!(plane = %preferred.plane, %why, "not available any more"),
        }
        match self.check(current.plane) {
            Ok(()) => self.select(current.plane, &current.reason),
            Err(why) => {
                tracing::warn!(plane = %current.plane, %why, "not available any more");
                self.select_preferred();
            }
        }
    }

    /// Returns to the preferred plane after a front-end has disconnected. No queue may run.
    pub fn select_preferred(&mut self) {
        let Selection { plane, reason } = self.preferred.clone();
        self.select(plane, &reason);
    }

    /// Replaces guest memory (`None`: removes it). No queue may run.
    pub fn set_memory(&mut self, memory: Option<Arc<GuestMemory>>) {
        self.memory.clone_from(&memory);
        self.plane_mut(self.current()).set_memory(memory);
    }

    /// Makes both planes adopt the present capacity of the disk. No queue may run: the kernel
    /// plane opens the storage with the next one.
    ///
    /// # Errors
    /// The error of a thread that cannot open the disk again, and keeps the old capacity.
    pub fn adopt_capacity(&self) -> io::Result<()> {
        self.uring.reopen_lanes()
    }

    /// The limits of the disk and of the others of its group.
    pub fn limits(&self) -> Limits {
        self.uring.limits()
    }

    /// Name of the group of disks that share the limits.
    pub fn limit_group(&self) -> Option<&Arc<str>> {
        self.uring.limit_group()
    }

    /// The limits of a group; `None`: it has none, or no disk.
    pub fn limits_of_group(&self, name: &str) -> Option<Limits> {
        self.uring.limits_of_group(name)
    }

    /// Makes the disk share the limits of a group on both planes, in place of its present ones, and changes them. A new
    /// group has none before. Returns whether something has changed.
    ///
    /// # Errors
    /// [`LimitError`] if the group would have no limit, or if the kernel is selected for the queues of this front-end
    /// or of the next one, and cannot share limits: nothing is changed.
    pub fn join_limit_group(
        &mut self,
        name: &str,
        change: LimitChange,
    ) -> Result<bool, LimitError> {
        let Some(member) = self.uring.new_member(name) else {
            return self.uring.change_limits(change);
        };
        let in_use = [self.current.plane, self.preferred.plane].contains(&PlaneKind::Kernel);
        let share = Arc::clone(member.share());
        let kernel = self.kernel.as_mut();
        member.limiter().change_with(change, || {
            kernel.map_or(Ok(()), |kernel| kernel.share_limits(Some(share), in_use))?;
            Ok(())
        })?;
        self.uring.become_member(member);
        self.uring.limits_changed();
        Ok(true)
    }

    /// Gives the group of the disk, which starts, the limits of its options. Returns whether they change.
    ///
    /// # Errors
    /// As [`PlaneSelector::change_limits`].
    pub fn start_in_group(&mut self, start: &GroupStart) -> Result<bool, LimitError> {
        match start {
            GroupStart::Command(change) => self.change_limits(*change),
            GroupStart::File { disk, limits } => Ok(self.uring.set_limits_of_file(disk, limits)),
        }
    }

    /// Changes the limits of the disk on both planes, or those of its group. A change that removes all takes the disk
    /// out of its group. Returns whether something has changed.
    ///
    /// # Errors
    /// [`LimitError`]: the old limits hold.
    pub fn change_limits(&mut self, change: LimitChange) -> Result<bool, LimitError> {
        let is_of_group = self.limit_group().is_some();
        if is_of_group && !change.removes_all() {
            return self.uring.change_limits(change);
        }
        // Only the thread of the disk changes its own limits.
        let limits = change.of(self.limits());
        let changed = is_of_group || limits != self.limits();
        if changed {
            self.set_limits(&limits)?;
        }
        Ok(changed)
    }

    /// Replaces the limits of the disk on both planes, or those of its group: see
    /// [`UringPlane::set_limits`].
    ///
    /// # Errors
    /// [`KernelError`] if the kernel runs queues and refuses the limits: the old ones hold.
    pub fn set_limits(&mut self, limits: &Limits) -> Result<(), KernelError> {
        let leaves = self.limit_group().is_some() && !limits.is_set();
        match &mut self.kernel {
            Some(kernel) if leaves => {
                // Those from before the disk joined the group.
                kernel.set_limits(limits)?;
                kernel.share_limits(None, false)?;
            }
            Some(kernel) if self.uring.limit_group().is_none() => kernel.set_limits(limits)?,
            _ => {}
        }
        self.uring.set_limits(limits);
        Ok(())
    }

    /// Makes the kernel plane adopt the rules for errors. No queue may run.
    ///
    /// # Errors
    /// [`KernelError`] if the kernel is selected for the queues of this front-end or of the next one, and cannot have
    /// these rules: nothing is changed.
    pub fn set_error_rules(&mut self, old: ErrorRules, new: ErrorRules) -> Result<(), KernelError> {
        let in_use = [self.current.plane, self.preferred.plane].contains(&PlaneKind::Kernel);
        let Some(kernel) = &mut self.kernel else { return Ok(()) };
        kernel.set_error_rules(new);
        if in_use && let Err(error) = kernel.check() {
            kernel.set_error_rules(old);
            return Err(error);
        }
        Ok(())
    }

    /// Starts a queue on the current plane. After an error the queue is unchanged, except for
    /// [`Started::recovered`].
    pub fn start_queue(&mut self, setup: QueueSetup) -> Started {
        let (index, plane) = (setup.index, self.current());
        let mut recovered = None;
        let runs_on = match plane {
            PlaneKind::Kernel => self.start_in_kernel(setup, &mut recovered),
            PlaneKind::Uring => self.uring.start_queue(setup).map(|()| plane),
        };
        let result = runs_on.map(|runs_on| QueueHandle { index, plane, runs_on });
        Started { result, recovered }
    }

    /// Makes the queues carry out the requests that they keep, after the end of a halt.
    pub fn retry_kept(&self) {
        self.uring.wake();
    }

    /// Stops queues: none of them takes a further chain, and their requests in flight complete.
    /// Returns their states in the same order. All queues stop before the first wait: this takes as
    /// long as the slowest queue. Requests that a halted disk keeps end as `at_stop` says.
    pub fn stop_queues(&mut self, queues: Vec<QueueHandle>, at_stop: AtStop) -> Vec<QueueState> {
        let mut stopped = std::mem::take(&mut self.faulted);
        for kind in [PlaneKind::Kernel, PlaneKind::Uring] {
            let runs =
                |queue: &&QueueHandle| queue.runs_on == kind && !stopped.contains_key(&queue.index);
            let indices: Vec<u16> = queues.iter().filter(runs).map(|queue| queue.index).collect();
            let states = self.plane_mut(kind).stop_queues(&indices, at_stop);
            stopped.extend(indices.into_iter().zip(states));
        }
        let state = |queue: QueueHandle| {
            stopped.remove(&queue.index).expect("each running queue has a state")
        };
        let states = queues.into_iter().map(state).collect();
        self.faulted = stopped; // those that were not asked for
        states
    }

    /// Replaces the call eventfd of a running queue without waiting for its I/O.
    ///
    /// # Errors
    /// [`KernelError`] if the kernel refuses it: the queue keeps the old one.
    pub fn set_call(&mut self, queue: &QueueHandle, call: Option<File>) -> Result<(), KernelError> {
        if self.faulted.contains_key(&queue.index) {
            return Ok(());
        }
        self.plane_mut(queue.runs_on).set_call(queue.index, call)
    }

    /// Applies a change of the cache mode, which [`virtio_blk::DiskView`] shares.
    ///
    /// # Errors
    /// [`KernelError`] if the kernel refuses it: its queues keep the old mode.
    pub fn cache_mode_changed(&mut self) -> Result<(), KernelError> {
        self.plane_mut(self.current()).cache_mode_changed()
    }

    /// A running queue as it is now. `device` is the result of [`PlaneSelector::device_counters`].
    pub fn queue_report(&self, queue: &QueueHandle, device: &[(String, String)]) -> QueueReport {
        if let Some(state) = self.faulted.get(&queue.index) {
            return state.report();
        }
        self.plane(queue.runs_on).queue_report(queue.index, device)
    }

    /// Name and value of each counter of the kernel module, while it runs queues.
    ///
    /// # Errors
    /// The error of the system call.
    pub fn device_counters(&self) -> io::Result<Vec<(String, String)>> {
        self.plane(self.current()).device_counters()
    }
}
