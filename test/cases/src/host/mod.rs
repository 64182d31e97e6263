// SPDX-License-Identifier: Apache-2.0
//! Cases of the host machine: `/dev/vhost-blk`, and the daemon that drives it.
//!
//! * [`mod@env`]: the environment, from the command line.
//! * [`disks`], [`fixture`]: disks to serve.
//! * [`target`]: a disk behind a driver; [`daemon`]: the same through the daemon, [`groups`] through one
//!   with several disks.
//! * [`load`]: requests on all queues, with every sector verified.
//! * [`module`]: the module itself.
//!
//! Each other module has cases.

pub(crate) mod daemon;
pub(crate) mod env;
pub(crate) mod fixture;
pub(crate) mod owner;

mod abi;
mod charge;
mod control;
mod disks;
mod durability;
mod engines;
mod failure;
mod faults;
mod fuzz;
mod groups;
mod halt;
mod hostile;
mod in_memory;
mod integrity;
mod load;
mod module;
mod notify;
mod operate;
mod over_daemon;
mod packages;
mod pinned;
mod power_loss;
mod ranges;
mod removal;
mod requests;
mod shared_limits;
mod stall;
mod suite;
mod target;
mod trace;
mod visibility;
