// SPDX-License-Identifier: Apache-2.0
//! Limits that several disks share.

use crate::reload::file;
use crate::rig::Rig;
use crate::saving::{restart, text_of};
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
    let in_force = "limits: 500 requests/s, burst 100 ms, of the group g\n";
    assert_eq!(rig.ok("limit a --group g --iops 500"), format!("done; {in_force}"));
    assert_eq!(rig.ok("limit b --group g"), format!("done; {in_force}"));
    assert_eq!(rig.ok("limit b --group g"), format!("nothing to do; {in_force}"));
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
    assert_eq!(rig.ok("limit a --none"), "done; limits: none\n");
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

#[test]
fn a_change_of_one_limit_keeps_the_others_and_the_answer_has_all() {
    let mut rig = Rig::with(&["--log-level", "info"]);
    rig.add("a", "");
    let changed = |words: &str, iops: Value, bandwidth: Value, burst_ms: u64| {
        let limits =
            json!({"group": null, "iops": iops, "bandwidth": bandwidth, "burst_ms": burst_ms});
        let expected = json!({"changed": true, "limits": limits});
        assert_eq!(rig.json(&format!("limit a {words}")), expected, "{words}");
        assert_eq!(self::limits(&rig, "a"), limits, "{words}");
    };
    changed("--iops 500", json!(500), Value::Null, 100);
    changed("--bandwidth 1M", json!(500), json!(1 << 20), 100);
    changed("--burst-seconds 2", json!(500), json!(1 << 20), 2000);
    changed("--iops 600", json!(600), json!(1 << 20), 2000);
    changed("--iops off", Value::Null, json!(1 << 20), 2000);
    changed("--iops 7 --bandwidth off", json!(7), Value::Null, 2000);
    changed("--iops off", Value::Null, Value::Null, 2000);
    changed("--iops 8", json!(8), Value::Null, 2000);
    changed("--none", Value::Null, Value::Null, 100);
    let line = rig.refused("limit a --group off", 2);
    assert!(line.contains("give --none to leave the group"), "{line}");
    let line = rig.refused("limit a", 2);
    assert!(line.contains("--iops"), "{line}");
    let reply = rig.connect().call(r#"{"method":"io.vhostblk.Limit","parameters":{"name":"a"}}"#);
    assert_eq!(reply["error"], "io.vhostblk.Refused");
    assert!(reply["parameters"]["remedy"].as_str().unwrap().contains("iops 0 and bandwidth 0"));
    let line = rig.daemon.log_line("method=\"Limit\"");
    assert!(line.contains("disk=\"a\"") && line.contains("outcome=\"ok\""), "{line}");
}

#[test]
fn a_part_of_the_limits_of_a_group_changes_for_all_and_its_last_limit_stays() {
    let rig = Rig::new();
    for disk in ["a", "b", "c"] {
        rig.add(disk, "");
    }
    rig.ok("limit a --group g --iops 500 --bandwidth 1M");
    rig.ok("limit c --iops 9 --burst-seconds 3");
    let both = json!({"group": "g", "iops": 500, "bandwidth": 2 << 20, "burst_ms": 100});
    // The values that are not given are those of the group, not those of the disk before.
    assert_eq!(rig.json("limit c --group g --bandwidth 2M")["limits"], both);
    rig.ok("limit b --group g");
    assert_eq!((limits(&rig, "a"), limits(&rig, "b")), (both.clone(), both));
    rig.ok("limit b --bandwidth off");
    assert_eq!((limits(&rig, "a"), limits(&rig, "c")), (of_group(500), of_group(500)));
    for words in [
        "limit b --iops off",
        "limit b --group g --iops off",
        "limit b --group g --iops off --bandwidth off",
    ] {
        let line = rig.refused(words, 1);
        assert!(line.contains("the limit group g would have no limit; give --iops"), "{line}");
    }
    assert_eq!(limits(&rig, "b"), of_group(500));
    // A group of this change would have nothing either: the disk keeps its own limits.
    rig.ok("limit c --none");
    rig.ok("limit c --iops 9");
    let line = rig.refused("limit c --group h --burst-seconds 1", 1);
    assert!(line.contains("the limit group h would have no limit"), "{line}");
    assert_eq!(
        (limits(&rig, "c")["iops"].clone(), limits(&rig, "c")["group"].clone()),
        (json!(9), Value::Null)
    );
    rig.ok("limit b --iops off --bandwidth off");
    assert_eq!(
        (limits(&rig, "b")["group"].clone(), limits(&rig, "a")),
        (Value::Null, of_group(500))
    );
}

#[test]
fn clients_that_change_different_limits_of_a_group_at_once_lose_none() {
    const CHANGES: u64 = 200;
    let rig = Rig::with(&["--log-level", "error"]);
    rig.add("a", "");
    rig.add("b", "");
    rig.ok("limit a --group g --iops 1 --bandwidth 1");
    rig.ok("limit b --group g");
    let change = |disk: &str, member: &str| {
        let mut raw = rig.connect();
        for n in 2..=CHANGES {
            let call =
                json!({"method": "io.vhostblk.Limit", "parameters": {"name": disk, member: n}});
            let told = raw.call(&call.to_string())["parameters"].take();
            // The other client changes the other member only.
            assert_eq!((&told["changed"], &told["limits"][member]), (&json!(true), &json!(n)));
        }
    };
    std::thread::scope(|scope| {
        scope.spawn(|| change("a", "iops"));
        scope.spawn(|| change("b", "bandwidth"));
    });
    let told = json!({"group": "g", "iops": CHANGES, "bandwidth": CHANGES, "burst_ms": 100});
    assert_eq!(limits(&rig, "a"), told);
}

#[test]
fn a_part_that_is_saved_leaves_the_rest_of_the_limits_in_the_file() {
    let more = "limit-iops = 5\nlimit-burst = 2\n";
    let rig = Rig::of_directory(&[("a", &file("a", more))]);
    rig.ok("limit a --bandwidth 1M --save");
    let text = std::fs::read_to_string(rig.path("conf").join("a.toml")).unwrap();
    for line in ["limit-iops = 5\n", "limit-bandwidth = ", "limit-burst = 2.0\n"] {
        assert!(text.contains(line), "{text}");
    }
    rig.ok("limit a --iops off --save");
    let text = std::fs::read_to_string(rig.path("conf").join("a.toml")).unwrap();
    assert!(!text.contains("limit-iops") && text.contains("limit-bandwidth"), "{text}");
    assert_eq!(rig.ok("reload"), "nothing to do\n");
}

#[test]
fn a_disk_that_does_not_start_changes_no_limit_of_its_group() {
    let rig = Rig::new();
    rig.add("a", "--limit-group g --limit-iops 5000 --limit-bandwidth 100M");
    rig.add("b", "");
    let before = limits(&rig, "a");
    let image = rig.path("x.img");
    std::fs::File::create(&image).unwrap().set_len(1 << 20).unwrap();
    let taken = rig.path("b.sock");
    let (image, taken) = (image.display(), taken.display());
    let options = "--limit-group g --limit-iops 10";
    rig.refused(&format!("add x --blk-file {image} --socket-path {taken} {options}"), 1);
    assert_eq!(limits(&rig, "a"), before);
    // One that starts changes the limits that it gives.
    rig.add("y", options);
    let after = json!({"group": "g", "iops": 10, "bandwidth": 100 << 20, "burst_ms": 100});
    assert_eq!((limits(&rig, "a"), limits(&rig, "y")), (after.clone(), after));
}

#[test]
fn the_last_file_of_a_group_has_its_limits_until_a_command_changes_them() {
    let of_file =
        |name: &str, iops: u64| file(name, &format!("limit-group = 'g'\nlimit-iops = {iops}"));
    for _ in 0..3 {
        let rig = Rig::of_directory(&[
            ("a", &of_file("a", 50)),
            ("b", &of_file("b", 60)),
            ("c", &file("c", "limit-group = 'g'")),
        ]);
        assert_eq!(limits(&rig, "a"), of_group(60));
        rig.write_file("d", &of_file("d", 70));
        assert_eq!(rig.ok("reload"), "d: added\n");
        assert_eq!(limits(&rig, "a"), of_group(70));
        rig.ok("limit a --iops 80");
        rig.write_file("e", &of_file("e", 90));
        assert_eq!(rig.ok("reload"), "e: added\n");
        assert_eq!(limits(&rig, "e"), of_group(80));
    }
}

#[test]
fn saved_limits_of_a_group_are_those_of_all_its_files() {
    let of_file = |name: &str| file(name, "limit-group = 'g'\nlimit-iops = 50");
    let mut rig = Rig::of_directory(&[
        ("a", &of_file("a")),
        ("b", &format!("{}# a comment\n", of_file("b"))),
        ("c", &file("c", "limit-group = 'g'")),
        ("d", &file("d", "limit-iops = 50")),
    ]);
    rig.ok("limit a --iops 80 --save");
    assert_eq!(rig.ok("reload"), "nothing to do\n");
    let text = text_of(&rig, "b");
    assert!(text.contains("limit-iops = 80") && text.contains("# a comment"), "{text}");
    assert!(!text_of(&rig, "c").contains("limit-iops"));
    assert!(text_of(&rig, "d").contains("limit-iops = 50"));
    restart(&mut rig);
    assert_eq!((limits(&rig, "a"), limits(&rig, "c")), (of_group(80), of_group(80)));
}

#[test]
fn a_restart_of_a_disk_gives_its_group_the_limits_that_its_file_has_new() {
    let of_a = |more: &str| file("a", &format!("limit-group = 'g'\n{more}"));
    let of_b = |more: &str| file("b", &format!("limit-group = 'g'\n{more}"));
    let rig = Rig::of_directory(&[("a", &of_a("limit-iops = 900")), ("b", &of_b(""))]);
    rig.write_file("a", &of_a("limit-iops = 300"));
    rig.write_file("b", &of_b("serial = 'new'"));
    assert_eq!(rig.ok("reload"), "a: changed\nb: restarted\n");
    assert_eq!((limits(&rig, "a"), limits(&rig, "b")), (of_group(300), of_group(300)));
    rig.ok("limit b --iops 500");
    rig.write_file("a", &of_a("limit-iops = 200\nserial = 'new'"));
    assert_eq!(rig.ok("reload"), "a: restarted\n");
    assert_eq!((limits(&rig, "a"), limits(&rig, "b")), (of_group(200), of_group(200)));
    // The limits of a command stay in a group whose only disk starts again.
    rig.ok("remove b --save");
    rig.ok("limit a --iops 600");
    rig.write_file("a", &of_a("limit-iops = 200\nserial = 'newer'"));
    assert_eq!(rig.ok("reload"), "a: restarted\n");
    assert_eq!(limits(&rig, "a"), of_group(600));
}
