// SPDX-License-Identifier: Apache-2.0
//! The block device below a disk, as sysfs describes it: its name, paths, queues and cache.

use super::parts::{Part, is_multipath};
use super::{Finding, Outcome, engine, name, setting, speed};
use std::fs;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// Checks the block device `path`; nothing for a file.
pub(super) fn device(path: &Path) -> Vec<Finding> {
    let Ok(metadata) = path.metadata() else { return Vec::new() };
    if !metadata.file_type().is_block_device() {
        return Vec::new();
    }
    let number = metadata.rdev();
    let (major, minor) = (rustix::fs::major(number), rustix::fs::minor(number));
    let link = PathBuf::from(format!("/sys/dev/block/{major}:{minor}"));
    let Ok(sysfs) = link.canonicalize() else {
        let message = format!("there is no {}", link.display());
        return vec![Finding::new("device", Outcome::Warn, message).remedy("mount /sys")];
    };
    let mapped = read(&sysfs.join("dm/name"));
    let mut findings = vec![name::name(path, Path::new("/dev"), mapped.as_deref())];
    findings.extend(described(&sysfs));
    findings
}

/// Checks a device that has this directory in sysfs, and the devices that it is made of.
fn described(sysfs: &Path) -> Vec<Finding> {
    let top = Part::of(sysfs);
    let mut findings = vec![queues(top.disk())];
    let chain = top.chain();
    findings.extend(chain.map(|text| Finding::new("device_parts", Outcome::Info, text)));
    for part in top.all() {
        let of_part = judged(part).into_iter().map(|mut finding| {
            if part.sysfs != top.sysfs && part.sysfs != top.disk() {
                finding.message = format!("{}: {}", part.name, finding.message);
            }
            if part.spare.is_some() { as_spare(finding) } else { finding }
        });
        findings.extend(of_part);
        findings.extend(settings(part));
    }
    findings
}

/// Judges the paths or the engine of a device.
fn judged(part: &Part) -> Vec<Finding> {
    let sysfs = &part.sysfs;
    let paths =
        nvme_paths(sysfs).or_else(|| dm_paths(sysfs, &dmsetup(sysfs, &["status", "--noflush"])));
    let engines = [engine::nbd, engine::md, engine::iscsi, engine::drbd, engine::rbd];
    let engine = engines.iter().find_map(|engine| engine(sysfs));
    paths.into_iter().chain(engine).collect()
}

/// The finding about a device without which the one above goes on.
fn as_spare(finding: Finding) -> Finding {
    match finding.outcome {
        Outcome::Fail => Finding { outcome: Outcome::Warn, ..finding },
        // Its loss is what the one above is for.
        Outcome::Warn => Finding { outcome: Outcome::Info, remedy: String::new(), ..finding },
        Outcome::Ok | Outcome::Info => finding,
    }
}

fn settings(part: &Part) -> Vec<Finding> {
    let mut findings = setting::nvme(part);
    findings.extend(speed::speed(part));
    findings.extend(setting::iscsi(part));
    if is_multipath(&part.sysfs) {
        findings.extend(setting::multipath(&part.name, &dmsetup(&part.sysfs, &["table"])));
    }
    findings
}

/// Describes the queues, the cache and the range commands of the device.
fn queues(sysfs: &Path) -> Finding {
    let queue = sysfs.join("queue");
    let text = |name: &str| read(&queue.join(name)).unwrap_or_else(|| "unknown".to_owned());
    let offered = |name: &str| match read(&queue.join(name)).as_deref() {
        Some("0") | None => "no",
        Some(_) => "yes",
    };
    let hardware = fs::read_dir(sysfs.join("mq")).map_or(0, Iterator::count);
    let hardware = match hardware {
        0 => "no hardware queues of its own".to_owned(),
        count => format!("{count} hardware queues of {} requests", text("nr_requests")),
    };
    let message = format!(
        "{hardware}, scheduler {}, cache {}, discard {}, write zeroes {}",
        speed::chosen(&text("scheduler")),
        text("write_cache"),
        offered("discard_max_bytes"),
        offered("write_zeroes_max_bytes"),
    );
    Finding::new("device", Outcome::Info, message)
}

