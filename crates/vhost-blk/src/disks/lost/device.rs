// SPDX-License-Identifier: Apache-2.0
//! A block device as sysfs describes it: its number, its instance and its identity.

use backend::file::File as ImageFile;
use std::fs;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

/// The directory of all block devices, by number.
const DEVICES: &str = "/sys/dev/block";
/// Attributes that name the storage behind a device, the best first: NVMe, SCSI, device-mapper, md, NBD, virtio,
/// NVMe without a namespace's name, MMC, Ceph, loop.
const NAMES: [&str; 12] = [
    "wwid",
    "device/wwid",
    "dm/uuid",
    "dm/name",
    "md/uuid",
    "backend",
    "serial",
    "device/serial",
    "device/cid",
    "device/image_id",
    "loop/backing_file",
    "uuid",
];
/// Attributes of a partition: its number, and its first sector.
const OF_PARTITION: [&str; 2] = ["partition", "start"];

/// A block device at one moment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(in crate::disks) struct Device {
    /// The link to its directory in sysfs.
    link: PathBuf,
    number: (u32, u32),
    /// The kernel's number of this instance: another device with the same number has another one.
    instance: Option<String>,
    /// Names of its storage; empty: it has none.
    identity: Vec<(&'static str, String)>,
}

impl Device {
    /// The device that a disk has open; `None` if its path leads elsewhere, or sysfs does not know it.
    pub(in crate::disks) fn of_disk(path: &Path, open: &ImageFile) -> Option<Device> {
        let number = super::growth::device_number(open)?;
        Device::at_path(path).filter(|here| here.number == number)
    }

    /// The block device at a path.
    pub(in crate::disks) fn at_path(path: &Path) -> Option<Device> {
        let meta = fs::metadata(path).ok().filter(|meta| meta.file_type().is_block_device())?;
        let number = (libc::major(meta.rdev()), libc::minor(meta.rdev()));
        Device::of(Path::new(DEVICES), number)
    }

    fn of(devices: &Path, number: (u32, u32)) -> Option<Device> {
        let link = devices.join(format!("{}:{}", number.0, number.1));
        let directory = link.canonicalize().ok()?;
        let disk = match directory.join("partition").exists() {
            true => directory.parent()?.to_owned(),
            false => directory.clone(),
        };
        let of = |directory: &Path, name: &'static str| Some((name, read(&directory.join(name))?));
        let name = NAMES.iter().find_map(|name| of(&disk, name));
        let of_partition = OF_PARTITION.iter().filter_map(|name| of(&directory, name));
        let part: Vec<_> = of_partition.filter(|_| directory != disk).collect();
        let identity = name.into_iter().chain(part).collect();
        Some(Device { link, number, instance: read(&disk.join("diskseq")), identity })
    }

    /// Major and minor number.
    pub(in crate::disks) fn number(&self) -> (u32, u32) {
        self.number
    }

    /// Returns whether this instance of the device is still there.
    pub(in crate::disks) fn is_present(&self) -> bool {
        let directory = self.link.parent().unwrap_or(Path::new(DEVICES));
        let now = Device::of(directory, self.number);
        let has_size = read(&self.link.join("size")).is_some_and(|sectors| sectors != "0");
        has_size && now.is_some_and(|now| now.instance == self.instance)
    }

    /// Returns whether both are the same instance of a device.
    pub(in crate::disks) fn is(&self, other: &Device) -> bool {
        (self.number, &self.instance) == (other.number, &other.instance)
    }

    /// Returns whether the device has a name for its storage.
    pub(in crate::disks) fn has_identity(&self) -> bool {
        !self.identity.is_empty()
    }

    /// Refuses a device whose storage has another name, or none, with the remedy.
    pub(in crate::disks) fn check_same(&self, other: &Device) -> Result<(), String> {
        if self.identity == other.identity {
            return Ok(());
        }
        Err(format!(
            "another device is at its path: the disk has {}, and the device {}; give the disk its device \
             back, or start it again with the new one",
            shown(&self.identity),
            shown(&other.identity),
        ))
    }
}

fn shown(identity: &[(&'static str, String)]) -> String {
    let words: Vec<_> = identity.iter().map(|(name, value)| format!("{name} {value}")).collect();
    if words.is_empty() { "no identity".to_owned() } else { words.join(", ") }
}

/// The text of an attribute; `None` if there is none, or it is empty.
fn read(path: &Path) -> Option<String> {
    let text = fs::read_to_string(path).ok()?;
    Some(text.trim().to_owned()).filter(|text| !text.is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A directory of devices with one device, `8:0`, that has these attributes.
    fn devices(attributes: &[(&str, &str)]) -> tempfile::TempDir {
        let root = tempfile::tempdir().unwrap();
        for (name, text) in attributes {
            let path = root.path().join("8:0").join(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, format!("{text}\n")).unwrap();
        }
        root
    }

    fn device(root: &tempfile::TempDir) -> Device {
        Device::of(root.path(), (8, 0)).unwrap()
    }

    #[test]
    fn a_device_is_gone_without_its_directory_or_size_or_as_another_instance() {
        let root = devices(&[("size", "2048"), ("diskseq", "7")]);
        let before = device(&root);
        assert!(before.is_present());
        let file = |name: &str| root.path().join("8:0").join(name);
        fs::write(file("size"), "0\n").unwrap();
        assert!(!before.is_present());
        fs::write(file("size"), "2048\n").unwrap();
        fs::write(file("diskseq"), "8\n").unwrap();
        assert!(!before.is_present());
        assert!(!device(&root).is(&before));
        fs::remove_dir_all(root.path().join("8:0")).unwrap();
        assert!(!before.is_present());
        assert_eq!(Device::of(root.path(), (8, 0)), None);
    }

    #[test]
    fn the_best_name_of_the_storage_is_compared() {
        let named = |attributes: &[(&str, &str)]| device(&devices(attributes));
        let nvme = named(&[("wwid", "uuid.1"), ("device/serial", "a"), ("size", "1")]);
        let same = named(&[("wwid", "uuid.1"), ("device/serial", "b"), ("size", "2")]);
        assert_eq!(nvme.check_same(&same), Ok(()));
        for other in [&[("wwid", "uuid.2")][..], &[("size", "1")], &[("device/wwid", "uuid.1")]] {
            let told = nvme.check_same(&named(other)).unwrap_err();
            assert!(told.contains("the disk has wwid uuid.1, and the device "), "{told}");
        }
        let (none, other) = (named(&[("size", "1")]), named(&[("size", "2"), ("dm/uuid", "")]));
        assert!(!none.has_identity() && nvme.has_identity());
        assert_eq!(none.check_same(&other), Ok(()));
        assert!(none.check_same(&nvme).unwrap_err().contains("the disk has no identity"));
    }

    #[test]
    fn partitions_of_one_disk_differ() {
        let root = devices(&[("wwid", "w"), ("diskseq", "3"), ("p1/partition", "1")]);
        let part = |number: &str| {
            let directory = root.path().join("8:0/p1");
            for (name, text) in [("partition", number), ("start", "2048"), ("size", "8")] {
                fs::write(directory.join(name), text).unwrap();
            }
            let link = root.path().join("8:1");
            let _ = fs::remove_file(&link); // there is none at first
            std::os::unix::fs::symlink(directory, link).unwrap();
            Device::of(root.path(), (8, 1)).unwrap()
        };
        let first = part("1");
        assert!(first.is_present() && first.check_same(&first).is_ok());
        let told = first.check_same(&part("2")).unwrap_err();
        assert!(told.contains("wwid w, partition 1, start 2048"), "{told}");
    }
}
