// SPDX-License-Identifier: Apache-2.0
//! The end of streams: a stop of the daemon differs from a crash.

use crate::rig::Rig;
use crate::watcher::Watcher;
use driver::Request;
use serde_json::{Value, json};

/// An act, and its `reason` and `signal`.
type Stop = (fn(&Rig), &'static str, Value);

const CRASHED: &str = "it has ended without a stop: it has crashed, or was killed";

/// A daemon with a disk, and clients that print its events and slow requests.
fn watched(options: &str) -> (Rig, [Watcher; 2]) {
    let mut rig = Rig::with(&["--log-level", "info"]);
    rig.add("a", options);
    let mut events = Watcher::start(&rig, "events");
    events.wait_for_begin(&rig);
    let trace = Watcher::start(&rig, "trace a");
    // The trace has begun before this line.
    rig.daemon.log_line("method=\"Trace\"");
    (rig, [events, trace])
}

/// The last message of a stream, whose client ends with this code.
#[track_caller]
fn last_of(watcher: &mut Watcher, code: i32) -> (Value, String) {
    let last = std::iter::from_fn(|| watcher.next()).last().unwrap_or_default();
    let (ended, told) = watcher.end();
    assert_eq!(ended, Some(code), "{last} {told}");
    (last, told)
}

#[test]
fn a_stop_is_the_last_message_of_each_stream_with_its_cause() {
    let by_command: fn(&Rig) = |rig| drop(rig.ok("stop"));
    let stops: [Stop; 3] = [
        (by_command, "command", Value::Null),
        (|rig| rig.daemon.signal(libc::SIGTERM), "signal", json!("SIGTERM")),
        (|rig| rig.daemon.signal(libc::SIGINT), "signal", json!("SIGINT")),
    ];
    for (stop, reason, signal) in stops {
        let (mut rig, mut watchers) = watched("");
        stop(&rig);
        for watcher in &mut watchers {
            let (last, told) = last_of(watcher, 0);
            let fields = ["event", "reason", "signal", "drained"].map(|field| last[field].clone());
            assert_eq!(fields, [json!("stopped"), json!(reason), signal.clone(), json!(true)]);
            assert_eq!(told, "");
        }
        assert_eq!(rig.daemon.wait().code(), Some(0));
    }
}

#[test]
fn a_stop_follows_the_end_of_the_disks_and_has_the_last_reply() {
    let mut rig = Rig::new();
    rig.add("a", "");
    let mut raw = rig.events();
    let mut trace = rig.connect();
    let call = r#"{"method":"io.vhostblk.Trace","more":true,"parameters":{"slower_than_us":1}}"#;
    trace.call(call);
    rig.ok("stop");
    let removed = raw.receive();
    assert_eq!(
        (&removed["parameters"]["event"]["event"], &removed["continues"]),
        (&json!("removed"), &json!(true))
    );
    for stream in [&mut raw, &mut trace] {
        let last = stream.receive();
        assert_eq!(last["parameters"]["event"]["event"], "stopped", "{last}");
        assert_eq!(last.get("continues"), None, "{last}");
    }
    assert_eq!(rig.daemon.wait().code(), Some(0));
}

#[test]
fn a_killed_daemon_ends_its_clients_with_an_error() {
    let (mut rig, mut watchers) = watched("");
    rig.daemon.signal(libc::SIGKILL);
    assert_eq!(rig.daemon.wait().code(), None);
    for watcher in &mut watchers {
        let (last, told) = last_of(watcher, 3);
        assert_ne!(last["event"], "stopped");
        let failure: Value = serde_json::from_str(&told).unwrap();
        let why = failure["why"].as_str().unwrap();
        assert_eq!((why, &failure["exit_code"]), (CRASHED, &json!(3)));
    }
}

#[test]
fn a_stop_with_requests_in_flight_says_so() {
    let (mut rig, mut watchers) = watched("--wrap delay:us=3600000000");
    let mut guest = rig.guest("a");
    rig.submit("a", &mut guest, &Request::write(0, &[1; 512]));
    rig.daemon.signal(libc::SIGTERM);
    for watcher in &mut watchers {
        let (last, _) = last_of(watcher, 0);
        let fields = ["event", "reason", "drained"].map(|field| last[field].clone());
        assert_eq!(fields, [json!("stopped"), json!("signal"), json!(false)]);
    }
    assert_eq!(rig.daemon.wait().code(), Some(0));
}

#[test]
fn a_trace_of_a_disk_that_is_removed_ends_without_the_event() {
    let (rig, [_events, mut trace]) = watched("");
    rig.ok("remove a");
    let (last, told) = last_of(&mut trace, 0);
    assert_eq!((last, told), (Value::Null, String::new()));
}
