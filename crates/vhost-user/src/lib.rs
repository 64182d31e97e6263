// SPDX-License-Identifier: Apache-2.0
//! The control plane: handles the vhost-user messages of a block device.
//!
//! The `vhost` crate implements the wire protocol. A [`Device`] lives as long as the program, a
//! `Session` as long as a connection. Messages only collect state: a queue starts when its set-up
//! is complete (`queue_setup.rs`), and belongs to the data plane until it stops. A message that
//! changes the set-up of a running queue stops the queue, changes the set-up, and restarts the
//! queue.
//!
//! This crate handles no request: no message handler reads a virtqueue.

mod backend_channel;
mod connection;
mod control;
mod descriptor;
mod error;
mod faults;
mod handler;
mod handover;
mod image_lock;
mod inflight_region;
mod mem_table;
mod message;
mod operate;
mod peeked;
mod queue_setup;
mod region_use;
mod replace;
mod replay;
mod session;
mod state;
mod switch;
mod waiting;

pub use connection::{ACCEPT_RETRY, Next};
pub use control::{
    Answer, Command, Control, ErrorChange, ImageLockState, Notice, Posted, QueueStatus, Status,
};
pub use error::ConnectionError;
pub use handover::{Exported, Frozen};
pub use replace::{Replace, Replacement, Replacing, differs, seen};
pub use state::{DeviceState, StateError};
pub use waiting::Waiting;

use backend::{Disk, ImageLock};
use control::Mailbox;
use data_plane::{
    ErrorRules, GroupStart, Health, KernelError, LimitError, Limits, PlaneKind, PlaneSelector,
    QueueStats,
};
use handover::Inherited;
use image_lock::FollowedLock;
use session::Session;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use virtio_blk::DeviceConfig;

/// Maximum data segments of a request. QEMU's own devices have the same value with a queue of 128
/// descriptors, so that a guest can migrate between them.
pub const SEG_MAX: u32 = 126;
/// Maximum queues of a device.
pub const QUEUES_MAX: u16 = 64;

/// The `seg_max` of a device with queues of up to `queue_size_max` descriptors: header and status
/// take one descriptor each.
pub fn seg_max(queue_size_max: u16) -> u32 {
    SEG_MAX.min(u32::from(queue_size_max).saturating_sub(2)).max(1)
}

/// Options of a device.
#[derive(Clone, Debug)]
pub struct DeviceOptions {
    /// Number of request queues, 1 to [`QUEUES_MAX`].
    pub num_queues: u16,
    /// Maximum descriptors of a queue.
    pub queue_size_max: u16,
    /// The GET_ID answer; at most 20 bytes.
    pub serial: String,
    /// Offer the packed layout.
    pub packed: bool,
    /// Start in write-back mode.
    pub writeback: bool,
}

/// Receives notices; must not block.
type Observer = Box<dyn Fn(Notice) + Send>;

/// A block device that serves one front-end at a time.
pub struct Device {
    disk: Arc<dyn Disk>,
    config: DeviceConfig,
    options: DeviceOptions,
    planes: PlaneSelector,
    /// No queue runs until the operator resumes the device.
    paused: bool,
    /// It halts the disk after errors; the threads of the data plane share it.
    health: Arc<Health>,
    /// A command has replaced the rules of `health`.
    errors_set: bool,
    /// The lock of the image, if the device takes it and gives it up.
    image_lock: Option<FollowedLock>,
    /// Receives commands of an operator, after [`Device::control`].
    mailbox: Option<Mailbox>,
    /// Gets each change, after [`Device::observe`].
    observer: Option<Observer>,
    /// Signalled by all queues at a ring fault.
    faults: File,
    /// The cache mode. It outlives connections: a front-end that reconnects does not send it again.
    writeback: Arc<AtomicBool>,
    /// The cache mode that a command has set.
    cache_set: Option<bool>,
    /// The front-ends that wait for the end of the present connection.
    waiting: Waiting,
    /// The connection of an earlier program, until it is served.
    inherited: Option<Inherited>,
    /// Number of front-ends so far.
    front_ends: u64,
    /// Counters of each queue without those of its present start.
    earlier_stats: Vec<QueueStats>,
    /// For each queue, kept requests already in `earlier_stats`. 0 while the queue runs.
    counted_kept: Vec<u64>,
}

impl Device {
    /// A device of a disk and the data planes that were started for it.
    ///
    /// # Errors
    /// The error of the system call, if no file descriptor is left.
    pub fn new(
        disk: Arc<dyn Disk>,
        planes: impl Into<PlaneSelector>,
        options: DeviceOptions,
    ) -> io::Result<Self> {
        let planes = planes.into();
        let config = DeviceConfig {
            info: disk.info(),
            num_queues: options.num_queues,
            seg_max: seg_max(options.queue_size_max),
            packed: options.packed && planes.packed(),
        };
        let writeback = Arc::new(AtomicBool::new(options.writeback));
        let earlier_stats = vec![QueueStats::default(); options.num_queues.into()];
        let counted_kept = vec![0; options.num_queues.into()];
        Ok(Device {
            disk,
            config,
            options,
            planes,
            paused: false,
            health: Arc::default(),
            errors_set: false,
            image_lock: None,
            mailbox: None,
            observer: None,
            faults: faults::err_eventfd()?,
            writeback,
            cache_set: None,
            waiting: Waiting::default(),
            inherited: None,
            front_ends: 0,
            earlier_stats,
            counted_kept,
        })
    }

