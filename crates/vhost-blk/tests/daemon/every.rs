// SPDX-License-Identifier: Apache-2.0
//! Questions about all disks at once.

use crate::common::stdout;
use crate::disks::submitted;
use crate::reload::file;
use crate::rig::Rig;
use serde_json::{Value, json};

/// Names of the disks in an answer for all.
fn told_names(told: &Value) -> Vec<&str> {
    told.as_array().unwrap().iter().map(|disk| disk["name"].as_str().unwrap()).collect()
}

#[test]
fn disks_that_hang_at_once_keep_no_answer_of_another_back_however_short_the_patience() {
    let rig = Rig::new();
    // One for each connection of `ctl`.
    let stuck: Vec<_> = (1..=8).map(|n| format!("stuck{n}")).collect();
    let submit = |name: &String| {
        rig.add(name, "--wrap delay:us=3600000000");
        submitted(&rig, name)
    };
    let guests: Vec<_> = stuck.iter().map(submit).collect();
    let rig = &rig;
    std::thread::scope(|scope| {
        for name in &stuck {
            scope.spawn(move || rig.refused(&format!("--timeout 1 pause {name}"), 3));
        }
    });
    // Asked about before and after those that hang.
    ["a", "x1", "x2", "x3"].iter().for_each(|name| rig.add(name, ""));
    for (patience, code) in [("--timeout 8 ", 3), ("", 1)] {
        let all = rig.ctl(&format!("--json {patience}stats --all"));
        let failed = String::from_utf8_lossy(&all.stderr);
        assert_eq!(all.status.code(), Some(code), "{failed}");
        let told: Value = serde_json::from_slice(&all.stdout).unwrap();
        assert_eq!(told_names(&told), ["a", "x1", "x2", "x3"], "{failed}");
    }
    drop(guests);
}

#[test]
fn one_connection_that_is_left_tells_of_all_disks() {
    let rig = Rig::new();
    let names = ["a", "b", "c", "d", "e"];
    names.iter().for_each(|name| rig.add(name, ""));
    let clients = || rig.daemon.threads_named("control-client");
    rig.place.wait_until("the end of earlier connections", || clients() == 0);
    let mut others: Vec<_> = (0..31).map(|_| rig.connect()).collect();
    for other in &mut others {
        other.call(r#"{"method":"io.vhostblk.List"}"#);
    }
    for verb in ["stats", "status"] {
        rig.place.wait_until("the end of earlier connections", || clients() == 31);
        assert_eq!(told_names(&rig.json(&format!("{verb} --all"))), names);
    }
}

#[test]
fn status_and_stats_tell_of_all_disks_at_once() {
    let rig = Rig::new();
    assert_eq!((rig.ok("status --all"), rig.json("stats --all")), (String::new(), json!([])));
    rig.add("b", "");
    rig.add("a", "");
    rig.guest("b").write(0, &[1; 512]).unwrap();
    let names = |told: &Value| {
        let disks = told.as_array().unwrap().iter();
        disks.map(|disk| disk["name"].as_str().unwrap().to_owned()).collect::<Vec<_>>()
    };
    let (status, stats) = (rig.json("status --all"), rig.json("stats --all"));
    assert_eq!(
        (names(&status), names(&stats)),
        (vec!["a".into(), "b".into()], vec!["a".into(), "b".into()])
    );
    assert_eq!([0, 1].map(|at| stats[at]["queues"][0]["chains"].clone()), [json!(0), json!(1)]);
    let text = rig.ok("stats --all");
    assert!(text.starts_with("disk a\nQUEUE  ") && text.contains("\n\ndisk b\nQUEUE  "), "{text}");
    let text = rig.ok("status --all");
    assert!(text.contains("name        a\n") && text.contains("\n\nname        b\n"), "{text}");
    assert!(rig.refused("status a --all", 2).contains("--all"));
}

#[test]
fn a_pause_of_all_disks_answers_for_each_and_so_does_the_resume() {
    let rig = Rig::new();
    assert_eq!((rig.ok("pause --all"), rig.json("resume --all")), (String::new(), json!([])));
    ["b", "a"].iter().for_each(|name| rig.add(name, ""));
    rig.ok("pause a");
    assert_eq!(rig.ok("pause --all"), "a: nothing to do\nb: done\n");
    let states = || ["a", "b"].map(|name| rig.row(name)["state"].clone());
    assert_eq!(states(), [json!("paused"), json!("paused")]);
    rig.ok("resume b");
    let told = json!([{"changed": true, "name": "a"}, {"changed": false, "name": "b"}]);
    assert_eq!(rig.json("resume --all"), told);
    assert_eq!(states(), [json!("serving"), json!("serving")]);
    assert!(rig.refused("pause a --all", 2).contains("--all"));
    assert!(rig.refused("resume a --all", 2).contains("--all"));
}

#[test]
fn a_disk_that_cannot_be_paused_is_named_and_keeps_no_other_back() {
    let rig = Rig::new();
    let stuck = ["stuck1", "stuck2"];
    let guests = stuck.map(|name| {
        rig.add(name, "--wrap delay:us=3600000000");
        submitted(&rig, name)
    });
    ["a", "z"].iter().for_each(|name| rig.add(name, ""));
    let paused = rig.ctl("--json --timeout 10 pause --all");
    let failed = String::from_utf8(paused.stderr).unwrap();
    assert_eq!(paused.status.code(), Some(1), "{failed}");
    let told: Value = serde_json::from_slice(&paused.stdout).unwrap();
    assert_eq!(told_names(&told), ["a", "z"], "{failed}");
    assert_eq!(rig.row("z")["state"], "paused");
    let failures: Vec<Value> =
        failed.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let acts: Vec<&str> =
        failures.iter().map(|failure| failure["what"].as_str().unwrap()).collect();
    let each = ["pause the disk stuck1", "pause the disk stuck2", "pause the disk in each case"];
    assert_eq!(acts, each);
    assert!(failures[0]["why"].as_str().unwrap().contains("no answer in 10 s"), "{failed}");
    assert_eq!(failures[2]["why"], "failed: stuck1, stuck2");
    assert_eq!(failures[2]["exit_code"], 1);
    let resumed = rig.ctl("--timeout 4 resume --all");
    let failed = String::from_utf8(resumed.stderr).unwrap();
    assert_eq!(resumed.status.code(), Some(1), "{failed}");
    assert_eq!(stdout(&rig.ctl("resume a")), "nothing to do\n", "{failed}");
    assert!(failed.starts_with("vhost-blk: cannot resume the disk stuck1: "), "{failed}");
    drop(guests);
}

#[test]
fn a_disk_that_was_not_started_is_left_out_of_a_pause() {
    let absent = "blk-file = '@/none.img'\nsocket-path = '@/bad.sock'\n";
    let rig = Rig::of_directory(&[("a", &file("a", "")), ("bad", absent)]);
    rig.wait_for("bad", "failed");
    assert_eq!(rig.ok("pause --all"), "a: done\n");
}
