// SPDX-License-Identifier: Apache-2.0
//! The VM lab: boots real guests in stock QEMU on a disk served by the daemon, and host VMs in which
//! the kernel module is loaded and tested.
//!
//! Nothing here but [`disks`] knows how the daemon works. It is started as a program, attached to QEMU as any
//! user would attach it, and judged by what a Linux guest sees.
//!
//! [`cli`] has the command line. The parts, in the order in which a run uses them:
//!
//! * [`cache`]: expensive files (guest kernel, root image), made once and kept.
//! * [`qemu`]: the installed QEMU, or a private one if that is too old.
//! * [`kernel`], [`image`]: the guest kernel from Debian's packages and a small root image.
//! * [`accel`]: KVM if a guest really boots under it, else QEMU's own emulation.
//! * [`emulator`]: the faults of that emulation.
//! * [`server`]: the daemon (or another vhost-user-blk server) on a socket.
//! * [`firmware`]: UEFI firmware, which boots a disk that holds no Linux.
//! * [`guest`], [`job`]: one boot of the guest that runs one shell script and reports back.
//! * [`uml`]: the same in User Mode Linux, without QEMU.
//! * [`disk`]: making a disk, refusing to overwrite one that has content, checking it from outside.
//! * [`run`]: the main job that puts these together, [`report`] its table.
//! * [`soak`]: a guest whose disk is operated, killed and broken in random order.
//! * [`bench_guest`]: the comparison of inner guests, on this machine itself.
//!
//! And for the kernel module:
//!
//! * [`vm`]: the host VM, on one of several kernels.
//! * [`disks`]: the disks of a VM that is itself the guest, served from outside.
//! * [`exec`]: one command in it.
//! * [`suite`]: many cases in it.
//!
//! Every process that the lab starts ends with it: see [`kit::process`].

pub mod accel;
pub mod bench_guest;
pub mod cache;
pub mod cli;
mod debian;
pub mod disk;
pub mod disks;
pub mod emulator;
pub mod exec;
mod failure;
pub mod firmware;
pub mod guest;
pub mod image;
pub mod job;
pub mod kernel;
pub mod qemu;
pub mod report;
pub mod run;
mod scripts;
pub mod server;
pub mod soak;
pub mod suite;
pub mod uml;
pub mod vm;
