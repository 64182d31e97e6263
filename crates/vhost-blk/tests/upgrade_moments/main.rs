// SPDX-License-Identifier: Apache-2.0
//! `vhost-blk ctl upgrade` at particular moments, and upgrades that are refused.

#[path = "../common/mod.rs"]
mod common;
#[path = "../common/locks.rs"]
mod locks;
#[path = "../common/moments.rs"]
mod moments;
mod passed;
mod refused;
#[path = "../common/served.rs"]
mod served;
