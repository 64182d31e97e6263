// SPDX-License-Identifier: Apache-2.0
//! The program: command line, configuration file, socket and signals. It connects a disk, a data
//! plane and a vhost-user device.
//!
//! This crate handles no vhost-user message and no virtqueue, and does no block I/O.

pub mod backup;
pub mod cli;
mod clock;
pub mod config;
pub mod control;
pub mod create;
pub mod ctl;
pub mod daemon;
pub mod disk;
pub mod disk_options;
pub mod disks;
pub mod doctor;
pub mod events;
pub mod failure;
pub mod generate;
pub mod image;
pub mod log;
pub mod man;
pub mod metrics;
mod module;
pub mod nbd;
pub mod notify;
pub mod options;
pub mod os;
mod output;
mod pace;
mod pidfile;
pub mod server;
pub mod signals;
pub mod socket;
pub mod socket_file;
pub mod stop;
mod stop_signals;
pub mod subscription;
pub mod top;
pub mod upgrade;
pub mod values;
mod watchdog;
mod wrappers;

pub use cli::run;
