// SPDX-License-Identifier: Apache-2.0
//! The parts of a block device: the disk of a partition, and the devices below device-mapper and md.

use super::device::read;
use std::fs;
use std::path::{Path, PathBuf};

/// Maximum levels of parts that are looked at.
const LEVELS_MAX: u32 = 8;

/// The form in which a device goes on without one of its parts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Spare {
    /// Other paths to the same data (device-mapper multipath).
    Path,
    /// Other members of an array (md).
    Member,
}

/// A block device with the devices that it is made of.
pub(super) struct Part {
    /// Its directory in sysfs.
    pub(super) sysfs: PathBuf,
    /// The name that the kernel gave it.
    pub(super) name: String,
    /// A device above goes on without this one.
    pub(super) spare: Option<Spare>,
    /// The devices that it is made of.
    below: Vec<Part>,
}

impl Part {
    /// The device with this directory in sysfs, which is no symbolic link.
    pub(super) fn of(sysfs: &Path) -> Part {
        Part::at(sysfs, None, LEVELS_MAX)
    }

    fn at(sysfs: &Path, spare: Option<Spare>, levels: u32) -> Part {
        let name = sysfs.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let mut below = match is_partition(sysfs) {
            true => sysfs.parent().map(Path::to_owned).into_iter().collect(),
            false => slaves(sysfs),
        };
        if levels == 0 {
            below.clear();
        }
        let spare_below = spare_of(sysfs).or(spare);
        let below = below.iter().map(|sysfs| Part::at(sysfs, spare_below, levels - 1)).collect();
        Part { sysfs: sysfs.to_owned(), name, spare, below }
    }

    /// The device and all its parts, each once, those above first.
    pub(super) fn all(&self) -> Vec<&Part> {
        let mut found: Vec<&Part> = vec![self];
        let mut next = 0;
        while let Some(part) = found.get(next).copied() {
            for below in &part.below {
                if found.iter().all(|known| known.sysfs != below.sysfs) {
                    found.push(below);
                }
            }
            next += 1;
        }
        found
    }

    /// The disk, which has the queue of a partition.
    pub(super) fn disk(&self) -> &Path {
        match self.below.first().filter(|_| is_partition(&self.sysfs)) {
            Some(disk) => &disk.sysfs,
            None => &self.sysfs,
        }
    }

    /// The chain in words, such as `dm-0 (LVM vg-data) on sda1 on sda`; `None` for a device without parts.
    pub(super) fn chain(&self) -> Option<String> {
        (!self.below.is_empty()).then(|| self.text())
    }

    fn text(&self) -> String {
        let own = match kind(&self.sysfs) {
            Some(kind) => format!("{} ({kind})", self.name),
            None => self.name.clone(),
        };
        let below: Vec<String> = self.below.iter().map(Part::text).collect();
        match below.as_slice() {
            [] => own,
            [one] => format!("{own} on {one}"),
            many => format!("{own} on [{}]", many.join(", ")),
        }
    }
}

fn is_partition(sysfs: &Path) -> bool {
    sysfs.join("partition").exists()
}

fn slaves(sysfs: &Path) -> Vec<PathBuf> {
    let links = fs::read_dir(sysfs.join("slaves")).into_iter().flatten().flatten();
    let mut found: Vec<_> = links.filter_map(|link| link.path().canonicalize().ok()).collect();
    found.sort();
    found
}

fn spare_of(sysfs: &Path) -> Option<Spare> {
    if is_multipath(sysfs) {
        return Some(Spare::Path);
    }
    let level = read(&sysfs.join("md/level"))?;
    matches!(level.as_str(), "raid1" | "raid10" | "raid4" | "raid5" | "raid6")
        .then_some(Spare::Member)
}

/// Returns whether the device is one of device-mapper multipath.
pub(super) fn is_multipath(sysfs: &Path) -> bool {
    read(&sysfs.join("dm/uuid")).is_some_and(|uuid| uuid.starts_with("mpath-"))
}

/// The kind of a device that is made of others.
fn kind(sysfs: &Path) -> Option<String> {
    if let Some(level) = read(&sysfs.join("md/level")).filter(|level| !level.is_empty()) {
        return Some(level);
    }
    let name = read(&sysfs.join("dm/name"))?;
    let uuid = read(&sysfs.join("dm/uuid")).unwrap_or_default();
    let kind = match uuid.split_once('-').map(|(kind, _)| kind) {
        Some("LVM") => "LVM",
        Some("mpath") => "multipath",
        Some("CRYPT") => "dm-crypt",
        _ => "device-mapper",
    };
    Some(format!("{kind} {name}"))
}

#[cfg(test)]
pub(super) mod tests {
    use super::super::device::tests::tree;
    use super::*;
    use std::os::unix::fs::symlink;

    /// A tree of sysfs: files, and for each device the directories of its parts.
    pub(in crate::doctor) fn stack(
        files: &[(&str, &str)],
        slaves: &[(&str, &[&str])],
    ) -> (tempfile::TempDir, PathBuf) {
        let root = tree(files);
        let path = root.path().canonicalize().unwrap();
        for (device, parts) in slaves {
            let directory = path.join(device).join("slaves");
            fs::create_dir_all(&directory).unwrap();
            for part in *parts {
                let part = path.join(part);
                symlink(&part, directory.join(part.file_name().unwrap())).unwrap();
            }
        }
        (root, path)
    }

    #[test]
    fn a_device_is_shown_with_all_its_parts() {
        let (_root, sys) = stack(
            &[
                ("dm-0/dm/name", "vg-data"),
                ("dm-0/dm/uuid", "LVM-abc"),
                ("md0/md/level", "raid1"),
                ("nbd0/pid", "1"),
                ("sda/size", "8"),
                ("sda/sda1/partition", "1"),
            ],
            &[("dm-0", &["md0"]), ("md0", &["nbd0", "sda/sda1"])],
        );
        let part = Part::of(&sys.join("dm-0"));
        let wanted = "dm-0 (LVM vg-data) on md0 (raid1) on [nbd0, sda1 on sda]";
        assert_eq!(part.chain().as_deref(), Some(wanted));
        let all: Vec<_> =
            part.all().iter().map(|part| (part.name.as_str().to_owned(), part.spare)).collect();
        let wanted = [
            ("dm-0", None),
            ("md0", None),
            ("nbd0", Some(Spare::Member)),
            ("sda1", Some(Spare::Member)),
            ("sda", Some(Spare::Member)),
        ];
        assert_eq!(all, wanted.map(|(name, spare)| (name.to_owned(), spare)));
        assert_eq!(Part::of(&sys.join("sda/sda1")).disk(), sys.join("sda"));
        assert_eq!(part.disk(), sys.join("dm-0"));
        assert_eq!(Part::of(&sys.join("sda")).chain(), None);
    }

    #[test]
    fn a_disk_below_two_parts_is_judged_once_and_a_loop_ends() {
        let (_root, sys) = stack(
            &[("sda/sda1/partition", "1"), ("sda/sda2/partition", "2"), ("md0/md/level", "raid0")],
            &[("md0", &["sda/sda1", "sda/sda2"]), ("dm-1", &["dm-2"]), ("dm-2", &["dm-1"])],
        );
        let part = Part::of(&sys.join("md0"));
        let names: Vec<_> = part.all().iter().map(|part| part.name.clone()).collect();
        assert_eq!(names, ["md0", "sda1", "sda2", "sda"]);
        assert!(part.all().iter().all(|part| part.spare.is_none()));
        assert_eq!(Part::of(&sys.join("dm-1")).all().len(), 2);
    }
}
