// SPDX-License-Identifier: Apache-2.0
//! The storage below a block device, as sysfs tells it: the disk of a partition, the devices below one of the device
//! mapper or of md, and the file below a loop device. Its bytes are bytes of the device, too.

use backend::file::identity_of;
use rustix::fs::{major, minor};
use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

/// As [`identity_of`] returns it.
pub(super) type Identity = (u64, u64);

/// The identity of a block device.
const fn of_device(number: u64) -> Identity {
    (u64::MAX, number)
}

/// Returns whether the storage is a file.
pub(super) const fn is_file(identity: Identity) -> bool {
    identity.0 != of_device(0).0
}

/// The storage, and all below it.
pub(super) fn stack(top: Identity, sysfs: &Path) -> BTreeSet<Identity> {
    let (mut found, mut open) = (BTreeSet::new(), vec![top]);
    while let Some(next) = open.pop() {
        if found.insert(next) && !is_file(next) {
            open.extend(below(next.1, sysfs));
        }
    }
    found
}

/// The storage right below a block device.
fn below(number: u64, sysfs: &Path) -> Vec<Identity> {
    let directory = sysfs.join(format!("dev/block/{}:{}", major(number), minor(number)));
    let mut found = Vec::new();
    if directory.join("partition").exists() {
        // The link leads into the directory of the disk.
        let disk = fs::canonicalize(&directory).ok().and_then(|own| device_at(own.parent()?));
        found.extend(disk);
    }
    let slaves = fs::read_dir(directory.join("slaves")).into_iter().flatten().flatten();
    found.extend(slaves.filter_map(|slave| device_at(&slave.path())));
    let file = fs::read_to_string(directory.join("loop/backing_file"));
    let file = file.ok().and_then(|path| fs::metadata(path.trim_end_matches('\n')).ok());
    found.extend(file.as_ref().map(identity_of));
    found
}

/// The device of a directory of sysfs.
fn device_at(directory: &Path) -> Option<Identity> {
    let text = fs::read_to_string(directory.join("dev")).ok()?;
    let (major, minor) = text.trim().split_once(':')?;
    let number = rustix::fs::makedev(major.parse().ok()?, minor.parse().ok()?);
    Some(of_device(number))
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::fs::makedev;
    use std::os::unix::fs::symlink;

    #[test]
    fn partitions_mapped_devices_and_loop_devices_have_what_is_below_them() {
        let sysfs = tempfile::tempdir().unwrap();
        let sysfs = sysfs.path();
        let at = |path: &str| sysfs.join(path);
        // A disk with a partition, a device of the mapper over that, and a loop device over a file.
        for (directory, number) in
            [("d/sda", "8:0"), ("d/sda/sda1", "8:1"), ("d/dm-0", "253:0"), ("d/loop0", "7:0")]
        {
            fs::create_dir_all(at(directory)).unwrap();
            fs::write(at(directory).join("dev"), format!("{number}\n")).unwrap();
            fs::create_dir_all(at("dev/block")).unwrap();
            symlink(at(directory), at("dev/block").join(number)).unwrap();
        }
        fs::write(at("d/sda/sda1/partition"), "1\n").unwrap();
        fs::create_dir(at("d/dm-0/slaves")).unwrap();
        symlink(at("d/sda/sda1"), at("d/dm-0/slaves/sda1")).unwrap();
        fs::create_dir(at("d/loop0/loop")).unwrap();
        fs::write(at("image"), "").unwrap();
        let path = format!("{}\n", at("image").display());
        fs::write(at("d/loop0/loop/backing_file"), path).unwrap();
        let device = |major, minor| of_device(makedev(major, minor));
        let all = |top| Vec::from_iter(stack(top, sysfs));
        assert_eq!(all(device(8, 0)), [device(8, 0)]);
        assert_eq!(all(device(8, 1)), [device(8, 0), device(8, 1)]);
        assert_eq!(all(device(253, 0)), [device(8, 0), device(8, 1), device(253, 0)]);
        let file = identity_of(&fs::metadata(at("image")).unwrap());
        assert_eq!(stack(device(7, 0), sysfs), [device(7, 0), file].into());
        assert_eq!(all(file), [file]);
    }
}
