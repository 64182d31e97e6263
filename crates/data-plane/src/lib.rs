// SPDX-License-Identifier: Apache-2.0
//! The data plane: serves the requests of running queues, in user space or by the kernel.
//!
//! Read `worker.rs` first: one turn of its loop shows the whole life of a request. Each stage has its
//! own code: *chain* and *used* in `virtqueue`, *request* and *completion* in `virtio-blk`, *submit* in
//! `submit.rs`, *notify* in `running.rs`.
//!
//! A data plane implements `DataPlane` (`plane.rs`): `uring_plane.rs` is this one, `kernel/` the one
//! of the kernel module. [`PlaneSelector`] selects one of them for a device.
//!
//! This crate handles no socket and no vhost-user message. The control plane starts complete queues
//! ([`PlaneSelector::start_queue`]) and gets their state back ([`PlaneSelector::stop_queues`]). Between
//! the two a queue belongs to one thread, and nothing changes it.

mod affinity;
mod arrivals;
mod backoff;
mod batch_size;
mod coalesce;
mod completion_batch;
#[cfg(test)]
mod conformance;
mod error;
mod error_rules;
mod event;
mod eventfd_watch;
mod failure;
mod gain;
mod health;
mod io_workers;
mod kernel;
mod lanes;
mod latency;
mod limit_change;
mod limits;
mod mail;
mod once_per_second;
mod plane;
mod poll;
mod poll_ring;
mod poll_trial;
mod pool;
mod port;
mod region;
mod remote;
mod request_table;
mod running;
mod selector;
mod stall;
mod stats;
mod submit;
mod table;
mod throttle;
mod trace;
mod transfer;
mod trial;
mod uring;
mod uring_plane;
mod worker;

pub use error::{KernelError, QueueStartError, StartError};
pub use error_rules::{ErrorPolicies, ErrorPolicy, ErrorRules};
pub use eventfd_watch::{Blocked, signal};
pub use failure::{FailureKind, StorageFailure};
pub use health::{Halt, Health, HealthEvent, HealthHook, HealthReport, HealthTotals, TraceHook};
pub use kernel::{DEVICE_PATH, KernelOptions, check_kernel};
pub use latency::{Histogram, LATENCY_BUCKETS, Latencies, Operation};
pub use limit_change::{GroupStart, LimitChange, LimitError, Limits};
pub use once_per_second::{LogLimit, OncePerSecond};
pub use plane::{
    AtStop, Choices, Coalesce, IoPoll, PlaneKind, QueueReport, QueueSetup, QueueState,
};
pub use pool::{UringOptions, UringPool};
pub use region::{InflightRegion, queue_region_bytes};
pub use selector::{
    PlaneChoice, PlaneSelector, Prepared, QueueHandle, Recovered, ReplaceError, Selected,
    Selection, Started,
};
pub use stats::QueueStats;
pub use trace::{SlowRequest, Traced};
pub use uring_plane::UringPlane;
pub use worker::BATCH_CHAINS_MAX;
