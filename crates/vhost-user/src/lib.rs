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
mod descriptor;
mod handler;
mod inflight;
mod mem_table;
mod queue_setup;
mod session;
mod status;

pub use connection::ConnectionError;

use backend::Disk;
use data_plane::DataPlane;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use virtio_blk::DeviceConfig;

/// Data segments of a request: what QEMU's own devices say with a queue of 128, so that a guest
/// can migrate between them.
pub const SEG_MAX: u32 = 126;
/// Most queues of a device.
pub const QUEUES_MAX: u16 = 64;

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
    plane: DataPlane,
    /// The cache mode; kept from connection to connection, as a front-end that connects anew does
    /// not say it again.
    writeback: Arc<AtomicBool>,
}

impl Device {
    /// Makes a device of a disk and the data plane that was started for it.
    pub fn new(disk: Arc<dyn Disk>, plane: DataPlane, options: DeviceOptions) -> Self {
        let config = DeviceConfig {
            info: disk.info(),
            num_queues: options.num_queues,
            // Header and status take a descriptor each.
            seg_max: SEG_MAX.min(u32::from(options.queue_size_max).saturating_sub(2)).max(1),
            packed: options.packed,
        };
        let writeback = Arc::new(AtomicBool::new(options.writeback));
        Device { config, options, plane, writeback }
    }

    /// Serves one front-end until it disconnects or the stream is shut down. All its queues are
    /// stopped and drained, and its memory is unmapped, when this returns.
    ///
    /// # Errors
    /// [`ConnectionError`] when the front-end broke the protocol; the next one may be served.
    pub fn serve(&mut self, stream: UnixStream) -> Result<(), ConnectionError> {
        connection::serve(self, stream)
    }
}
