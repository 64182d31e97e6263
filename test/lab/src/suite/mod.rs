// SPDX-License-Identifier: Apache-2.0
//! Many cases in host VMs: which there are, how they are run, how they are judged.
//!
//! * [`case`]: the cases that the program `cases` has, and the lab's own.
//! * `script`: what one boot does: case after case, each between two marks in the kernel's log.
//! * [`runner`]: boots, and boots again after a case that took the kernel down.
//! * `follow`: follows the cases of one boot and judges them.
//! * `live`: shows the output of the cases while they run.
//! * [`klog`]: finds what a kernel log must not hold.
//! * [`report`]: the closing line, and the same for machines.

pub mod case;
pub(crate) mod follow;
pub mod klog;
pub(crate) mod live;
pub mod report;
pub mod runner;
pub(crate) mod script;
