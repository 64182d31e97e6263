// SPDX-License-Identifier: Apache-2.0
//! Settings of a block device that make it slower than it is, with the command that changes them. None of them is a
//! problem: each finding is [`Outcome::Info`].

use super::device::{Controller, read};
use super::parts::Part;
use super::{Finding, Outcome, engine};
use std::fs;
use std::path::Path;

/// Requests in flight that a disk of a guest commonly has: the queue of its driver.
const DEPTH: u64 = 128;

/// Judges the scheduler, the depth and the use of the paths of a device.
pub(super) fn speed(part: &Part) -> Vec<Finding> {
    let sysfs = &part.sysfs;
    [scheduler(&part.name, sysfs), depth(&part.name, sysfs), spread(sysfs)]
        .into_iter()
        .flatten()
        .collect()
}

fn finding(message: String, remedy: String) -> Option<Finding> {
    Some(Finding::new("device_speed", Outcome::Info, message).remedy(remedy))
}

/// A scheduler in the host sorts for a disk that turns. Others have nothing to gain, and each request pays for it.
fn scheduler(name: &str, sysfs: &Path) -> Option<Finding> {
    let queue = sysfs.join("queue");
    if read(&queue.join("rotational"))? != "0" {
        return None;
    }
    let line = read(&queue.join("scheduler"))?;
    let chosen = chosen(&line);
    if chosen == "none" || !line.split_whitespace().any(|word| word == "none") {
        return None;
    }
    finding(
        format!("the scheduler {chosen} orders requests for a non-rotational device"),
        format!("echo none >/sys/block/{name}/queue/scheduler"),
    )
}

/// The chosen scheduler of a line such as `[none] mq-deadline`.
pub(super) fn chosen(line: &str) -> &str {
    let chosen = line.split_once('[').and_then(|(_, rest)| rest.split_once(']'));
    chosen.map_or(line, |(chosen, _)| chosen)
}

/// Requests beyond the depth of the device wait in the host. A SCSI disk has a depth of its own.
fn depth(name: &str, sysfs: &Path) -> Option<Finding> {
    let queues = fs::read_dir(sysfs.join("mq")).map_or(0, Iterator::count) as u64;
    let number = |file: &str| read(&sysfs.join(file))?.parse::<u64>().ok();
    if let Some(depth) = number("device/queue_depth").filter(|depth| *depth < DEPTH) {
        let lasting = match engine::session(sysfs).is_some() {
            true => ", and for later logins node.session.queue_depth (docs/engines.md)",
            false => "",
        };
        return finding(
            format!(
                "the device has {depth} requests in flight at most; those of {DEPTH} wait in the host"
            ),
            format!("echo {DEPTH} >/sys/block/{name}/device/queue_depth{lasting}"),
        );
    }
    let each = number("queue/nr_requests")?;
    if queues == 0 || queues * each >= DEPTH {
        return None;
    }
    finding(
        format!("{queues} hardware queues of {each} requests; those of {DEPTH} wait in the host"),
        format!("raise /sys/block/{name}/queue/nr_requests, or give the device more queues"),
    )
}

/// The paths of NVMe: the policy `numa` uses one of them.
fn spread(sysfs: &Path) -> Option<Finding> {
    let paths = Controller::of_device(sysfs).iter().filter(|path| path.is_live()).count();
    let policy = read(&sysfs.join("device/iopolicy"))?;
    if paths < 2 || policy != "numa" {
        return None;
    }
    let directory = sysfs.join("device").canonicalize().ok()?;
    let subsystem = directory.file_name()?.to_str()?;
    finding(
        format!("the policy numa sends all requests of a CPU over one of {paths} paths"),
        format!(
            "echo queue-depth >/sys/class/nvme-subsystem/{subsystem}/iopolicy (before Linux 6.11: round-robin), \
             for equal paths"
        ),
    )
}

#[cfg(test)]
mod tests {
    use super::super::parts::tests::stack;
    use super::*;

    fn judged(name: &str, files: &[(&str, &str)]) -> Vec<(String, String)> {
        let files: Vec<_> =
            files.iter().map(|(file, text)| (format!("{name}/{file}"), *text)).collect();
        let files: Vec<_> = files.iter().map(|(file, text)| (file.as_str(), *text)).collect();
        let (_root, sys) = stack(&files, &[]);
        let part = Part::of(&sys.join(name));
        let texts = speed(&part).into_iter().inspect(|it| assert_eq!(it.outcome, Outcome::Info));
        texts.map(|it| (it.message, it.remedy)).collect()
    }

    #[test]
    fn a_scheduler_is_for_disks_that_turn() {
        let of = |turns: &str, line: &str| {
            judged("sda", &[("queue/rotational", turns), ("queue/scheduler", line)])
        };
        assert_eq!(of("1", "none [mq-deadline]"), []);
        assert_eq!(of("0", "[none] mq-deadline"), []);
        assert_eq!(of("0", "none"), []);
        let found = of("0", "none [mq-deadline]");
        assert!(found[0].0.starts_with("the scheduler mq-deadline orders"), "{found:?}");
        assert_eq!(found[0].1, "echo none >/sys/block/sda/queue/scheduler");
    }

    #[test]
    fn a_depth_below_that_of_a_guest_is_told() {
        let of_scsi = |depth| judged("sda", &[("device/queue_depth", depth), ("mq/0/cpus", "0")]);
        assert_eq!(of_scsi("128"), []);
        let found = of_scsi("32");
        assert!(found[0].0.starts_with("the device has 32 requests in flight at most"));
        assert_eq!(found[0].1, "echo 128 >/sys/block/sda/device/queue_depth");
        let of_queues = |each| {
            judged("nbd0", &[("queue/nr_requests", each), ("mq/0/cpus", "0"), ("mq/1/cpus", "1")])
        };
        assert_eq!(of_queues("64"), []);
        assert!(of_queues("63")[0].0.starts_with("2 hardware queues of 63 requests"));
        // A device such as one of device-mapper has no hardware queues.
        assert_eq!(judged("dm-0", &[("queue/nr_requests", "8")]), []);
    }

    #[test]
    fn the_login_of_iscsi_sets_the_depth_of_later_sessions() {
        let files = [
            ("session1/iscsi_session/session1/targetname", "iqn.a:disk1"),
            ("session1/target2:0:0/block/sda/device/queue_depth", "32"),
        ];
        let (_root, sys) = stack(&files, &[]);
        let found = speed(&Part::of(&sys.join("session1/target2:0:0/block/sda")));
        assert!(found[0].remedy.ends_with("node.session.queue_depth (docs/engines.md)"));
    }

    #[test]
    fn paths_of_nvme_of_which_one_is_used_are_told() {
        let of = |policy: &str, second: &str| {
            judged(
                "nvme1n1",
                &[
                    ("device/iopolicy", policy),
                    ("device/nvme1/transport", "tcp"),
                    ("device/nvme1/state", "live"),
                    ("device/nvme2/transport", "tcp"),
                    ("device/nvme2/state", second),
                ],
            )
        };
        assert_eq!(of("queue-depth", "live"), []);
        assert_eq!(of("numa", "connecting"), []);
        let found = of("numa", "live");
        assert!(found[0].0.ends_with("over one of 2 paths"), "{found:?}");
        assert!(found[0].1.starts_with("echo queue-depth >/sys/class/nvme-subsystem/"));
    }
}
