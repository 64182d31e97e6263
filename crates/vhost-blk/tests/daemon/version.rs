// SPDX-License-Identifier: Apache-2.0
//! The versions of the daemon, the module and the client.

use crate::common::{self, program, stdout};
use crate::rig::Rig;
use serde_json::{Value, json};
use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixListener;
use std::path::Path;

const OWN: &str = env!("CARGO_PKG_VERSION");

#[test]
fn the_daemon_tells_its_version_its_process_and_the_module() {
    let rig = Rig::new();
    let told = rig.json("version");
    let daemon = &told["daemon"];
    assert_eq!((&daemon["version"], &told["ctl"]["version"]), (&json!(OWN), &json!(OWN)));
    assert_eq!(daemon["interface"], "io.vhostblk");
    assert_eq!(daemon["interface_digest"], told["ctl"]["interface_digest"]);
    assert_eq!((&daemon["pid"], &daemon["upgraded"]), (&json!(rig.daemon.id()), &Value::Null));
    let since = daemon["since"].as_str().unwrap();
    assert!(since > "2026-01-01T00:00:00Z" && since.len() == 20, "{since}");
    let is_loaded = Path::new("/sys/module/vhost_blk").exists();
    assert_eq!(daemon["module"]["loaded"], is_loaded);
    assert_eq!(told["warnings"], json!([]));
    let text = rig.ok("version");
    for line in [
        format!("ctl         {OWN}\n"),
        format!("daemon      {OWN}\n"),
        format!("pid         {}\n", rig.daemon.id()),
        format!("since       {since} ("),
    ] {
        assert!(text.contains(&line), "{line}: {text}");
    }
    let module = if is_loaded { "module      " } else { "module      not loaded\n" };
    assert!(text.contains(module), "{text}");
}

#[test]
fn an_upgrade_keeps_the_process_and_its_start() {
    let rig = Rig::new();
    let before = rig.json("version")["daemon"].take();
    rig.ok("upgrade");
    let after = rig.json("version")["daemon"].take();
    for fact in ["pid", "since"] {
        assert!(!before[fact].is_null() && after[fact] == before[fact], "{before} {after}");
    }
    assert!(after["upgraded"].as_str() >= before["since"].as_str(), "{before} {after}");
    assert!(rig.ok("version").contains("\nupgraded    20"));
}

#[test]
fn another_version_is_a_warning_on_standard_error() {
    let rig = Rig::new();
    let other = rig.path("other");
    let listener = UnixListener::bind(&other).unwrap();
    let reply = json!({"parameters": {
        "version": "9.8.7", "interface": "io.vhostblk", "interface_digest": "x", "pid": 1,
        "since": "2026-11-25T10:50:12Z", "upgraded": null,
        "module": {"loaded": true, "version": "9.8.6", "device": "usable", "reason": null},
    }});
    let answer = || {
        let (mut stream, _) = listener.accept().unwrap();
        let mut call = Vec::new();
        BufReader::new(stream.try_clone().unwrap()).read_until(0, &mut call).unwrap();
        assert!(String::from_utf8(call).unwrap().contains("io.vhostblk.Version"));
        stream.write_all(reply.to_string().as_bytes()).unwrap();
        stream.write_all(&[0]).unwrap();
    };
    let shown = std::thread::scope(|scope| {
        scope.spawn(answer);
        common::finish(program().args(["ctl", "version", "--control-path"]).arg(&other))
    });
    assert_eq!(shown.status.code(), Some(0));
    assert!(stdout(&shown).contains("module      loaded, version 9.8.6\n"), "{}", stdout(&shown));
    let told = String::from_utf8(shown.stderr).unwrap();
    let lines: Vec<&str> = told.lines().collect();
    assert_eq!(lines.len(), 2, "{told}");
    assert!(
        lines[0].contains("warning: the daemon runs version 9.8.7, and this program"),
        "{told}"
    );
    assert!(lines[1].contains("kernel module is version 9.8.6, and the daemon is 9.8.7"), "{told}");
}

#[test]
fn without_a_daemon_there_is_no_version() {
    let mut rig = Rig::new();
    rig.ok("stop");
    assert_eq!(rig.daemon.wait().code(), Some(0));
    rig.refused("version", 3);
}
