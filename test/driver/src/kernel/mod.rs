// SPDX-License-Identifier: Apache-2.0
//! The second transport: `/dev/vhost-blk` programmed as a VMM without a daemon would. It shares
//! nothing with the daemon's hand-over, so that each witnesses for the other.

pub mod abi;
mod device;
mod limits;
mod link;
mod sys;

pub use device::{KernelDevice, KernelError, errno_of};
pub use link::{KernelOptions, KernelSession, Workers, regions_of};
pub use sys::BadAddress;
