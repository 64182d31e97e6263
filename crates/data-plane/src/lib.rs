// SPDX-License-Identifier: Apache-2.0
//! The data plane in user space: moves the requests of started queues.
//!
//! Read `worker.rs` first: one turn of its loop shows the whole life of a request. Each of its
//! stages has a file behind it: *chain* and *used* are `virtqueue`'s, *request* and *completion*
//! are `virtio-blk`'s, *submit* is `submit.rs`, *notify* is `running.rs`.
//!
//! What is absent: sockets and vhost-user messages. The control plane hands complete queues in
//! ([`DataPlane::start_queue`]) and gets their state back ([`DataPlane::stop_queue`]); between the
//! two a queue belongs to one thread and nothing changes it.

mod affinity;
mod batch;
#[cfg(test)]
mod conformance;
mod event;
mod inflight;
mod plane;
mod poll;
mod poll_ring;
mod region;
mod running;
mod submit;
mod transfer;
mod uring;
mod worker;

pub use plane::{
    DataPlane, IoPoll, PlaneOptions, QueueHandle, QueueStart, QueueStopped, StartError,
};
pub use region::{InflightRegion, queue_region_bytes};
pub use running::QueueStats;
