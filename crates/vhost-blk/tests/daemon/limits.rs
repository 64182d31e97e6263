// SPDX-License-Identifier: Apache-2.0
//! Limits that several disks share.

use crate::reload::file;
use crate::rig::Rig;
use serde_json::{Value, json};

fn limits(rig: &Rig, disk: &str) -> Value {
    rig.json(&format!("status {disk}"))["limits"].take()
}

fn of_group(iops: u64) -> Value {
    json!({"group": "g", "iops": iops, "bandwidth": null, "burst_ms": 100})
}

#[test]
fn disks_join_and_leave_a_group_and_each_view_shows_it() {
    let rig = Rig::new();
    for disk in ["a", "b", "c"] {
        rig.add(disk, "");
    }
    let line = rig.refused("limit a --group g", 1);
    assert!(line.contains("the limit group g has no limits; give --iops"), "{line}");
    assert_eq!(rig.ok("limit a --group g --iops 500"), "done\n");
    assert_eq!(rig.ok("limit b --group g"), "done\n");
    assert_eq!(rig.ok("limit b --group g"), "nothing to do\n");
    assert_eq!((limits(&rig, "a"), limits(&rig, "b")), (of_group(500), of_group(500)));
    rig.ok("limit b --iops 700");
    assert_eq!(limits(&rig, "a"), of_group(700), "a change of one disk is one of the group");
    assert_eq!(limits(&rig, "c")["iops"], Value::Null);
    let text = "700 requests/s, burst 100 ms, of the group g";
    assert!(rig.ok("status a").contains(&format!("limits      {text}\n")));
    assert!(rig.ok("stats a").contains(&format!("limits      {text}\n")));
    assert_eq!(rig.json("stats a")["limits"], of_group(700));
    assert_eq!(rig.json("list")[0]["limits"], of_group(700));
    let list = rig.ok("list");
    assert!(list.lines().nth(1).unwrap().contains(" g      /"), "{list}");
    assert_eq!(rig.ok("limit a --none"), "done\n");
    assert_eq!(limits(&rig, "a")["group"], Value::Null);
    assert_eq!(limits(&rig, "b"), of_group(700), "the group has lost its limits");
    rig.ok("remove b");
    let line = rig.refused("limit a --group g", 1);
    assert!(line.contains("has no limits"), "the group has outlived its disks: {line}");
    rig.add("d", "--limit-group g --limit-iops 300");
    rig.ok("limit a --group g");
    assert_eq!(limits(&rig, "a"), of_group(300));
}

#[test]
fn a_reload_moves_a_running_disk_between_groups() {
    let rig = Rig::of_directory(&[
        ("a", &file("a", "limit-group = 'g'")),
        ("b", &file("b", "limit-group = 'g'\nlimit-iops = 50")),
    ]);
    let _guests = [rig.guest("a"), rig.guest("b")];
    assert_eq!(limits(&rig, "a"), of_group(50), "a has joined before the group had limits");
    rig.write_file("a", &file("a", "limit-iops = 7"));
    assert_eq!(rig.ok("reload"), "a: changed\n");
    let own = json!({"group": null, "iops": 7, "bandwidth": null, "burst_ms": 100});
    assert_eq!((limits(&rig, "a"), limits(&rig, "b")), (own, of_group(50)));
    rig.write_file("a", &file("a", "limit-group = 'g'\nlimit-iops = 60"));
    assert_eq!(rig.ok("reload"), "a: changed\n");
    assert_eq!((limits(&rig, "a"), limits(&rig, "b")), (of_group(60), of_group(60)));
}
