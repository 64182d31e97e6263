// SPDX-License-Identifier: Apache-2.0
//! The engine of a block device that is a client of NBD, iSCSI or Ceph, an array of disks (md) or a mirror
//! of machines (DRBD), as the kernel describes it.

use super::device::read;
use super::{Finding, Outcome};
use std::fs;
use std::path::{Path, PathBuf};

/// Judges the connections of an NBD device; `None` for other devices.
pub(super) fn nbd(sysfs: &Path) -> Option<Finding> {
    let name = sysfs.file_name()?.to_str()?;
    name.strip_prefix("nbd").filter(|number| number.parse::<u32>().is_ok())?;
    if read(&sysfs.join("pid")).is_none() {
        return Some(
            Finding::new("device_engine", Outcome::Fail, "nbd: not connected")
                .remedy("connect it with nbd-client before the start"),
        );
    }
    // The client has a hardware queue for each connection.
    let connections = fs::read_dir(sysfs.join("mq")).map_or(0, Iterator::count);
    let milliseconds = read(&sysfs.join("queue/io_timeout")).and_then(|text| text.parse().ok());
    let timeout = milliseconds.map_or("unknown".to_owned(), |ms: u64| format!("{} s", ms / 1000));
    let backend = read(&sysfs.join("backend")).filter(|name| !name.is_empty());
    let backend = backend.map_or_else(String::new, |name| format!(" to {name}"));
    let noun = if connections == 1 { "connection" } else { "connections" };
    let message = format!("nbd: {connections} {noun}{backend}, time-out of a request {timeout}");
    Some(match connections {
        0 | 1 => Finding::new("device_engine", Outcome::Warn, message).remedy(
            "without a dead-connection time-out the loss of the connection fails all requests: \
             connect more than one, or through a proxy that reconnects (docs/engines.md)",
        ),
        _ => Finding::new("device_engine", Outcome::Ok, message),
    })
}

/// Judges the members of an md array; `None` for other devices.
pub(super) fn md(sysfs: &Path) -> Option<Finding> {
    let text = |name: &str| read(&sysfs.join("md").join(name));
    let level = text("level").filter(|level| !level.is_empty())?;
    let state = text("array_state").unwrap_or_else(|| "unknown".to_owned());
    let action = text("sync_action").unwrap_or_else(|| "none".to_owned());
    let members = text("raid_disks").unwrap_or_else(|| "unknown".to_owned());
    let missing = text("degraded").and_then(|text| text.parse().ok()).unwrap_or(0_u32);
    let message = format!("md: {level} of {members}, {state}, {missing} missing, sync {action}");
    let finding = |outcome| Finding::new("device_engine", outcome, message);
    Some(match (state.as_str(), missing) {
        ("inactive" | "clear" | "broken", _) => {
            finding(Outcome::Fail).remedy("assemble the array: mdadm --assemble --scan")
        }
        (_, 0) => finding(Outcome::Ok),
        _ if matches!(action.as_str(), "recover" | "resync") => {
            finding(Outcome::Warn).remedy("wait for the end of the synchronisation")
        }
        _ => finding(Outcome::Warn).remedy(
            "another loss loses data or access: return the member with mdadm --re-add, or replace \
             it with mdadm --add",
        ),
    })
}

/// The directory of the session of an iSCSI disk, whose name is that of the session.
pub(super) fn session(sysfs: &Path) -> Option<PathBuf> {
    // `.../session1/target2:0:0/2:0:0:0/block/sda`
    let name = |directory: &Path| directory.file_name()?.to_str().map(str::to_owned);
    let is_session =
        |directory: &&Path| name(directory).is_some_and(|name| name.starts_with("session"));
    let session = sysfs.ancestors().find(is_session)?;
    Some(session.join("iscsi_session").join(name(session)?))
}

/// Judges the session of an iSCSI disk; `None` for other devices.
pub(super) fn iscsi(sysfs: &Path) -> Option<Finding> {
    if sysfs.join("partition").exists() {
        return None;
    }
    let class = session(sysfs)?;
    let text = |name: &str| read(&class.join(name));
    let (target, state) = (text("targetname")?, text("state")?);
    let wait = text("recovery_tmo").unwrap_or_else(|| "unknown".to_owned());
    let wait = match wait.parse::<i64>() {
        Ok(seconds) if seconds < 0 => "for ever".to_owned(),
        _ => format!("for {wait} s"),
    };
    let message = format!("iscsi: {target}, session {state}; without it requests wait {wait}");
    Some(match state.as_str() {
        "LOGGED_IN" => Finding::new("device_engine", Outcome::Ok, message),
        _ => Finding::new("device_engine", Outcome::Fail, message)
            .remedy("check the target and the network; iscsid logs in again by itself"),
    })
}

