// SPDX-License-Identifier: Apache-2.0
//! Messages that no front-end should send. In every case the daemon refuses or hangs up, and the
//! next front-end is served with its data intact.

#[path = "../common/mod.rs"]
mod common;

mod backend_req;
mod calls;
mod device;
mod memory;
mod messages;
mod mischief;
mod page;
mod queues;
