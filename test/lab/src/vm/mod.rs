// SPDX-License-Identifier: Apache-2.0
//! The host VM: a machine with loadable modules, independent of the real one.
//!
//! A Debian system with QEMU in it, on one of several kernels, with this project's module loaded
//! and its programs below `/lab`. Under emulation its CPU has AMD's virtualization, so that guests
//! run inside it with real KVM. Or it is a guest itself, for the guest's driver.
//!
//! * [`kernel`]: the kernels it can run.
//! * [`machine`]: the machines it can be.
//! * [`root`]: its root image, the same for all kernels.
//! * [`systemd_root`]: the root images with systemd, on which the packages are installed.
//! * [`payload`]: what changes from run to run: modules and programs.
//! * [`boot`]: one boot, which runs one script.
//! * `stall`: wakes emulated CPUs that have lost an interrupt, and tells a machine that is lost.

pub mod boot;
pub mod kernel;
pub mod machine;
pub mod payload;
pub mod root;
pub(crate) mod stall;
pub mod systemd_root;
