// SPDX-License-Identifier: Apache-2.0
//! The count of unmapped bytes belongs to the disk, not to one of its images.

use crate::images::{add, guest, image};
use crate::rig::Rig;
use crate::{Device, upgrade};

const MIB: u64 = 1 << 20;

/// Writes a MiB of the disk `a`, discards a half of it, and waits until the disk has unmapped `bytes`.
#[track_caller]
fn discard(rig: &Rig, device: &mut Device, bytes: u64) {
    device.write(0, &vec![1; MIB as usize]).unwrap();
    device.discard(0, (MIB / 2 / 512) as u32).unwrap();
    rig.place.wait_until("the clusters have left", || unmapped(rig) == bytes);
}

#[track_caller]
fn unmapped(rig: &Rig) -> u64 {
    rig.json("discard-stats a")["unmapped_bytes"].as_u64().unwrap_or(0)
}

#[test]
fn the_unmapped_bytes_of_a_disk_count_on_through_snapshots_commits_and_upgrades() {
    let rig = Rig::new();
    image(&rig, "a.img", "raw");
    add(&rig, "a", "--blk-file a.img --format raw");
    let mut device = guest(&rig, "a");
    upgrade(&rig);
    assert_eq!(unmapped(&rig), 0);
    rig.ok("snapshot a --to middle");
    discard(&rig, &mut device, MIB / 2);
    rig.ok("snapshot a --to top");
    assert_eq!(unmapped(&rig), MIB / 2, "after a snapshot");
    discard(&rig, &mut device, MIB);
    upgrade(&rig);
    assert_eq!(unmapped(&rig), MIB, "after an upgrade");
    discard(&rig, &mut device, 3 * MIB / 2);
    rig.ok("commit a");
    assert_eq!(unmapped(&rig), 3 * MIB / 2, "after a commit");
    rig.ok("commit a");
    upgrade(&rig);
    assert_eq!(unmapped(&rig), 3 * MIB / 2, "in a raw image");
}
