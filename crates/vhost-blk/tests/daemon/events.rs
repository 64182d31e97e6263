// SPDX-License-Identifier: Apache-2.0
//! Events of the disks.

use crate::rig::Rig;
use crate::watcher::Watcher;
use serde_json::{Value, json};
use std::process::{Child, Stdio};

#[test]
fn each_change_of_a_disk_is_an_event_with_its_disk() {
    let rig = Rig::new();
    let (mut one, mut other) = (rig.events(), rig.events());
    rig.add("a", "");
    rig.ok("pause a");
    rig.ok("pause a");
    rig.ok("resume a");
    rig.ok("resize a 2M");
    rig.ok("limit a --iops 5");
    rig.ok("set-cache a writethrough");
    let guest = rig.guest("a");
    drop(guest);
    rig.place
        .wait_until("the guest has gone", || rig.json("status")["front_end_connected"] == false);
    rig.ok("remove a");
    for raw in [&mut one, &mut other] {
        let mut told = Vec::new();
        while told.last() != Some(&"removed".to_owned()) {
            let event = raw.next_event();
            assert_eq!(event["disk"], "a");
            let name = event["event"].as_str().unwrap().to_owned();
            match &*name {
                "resized" => assert_eq!(event["capacity_bytes"], 2 << 20),
                "limited" => assert_eq!(event["limits"]["iops"], 5),
                "cache_set" => assert_eq!(event["writeback"], false),
                _ => {}
            }
            told.push(name);
        }
        let expected = [
            "added",
            "paused",
            "resumed",
            "resized",
            "limited",
            "cache_set",
            "connected",
            "disconnected",
            "removed",
        ];
        assert_eq!(told, expected);
    }
}

#[test]
fn a_ring_fault_is_an_event_with_its_queue_and_once() {
    let rig = Rig::new();
    rig.add("a", "");
    let mut guest = rig.guest("a");
    let mut raw = rig.events();
    // More chains than the ring has entries.
    guest.queue(0).queue().split().write_avail_idx(0x8000);
    guest.queue(0).queue().kick();
    let event = raw.next_event();
    assert_eq!((&event["event"], &event["queue"]), (&json!("faulted"), &json!(0)));
    guest.queue(0).queue().kick();
    rig.ok("pause a");
    assert_eq!(raw.next_event()["event"], "paused");
}

#[test]
fn a_subscriber_that_does_not_read_loses_events_and_is_told_how_many() {
    // Log lines would fill the pipe that this test does not read.
    let rig = Rig::with(&["--log-level", "error"]);
    rig.add("a", "");
    let mut slow = rig.events();
    let mut raw = rig.connect();
    let limit = |iops: u64| {
        format!(r#"{{"method":"io.vhostblk.Limit","parameters":{{"name":"a","iops":{iops}}}}}"#)
    };
    // More than the socket and the ring hold: each is some hundred bytes.
    const EVENTS: u64 = 20_000;
    for n in 0..EVENTS {
        assert_eq!(raw.call(&limit(n + 1))["parameters"]["changed"], true);
    }
    let (mut seen, mut lost) = (0, 0);
    while seen + lost < EVENTS {
        let event = slow.next_event();
        match event["event"].as_str().unwrap() {
            "limited" => seen += 1,
            "lost" => lost += event["lost"].as_u64().unwrap(),
            other => panic!("{other}"),
        }
    }
    assert_eq!(seen + lost, EVENTS);
    assert!(lost > 0 && seen > 256, "{seen} {lost}");
}

#[test]
fn ctl_prints_events_until_the_daemon_ends() {
    let mut rig = Rig::new();
    rig.add("a", "");
    let mut events = Watcher::start(&rig, "events");
    events.wait_for_begin(&rig);
    rig.ok("limit a --iops 5");
    rig.ok("stop");
    assert_eq!(rig.daemon.wait().code(), Some(0));
    let names = std::iter::from_fn(|| events.next())
        .map(|event| event["event"].as_str().unwrap().to_owned())
        .filter(|name| !["paused", "resumed"].contains(&&**name));
    assert_eq!(names.collect::<Vec<_>>(), ["limited", "removed", "stopped"]);
    assert_eq!(events.end(), (Some(0), String::new()));
}

#[test]
fn ctl_ends_well_when_the_reader_of_its_output_has_gone() {
    let rig = Rig::new();
    rig.add("a", "");
    let spawn = |words: &str| {
        let (reader, writer) = std::io::pipe().unwrap();
        let child = rig.command(words).stdout(writer).stderr(Stdio::piped()).spawn().unwrap();
        drop(reader);
        child
    };
    let ended = |child: Child| {
        let output = child.wait_with_output().unwrap();
        assert_eq!(String::from_utf8(output.stderr).unwrap(), "");
        assert_eq!(output.status.code(), Some(0));
    };
    let mut events = spawn("events");
    rig.place.wait_until("the end of ctl events", || {
        rig.ok("pause a");
        rig.ok("resume a");
        events.try_wait().unwrap().is_some()
    });
    ended(events);
    ended(spawn("list"));
}

#[test]
fn events_without_more_are_refused() {
    let rig = Rig::new();
    let reply = rig.connect().call(r#"{"method":"io.vhostblk.Events"}"#);
    assert_eq!(reply["error"], "org.varlink.service.ExpectedMore");
}

#[test]
fn a_failure_of_the_storage_is_an_event_and_in_the_status() {
    let rig = Rig::new();
    rig.add("a", "--wrap fault:ops=write,errno=ENOSPC");
    let mut guest = rig.guest("a");
    let mut raw = rig.events();
    assert_eq!(rig.json("status a")["last_failure"], Value::Null);
    for _ in 0..3 {
        guest.write(24, &[1; 512]).unwrap_err();
    }
    let event = raw.next_event();
    let expected = json!({
        "kind": "no_space", "operation": "write", "sector": 24, "requests": 1,
        "reason": "storage error: No space left on device (os error 28)",
    });
    assert_eq!((&event["event"], &event["disk"]), (&json!("failed"), &json!("a")));
    assert_eq!(event["failure"], expected);
    let status = rig.json("status a");
    assert_eq!(status["last_failure"]["failure"], expected);
    assert_eq!(
        (&status["failures"]["no_space"], &status["failures"]["io"]),
        (&json!(3), &json!(0))
    );
    let text = rig.ok("status a");
    assert!(text.contains("failed      3 requests; last at 20"), "{text}");
    assert!(text.contains("Z: write at sector 24: storage"), "{text}");
}
