// SPDX-License-Identifier: Apache-2.0
//! `vhost-blk ctl upgrade` of disks in qcow2 images.

#[path = "../common/mod.rs"]
mod common;
mod crash;
#[path = "../common/images.rs"]
mod images;
mod known;
#[path = "../../../vhost-user/tests/common/load.rs"]
#[allow(dead_code, unreachable_pub, reason = "each test program uses its part")]
mod load;
mod loads;
mod locked;
#[path = "../common/locks.rs"]
mod locks;
#[path = "../common/moments.rs"]
mod moments;
mod refused;
#[path = "../common/rig.rs"]
#[allow(dead_code, reason = "each test program uses its part")]
mod rig;
mod serve;
#[path = "../common/stamped.rs"]
mod stamped;
mod unmapped;

use common::{BUSY, done, pattern, upgraded, wait_until};
use driver::Device;
use images::{QUEUES, add, add_raw, begin, check_after_kill, content, guest, image, text};
use kit::mount;
use rig::Rig;
use std::time::Duration;

/// A sector behind those of the load.
const FIRST: u64 = 8192;

/// Adds the disk `a` in the chain `top`, `middle`, and a base `a.img` of the format. Returns its guest,
/// which has written to each file: the sectors 1, 2 and 3 behind `FIRST` have the bytes 1, 2 and 3.
fn chain(rig: &Rig, format: &str) -> Device {
    image(rig, "a.img", format);
    add(rig, "a", &format!("--blk-file a.img --format {format}"));
    let mut device = guest(rig, "a");
    device.write(FIRST + 1, &[1; 512]).unwrap();
    rig.ok("snapshot a --to middle");
    device.write(FIRST + 2, &[2; 512]).unwrap();
    rig.ok("snapshot a --to top");
    device.write(FIRST + 3, &[3; 512]).unwrap();
    device
}

/// Reads the sectors of [`chain`], and writes to a cluster that no file has, if `n` is new.
#[track_caller]
fn read_and_write(device: &mut Device, n: u64) {
    device.write(FIRST + 128 * n, &[9; 512]).unwrap();
    let mut data = [0; 512];
    for sector in 1..=3 {
        device.read(FIRST + sector, &mut data).unwrap();
        assert_eq!(data, [sector as u8; 512], "sector {sector}");
    }
    device.read(FIRST + 128 * n, &mut data).unwrap();
    assert_eq!(data, [9; 512]);
}

/// Upgrades under a load, so many times. Calls `before` before each upgrade. Returns the pauses, sorted.
#[track_caller]
fn upgrade_under_load(rig: &Rig, count: usize, mut before: impl FnMut(usize)) -> Vec<Duration> {
    let mut pauses = Vec::new();
    for n in 0..count {
        before(n);
        pauses.push(upgrade(rig));
    }
    pauses.sort_unstable();
    pauses
}

/// Upgrades to the same program. Returns the pause.
#[track_caller]
fn upgrade(rig: &Rig) -> Duration {
    upgraded(|| rig.ctl("--json upgrade"))
}
