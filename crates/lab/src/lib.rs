// SPDX-License-Identifier: Apache-2.0
//! The VM lab: boots real guests in stock QEMU on a disk served by the daemon, and host VMs in which
//! the kernel module is loaded and tested.
//!
//! Nothing here knows how the daemon works. It is started as a program, attached to QEMU as any
//! user would attach it, and judged by what a Linux guest sees.
//!
//! The parts, in the order in which a run uses them:
//!
//! * [`cache`]: what is expensive to make (guest kernel, root image) is made once and kept.
//! * [`kernel`], [`image`]: the guest kernel from Debian's packages and a small root image.
//! * [`accel`]: KVM where a guest truly boots under it, else QEMU's own emulation.
//! * [`server`]: the daemon (or another vhost-user-blk server) on a socket.
//! * [`guest`], [`job`]: one boot of the guest that runs one shell script and reports back.
//! * [`disk`]: making a disk, refusing to overwrite one that has content, checking it from outside.
//! * [`run`]: the main job that puts these together, [`report`] its table.
//!
//! And for the kernel module:
//!
//! * [`vm`]: the host VM, on one of several kernels.
//! * [`exec`]: one command in it.
//! * [`suite`]: many cases in it.
//!
//! Every process that the lab starts ends with it: see [`process`].

pub mod accel;
pub mod cache;
mod debian;
pub mod disk;
pub mod exec;
pub mod guest;
pub mod image;
pub mod interrupt;
pub mod job;
pub mod kernel;
pub mod process;
pub mod report;
pub mod run;
mod scripts;
pub mod server;
pub mod suite;
pub mod vm;
