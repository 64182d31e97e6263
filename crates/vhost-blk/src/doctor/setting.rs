// SPDX-License-Identifier: Apache-2.0
//! Settings of a block device that differ from those that docs/engines.md recommends, with the command that
//! changes them.

use super::device::{Controller, read};
use super::engine;
use super::parts::{Part, Spare};
use super::{Finding, Outcome};

/// Seconds without a path for which the host has to keep a controller of NVMe.
const LOSS_MIN: u64 = 600;
/// Seconds after which a part has to fail its requests, so that another part gets them.
const FAIL_MAX: i64 = 5;

/// Judges the time-outs of NVMe over a network.
pub(super) fn nvme(part: &Part) -> Vec<Finding> {
    let controllers = Controller::of_device(&part.sysfs);
    let with = |is_wanted: &dyn Fn(&Controller) -> bool| -> Vec<&Controller> {
        controllers.iter().filter(|controller| is_wanted(controller)).collect()
    };
    let short = |c: &Controller| c.loss_seconds().is_some_and(|seconds| seconds < LOSS_MIN);
    let endless = |c: &Controller| c.loss.as_deref() == Some("off");
    let waits = |c: &Controller| c.fast_fail.as_deref().is_none_or(|value| value == "off");
    let is_member = part.spare == Some(Spare::Member);
    let judged = [
        (
            with(&short),
            Outcome::Warn,
            "without a path the device disappears too early: requests fail until it is back",
            ("ctrl_loss_tmo", LOSS_MIN.to_string()),
        ),
        (
            with(&endless),
            Outcome::Info,
            "without a path a stop of the disk waits without a limit",
            ("ctrl_loss_tmo", LOSS_MIN.to_string()),
        ),
        (
            with(&|c| is_member && waits(c)),
            Outcome::Warn,
            "a member that hangs makes the requests of the array wait",
            ("fast_io_fail_tmo", FAIL_MAX.to_string()),
        ),
    ];
    let judged = judged.into_iter().filter(|(controllers, ..)| !controllers.is_empty());
    judged
        .map(|(controllers, outcome, why, (file, value))| {
            let names: Vec<&str> = controllers.iter().map(|c| c.name.as_str()).collect();
            let files = names.iter().map(|name| format!(" /sys/class/nvme/{name}/{file}"));
            let message = format!("{file} of {}: {why}", names.join(", "));
            Finding::new("device_setting", outcome, message).remedy(format!(
                "echo {value} | tee{}, and give it to nvme connect (docs/engines.md)",
                files.collect::<String>()
            ))
        })
        .collect()
}

/// Judges the time-out of an iSCSI session that is a path.
pub(super) fn iscsi(part: &Part) -> Option<Finding> {
    part.spare.filter(|spare| *spare == Spare::Path)?;
    let session = engine::session(&part.sysfs)?;
    let seconds: i64 = read(&session.join("recovery_tmo"))?.parse().ok()?;
    if (0..=FAIL_MAX).contains(&seconds) {
        return None;
    }
    let (name, target) = (session.file_name()?.to_str()?, read(&session.join("targetname"))?);
    let message = format!(
        "replacement time-out of {name} ({target}) is {seconds} s: the requests of a lost path wait that \
         long before another path gets them"
    );
    Some(Finding::new("device_setting", Outcome::Warn, message).remedy(format!(
        "echo {FAIL_MAX} >/sys/class/iscsi_session/{name}/recovery_tmo, and for later logins \
         iscsiadm -m node -T {target} --op update -n node.session.timeo.replacement_timeout -v \
         {FAIL_MAX} (docs/engines.md)"
    )))
}

/// Judges the table of a device of device-mapper multipath, as dmsetup tells it.
pub(super) fn multipath(name: &str, table: &str) -> Option<Finding> {
    let mut words = table.split_whitespace();
    words.find(|word| *word == "multipath")?;
    if words.any(|word| word == "queue_if_no_path") {
        return None;
    }
    let message = format!("{name} fails its requests when it has no path");
    Some(Finding::new("device_setting", Outcome::Warn, message).remedy(
        "set no_path_retry queue in /etc/multipath.conf, then systemctl restart multipathd \
         (docs/engines.md)",
    ))
}

#[cfg(test)]
mod tests {
    use super::super::parts::tests::stack;
    use super::*;