/// Judges a device of DRBD 8.4; `None` for other devices.
pub(super) fn drbd(sysfs: &Path) -> Option<Finding> {
    let minor = sysfs.file_name()?.to_str()?.strip_prefix("drbd")?.parse().ok()?;
    drbd_line(minor, &read(Path::new("/proc/drbd"))?)
}

/// Judges the line about a minor, such as `0: cs:Connected ro:Primary/Secondary ds:UpToDate/UpToDate`.
fn drbd_line(minor: u32, text: &str) -> Option<Finding> {
    let start = format!("{minor}: ");
    let line = text.lines().find_map(|line| line.trim().strip_prefix(&start))?;
    let field = |name: &str| line.split_whitespace().find_map(|word| word.strip_prefix(name));
    let (connection, roles, disks) = (field("cs:")?, field("ro:")?, field("ds:")?);
    let message = format!("drbd: {connection}, {roles}, disks {disks} (this node first)");
    let finding = |outcome| Finding::new("device_engine", outcome, message);
    Some(if !roles.starts_with("Primary/") {
        finding(Outcome::Fail).remedy("make this node the primary: drbdadm primary RESOURCE")
    } else if !disks.split('/').any(|disk| disk == "UpToDate") {
        finding(Outcome::Fail).remedy("connect a node that has all data: see drbdadm status")
    } else if connection == "Connected" && disks == "UpToDate/UpToDate" {
        finding(Outcome::Ok)
    } else {
        finding(Outcome::Warn).remedy("another loss stops the guest: see drbdadm status")
    })
}

/// Describes an image of Ceph that the kernel attached; `None` for other devices.
pub(super) fn rbd(sysfs: &Path) -> Option<Finding> {
    sysfs.file_name()?.to_str()?.strip_prefix("rbd")?.parse::<u32>().ok()?;
    let text = |name: &str| read(&sysfs.join("device").join(name));
    let (pool, image) = (text("pool")?, text("name")?);
    // Monitors, options, pool, image and snapshot.
    let options = text("config_info").unwrap_or_default();
    let wait = options.split([' ', ',']).find_map(|word| word.strip_prefix("osd_request_timeout="));
    let wait = match wait {
        None | Some("0") => "for ever".to_owned(),
        Some(seconds) => format!("for {seconds} s"),
    };
    let message = format!("rbd: {pool}/{image}; without OSDs requests wait {wait}");
    Some(match text("current_snap").as_deref() {
        None | Some("-") => Finding::new("device_engine", Outcome::Ok, message),
        Some(snapshot) => {
            let message = format!("{message}; it is the snapshot {snapshot}");
            Finding::new("device_engine", Outcome::Warn, message)
                .remedy("attach the image itself, or give --read-only on")
        }
    })
}

#[cfg(test)]
mod tests {
    use super::super::device::tests::tree;
    use super::*;

    /// A directory of sysfs with this name.
    fn device(name: &str, files: &[(&str, &str)]) -> (tempfile::TempDir, std::path::PathBuf) {
        let files: Vec<_> =
            files.iter().map(|(file, text)| (format!("{name}/{file}"), *text)).collect();
        let files: Vec<_> = files.iter().map(|(file, text)| (file.as_str(), *text)).collect();
        let root = tree(&files);
        let path = root.path().join(name);
        (root, path)
    }

    const ONE: &[(&str, &str)] =
        &[("pid", "77"), ("backend", ""), ("mq/0/cpu_list", "0"), ("queue/io_timeout", "30000")];

    #[test]
    fn one_connection_of_nbd_is_a_warning_and_two_are_none() {
        let (_root, path) = device("nbd0", ONE);
        let one = nbd(&path).unwrap();
        assert_eq!(one.outcome, Outcome::Warn);
        assert_eq!(one.message, "nbd: 1 connection, time-out of a request 30 s");
        let two = [ONE, &[("mq/1/cpu_list", "1"), ("backend", "disk1")]].concat();
        let (_root, path) = device("nbd12", &two);
        let two = nbd(&path).unwrap();
        assert_eq!(two.outcome, Outcome::Ok);
        assert_eq!(two.message, "nbd: 2 connections to disk1, time-out of a request 30 s");
    }

    #[test]
    fn an_nbd_device_without_a_server_cannot_be_served() {
        let (_root, path) = device("nbd3", &[("size", "0")]);
        assert_eq!(nbd(&path).unwrap().outcome, Outcome::Fail);
    }

    fn array(state: &str, missing: &str, action: &str) -> Option<Finding> {
        let files = [
            ("md/level", "raid1"),
            ("md/array_state", state),
            ("md/raid_disks", "2"),
            ("md/degraded", missing),
            ("md/sync_action", action),
        ];
        let (_root, path) = device("md0", &files);
        md(&path)
    }

