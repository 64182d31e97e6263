// SPDX-License-Identifier: Apache-2.0
//! The clusters that the tables of an image name pass on: they are not looked at again.

use crate::images::{BYTES, add, guest, image};
use crate::{Rig, text, upgrade};
use driver::{Device, Error};
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;
use virtio_spec::blk::S_IOERR;

/// Sectors of a cluster.
const CLUSTER: u64 = 128;

/// Writes an entry of the only L2 table that names the refcount table: a look at the table finds it.
fn damage(path: &Path) {
    let file = File::options().read(true).write(true).open(path).unwrap();
    let number = |at: u64| {
        let mut bytes = [0; 8];
        file.read_exact_at(&mut bytes, at).unwrap();
        u64::from_be_bytes(bytes) & 0x00ff_ffff_ffff_fe00
    };
    let l2_table = number(number(40));
    let last_entry = l2_table + (BYTES / (CLUSTER * 512) - 1) * 8;
    file.write_all_at(&(1 << 63 | 1_u64 << 16).to_be_bytes(), last_entry).unwrap();
}

fn write(guest: &mut Device, cluster: u64) -> Result<(), Error> {
    guest.write(cluster * CLUSTER, &[cluster as u8; 4096])
}

#[test]
fn the_first_write_after_an_upgrade_looks_at_no_table_that_the_program_before_has_seen() {
    let rig = Rig::new();
    let path = image(&rig, "a.qcow2", "qcow2");
    add(&rig, "a", "--blk-file a.qcow2 --format qcow2");
    let mut device = guest(&rig, "a");
    write(&mut device, 1).unwrap();
    damage(&path);
    upgrade(&rig);
    write(&mut device, 2).unwrap();
    upgrade(&rig);
    write(&mut device, 3).unwrap();
    let mut data = [0; 4096];
    for cluster in 1..=3 {
        device.read(cluster * CLUSTER, &mut data).unwrap();
        assert_eq!(data, [cluster as u8; 4096]);
    }
    // The opening of the disk looks at all of them.
    drop(device);
    rig.ok("remove a");
    add(&rig, "a", &format!("--blk-file {} --format qcow2", text(&path)));
    let refused = write(&mut guest(&rig, "a"), 4);
    assert!(matches!(refused, Err(Error::Status(Some(S_IOERR)))), "{refused:?}");
}