/// A controller of an NVMe subsystem.
pub(super) struct Controller {
    pub(super) name: String,
    transport: String,
    state: String,
    /// Seconds without a connection after which the host gives the controller up, or `off`.
    pub(super) loss: Option<String>,
    /// Seconds without a connection after which requests fail, or `off`.
    pub(super) fast_fail: Option<String>,
}

impl Controller {
    fn read(directory: &Path) -> Option<Controller> {
        let text = |name: &str| read(&directory.join(name));
        Some(Controller {
            name: directory.file_name()?.to_str()?.to_owned(),
            transport: text("transport")?,
            state: text("state")?,
            loss: text("ctrl_loss_tmo"),
            fast_fail: text("fast_io_fail_tmo"),
        })
    }

    /// The controllers of an NVMe namespace over a network; none of other devices.
    pub(super) fn of_device(sysfs: &Path) -> Vec<Controller> {
        let entries = fs::read_dir(sysfs.join("device")).into_iter().flatten().flatten();
        let mut found: Vec<_> =
            entries.filter_map(|entry| Controller::read(&entry.path())).collect();
        found.sort_by(|a, b| a.name.cmp(&b.name));
        found.retain(|controller| !matches!(controller.transport.as_str(), "pcie" | "loop"));
        found
    }

    /// Seconds of `loss`.
    pub(super) fn loss_seconds(&self) -> Option<u64> {
        self.loss.as_deref()?.parse().ok()
    }

    pub(super) fn is_live(&self) -> bool {
        self.state == "live"
    }
}

/// Judges the paths of an NVMe namespace over a network; `None` for other devices.
fn nvme_paths(sysfs: &Path) -> Option<Finding> {
    let controllers = Controller::of_device(sysfs);
    let first = controllers.first()?;
    let each = controllers.iter().map(|c| format!("{} {} {}", c.name, c.transport, c.state));
    let policy = read(&sysfs.join("device/iopolicy")).unwrap_or_else(|| "unknown".to_owned());
    let seconds = |value: &Option<String>| match value.as_deref() {
        Some("off") | None => "never".to_owned(),
        Some(seconds) => format!("after {seconds} s"),
    };
    let message = format!(
        "{}; policy {policy}; without a path requests fail {}, and the device disappears {}",
        each.collect::<Vec<_>>().join(", "),
        seconds(&first.fast_fail),
        seconds(&first.loss),
    );
    let live = controllers.iter().filter(|controller| controller.is_live()).count();
    Some(match live {
        0 => Finding::new("device_paths", Outcome::Fail, message)
            .remedy("check the target and the network; requests wait until a path is live"),
        1 => Finding::new("device_paths", Outcome::Warn, message)
            .remedy("connect a second path, so that the loss of one stops no guest"),
        _ => Finding::new("device_paths", Outcome::Ok, message),
    })
}

/// The answer of dmsetup about a device of device-mapper multipath; empty for other devices, and without dmsetup.
fn dmsetup(sysfs: &Path, args: &[&str]) -> String {
    let Some(name) = read(&sysfs.join("dm/name")).filter(|_| is_multipath(sysfs)) else {
        return String::new();
    };
    let mut command = Command::new("dmsetup");
    let output = command.args(args).arg(name).stderr(Stdio::null()).output();
    output.map_or_else(|_| String::new(), |said| String::from_utf8_lossy(&said.stdout).into())
}