    /// Calls `observer` after each change, on the thread of the device. It must not block.
    pub fn observe(&mut self, observer: impl Fn(Notice) + Send + 'static) {
        self.observer = Some(Box::new(observer));
    }

    fn tell(&self, notice: Notice) {
        if let Some(observer) = &self.observer {
            observer(notice);
        }
    }

    /// Tells the data plane if it is another one than `before`.
    fn tell_plane(&self, before: PlaneKind) {
        let now = self.planes.current();
        if now != before {
            self.tell(Notice::Switched(now));
        }
    }

    /// Replaces the limits of the disk, or of its group: [`PlaneSelector::set_limits`].
    ///
    /// # Errors
    /// [`KernelError`] if the kernel runs queues and refuses them: the old ones hold.
    pub fn set_limits(&mut self, limits: Limits) -> Result<(), KernelError> {
        self.planes.set_limits(&limits)
    }

    /// Gives the group of the disk, which starts, the limits of its options.
    ///
    /// # Errors
    /// As [`PlaneSelector::change_limits`].
    pub fn start_in_group(&mut self, start: &GroupStart) -> Result<(), LimitError> {
        if self.planes.start_in_group(start)? {
            self.limits_changed();
        }
        Ok(())
    }

    /// The limits in force, and the group that has them.
    fn limits(&self) -> (Limits, Option<Arc<str>>) {
        (self.planes.limits(), self.planes.limit_group().cloned())
    }

    /// Reports the limits in force.
    fn limits_changed(&self) {
        let (limits, group) = self.limits();
        tracing::info!(iops = ?limits.iops, bytes = ?limits.bytes, burst = ?limits.burst, ?group, "limits");
        self.tell(Notice::Limited(limits, group));
    }

    /// Replaces the health of the disk, with its policy for errors. No queue may run. The kernel plane
    /// does not use it: the caller keeps a disk that can halt off that plane.
    pub fn set_health(&mut self, health: Arc<Health>) {
        self.health = health;
    }

    /// Replaces the treatment of storage that fails or hangs. No queue may run.
    fn set_error_rules(&mut self, rules: ErrorRules) -> Result<(), KernelError> {
        self.planes.set_error_rules(self.health.rules(), rules)?;
        self.health.set_rules(rules);
        self.errors_set = true;
        Ok(())
    }

    /// Makes the device take `lock` before a queue starts, and give it up when a guest migrates
    /// away. `held`: it is held now.
    pub fn follow_lock(&mut self, lock: ImageLock, held: bool) {
        self.image_lock = Some(FollowedLock { lock, held });
    }

    /// The data planes.
    pub fn planes(&self) -> &PlaneSelector {
        &self.planes
    }

    /// A handle that sends commands to the device. [`Device::serve`] and [`Device::answer`] handle
    /// them.
    ///
    /// # Errors
    /// The error of the system call, if no file descriptor is left.
    pub fn control(&mut self) -> io::Result<Control> {
        let mailbox = match self.mailbox.take() {
            Some(mailbox) => mailbox,
            None => Mailbox::new()?,
        };
        self.mailbox.insert(mailbox).control()
    }

    /// A descriptor that is readable while [`Device::answer`] has commands to handle; `None` before
    /// [`Device::control`].
    pub fn control_fd(&self) -> Option<BorrowedFd<'_>> {
        self.mailbox.as_ref().map(Mailbox::as_fd)
    }

    /// Handles commands while no front-end is connected.
    pub fn answer(&mut self) {
        if let Some(mailbox) = self.mailbox.take() {
            mailbox.handle(&mut Session::new(self), None);
            self.mailbox = Some(mailbox);
        }
    }

    /// Serves one front-end until it disconnects or the stream is shut down. Then stops and drains
    /// its queues and unmaps its memory. Accepts those that connect meanwhile; [`Device::take_waiting`] returns
    /// them. A silent front-end makes room for the first of them after [`Next::patience`].
    ///
    /// # Errors
    /// [`ConnectionError`], for example if the front-end violates the protocol. The device can
    /// serve the next front-end.
    pub fn serve(
        &mut self,
        stream: UnixStream,
        next: Option<Next<'_>>,
    ) -> Result<(), ConnectionError> {
        if self.inherited.is_none() {
            self.front_ends += 1;
        }
        let mailbox = self.mailbox.take();
        let outcome = connection::serve(self, stream, next, mailbox.as_ref());
        self.mailbox = mailbox;
        outcome
    }

    /// Forgets the connection of an earlier program that cannot be served on: the next front-end begins anew.
    pub fn forget_inherited(&mut self) {
        self.inherited = None;
    }

    /// The first of the front-ends that [`Device::serve`] has accepted. They are served before those in the backlog.
    pub fn take_waiting(&mut self) -> Option<UnixStream> {
        self.waiting.pop()
    }

    /// Those front-ends, for another thread that ends the device.
    pub fn waiting(&self) -> Waiting {
        self.waiting.clone()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_leaves_room_for_header_and_status_in_a_small_ring() {
        let queue_sizes = [2, 4, 64, 128, 256, 32768];
        assert_eq!(queue_sizes.map(seg_max), [1, 2, 62, 126, 126, 126]);
    }
}
