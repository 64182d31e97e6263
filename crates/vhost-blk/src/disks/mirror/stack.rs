// SPDX-License-Identifier: Apache-2.0
//! The storage below a block device, as sysfs tells it: the devices that it is made of, and the files below the loop
//! devices among them. Its bytes are bytes of the device, too.

use backend::file::{device_of, identity_of, identity_of_device, made_of};
use rustix::fs::{major, minor};
use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

/// As [`identity_of`] returns it.
pub(super) type Identity = (u64, u64);

/// The block devices of the kernel, by number.
const DEVICES: &str = "/sys/dev/block";

/// The storage, and all below it.
pub(super) fn stack(top: Identity) -> BTreeSet<Identity> {
    let Some(device) = device_of(top) else { return [top].into() };
    let devices: Vec<u64> = made_of(device).collect();
    let files = devices.iter().filter_map(|device| file_below(Path::new(DEVICES), *device));
    devices.iter().map(|device| identity_of_device(*device)).chain(files).collect()
}

/// The file below a loop device.
fn file_below(devices: &Path, device: u64) -> Option<Identity> {
    let (major, minor) = (major(device), minor(device));
    let path = devices.join(format!("{major}:{minor}/loop/backing_file"));
    let file = fs::read_to_string(path).ok()?;
    fs::metadata(file.trim_end_matches('\n')).ok().as_ref().map(identity_of)
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::fs::makedev;

    #[test]
    fn a_loop_device_has_its_file_below_it() {
        let sysfs = tempfile::tempdir().unwrap();
        let at = |path: &str| sysfs.path().join(path);
        fs::create_dir_all(at("7:0/loop")).unwrap();
        fs::write(at("image"), "").unwrap();
        fs::write(at("7:0/loop/backing_file"), format!("{}\n", at("image").display())).unwrap();
        let file = identity_of(&fs::metadata(at("image")).unwrap());
        assert_eq!(file_below(sysfs.path(), makedev(7, 0)), Some(file));
        assert_eq!(file_below(sysfs.path(), makedev(8, 0)), None);
        assert_eq!(stack(file), [file].into());
    }
}