/// Judges the paths of a device-mapper multipath device, which can have given up a path whose device
/// answers; `None` for other devices.
fn dm_paths(sysfs: &Path, status: &str) -> Option<Finding> {
    if !is_multipath(sysfs) {
        return None;
    }
    let slaves = fs::read_dir(sysfs.join("slaves")).ok()?.flatten();
    let mut paths: Vec<_> = slaves.map(|slave| slave.path()).collect();
    paths.sort();
    let words: Vec<&str> = status.split_whitespace().collect();
    let has_failed = |number: &str| words.windows(2).any(|pair| pair == [number, "F"]);
    let state = |path: &PathBuf| {
        if read(&path.join("dev")).is_some_and(|number| has_failed(&number)) {
            return "failed".to_owned();
        }
        read(&path.join("device/state")).unwrap_or_else(|| "unknown".to_owned())
    };
    let states: Vec<String> = paths.iter().map(state).collect();
    let each = paths.iter().zip(&states).map(|(path, state)| {
        format!("{} {state}", path.file_name().unwrap_or_default().to_string_lossy())
    });
    let message = format!("multipath: {}", each.collect::<Vec<_>>().join(", "));
    // Devices that are no SCSI disks have no state.
    let is_usable = |state: &&String| matches!(state.as_str(), "running" | "live" | "unknown");
    let usable = states.iter().filter(is_usable).count();
    Some(match (usable, paths.len()) {
        (_, 0) => Finding::new("device_paths", Outcome::Fail, "multipath without a path")
            .remedy("see multipath -ll"),
        (0, _) => Finding::new("device_paths", Outcome::Fail, message)
            .remedy("check the target and the network; see multipath -ll"),
        (1, 1) => Finding::new("device_paths", Outcome::Warn, message)
            .remedy("add a second path, so that the loss of one stops no guest"),
        (1, _) => Finding::new("device_paths", Outcome::Warn, message)
            .remedy("another loss stops the guest: return the other paths, see multipath -ll"),
        _ => Finding::new("device_paths", Outcome::Ok, message),
    })
}

pub(super) fn read(path: &Path) -> Option<String> {
    fs::read_to_string(path).ok().map(|text| text.trim().to_owned())
}

#[cfg(test)]
pub(super) mod tests {
    use super::super::parts::tests::stack;
    use super::*;

    /// Writes files below a new directory.
    pub(in crate::doctor) fn tree(files: &[(&str, &str)]) -> tempfile::TempDir {
        let root = tempfile::tempdir().unwrap();
        for (name, text) in files {
            let path = root.path().join(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, format!("{text}\n")).unwrap();
        }
        root
    }

    fn controllers(states: [&str; 2]) -> tempfile::TempDir {
        tree(&[
            ("device/iopolicy", "numa"),
            ("device/nvme1/transport", "tcp"),
            ("device/nvme1/state", states[0]),
            ("device/nvme1/ctrl_loss_tmo", "600"),
            ("device/nvme1/fast_io_fail_tmo", "off"),
            ("device/nvme2/transport", "tcp"),
            ("device/nvme2/state", states[1]),
        ])
    }

    #[test]
    fn paths_of_nvme_are_judged_by_their_number() {
        let outcome = |states| nvme_paths(controllers(states).path()).unwrap().outcome;
        assert_eq!(outcome(["live", "live"]), Outcome::Ok);
        assert_eq!(outcome(["live", "connecting"]), Outcome::Warn);
        assert_eq!(outcome(["connecting", "connecting"]), Outcome::Fail);
        let finding = nvme_paths(controllers(["live", "connecting"]).path()).unwrap();
        let wanted = "nvme1 tcp live, nvme2 tcp connecting; policy numa; without a path requests \
                      fail never, and the device disappears after 600 s";
        assert_eq!(finding.message, wanted);
    }

    #[test]
    fn a_local_device_has_no_paths_to_judge() {
        let files = [("device/nvme0/transport", "pcie"), ("device/nvme0/state", "live")];
        assert_eq!(nvme_paths(tree(&files).path()), None);
        assert_eq!(nvme_paths(tree(&[("size", "1")]).path()), None);
        assert_eq!(dm_paths(tree(&[("dm/uuid", "LVM-abc")]).path(), ""), None);
    }

    #[test]
    fn multipath_of_the_device_mapper_is_judged_by_its_usable_paths() {
        let one = vec![
            ("dm/uuid", "mpath-360"),
            ("slaves/sda/dev", "8:0"),
            ("slaves/sda/device/state", "running"),
        ];
        let judged =
            |files: &[(&str, &str)], status: &str| dm_paths(tree(files).path(), status).unwrap();
        let alone = judged(&one, "");
        assert_eq!(
            (alone.outcome, alone.message.as_str()),
            (Outcome::Warn, "multipath: sda running")
        );
        let two = |state| {
            [&one[..], &[("slaves/sdb/dev", "8:16"), ("slaves/sdb/device/state", state)]].concat()
        };
        let good = "0 8192 multipath 2 0 0 0 1 1 A 0 2 1 8:0 A 0 1 8:16 A 0 1";
        assert_eq!(judged(&two("running"), good).outcome, Outcome::Ok);
        let offline = judged(&two("offline"), good);
        assert_eq!(
            (offline.outcome, offline.message.as_str()),
            (Outcome::Warn, "multipath: sda running, sdb offline")
        );
        let failed = judged(&two("running"), &good.replace("8:16 A", "8:16 F"));
        assert_eq!(
            (failed.outcome, failed.message.as_str()),
            (Outcome::Warn, "multipath: sda running, sdb failed")
        );
        let none = judged(&two("offline"), &good.replace("8:0 A", "8:0 F"));
        assert_eq!(none.outcome, Outcome::Fail);
    }

