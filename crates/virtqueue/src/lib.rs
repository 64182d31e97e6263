// SPDX-License-Identifier: Apache-2.0
//! The device side of virtqueues (virtio 1.3, sections 2.7 and 2.8).
//!
//! The order of a request's life here: [`VirtQueue::take`] (stage *chain*), and after the data
//! plane has done the work, [`VirtQueue::push_used`] and [`VirtQueue::publish`] (stage *used*) and
//! [`VirtQueue::needs_call`] (stage *notify*).
//!
//! What is absent: files, threads, eventfds, and any knowledge of what a chain means.

pub mod chain;
pub mod dirty_log;
pub mod memory;
mod notify;
mod packed;
mod queue;
mod ring_area;
mod split;

pub use chain::{Chain, ChainHead};
pub use dirty_log::DirtyLog;
pub use memory::{GuestMemory, MemoryError, Region};
pub use queue::{Layout, QueueError, QueueSetup, Resubmit, VirtQueue};

/// The guest broke the queue's protocol. The queue stops; chains in flight still complete.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RingFault {
    /// Section 2.7.13: more chains made available than the queue has descriptors.
    #[error("the avail index jumped to {avail_idx}, {ahead} entries ahead of {next_avail}")]
    AvailIndex {
        /// What the driver wrote.
        avail_idx: u16,
        /// What the device takes next.
        next_avail: u16,
        /// Their distance.
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
    /// Section 2.7.5.3.1: a chain that loops or is longer than a chain may be.
    #[error("a descriptor chain is longer than {limit} descriptors")]
    ChainTooLong {
        /// The bound.
        limit: u32,
    },
    /// Section 2.7.4.2: a device-readable buffer behind a device-writable one.
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
    /// Section 2.7.5.3: an indirect descriptor where none is allowed, or a malformed table.
    #[error("a malformed indirect descriptor (table of {len} bytes)")]
    Indirect {
        /// Length of the table in bytes.
        len: u32,
    },
}
