// SPDX-License-Identifier: Apache-2.0
//! A user-space virtio-blk driver behind a vhost-user front-end, for tests and benchmarks.
//!
//! It takes the guest's and the VMM's part against any vhost-user-blk daemon, or against the
//! kernel's `/dev/vhost-blk` without a daemon ([`kernel`]). Only `virtio-spec`
//! is shared with the device side, so that a misreading of the specification shows. Bookkeeping
//! is private: nothing that the device can write is ever trusted or walked.
//!
//! From top to bottom: [`Device`] (everything set up, synchronous helpers), [`RequestQueue`]
//! (requests in any legal layout), [`Queue`] (chains on a split or packed ring, kicks and calls),
//! [`Session`] (the vhost-user messages one by one), [`RawChannel`] (any bytes as a message) and
//! [`GuestMemory`].

mod blk;
mod device;
mod frontend;
pub mod kernel;
mod memory;
mod packed;
mod queue;
mod raw;
mod split;

pub use blk::{Completion, Cuts, Layout, Placed, Request, RequestQueue};
pub use device::{Device, Error, Options, QueueSetup};
pub use frontend::{DirtyLog, InflightRegion, Place, Session};
pub use memory::{Area, GuestMemory, Region};
pub use packed::PackedRing;
pub use queue::{Queue, Ring, RingError, Segment, Used};
pub use raw::{RawChannel, RawReply};
pub use split::SplitRing;
