// SPDX-License-Identifier: Apache-2.0
//! The device side of virtqueues (virtio 1.3, sections 2.7 and 2.8).
//!
//! A request passes through these calls: [`VirtQueue::take`] (stage *chain*); after the data plane
//! has done the work, [`VirtQueue::push_used`] and [`VirtQueue::publish`] (stage *used*) and
//! [`VirtQueue::needs_call`] (stage *notify*).
//!
//! This crate opens no file, starts no thread and uses no eventfd. It does not interpret the
//! content of a chain. It handles SIGBUS from the first mapping on.

mod address_space;
pub mod chain;
pub mod dirty_log;
mod guard;
pub mod memory;
mod notify;
mod packed;
mod queue;
mod ring_area;
mod shared_mapping;
mod split;

pub use chain::{Chain, ChainHead};
pub use dirty_log::DirtyLog;
pub use memory::{GuestMemory, MemoryError, Region};
pub use queue::{InflightChain, Layout, QueueError, RingSetup, VirtQueue};
pub use shared_mapping::SharedMapping;

/// A violation of the queue's protocol by the guest. The queue stops taking chains; chains in
/// flight still complete.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RingFault {
    /// Section 2.7.13: the driver made more chains available than the queue has descriptors.
    #[error("the avail index jumped to {avail_idx}, {ahead} entries ahead of {next_avail}")]
    AvailIndex {
        /// Index that the driver wrote.
        avail_idx: u16,
        /// Index of the next entry that the device takes.
        next_avail: u16,
        /// Distance in entries.
        ahead: u16,
    },
    /// A descriptor index beyond the table.
    #[error("descriptor index {index} is beyond the table of {size}")]
    DescriptorIndex {
        /// The index.
        index: u16,
        /// Descriptors in the table.
        size: u16,
    },
    /// Section 2.7.5.3.1: a chain that loops or exceeds the maximum length.
    #[error("a descriptor chain is longer than {limit} descriptors")]
    ChainTooLong {
        /// Maximum length in descriptors.
        limit: u32,
    },
    /// Buffers of a chain that span too many memory regions.
    #[error("the buffers of a chain cross more than {limit} boundaries of memory regions")]
    ChainTooFragmented {
        /// Maximum number of boundaries.
        limit: u32,
    },
    /// Section 2.7.4.2: a device-readable buffer after a device-writable one.
    #[error("a device-readable descriptor follows a device-writable one")]
    ReadableAfterWritable,
    /// A buffer or table outside the guest's memory.
    #[error("{len} bytes at guest address {addr:#x} are not guest memory")]
    NotMemory {
        /// Guest-physical address.
        addr: u64,
        /// Length in bytes.
        len: u64,
    },
    /// The front-end has truncated the file of the guest's memory, of the dirty log or of the in-flight
    /// region, or its file system has no room for a page.
    #[error(
        "guest memory was truncated, or its file system is full, or that of the dirty log or in-flight region"
    )]
    MemoryLost,
    /// A chain of a previous daemon is of the other ring layout.
    #[error("a chain in flight is not of the layout of its ring")]
    WrongLayout,
    /// Section 2.7.5.3: an indirect descriptor that is not allowed here, or a malformed table.
    #[error("a malformed indirect descriptor (table of {len} bytes)")]
    Indirect {
        /// Length of the table in bytes.
        len: u32,
    },
}
