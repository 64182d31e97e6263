// SPDX-License-Identifier: Apache-2.0
//! Code that the test programs share, and the messages between cases and the lab.
//!
//! * [`agent`]: commands for the agent in a guest.
//! * [`outcome`]: outcomes of a case (passed, failed, could not run), and messages it provokes.
//! * [`disks`]: requests of cases in the guest machine to the lab, which serves their disks.
//! * [`faults`]: faults that the kernel injects.
//! * [`file_system`]: file systems that are made and checked.
//! * [`fio`]: fio's jobs and results.
//! * [`load`]: a load in a guest that verifies itself.
//! * [`loop_device`]: block devices over files.
//! * [`metric`]: measurements, [`report`] their tables, goals and JSON.
//! * [`probe`]: calls of a kernel function, counted.
//! * [`process`]: child processes, [`interrupt`] the signals that end all of them.
//! * [`daemon`]: a vhost-user-blk server on a socket.
//! * [`mount`]: small file systems and loop devices of tests.
//! * [`null_blk`]: devices in memory.
//! * [`system`]: programs and modules of the machine it runs in.
//! * [`qmp`]: QEMU's monitor.
//! * [`power_cut`]: what a disk without power leaves of a write.
//! * [`port`]: a virtio serial port with a time limit.
//! * [`rng`]: random numbers that a seed repeats.
//! * [`sched`]: CPU time of threads, and time-outs that a busy machine extends.
//! * [`set`]: when cases run.
//! * [`signals`]: kicks and interrupts of a guest's disk.
//! * [`skips`]: the skips that are expected.
//! * [`soak`]: a guest under load while its disk is operated, killed and broken in random order.
//! * [`stat`]: the kernel's counters of a block device.
//! * [`wait`]: waits until a condition holds.

pub mod agent;
pub mod daemon;
pub mod disks;
pub mod faults;
pub mod file_system;
pub mod fio;
pub mod interrupt;
pub mod load;
pub mod loop_device;
pub mod metric;
pub mod mount;
pub mod null_blk;
pub mod outcome;
pub mod port;
pub mod power_cut;
pub mod probe;
pub mod process;
pub mod qmp;
pub mod report;
pub mod rng;
pub mod sched;
pub mod set;
pub mod signals;
pub mod skips;
pub mod soak;
pub mod stat;
pub mod system;
pub mod wait;
