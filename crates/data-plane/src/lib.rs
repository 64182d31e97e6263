// SPDX-License-Identifier: Apache-2.0
//! The data plane: moves the requests of started queues, in user space or by the kernel.
//!
//! Read `worker.rs` first: one turn of its loop shows the whole life of a request. Each of its
//! stages has a file behind it: *chain* and *used* are `virtqueue`'s, *request* and *completion*
//! are `virtio-blk`'s, *submit* is `submit.rs`, *notify* is `running.rs`.
//!
//! [`Planes`] stands before this plane and the other one, the kernel module's (`kernel/`).
//!
//! What is absent: sockets and vhost-user messages. The control plane hands complete queues in
//! ([`Planes::start_queue`]) and gets their state back ([`Planes::stop_queue`]); between the
//! two a queue belongs to one thread and nothing changes it.

mod affinity;
mod batch;
#[cfg(test)]
mod conformance;
mod event;
mod inflight;
mod kernel;
mod plane;
mod planes;
mod poll;
mod poll_ring;
mod region;
mod running;
mod submit;
mod transfer;
mod uring;
mod worker;

pub use kernel::{DEVICE_PATH, KernelError, KernelOptions, kernel_suits};
pub use plane::{
    DataPlane, IoPoll, PlaneOptions, QueueHandle, QueueStart, QueueStopped, StartError,
};
pub use planes::{PlaneChoice, PlaneKind, Planes, QueueSpec, QueueStartError, StartedQueue};
pub use region::{InflightRegion, queue_region_bytes};
pub use running::QueueStats;