    #[test]
    fn an_array_is_judged_by_its_missing_members() {
        let whole = array("clean", "0", "idle").unwrap();
        assert_eq!(whole.outcome, Outcome::Ok);
        assert_eq!(whole.message, "md: raid1 of 2, clean, 0 missing, sync idle");
        let degraded = array("active", "1", "idle").unwrap();
        assert_eq!(degraded.outcome, Outcome::Warn);
        assert!(degraded.remedy.contains("mdadm --re-add"), "{}", degraded.remedy);
        let recovering = array("active", "1", "recover").unwrap();
        assert_eq!(recovering.outcome, Outcome::Warn);
        assert!(recovering.remedy.contains("wait"), "{}", recovering.remedy);
        assert_eq!(array("inactive", "0", "idle").unwrap().outcome, Outcome::Fail);
    }

    #[test]
    fn a_disk_of_iscsi_is_judged_by_its_session() {
        let finding = |state, wait| {
            let class = "session3/iscsi_session/session3";
            let root = tree(&[
                (&format!("{class}/targetname"), "iqn.2026-01.org.example:disk1"),
                (&format!("{class}/state"), state),
                (&format!("{class}/recovery_tmo"), wait),
                ("session3/target2:0:0/2:0:0:0/block/sda/size", "8"),
            ]);
            iscsi(&root.path().join("session3/target2:0:0/2:0:0:0/block/sda")).unwrap()
        };
        let whole = finding("LOGGED_IN", "120");
        assert_eq!(whole.outcome, Outcome::Ok);
        let wanted = "iscsi: iqn.2026-01.org.example:disk1, session LOGGED_IN; without it requests \
                      wait for 120 s";
        assert_eq!(whole.message, wanted);
        let lost = finding("FAILED", "-1");
        assert_eq!(lost.outcome, Outcome::Fail);
        assert!(lost.message.ends_with("wait for ever"), "{}", lost.message);
    }

    #[test]
    fn a_device_of_drbd_is_judged_by_its_nodes() {
        let judged = |rest: &str| {
            let text =
                format!("version: 8.4.11\n\n 1: cs:Connected\n 0: {rest} C r-----\n    ns:0\n");
            drbd_line(0, &text).unwrap()
        };
        let whole = judged("cs:Connected ro:Primary/Secondary ds:UpToDate/UpToDate");
        assert_eq!(whole.outcome, Outcome::Ok);
        let wanted =
            "drbd: Connected, Primary/Secondary, disks UpToDate/UpToDate (this node first)";
        assert_eq!(whole.message, wanted);
        let outcome = |rest| judged(rest).outcome;
        let alone = "cs:WFConnection ro:Primary/Unknown ds:UpToDate/DUnknown";
        assert_eq!(outcome(alone), Outcome::Warn);
        let syncing = "cs:SyncSource ro:Primary/Secondary ds:UpToDate/Inconsistent";
        assert_eq!(outcome(syncing), Outcome::Warn);
        let lost = "cs:WFConnection ro:Primary/Unknown ds:Diskless/DUnknown";
        assert_eq!(outcome(lost), Outcome::Fail);
        let secondary = "cs:Connected ro:Secondary/Primary ds:UpToDate/UpToDate";
        assert_eq!(outcome(secondary), Outcome::Fail);
        assert_eq!(drbd_line(2, "version: 8.4.11"), None);
    }

    #[test]
    fn an_image_of_ceph_is_named_with_its_time_out() {
        let judged = |options: &str, snapshot| {
            let files = [
                ("device/pool", "disks"),
                ("device/name", "disk1"),
                ("device/current_snap", snapshot),
                ("device/config_info", options),
            ];
            let (_root, path) = device("rbd0", &files);
            rbd(&path).unwrap()
        };
        let usual = judged("192.0.2.1:6789 name=admin disks disk1 -", "-");
        let wanted = "rbd: disks/disk1; without OSDs requests wait for ever";
        assert_eq!((usual.outcome, usual.message.as_str()), (Outcome::Ok, wanted));
        let limited = judged("192.0.2.1:6789 name=admin,osd_request_timeout=30 disks disk1 -", "-");
        assert!(limited.message.ends_with("wait for 30 s"), "{}", limited.message);
        assert_eq!(judged("", "monday").outcome, Outcome::Warn);
    }

    #[test]
    fn other_devices_have_none() {
        let (_root, path) = device("sda", &[("size", "8")]);
        for engine in [nbd, md, iscsi, drbd, rbd] {
            assert_eq!(engine(&path), None);
        }
        let (_root, path) = device("nbdx", &[("size", "8")]);
        assert_eq!(nbd(&path), None);
    }
}