    #[test]
    fn queues_and_commands_are_described() {
        let device = tree(&[
            ("mq/0/cpu_list", "0"),
            ("mq/1/cpu_list", "1"),
            ("queue/nr_requests", "1023"),
            ("queue/scheduler", "[none] mq-deadline"),
            ("queue/write_cache", "write back"),
            ("queue/discard_max_bytes", "4096"),
            ("queue/write_zeroes_max_bytes", "0"),
        ]);
        let wanted = "2 hardware queues of 1023 requests, scheduler none, cache write back, \
                      discard yes, write zeroes no";
        assert_eq!(queues(device.path()).message, wanted);
    }

    fn found(sysfs: &Path) -> Vec<(&'static str, Outcome, String)> {
        described(sysfs).into_iter().map(|it| (it.check, it.outcome, it.message)).collect()
    }

    #[test]
    fn a_partition_is_described_by_its_disk() {
        let (_root, sys) = stack(
            &[
                ("nvme0n1/queue/scheduler", "[none]"),
                ("nvme0n1/queue/write_cache", "write through"),
                ("nvme0n1/queue/discard_max_bytes", "4096"),
                ("nvme0n1/device/nvme1/transport", "tcp"),
                ("nvme0n1/device/nvme1/state", "live"),
                ("nvme0n1/nvme0n1p1/partition", "1"),
            ],
            &[],
        );
        let of_disk = found(&sys.join("nvme0n1"));
        let of_partition = found(&sys.join("nvme0n1/nvme0n1p1"));
        assert!(of_disk[0].2.contains("cache write through, discard yes"), "{of_disk:?}");
        assert_eq!((of_disk[1].0, of_disk[1].1), ("device_paths", Outcome::Warn));
        let chain = ("device_parts", Outcome::Info, "nvme0n1p1 on nvme0n1".to_owned());
        let wanted = [&of_disk[..1], &[chain], &of_disk[1..]].concat();
        assert_eq!(of_partition, wanted);
    }

    #[test]
    fn the_parts_of_a_device_are_judged_and_a_spare_one_fails_nothing() {
        let files = |level| {
            [
                ("dm-0/dm/name", "vg-data"),
                ("dm-0/dm/uuid", "LVM-abc"),
                ("md0/md/level", level),
                ("md0/md/array_state", "clean"),
                ("md0/md/degraded", "0"),
                ("nbd0/size", "0"),
                ("nbd1/pid", "1"),
                ("nbd1/mq/0/cpu_list", "0"),
            ]
        };
        let of_level = |level| {
            let parts: [(&str, &[&str]); 2] = [("dm-0", &["md0"]), ("md0", &["nbd0", "nbd1"])];
            let (_root, sys) = stack(&files(level), &parts);
            let found = found(&sys.join("dm-0")).into_iter().skip(1);
            found.map(|(_, outcome, message)| (outcome, message)).collect::<Vec<_>>()
        };
        let spare = of_level("raid1");
        let wanted = "dm-0 (LVM vg-data) on md0 (raid1) on [nbd0, nbd1]";
        assert_eq!(spare[0], (Outcome::Info, wanted.to_owned()));
        assert!(spare[1].0 == Outcome::Ok && spare[1].1.starts_with("md0: md: raid1"), "{spare:?}");
        assert_eq!(spare[2], (Outcome::Warn, "nbd0: nbd: not connected".to_owned()));
        assert!(spare[3].0 == Outcome::Info && spare[3].1.starts_with("nbd1: nbd: 1 connection"));
        let needed = of_level("raid0");
        assert_eq!((needed[2].0, needed[3].0), (Outcome::Fail, Outcome::Warn));
    }
}
