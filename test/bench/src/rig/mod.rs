// SPDX-License-Identifier: Apache-2.0
//! Storage inside a lab VM: devices of chosen speed, made through configfs and removed on drop.

mod null_blk;
mod scsi_target;

pub use null_blk::{Speed, null_blk, null_blk_with_memory};
pub use scsi_target::ScsiTarget;
