// SPDX-License-Identifier: Apache-2.0
//! The block devices that a block device is made of, as sysfs shows them.
//!
//! Some drivers in such a stack wait in the submission of a request. Most refuse a submission that must not wait
//! (`REQ_NOWAIT`), and io_uring then repeats it from a thread of the kernel. The client of NBD takes the request, and
//! keeps the submitting thread while its socket is full, or while it has no connection (`wait_for_reconnect` in
//! drivers/block/nbd.c), for the dead-connection time-out.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

/// The block devices of the kernel, by number.
const DEVICES: &str = "/sys/dev/block";
/// The major number of NBD (include/uapi/linux/major.h).
const NBD_MAJOR: u32 = 43;
/// Maximum levels of a stack that are looked at.
const LEVELS_MAX: u32 = 8;

/// Major and minor number.
type Number = (u32, u32);

/// Returns whether the block device with this number, or one that it is made of, may keep a thread that
/// submits a request without waiting for it. A device that sysfs does not show does not: for example the
/// anonymous one of a network file system, or of btrfs.
pub(super) fn blocks_submitters(device: u64) -> bool {
    has_nbd(Path::new(DEVICES), number_of(device))
}

/// The numbers of a block device and of those that it is made of: the disk of a partition, and the devices below one
/// of the device mapper or of md.
pub fn made_of(device: u64) -> impl Iterator<Item = u64> {
    let found = stack(Path::new(DEVICES), number_of(device)).into_iter();
    found.map(|(major, minor)| libc::makedev(major, minor))
}

fn number_of(device: u64) -> Number {
    (libc::major(device), libc::minor(device))
}

fn has_nbd(devices: &Path, top: Number) -> bool {
    stack(devices, top).iter().any(|(major, _)| *major == NBD_MAJOR)
}

/// The device, and all below it to the bound.
fn stack(devices: &Path, top: Number) -> BTreeSet<Number> {
    let (mut found, mut level) = (BTreeSet::from([top]), vec![top]);
    for _ in 0..LEVELS_MAX {
        let below = level.iter().flat_map(|device| below(devices, *device));
        level = below.filter(|device| found.insert(*device)).collect();
    }
    found
}

/// The devices right below a device.
fn below(devices: &Path, (major, minor): Number) -> Vec<Number> {
    let node = devices.join(format!("{major}:{minor}"));
    let number = |directory: &Path| parse(&fs::read_to_string(directory.join("dev")).ok()?);
    if !node.join("partition").exists() {
        return slaves(&node).filter_map(|slave| number(&slave)).collect();
    }
    // A partition has its disk's devices, and the disk is the parent of the link's target.
    let part = fs::canonicalize(&node).unwrap_or_default();
    let Some(disk) = part.parent() else { return Vec::new() };
    let slaves = slaves(disk).filter_map(|slave| number(&slave));
    number(disk).into_iter().chain(slaves).collect()
}

/// The directories of the devices below that with this one.
fn slaves(directory: &Path) -> impl Iterator<Item = PathBuf> {
    let found = fs::read_dir(directory.join("slaves")).into_iter().flatten().flatten();
    found.map(|slave| slave.path())
}

/// The number in the attribute `dev` of a device.
fn parse(text: &str) -> Option<Number> {
    let (major, minor) = text.trim().split_once(':')?;
    Some((major.parse().ok()?, minor.parse().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::symlink;
    use tempfile::TempDir;

    /// A directory like [`DEVICES`] in which each device is made of those behind it.
    fn devices(made_of: &[(&str, &[&str])]) -> TempDir {
        let directory = tempfile::tempdir().expect("a directory");
        for (device, below) in made_of {
            fs::create_dir_all(directory.path().join(device).join("slaves")).expect("a device");
            for of in *below {
                let slave = directory.path().join(device).join("slaves").join(of.replace(':', "-"));
                fs::create_dir(&slave).expect("a slave");
                fs::write(slave.join("dev"), format!("{of}\n")).expect("its number");
            }
        }
        directory
    }

    fn blocks(directory: &TempDir, device: (u32, u32)) -> bool {
        has_nbd(directory.path(), device)
    }

    #[test]
    fn nbd_keeps_submitters_itself_and_below_other_devices() {
        let found = devices(&[("9:0", &["8:0", "43:1"]), ("253:0", &["9:0"]), ("253:1", &["8:0"])]);
        for device in [(43, 0), (43, 7), (9, 0), (253, 0)] {
            assert!(blocks(&found, device), "{device:?}");
        }
        for device in [(8, 0), (253, 1), (0, 40), (259, 3)] {
            assert!(!blocks(&found, device), "{device:?}");
        }
    }

    #[test]
    fn a_partition_is_made_of_what_its_disk_is_made_of() {
        let found = devices(&[("9:0", &["43:1"])]);
        let part = found.path().join("9:0/md0p1");
        fs::create_dir(&part).expect("a partition");
        fs::write(part.join("partition"), "1\n").expect("its number");
        symlink(&part, found.path().join("259:0")).expect("a link");
        assert!(blocks(&found, (259, 0)));
    }

    #[test]
    fn a_stack_without_an_end_is_looked_at_to_its_bound() {
        assert!(!blocks(&devices(&[("9:0", &["9:1"]), ("9:1", &["9:0"])]), (9, 0)));
    }

    #[test]
    fn a_partition_and_a_mapped_device_are_made_of_what_is_below_them() {
        let sysfs = tempfile::tempdir().expect("a directory");
        let at = |path: &str| sysfs.path().join(path);
        // A disk with a partition, and a device of the mapper over that.
        for (directory, number) in [("sda", "8:0"), ("sda/sda1", "8:1"), ("dm-0", "253:0")] {
            fs::create_dir_all(at(directory)).expect("a device");
            fs::write(at(directory).join("dev"), format!("{number}\n")).expect("its number");
            symlink(at(directory), at(number)).expect("a link");
        }
        fs::write(at("sda/sda1/partition"), "1\n").expect("its number");
        fs::create_dir(at("dm-0/slaves")).expect("a directory");
        symlink(at("sda/sda1"), at("dm-0/slaves/sda1")).expect("a slave");
        let all = |top| Vec::from_iter(stack(sysfs.path(), top));
        assert_eq!(all((8, 0)), [(8, 0)]);
        assert_eq!(all((8, 1)), [(8, 0), (8, 1)]);
        assert_eq!(all((253, 0)), [(8, 0), (8, 1), (253, 0)]);
    }
}
