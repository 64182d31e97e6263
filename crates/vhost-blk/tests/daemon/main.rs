// SPDX-License-Identifier: Apache-2.0
//! `vhost-blk daemon`: many disks in one process, and the control interface.

mod audit;
#[path = "../common/mod.rs"]
mod common;
mod discards;
mod disks;
mod ended;
mod error_rules;
mod events;
mod every;
mod frozen;
mod given_up;
mod interface;
mod limits;
mod pidfile;
mod reload;
#[path = "../common/rig.rs"]
mod rig;
mod saving;
mod starting;
mod top;
mod trace;
mod version;
#[path = "../common/watcher.rs"]
mod watcher;

use kit::mount;
