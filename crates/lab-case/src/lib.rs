// SPDX-License-Identifier: Apache-2.0
//! What the programs that have cases for the lab share with each other and with the lab, and the
//! words by which the lab understands them.
//!
//! * [`outcome`]: how a case says that it passed, failed, could not run, or provokes a message.
//! * [`faults`]: faults that the kernel injects.
//! * [`system`]: programs and modules of the machine it runs in.
//! * [`qmp`]: QEMU's monitor.
//! * [`rng`]: random numbers that a seed repeats.
//! * [`stat`]: what the kernel counts of a block device.
//! * [`wait`]: until something is there.

pub mod faults;
pub mod outcome;
pub mod qmp;
pub mod rng;
pub mod stat;
pub mod system;
pub mod wait;
