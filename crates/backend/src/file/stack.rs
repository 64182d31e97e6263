// SPDX-License-Identifier: Apache-2.0
//! Drivers in the stack of a block device that wait in the submission of a request.
//!
//! Most drivers refuse a submission that must not wait (`REQ_NOWAIT`), and io_uring then repeats it from a
//! thread of the kernel. The client of NBD takes the request, and keeps the submitting thread while its
//! socket is full, or while it has no connection (`wait_for_reconnect` in drivers/block/nbd.c), for the
//! dead-connection time-out.

use std::fs;
use std::path::Path;

/// The block devices of the kernel, by number.
const DEVICES: &str = "/sys/dev/block";
/// The major number of NBD (include/uapi/linux/major.h).
const NBD_MAJOR: u32 = 43;
/// Maximum levels of a stack that are looked at.
const LEVELS_MAX: u32 = 8;

/// Returns whether the block device with this number, or one that it is made of, may keep a thread that
/// submits a request without waiting for it. A device that sysfs does not show does not: for example the
/// anonymous one of a network file system, or of btrfs.
pub(super) fn blocks_submitters(device: u64) -> bool {
    has_nbd(Path::new(DEVICES), (libc::major(device), libc::minor(device)), LEVELS_MAX)
}

fn has_nbd(devices: &Path, (major, minor): (u32, u32), levels: u32) -> bool {
    if major == NBD_MAJOR || levels == 0 {
        return major == NBD_MAJOR;
    }
    let node = devices.join(format!("{major}:{minor}"));
    // A partition has its disk's devices, and the disk is the parent of the link's target.
    let disk = match node.join("partition").exists() {
        true => fs::canonicalize(&node).ok().and_then(|part| Some(part.parent()?.to_owned())),
        false => Some(node),
    };
    let Some(slaves) = disk.and_then(|disk| fs::read_dir(disk.join("slaves")).ok()) else {
        return false;
    };
    slaves.flatten().any(|slave| {
        let number = fs::read_to_string(slave.path().join("dev")).unwrap_or_default();
        parse(&number).is_some_and(|number| has_nbd(devices, number, levels - 1))
    })
}

/// The number in the attribute `dev` of a device.
fn parse(text: &str) -> Option<(u32, u32)> {
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
        has_nbd(directory.path(), device, LEVELS_MAX)
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
}
