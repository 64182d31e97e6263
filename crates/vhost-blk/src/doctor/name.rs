// SPDX-License-Identifier: Apache-2.0
//! The name of a block device: those that the kernel gives can belong to another device after a restart of the
//! machine.

use super::{Finding, Outcome};
use backend::quoted;
use std::fs;
use std::path::{Path, PathBuf};

/// Directories of names that udev derives from the content, the identity or the place of a device, in the order in
/// which they are recommended. `by-diskseq` counts as the kernel does.
const BY: [&str; 6] = ["id", "partuuid", "uuid", "path", "partlabel", "label"];
/// Directories of names that drivers and their tools derive from their configuration.
const CONFIGURED: [&str; 4] = ["mapper", "rbd", "drbd", "md"];
/// Symbolic links that are followed at most, as the kernel does.
const LINKS_MAX: usize = 40;

/// Judges the name `path`. `dev`: the directory of devices; `mapped`: the name of a device of device-mapper.
pub(super) fn name(path: &Path, dev: &Path, mapped: Option<&str>) -> Finding {
    let shown = path.display();
    if steps(path).iter().any(|step| is_stable(step, dev, mapped.is_some())) {
        return Finding::new("device_name", Outcome::Ok, format!("{shown} is stable"));
    }
    let Some(link) = stable_name(path, dev, mapped) else {
        return Finding::new("device_name", Outcome::Info, format!("{shown} has no stable name"));
    };
    let message = format!("{shown} can become another device when the machine restarts");
    Finding::new("device_name", Outcome::Warn, message)
        .remedy(format!("give --blk-file {}", quoted(&link)))
}

/// The path and the links that it leads to, without links in their directories.
fn steps(path: &Path) -> Vec<PathBuf> {
    let plain = |path: &Path| {
        let directory = path.parent()?.canonicalize().ok()?;
        Some(directory.join(path.file_name()?))
    };
    let mut steps: Vec<PathBuf> = plain(path).into_iter().collect();
    while let Some(last) = steps.last().filter(|_| steps.len() < LINKS_MAX)
        && let Ok(target) = fs::read_link(last)
        && let Some(next) = plain(&last.with_file_name(target))
    {
        steps.push(next);
    }
    steps
}

fn is_stable(step: &Path, dev: &Path, is_mapped: bool) -> bool {
    let Ok(rest) = step.strip_prefix(dev) else { return false };
    let words: Vec<&str> = rest.iter().filter_map(|word| word.to_str()).collect();
    match words.as_slice() {
        ["disk", directory, _] => directory.strip_prefix("by-").is_some_and(|by| BY.contains(&by)),
        [directory, _, ..] if CONFIGURED.contains(directory) => true,
        // `/dev/VOLUME_GROUP/VOLUME`: the kernel's names are not in a directory.
        [_, _] => is_mapped,
        _ => false,
    }
}

/// A stable name of the same device.
fn stable_name(path: &Path, dev: &Path, mapped: Option<&str>) -> Option<PathBuf> {
    let target = path.canonicalize().ok()?;
    let is_same = |link: &PathBuf| link.canonicalize().is_ok_and(|found| found == target);
    let of_mapper = mapped.map(|name| dev.join("mapper").join(name));
    of_mapper.filter(is_same).or_else(|| {
        BY.iter().find_map(|by| {
            let links = fs::read_dir(dev.join(format!("disk/by-{by}"))).ok()?;
            links.flatten().map(|entry| entry.path()).filter(is_same).min()
        })
    })
}

#[cfg(test)]
mod tests {
    use super::super::device::tests::tree;
    use super::*;
    use std::os::unix::fs::symlink;

    /// A directory of devices with links, which are relative to it.
    fn devices(links: &[(&str, &str)]) -> (tempfile::TempDir, PathBuf) {
        let root = tree(&[("sda1", ""), ("dm-0", ""), ("md0", ""), ("rbd0", "")]);
        let dev = root.path().canonicalize().unwrap();
        for (link, to) in links {
            let link = dev.join(link);
            fs::create_dir_all(link.parent().unwrap()).unwrap();
            symlink(dev.join(to), link).unwrap();
        }
        (root, dev)
    }

    #[test]
    fn a_name_is_judged_by_its_kind() {
        let (_root, dev) = devices(&[
            ("disk/by-id/wwn-1-part1", "sda1"),
            ("disk/by-uuid/12-34", "sda1"),
            ("disk/by-partuuid/56-78", "sda1"),
            ("disk/by-diskseq/9-part1", "sda1"),
            ("mapper/vg-data", "dm-0"),
            ("vg/data", "dm-0"),
            ("md/home", "md0"),
            ("rbd/disks/disk1", "rbd0"),
            ("own", "sda1"),
            ("good", "disk/by-uuid/12-34"),
            ("directory", "disk/by-uuid"),
        ]);
        let judged = |path: &str| name(&dev.join(path), &dev, None);
        let stable =
            ["id/wwn-1-part1", "uuid/12-34", "partuuid/56-78"].map(|at| format!("disk/by-{at}"));
        let others = ["mapper/vg-data", "md/home", "rbd/disks/disk1", "good", "directory/12-34"];
        for path in stable.iter().map(String::as_str).chain(others) {
            assert_eq!(judged(path).outcome, Outcome::Ok, "{path}");
        }
        for path in ["sda1", "own", "disk/by-diskseq/9-part1"] {
            let finding = judged(path);
            assert_eq!(finding.outcome, Outcome::Warn, "{path}");
            let link = dev.join("disk/by-id/wwn-1-part1");
            assert_eq!(finding.remedy, format!("give --blk-file {}", link.display()));
        }
        assert_eq!(judged("rbd0").outcome, Outcome::Info);
        // A volume of LVM.
        let of_volume = |path: &str| name(&dev.join(path), &dev, Some("vg-data"));
        assert_eq!(of_volume("vg/data").outcome, Outcome::Ok);
        assert_eq!(judged("vg/data").outcome, Outcome::Info);
        let finding = of_volume("dm-0");
        let link = dev.join("mapper/vg-data");
        assert_eq!(finding.remedy, format!("give --blk-file {}", link.display()));
    }

    #[test]
    fn without_a_name_by_id_another_stable_one_is_recommended() {
        let (_root, dev) = devices(&[("disk/by-uuid/12-34", "sda1")]);
        let finding = name(&dev.join("sda1"), &dev, None);
        assert_eq!(finding.outcome, Outcome::Warn);
        assert!(finding.remedy.ends_with("/disk/by-uuid/12-34"), "{}", finding.remedy);
    }
}
