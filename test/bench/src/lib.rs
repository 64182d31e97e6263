// SPDX-License-Identifier: Apache-2.0
//! Measures vhost-user-blk servers natively, without a guest, and compares them. The program is
//! `bench`; this library is its parts, from the load up.

#![forbid(unsafe_code)]

pub mod bare;
pub mod changes;
pub mod client;
pub mod compare;
pub mod cpu;
pub mod density;
pub mod disk;
mod goals;
pub mod host;
pub mod icount;
pub mod kept;
pub mod load;
mod one_daemon;
pub mod operations;
pub mod page;
mod plan;
pub mod rig;
pub mod server;
pub mod setup;
pub mod significance;
pub mod socket;
mod syscalls;
pub mod timeline;
mod tracing;
pub mod vhost_scsi;
pub mod wire;
pub mod worker;