    /// A namespace with two controllers, below an array if `is_member`.
    fn of_nvme(loss: [&str; 2], fast_fail: &str, is_member: bool) -> Vec<Finding> {
        let (_root, sys) = stack(
            &[
                ("md0/md/level", "raid1"),
                ("nvme1n1/device/nvme1/transport", "tcp"),
                ("nvme1n1/device/nvme1/state", "live"),
                ("nvme1n1/device/nvme1/ctrl_loss_tmo", loss[0]),
                ("nvme1n1/device/nvme1/fast_io_fail_tmo", fast_fail),
                ("nvme1n1/device/nvme2/transport", "tcp"),
                ("nvme1n1/device/nvme2/state", "live"),
                ("nvme1n1/device/nvme2/ctrl_loss_tmo", loss[1]),
                ("nvme1n1/device/nvme2/fast_io_fail_tmo", fast_fail),
                ("nvme1n1/device/nvme3/transport", "pcie"),
                ("nvme1n1/device/nvme3/state", "live"),
            ],
            &[("md0", &["nvme1n1"])],
        );
        let top = Part::of(&sys.join(if is_member { "md0" } else { "nvme1n1" }));
        nvme(top.all().last().unwrap())
    }

    #[test]
    fn time_outs_of_nvme_are_judged_with_the_command_that_changes_them() {
        assert_eq!(of_nvme(["600", "602"], "off", false), []);
        let short = of_nvme(["600", "30"], "off", false);
        assert_eq!(short.len(), 1);
        assert_eq!(short[0].outcome, Outcome::Warn);
        assert!(short[0].message.starts_with("ctrl_loss_tmo of nvme2: "), "{}", short[0].message);
        assert!(short[0].remedy.starts_with("echo 600 | tee /sys/class/nvme/nvme2/ctrl_loss_tmo,"));
        let endless = of_nvme(["off", "off"], "off", false);
        assert_eq!((endless.len(), endless[0].outcome), (1, Outcome::Info));
        assert!(endless[0].message.starts_with("ctrl_loss_tmo of nvme1, nvme2: "));
    }

    #[test]
    fn a_member_of_an_array_on_nvme_has_to_fail_soon() {
        assert_eq!(of_nvme(["600", "600"], "5", true), []);
        let waits = of_nvme(["600", "600"], "off", true);
        assert_eq!((waits.len(), waits[0].outcome), (1, Outcome::Warn));
        let wanted = "echo 5 | tee /sys/class/nvme/nvme1/fast_io_fail_tmo \
                      /sys/class/nvme/nvme2/fast_io_fail_tmo,";
        assert!(waits[0].remedy.starts_with(wanted), "{}", waits[0].remedy);
    }

    #[test]
    fn a_session_of_iscsi_that_is_a_path_has_to_fail_soon() {
        let judged = |seconds: &str, uuid: &str| {
            let (_root, sys) = stack(
                &[
                    ("dm-0/dm/name", "36001"),
                    ("dm-0/dm/uuid", uuid),
                    ("session1/iscsi_session/session1/targetname", "iqn.a:disk1"),
                    ("session1/iscsi_session/session1/recovery_tmo", seconds),
                    ("session1/target2:0:0/block/sda/size", "8"),
                ],
                &[("dm-0", &["session1/target2:0:0/block/sda"])],
            );
            iscsi(Part::of(&sys.join("dm-0")).all().last().unwrap())
        };
        assert_eq!(judged("5", "mpath-36001"), None);
        assert_eq!(judged("120", "LVM-abc"), None);
        for seconds in ["120", "-1"] {
            let finding = judged(seconds, "mpath-36001").unwrap();
            assert_eq!(finding.outcome, Outcome::Warn);
            let wanted = "echo 5 >/sys/class/iscsi_session/session1/recovery_tmo, ";
            assert!(finding.remedy.starts_with(wanted), "{}", finding.remedy);
            assert!(finding.remedy.contains("-T iqn.a:disk1 --op update"), "{}", finding.remedy);
        }
    }

    #[test]
    fn multipath_has_to_keep_requests_without_a_path() {
        let keeps = "0 8192 multipath 1 queue_if_no_path 0 1 1 service-time 0 1 2 8:0 1 1";
        assert_eq!(multipath("dm-0", keeps), None);
        assert_eq!(multipath("dm-0", ""), None);
        let fails = keeps.replace("1 queue_if_no_path", "0");
        let finding = multipath("dm-0", &fails).unwrap();
        assert_eq!(finding.outcome, Outcome::Warn);
        assert!(finding.remedy.contains("no_path_retry queue in /etc/multipath.conf"));
    }
}
