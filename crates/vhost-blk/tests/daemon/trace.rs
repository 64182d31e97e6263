// SPDX-License-Identifier: Apache-2.0
//! The trace of slow requests.

use crate::rig::{Raw, Rig};
use driver::Request;
use serde_json::{Value, json};
use std::time::{Duration, Instant};
use virtio_spec::blk::S_OK;

/// Time that the delayed disk adds.
const DELAY_US: u64 = 30_000;

fn trace(parameters: &str) -> String {
    format!(r#"{{"method":"io.vhostblk.Trace","more":true,"parameters":{{{parameters}}}}}"#)
}

fn traced(rig: &Rig, parameters: &str) -> Raw {
    let mut raw = rig.connect();
    let first = raw.call(&trace(parameters));
    assert_eq!(first, json!({"parameters": {"untraced": []}, "continues": true}));
    raw
}

#[track_caller]
fn next(raw: &mut Raw) -> Value {
    let mut reply = raw.receive();
    assert_eq!(reply["continues"], true, "{reply}");
    reply["parameters"]["request"].take()
}

fn us(request: &Value, stage: &str) -> u64 {
    request[format!("{stage}_us")].as_u64().unwrap()
}

#[test]
fn a_slow_disk_shows_in_the_storage_and_a_fast_one_in_nothing() {
    let rig = Rig::new();
    rig.add("slow", &format!("--wrap delay:us={DELAY_US},ops=write"));
    let mut all = traced(&rig, r#""slower_than_us":20000"#);
    let mut fast = traced(&rig, r#""name":"slow","slower_than_us":3600000000"#);
    rig.add("later", &format!("--wrap delay:us={DELAY_US},ops=flush"));
    let (mut guest, mut later) = (rig.guest("slow"), rig.guest("later"));
    guest.write(24, &[1; 1024]).unwrap();
    later.flush().unwrap();
    let request = next(&mut all);
    assert_eq!(request["disk"], "slow");
    assert_eq!(
        (&request["operation"], &request["sector"], &request["bytes"], &request["failed"]),
        (&json!("write"), &json!(24), &json!(1024), &json!(false))
    );
    assert!(us(&request, "storage") >= DELAY_US, "{request}");
    let stages = ["limit", "submit", "storage", "used"].iter().map(|stage| us(&request, stage));
    let stages = stages.chain(request["ring_us"].as_u64());
    // Each stage is cut to whole microseconds.
    assert!((0..5).contains(&(us(&request, "total") - stages.sum::<u64>())), "{request}");
    let request = next(&mut all);
    assert_eq!((&request["disk"], &request["sector"]), (&json!("later"), &Value::Null));
    assert!(us(&request, "storage") >= DELAY_US, "{request}");
    drop((guest, later));
    rig.ok("remove slow");
    let last = fast.receive();
    assert_eq!(last, json!({"parameters": {}}), "a request within the bound, or no end");
    rig.ok("remove later");
    rig.add("last", &format!("--wrap delay:us={DELAY_US}"));
    rig.guest("last").flush().unwrap();
    assert_eq!(next(&mut all)["disk"], "last", "the trace of all disks has ended");
}

#[test]
fn a_wait_for_a_limit_is_a_stage() {
    let rig = Rig::new();
    rig.add("a", "");
    // The burst lets two requests through; each of the next ones waits 50 ms longer.
    rig.ok("limit a --iops 20 --burst-seconds 0.1");
    let mut raw = traced(&rig, r#""name":"a","slower_than_us":20000"#);
    let mut guest = rig.guest("a");
    let layout = guest.layout();
    for sector in 0..8 {
        guest.queue(0).submit(&Request::write(sector, &[1; 512]), &layout).unwrap();
    }
    for _ in 0..8 {
        assert_eq!(guest.queue(0).collect().unwrap().1.status, Some(S_OK));
    }
    // The storage may be slow, too.
    let waited = |request: &Value| us(request, "limit") >= 20_000;
    std::iter::repeat_with(|| next(&mut raw)).find(waited).unwrap();
}

#[test]
fn a_request_of_a_halted_disk_waits_in_the_ring() {
    let rig = Rig::new();
    rig.add("a", "--wrap fault:ops=write,every=2,errno=EIO --on-error stop");
    let mut raw = traced(&rig, r#""slower_than_us":50000"#);
    let mut guest = rig.guest("a");
    let layout = guest.layout();
    guest.write(0, &[1; 512]).unwrap();
    guest.queue(0).submit(&Request::write(4, &[1; 512]), &layout).unwrap();
    while rig.json("status a")["halted"].is_null() {
        std::thread::yield_now();
    }
    guest.queue(0).submit(&Request::read(8, 512), &layout).unwrap();
    let begin = Instant::now();
    std::thread::sleep(Duration::from_millis(60));
    let in_the_ring = begin.elapsed().as_micros() as u64;
    rig.ok("resume a");
    for _ in 0..2 {
        guest.queue(0).collect().unwrap();
    }
    let request = std::iter::repeat_with(|| next(&mut raw)).find(|it| it["sector"] == 8).unwrap();
    assert!(us(&request, "ring") >= in_the_ring, "{in_the_ring}: {request}");
    assert!(us(&request, "total") >= us(&request, "ring"), "{request}");
}

#[test]
fn a_driver_that_has_no_requests_is_no_wait_in_the_ring() {
    let idle = Duration::from_secs(2);
    let rig = Rig::new();
    rig.add("a", &format!("--wrap delay:us={DELAY_US}"));
    let mut raw = traced(&rig, r#""slower_than_us":1000"#);
    let mut guest = rig.guest("a");
    guest.write(0, &[1; 512]).unwrap();
    std::thread::sleep(idle);
    let begin = Instant::now();
    guest.write(8, &[1; 512]).unwrap();
    let waited = begin.elapsed().as_micros() as u64;
    next(&mut raw);
    let request = next(&mut raw);
    assert_eq!(request["sector"], 8);
    assert!(us(&request, "ring") <= waited, "{waited}: {request}");
}

#[test]
fn a_failed_request_says_so() {
    let rig = Rig::new();
    rig.add("a", &format!("--wrap fault:ops=write,errno=EIO --wrap delay:us={DELAY_US}"));
    let mut raw = traced(&rig, r#""slower_than_us":1000"#);
    rig.guest("a").write(0, &[1; 512]).unwrap_err();
    assert_eq!(next(&mut raw)["failed"], true);
}

#[test]
fn ctl_ends_after_the_wanted_number() {
    let rig = Rig::new();
    rig.add("a", &format!("--wrap delay:us={DELAY_US}"));
    let mut guest = rig.guest("a");
    let output = std::thread::scope(|scope| {
        let trace = scope.spawn(|| rig.ok("trace a --slower-than 1.5 --count 2"));
        while !trace.is_finished() {
            guest.write(8, &[1; 512]).unwrap();
        }
        trace.join().unwrap()
    });
    let lines: Vec<&str> = output.lines().collect();
    assert_eq!(lines.len(), 2, "{output}");
    assert!(lines[0].contains(" a queue=0 write sector=8 bytes=512 total="), "{output}");
}

#[test]
fn wrong_traces_are_refused() {
    let rig = Rig::new();
    rig.add("a", "");
    let mut raw = rig.connect();
    let no_more = r#"{"method":"io.vhostblk.Trace","parameters":{"slower_than_us":5}}"#;
    assert_eq!(raw.call(no_more)["error"], "org.varlink.service.ExpectedMore");
    for parameters in ["", r#""slower_than_us":0"#, r#""slower_than_us":5,"stage":"used""#] {
        let reply = raw.call(&trace(parameters));
        assert_eq!(reply["error"], "org.varlink.service.InvalidParameter", "{parameters}");
    }
    let line = rig.refused("trace b", 1);
    assert!(line.contains("find the disk b: there is none of this name"), "{line}");
    for words in ["trace a --slower-than 0", "trace a --slower-than x", "trace a --count 0"] {
        rig.refused(words, 2);
    }
}
