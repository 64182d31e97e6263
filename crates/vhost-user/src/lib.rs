// SPDX-License-Identifier: Apache-2.0
//! The control plane: what vhost-user messages mean to a block device.
//!
//! The wire protocol is the `vhost` crate's. A [`Device`] lives as long as the program, a
//! `Session` as long as a connection. Messages only gather state; a queue starts when its set-up
//! is complete (`queue_setup.rs`), and belongs to the data plane until it is stopped. A message
//! that changes what a running queue relies on stops the queue, changes it, and starts it again.
//!
//! What is absent: requests. No message handler reads a virtqueue.

mod connection;
mod control;
mod descriptor;
mod handler;
mod inflight;
mod mem_table;
mod queue_setup;
mod session;
mod status;
mod switch;

pub use connection::ConnectionError;
pub use control::{Answer, Command, Control, QueueStatus, Status};

use backend::Disk;
use control::Mailbox;
use data_plane::Planes;
use session::Session;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use virtio_blk::DeviceConfig;

/// Data segments of a request: what QEMU's own devices say with a queue of 128, so that a guest
/// can migrate between them.
pub const SEG_MAX: u32 = 126;
/// Most queues of a device.
pub const QUEUES_MAX: u16 = 64;

/// Data segments of a request that a device with queues of up to `queue_size_max` offers: header
/// and status take a descriptor each.
pub fn seg_max(queue_size_max: u16) -> u32 {
    SEG_MAX.min(u32::from(queue_size_max).saturating_sub(2)).max(1)
}

/// What a device shows to its front-end.
#[derive(Clone, Debug)]
pub struct DeviceOptions {
    /// Number of request queues, 1 to [`QUEUES_MAX`].
    pub num_queues: u16,
    /// Largest queue that a front-end may set up.
    pub queue_size_max: u16,
    /// The GET_ID answer; at most 20 bytes.
    pub serial: String,
    /// Offer the packed layout.
    pub packed: bool,
    /// Start in write-back mode.
    pub writeback: bool,
}

/// A block device that serves one front-end at a time.
pub struct Device {
    config: DeviceConfig,
    options: DeviceOptions,
    planes: Planes,
    /// Where an operator's commands come in, if they may.
    mailbox: Option<Mailbox>,
    /// The cache mode; kept from connection to connection, as a front-end that connects anew does
    /// not say it again.
    writeback: Arc<AtomicBool>,
}

impl Device {
    /// Makes a device of a disk and the data planes that were started for it.
    pub fn new(disk: Arc<dyn Disk>, planes: impl Into<Planes>, options: DeviceOptions) -> Self {
        let planes = planes.into();
        let config = DeviceConfig {
            info: disk.info(),
            num_queues: options.num_queues,
            seg_max: seg_max(options.queue_size_max),
            packed: options.packed && planes.packed(),
        };
        let writeback = Arc::new(AtomicBool::new(options.writeback));
        Device { config, options, planes, mailbox: None, writeback }
    }

    /// The data planes.
    pub fn planes(&self) -> &Planes {
        &self.planes
    }

    /// Something to ask the device things with. They are answered while a front-end is served,
    /// and in [`Device::answer`].
    ///
    /// # Errors
    /// When no descriptor is left.
    pub fn control(&mut self) -> io::Result<Control> {
        let mailbox = match self.mailbox.take() {
            Some(mailbox) => mailbox,
            None => Mailbox::new()?,
        };
        self.mailbox.insert(mailbox).control()
    }

    /// Readable when [`Device::answer`] has something to do; `None` before [`Device::control`].
    pub fn control_fd(&self) -> Option<BorrowedFd<'_>> {
        self.mailbox.as_ref().map(Mailbox::as_fd)
    }

    /// Answers what was asked while no front-end is connected.
    pub fn answer(&mut self) {
        if let Some(mailbox) = self.mailbox.take() {
            mailbox.handle(&mut Session::new(self), false);
            self.mailbox = Some(mailbox);
        }
    }

    /// Serves one front-end until it disconnects or the stream is shut down. All its queues are
    /// stopped and drained, and its memory is unmapped, when this returns.
    ///
    /// # Errors
    /// [`ConnectionError`] when the front-end broke the protocol; the next one may be served.
    pub fn serve(&mut self, stream: UnixStream) -> Result<(), ConnectionError> {
        let mailbox = self.mailbox.take();
        let outcome = connection::serve(self, stream, mailbox.as_ref());
        self.mailbox = mailbox;
        outcome
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
