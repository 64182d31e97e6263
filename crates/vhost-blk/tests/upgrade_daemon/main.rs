// SPDX-License-Identifier: Apache-2.0
//! `vhost-blk ctl upgrade` of a daemon with many disks.

#[path = "../common/mod.rs"]
mod common;
#[path = "../../../vhost-user/tests/common/load.rs"]
#[allow(dead_code, unreachable_pub, reason = "each test program uses its part")]
mod load;
mod loads;
#[path = "../common/mount.rs"]
mod mount;
mod others;
mod passed;
mod refused;
#[path = "../daemon/rig.rs"]
#[allow(dead_code, reason = "each test program uses its part")]
mod rig;

use rig::Rig;
use std::time::{Duration, Instant};

/// For the load: differs from seed to seed.
fn pattern(len: usize, seed: u64) -> Vec<u8> {
    let word = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    word.to_le_bytes().into_iter().cycle().take(len).collect()
}

fn wait_until(what: &str, mut condition: impl FnMut() -> bool) {
    let end = Instant::now() + Duration::from_secs(60);
    while !condition() {
        assert!(Instant::now() < end, "waited in vain: {what}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

impl Rig {
    /// Upgrades to the same program. Returns the pause.
    #[track_caller]
    pub(crate) fn upgrade(&self) -> Duration {
        let answer = self.json("upgrade");
        assert_eq!(answer["version"], env!("CARGO_PKG_VERSION"));
        Duration::from_micros(answer["pause_us"].as_u64().expect("a pause"))
    }
}
