// SPDX-License-Identifier: Apache-2.0
//! The wire protocol, by hand-written bytes.

use crate::common::{self, program};
use crate::rig::{Rig, run_line};
use serde_json::{Value, json};
use std::io::{ErrorKind, Read, Write};
use std::os::unix::net::UnixStream;
use std::time::Duration;

#[test]
fn the_service_describes_itself() {
    let rig = Rig::new();
    let mut raw = rig.connect();
    let info = raw.call(r#"{"method":"org.varlink.service.GetInfo"}"#);
    assert_eq!(info["parameters"]["product"], "vhost-blk");
    let interfaces = json!(["org.varlink.service", "io.vhostblk"]);
    assert_eq!(info["parameters"]["interfaces"], interfaces);
    for name in ["org.varlink.service", "io.vhostblk"] {
        let reply = raw.call(&format!(
            r#"{{"method":"org.varlink.service.GetInterfaceDescription","parameters":{{"interface":"{name}"}}}}"#
        ));
        let text = reply["parameters"]["description"].as_str().unwrap();
        assert!(text.contains(&format!("\ninterface {name}\n")), "{text}");
    }
}

/// The methods in the description of the interface.
fn methods() -> Vec<String> {
    let text = include_str!("../../src/control/io.vhostblk.varlink");
    let lines = text.lines().filter_map(|line| line.strip_prefix("method "));
    lines.map(|line| line.split('(').next().unwrap().to_owned()).collect()
}

#[test]
fn each_described_method_exists_and_no_other() {
    let rig = Rig::new();
    let mut raw = rig.connect();
    let methods = methods();
    assert!(methods.len() > 10);
    for method in methods {
        // An unknown parameter: no method does anything.
        let reply = raw.call(&format!(
            r#"{{"method":"io.vhostblk.{method}","parameters":{{"zz":1}},"more":true}}"#
        ));
        assert_eq!(reply["error"], "org.varlink.service.InvalidParameter", "{method}: {reply}");
    }
    for (call, error) in [
        (r#"{"method":"io.vhostblk.Nothing"}"#, "MethodNotFound"),
        (r#"{"method":"io.vhostblk.list"}"#, "MethodNotFound"),
        (r#"{"method":"io.other.List"}"#, "InterfaceNotFound"),
        (r#"{"method":"List"}"#, "InterfaceNotFound"),
        (r#"{"method":""}"#, "InterfaceNotFound"),
        (r#"{"method":"org.varlink.service.Get"}"#, "MethodNotFound"),
        (r#"{"method":"org.varlink.service.GetInterfaceDescription"}"#, "InvalidParameter"),
        (r#"{"method":"io.vhostblk.Pause","parameters":{"name":5}}"#, "InvalidParameter"),
        (r#"{"method":"io.vhostblk.Switch","parameters":{"plane":"x"}}"#, "InvalidParameter"),
        (r#"{"method":"io.vhostblk.SetCache","parameters":{}}"#, "InvalidParameter"),
        (r#"{"method":"io.vhostblk.Resize","parameters":{"bytes":-1}}"#, "InvalidParameter"),
        (r#"{"method":"io.vhostblk.Limit","parameters":{"burst_ms":1}}"#, "InvalidParameter"),
        (
            r#"{"method":"io.vhostblk.Add","parameters":{"name":"a","options":{},"image":0}}"#,
            "InvalidParameter",
        ),
    ] {
        let reply = raw.call(call);
        assert_eq!(reply["error"], format!("org.varlink.service.{error}"), "{call}: {reply}");
    }
}

#[test]
fn errors_have_what_why_and_remedy() {
    let rig = Rig::new();
    let mut raw = rig.connect();
    let reply = raw.call(r#"{"method":"io.vhostblk.Status","parameters":{"name":"x"}}"#);
    assert_eq!(reply["error"], "io.vhostblk.NoSuchDisk");
    assert_eq!(
        reply["parameters"],
        json!({"what": "find the disk x", "why": "there is none of this name",
               "remedy": "see vhost-blk ctl list"})
    );
    let reply = raw.call(
        r#"{"method":"io.vhostblk.Add","parameters":{"name":"x","options":{"direct":"maybe"}}}"#,
    );
    assert_eq!(reply["error"], "io.vhostblk.InvalidOptions");
    let reply = raw.call(
        r#"{"method":"io.vhostblk.Add","parameters":{"name":"x","options":{"blk_file":"/none","socket_path":"/none/s"}}}"#,
    );
    assert_eq!(reply["error"], "io.vhostblk.Refused");
}

#[test]
fn a_oneway_call_is_carried_out_and_not_answered() {
    let rig = Rig::new();
    rig.add("a", "");
    let mut raw = rig.connect();
    raw.send(r#"{"method":"io.vhostblk.Pause","oneway":true}"#);
    let reply = raw.call(r#"{"method":"io.vhostblk.Status"}"#);
    assert_eq!(reply["parameters"]["status"]["paused"], true);
}

#[test]
fn a_removal_is_complete_also_for_a_client_that_has_hung_up() {
    let rig = Rig::new();
    rig.add("a", "");
    let mut raw = rig.connect();
    raw.send(r#"{"method":"io.vhostblk.Remove","parameters":{"name":"a"}}"#);
    raw.stream.shutdown(std::net::Shutdown::Write).unwrap();
    assert!(raw.receive()["error"].is_null());
    assert_eq!(rig.names(), [""; 0]);
}

#[test]
fn calls_that_arrive_together_are_answered_in_order() {
    let rig = Rig::new();
    let mut raw = rig.connect();
    let call = r#"{"method":"io.vhostblk.Status","parameters":{"name":"N"}}"#;
    for name in ["x", "y", "z"] {
        raw.send(&call.replace('N', name));
    }
    for name in ["x", "y", "z"] {
        assert_eq!(raw.receive()["parameters"]["what"], format!("find the disk {name}"));
    }
}

#[test]
fn an_address_of_nbd_is_no_path() {
    let rig = Rig::new();
    rig.add("a", "");
    for words in [
        "add b --blk-file nbd:unix:disk.img --socket-path x.sock",
        "mirror a --to nbd:unix:x.sock",
        "snapshot a --to nbd+unix:///e?socket=x.sock",
    ] {
        let line = rig.refused(words, 2);
        assert!(line.contains("it is an address of NBD"), "{words}: {line}");
    }
}

#[test]
fn hostile_bytes_end_their_connection_only() {
    let rig = Rig::new();
    rig.add("a", "");
    let threads = || {
        let mut names: Vec<String> =
            rig.daemon.threads().into_iter().map(|(name, _)| name).collect();
        names.sort();
        names
    };
    let (descriptors, before) = (rig.daemon.settled_descriptors(), threads());
    let mut random = fastrand::Rng::with_seed(1);
    let valid = br#"{"method":"io.vhostblk.Limit","parameters":{"name":"a","iops":5},"more":true}"#;
    for _ in 0..300 {
        let mut bytes = valid.to_vec();
        for _ in 0..random.u32(1..=4) {
            let at = random.usize(..bytes.len());
            match random.u32(..4) {
                0 => bytes[at] = random.u8(..),
                1 => bytes.truncate(at.max(1)),
                2 => bytes.insert(at, random.u8(..)),
                _ => bytes.extend_from_within(at..),
            }
        }
        bytes.push(0);
        let mut stream = UnixStream::connect(rig.path("ctl")).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
        // The daemon may hang up first.
        let _ = stream.write_all(&bytes);
        let _ = stream.shutdown(std::net::Shutdown::Write);
        let mut answer = Vec::new();
        // The daemon hangs up, with a reset if it has not read everything.
        if let Err(why) = stream.read_to_end(&mut answer) {
            assert_eq!(why.kind(), ErrorKind::ConnectionReset, "{why}");
        }
        for part in answer.split(|&byte| byte == 0).filter(|part| !part.is_empty()) {
            let reply: Value = serde_json::from_slice(part).unwrap();
            assert!(reply.get("error").is_some() || reply.get("parameters").is_some(), "{reply}");
        }
    }
    assert_eq!(rig.daemon.settled_descriptors(), descriptors);
    rig.place.wait_until("the end of all threads of clients", || threads() == before);
    assert_eq!(rig.names(), ["a"]);
    rig.guest("a").write(0, &[1; 512]).unwrap();
}

#[test]
fn eight_clients_in_random_order_leave_the_disks_whole() {
    let rig = Rig::new();
    rig.add("a", "");
    rig.add("b", "");
    let mut guest = rig.guest("a");
    std::thread::scope(|scope| {
        for seed in 1..=8_u64 {
            let rig = &rig;
            scope.spawn(move || {
                let mut raw = rig.connect();
                let mut random = fastrand::Rng::with_seed(seed);
                for _ in 0..60 {
                    let name = if random.bool() { "a" } else { "b" };
                    let call = |method: &str, more: &str| {
                        format!(
                            r#"{{"method":"io.vhostblk.{method}","parameters":{{"name":"{name}"{more}}}}}"#
                        )
                    };
                    let call = match random.u32(..8) {
                        0 => call("Pause", ""),
                        1 => call("Resume", ""),
                        2 => call("Limit", &format!(",\"iops\":{}", random.u32(1000..17_000))),
                        3 => call("Resize", ""),
                        4 => call("Switch", r#","plane":"uring""#),
                        5 => call("SetCache", r#","mode":"writethrough""#),
                        6 => call("Status", ""),
                        _ => r#"{"method":"io.vhostblk.List"}"#.to_owned(),
                    };
                    let reply = raw.call(&call);
                    assert!(reply.get("error").is_none(), "{call}: {reply}");
                }
            });
        }
    });
    rig.ok("resume a");
    rig.ok("limit a --none");
    guest.write(3, &[3; 512]).unwrap();
    assert_eq!(rig.json("status a")["writeback"], false);
}

#[test]
fn a_client_that_says_nothing_holds_no_other() {
    let rig = Rig::new();
    let _silent: Vec<_> = (0..8).map(|_| rig.connect()).collect();
    let mut half = rig.connect();
    half.stream.write_all(b"{\"method\":").unwrap();
    // One that takes no reply: its replies exceed its socket.
    let mut deaf = rig.connect();
    deaf.stream.set_nonblocking(true).unwrap();
    let call = "{\"method\":\"org.varlink.service.GetInterfaceDescription\",\
                \"parameters\":{\"interface\":\"io.vhostblk\"}}\0";
    while deaf.stream.write_all(call.as_bytes()).is_ok() {}
    for _ in 0..5 {
        assert_eq!(rig.names(), [""; 0]);
    }
}

#[test]
fn json_may_stand_before_or_behind_the_verb() {
    let rig = Rig::new();
    rig.add("a", "");
    let before: serde_json::Value = serde_json::from_str(&rig.ok("--json list")).unwrap();
    let behind: serde_json::Value = serde_json::from_str(&rig.ok("list --json")).unwrap();
    assert_eq!(before, behind);
}

/// The error of a command with `--json`: one object on stderr.
fn json_error(output: &std::process::Output) -> Value {
    let text = std::str::from_utf8(&output.stderr).unwrap();
    assert_eq!(text.lines().count(), 1, "{text}");
    assert!(output.stdout.is_empty(), "{output:?}");
    let told: Value = serde_json::from_str(text).unwrap();
    assert_eq!(told["exit_code"], output.status.code().unwrap(), "{text}");
    let fields: Vec<&String> = told.as_object().unwrap().keys().collect();
    assert_eq!(fields, ["error", "exit_code", "remedy", "what", "why"]);
    assert!(["what", "why", "remedy"].iter().all(|field| told[field] != ""), "{text}");
    told
}

#[test]
fn failures_of_ctl_with_json_are_json() {
    let rig = Rig::new();
    rig.add("a", "");
    for (words, error, code) in [
        ("--json status b", json!("io.vhostblk.NoSuchDisk"), 1),
        ("status b --json", json!("io.vhostblk.NoSuchDisk"), 1),
        ("--json resize a 512", json!("io.vhostblk.Refused"), 1),
        (
            "--json add b --backend null --size 1M --socket-path b.sock --serial 0123456789012345678901",
            Value::Null,
            2,
        ),
        ("--json limit a", Value::Null, 2),
        ("--json unknown", Value::Null, 2),
        ("--json events --control-path none", Value::Null, 3),
    ] {
        // The last control path holds.
        let (words, path) = match words.split_once(" --control-path ") {
            Some((words, path)) => (words, path),
            None => (words, "ctl"),
        };
        let mut command = crate::common::program();
        command.current_dir(rig.place.dir.path()).args(["ctl", "--control-path", path]);
        let told = json_error(&crate::common::finish(command.args(words.split(' '))));
        assert_eq!((&told["error"], &told["exit_code"]), (&error, &json!(code)), "{words}: {told}");
    }
    let line = rig.refused("status b", 1);
    assert!(line.starts_with("vhost-blk: cannot find the disk b: "), "{line}");
    let told = json_error(&run_line("top --once --json --control-path /none"));
    assert_eq!((&told["error"], &told["exit_code"]), (&Value::Null, &json!(3)), "{told}");
}

#[test]
fn options_of_ctl_may_follow_the_verb_and_an_error_names_the_help_of_the_verb() {
    let rig = Rig::new();
    let line = rig.refused("status", 1);
    assert!(line.contains("there is none; add one: vhost-blk ctl add"), "{line}");
    rig.ok("list --timeout 5");
    let output = common::finish(
        program().args(["ctl", "list", "--json", "--control-path"]).arg(rig.path("ctl")),
    );
    assert_eq!(common::stdout(&output), "[]\n");
    for (words, help) in [
        ("list --nothing", "see vhost-blk ctl list --help"),
        ("--timeout 5 remove", "see vhost-blk ctl remove --help"),
        ("--nothing", "see vhost-blk ctl --help"),
    ] {
        let line = rig.refused(words, 2);
        assert!(line.ends_with(&format!("{help}\n")), "{line}");
    }
}
