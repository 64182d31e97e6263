// SPDX-License-Identifier: Apache-2.0
//! Watchers of a daemon go on after an upgrade.

use crate::common::wait_until;
use crate::rig::Rig;
use crate::watcher::Watcher;
use driver::Request;
use serde_json::{Value, json};

impl Watcher {
    /// The next message of a stream of events, without those of pauses.
    fn next_event(&mut self) -> Value {
        loop {
            let event = self.next().expect("the stream goes on");
            let name = event["event"].as_str().expect("an event").to_owned();
            if !["paused", "resumed"].contains(&&*name) {
                return event;
            }
        }
    }
}

#[test]
fn events_go_on_after_an_upgrade_and_tell_of_it() {
    let mut rig = Rig::new();
    rig.add("a", "");
    let mut events = Watcher::start(&rig, "events");
    events.wait_for_begin(&rig);
    let pause = rig.upgrade();
    assert_eq!(events.next_event()["event"], "reconnected");
    let told = events.next_event();
    let version = env!("CARGO_PKG_VERSION");
    assert_eq!(told["event"], "upgraded");
    assert_eq!((&told["from"], &told["to"]), (&json!(version), &json!(version)));
    assert_eq!(told["pause_us"], pause.as_micros() as u64);
    assert_eq!(told["disk"], Value::Null);
    rig.ok("limit a --iops 5");
    assert_eq!(events.next_event()["event"], "limited");
    rig.ok("stop");
    assert_eq!(rig.daemon.wait().code(), Some(0));
    let last = std::iter::from_fn(|| events.next()).last().unwrap();
    assert_eq!((&last["event"], &last["reason"]), (&json!("stopped"), &json!("command")));
    assert_eq!(events.end(), (Some(0), String::new()));
}

#[test]
fn each_watcher_learns_of_an_upgrade() {
    let rig = Rig::new();
    rig.add("a", "");
    let mut watchers = [(); 3].map(|()| Watcher::start(&rig, "events"));
    watchers.iter_mut().for_each(|watcher| watcher.wait_for_begin(&rig));
    rig.upgrade();
    for watcher in &mut watchers {
        let told = [watcher.next_event(), watcher.next_event()];
        assert_eq!(told.map(|event| event["event"].clone()), ["reconnected", "upgraded"]);
    }
}

#[test]
fn an_upgrade_without_a_watcher_is_told_to_the_first_one_after_it() {
    let rig = Rig::new();
    rig.add("a", "");
    rig.upgrade();
    let mut events = Watcher::start(&rig, "events");
    assert_eq!(events.next_event()["event"], "upgraded");
    let mut later = Watcher::start(&rig, "events");
    later.wait_for_begin(&rig);
    rig.ok("limit a --iops 5");
    assert_eq!(later.next_event()["event"], "limited");
}

#[test]
fn a_trace_goes_on_after_an_upgrade_and_says_so() {
    let rig = Rig::new();
    rig.add("a", "--wrap delay:us=2000");
    let mut guest = rig.guest("a");
    let mut trace = Watcher::start(&rig, "trace a --slower-than 1 --count 1000");
    let mut request = |trace: &mut Watcher| {
        std::thread::scope(|scope| {
            let next = scope.spawn(|| trace.next());
            wait_until("a slow request", || {
                guest.request(&Request::write(0, &[1; 512])).unwrap();
                next.is_finished()
            });
            next.join().unwrap().unwrap()
        })
    };
    assert_eq!(request(&mut trace)["operation"], "write");
    rig.upgrade();
    let mut told = request(&mut trace);
    // Those before the upgrade come first.
    while told["operation"] == "write" {
        told = request(&mut trace);
    }
    assert_eq!(told["event"], "reconnected");
    assert_eq!(request(&mut trace)["operation"], "write");
}

#[test]
fn the_level_of_log_lines_that_a_command_has_set_outlives_upgrades() {
    let mut rig = Rig::with(&["--log-level", "error"]);
    rig.add("a", "");
    rig.ok("log-level info");
    for _ in 0..2 {
        rig.upgrade();
    }
    // The first two lines of upgrades, and the pause after both.
    rig.daemon.log_line("the program was upgraded");
    rig.daemon.log_line("the program was upgraded");
    rig.ok("pause a");
    rig.daemon.log_line("paused");
    rig.ok("log-level error");
    rig.daemon.log_line("SetLogLevel");
    rig.upgrade();
    rig.ok("resume a");
    rig.ok("stop");
    assert_eq!(rig.daemon.wait().code(), Some(0));
    let rest = rig.daemon.rest_of_stderr();
    assert!(!rest.contains("INFO"), "{rest}");
}
