// SPDX-License-Identifier: Apache-2.0
//! `vhost-blk ctl upgrade` of a daemon with many disks.

#[path = "../common/mod.rs"]
mod common;
#[path = "../../../vhost-user/tests/common/load.rs"]
#[allow(dead_code, unreachable_pub, reason = "each test program uses its part")]
mod load;
mod loads;
#[path = "../common/moments.rs"]
mod moments;
mod others;
mod passed;
mod refused;
#[path = "../common/rig.rs"]
#[allow(dead_code, reason = "each test program uses its part")]
mod rig;
mod watched;
#[path = "../common/watcher.rs"]
mod watcher;

use common::{pattern, upgraded, wait_until};
use kit::mount;
use rig::Rig;
use std::time::Duration;

impl Rig {
    /// Upgrades to the same program. Returns the pause.
    #[track_caller]
    pub(crate) fn upgrade(&self) -> Duration {
        upgraded(|| self.ctl("--json upgrade"))
    }
}
