// SPDX-License-Identifier: Apache-2.0
//! The treatment of storage that fails or hangs: apart for reads, and changed while a guest is connected.

use crate::reload::file;
use crate::rig::Rig;
use driver::{Device, Options, Request};
use serde_json::{Value, json};
use std::time::Duration;
use virtio_spec::blk::{S_IOERR, S_OK};

/// Storage that fails all reads and writes.
const BROKEN: &str = "--wrap fault:ops=read,errno=EIO --wrap fault:ops=write,errno=EIO";

fn is_halted(rig: &Rig) -> bool {
    rig.json("status a")["halted"] != Value::Null
}

/// The options of the disk `a` that this is about.
fn rules(rig: &Rig) -> [Value; 3] {
    let options = rig.json("status a")["options"].clone();
    ["on_error", "on_read_error", "io_timeout"].map(|name| options[name].clone())
}

/// Submits a request, and waits for the halt by it.
fn halts(rig: &Rig, guest: &mut Device, request: &Request) {
    let layout = guest.layout();
    guest.queue(0).submit(request, &layout).unwrap();
    rig.place.wait_until("the halt", || is_halted(rig));
}

#[test]
fn reads_have_a_policy_of_their_own() {
    let (read, write) = (Request::read(8, 512), Request::write(8, &[1; 512]));
    for (policies, reported, kept) in [
        ("--on-error stop --on-read-error report", &read, &write),
        ("--on-error report --on-read-error stop", &write, &read),
    ] {
        let rig = Rig::new();
        rig.add("a", &format!("{BROKEN} {policies}"));
        let mut guest = rig.guest("a");
        guest.request(reported).unwrap_err();
        assert!(!is_halted(&rig), "{policies}");
        halts(&rig, &mut guest, kept);
        assert_eq!(rig.json("status a")["queues"][0]["kept"], 1, "{policies}");
    }
}

/// The queues restart with each change, and a kept request outlives it.
#[test]
fn the_policy_changes_while_a_guest_is_connected_also_if_its_requests_are_kept() {
    for (packed, inflight) in [(false, false), (false, true), (true, false), (true, true)] {
        let rig = Rig::new();
        rig.add("a", BROKEN);
        let limit = Duration::from_secs(60);
        let options = Options { packed, inflight, limit, ..Options::default() };
        let mut guest = Device::connect(rig.path("a.sock"), &options).unwrap();
        guest.write(8, &[1; 512]).unwrap_err();
        let mut told = rig.events();
        assert_eq!(rig.ok("set-errors a --on-error stop"), "done\n");
        assert_eq!(rig.ok("set-errors a --on-error stop"), "nothing to do\n");
        let event = told.next_event();
        let errors = json!({"on_error": "stop", "on_read_error": "stop", "io_timeout": null});
        assert_eq!((&event["event"], &event["errors"]), (&json!("errors_set"), &errors));
        halts(&rig, &mut guest, &Request::write(8, &[1; 512]));
        rig.ok("set-errors a --on-error report");
        assert!(is_halted(&rig), "a change of the policy ends no halt");
        assert_eq!(rules(&rig), [json!("report"), Value::Null, Value::Null]);
        rig.ok("resume a");
        let (_, done) = guest.queue(0).collect().unwrap();
        assert_eq!(done.status, Some(S_IOERR), "packed: {packed}, inflight: {inflight}");
        rig.ok("set-errors a --on-read-error stop");
        assert_eq!(rules(&rig), [json!("report"), json!("stop"), Value::Null]);
        guest.write(8, &[1; 512]).unwrap_err();
        halts(&rig, &mut guest, &Request::read(8, 512));
    }
}

#[test]
fn the_time_limit_of_requests_changes_while_a_guest_is_connected() {
    let rig = Rig::new();
    rig.add("a", "--wrap delay:us=1000000");
    let mut guest = rig.guest("a");
    let mut told = rig.events();
    rig.ok("set-errors a --io-timeout 0.1");
    guest.write(8, &[1; 512]).unwrap();
    let names = [(); 3].map(|()| told.next_event()["event"].clone());
    assert_eq!(names, ["errors_set", "stalled", "stall_ended"]);
    rig.ok("set-errors a --io-timeout 0");
    guest.write(8, &[1; 512]).unwrap();
    assert_eq!(rules(&rig), [json!("report"), Value::Null, Value::Null]);
    assert_eq!(rig.json("status a")["stalls"], 1);
    for words in ["--io-timeout 0.01", "--on-error none", "--on-read-error enospc", ""] {
        rig.refused(&format!("set-errors a {words}"), 2);
    }
}

#[test]
fn a_reload_changes_the_rules_of_a_disk_with_a_guest_and_they_are_saved() {
    let mut rig = Rig::of_directory(&[("a", &file("a", ""))]);
    let mut guest = rig.guest("a");
    let more = "on-error = 'enospc'\non-read-error = 'stop'\nio-timeout = 2.5\nlimit-iops = 5000";
    rig.write_file("a", &file("a", more));
    assert_eq!(rig.ok("reload"), "a: changed\n");
    assert_eq!(rules(&rig), [json!("enospc"), json!("stop"), json!(2.5)]);
    guest.write(8, &[1; 512]).unwrap();
    assert_eq!(rig.ok("reload"), "nothing to do\n");
    // One part is refused: none holds.
    rig.write_file("a", &file("a", "on-error = 'report'\nlimit-group = 'none'"));
    let text = crate::common::stdout(&rig.ctl("reload"));
    assert!(text.starts_with("a: failed: "), "{text}");
    assert_eq!(rules(&rig), [json!("enospc"), json!("stop"), json!(2.5)]);
    rig.write_file("a", &file("a", "on-error = 'report' # why\n"));
    rig.ok("reload");
    rig.ok("set-errors a --on-error stop --io-timeout 7 --save");
    let text = std::fs::read_to_string(rig.path("conf/a.toml")).unwrap();
    for line in ["on-error = \"stop\" # why\n", "io-timeout = 7\n"] {
        assert!(text.contains(line), "{text}");
    }
    assert_eq!(rig.ok("reload"), "nothing to do\n");
    let layout = guest.layout();
    guest.queue(0).submit(&Request::write(8, &[1; 512]), &layout).unwrap();
    assert_eq!(guest.queue(0).collect().unwrap().1.status, Some(S_OK));
    rig.ok("stop");
    rig.daemon.wait();
    let conf = rig.path("conf");
    rig.restart(&["--config-dir", conf.to_str().unwrap()]);
    assert_eq!(rules(&rig), [json!("stop"), Value::Null, json!(7.0)]);
}
