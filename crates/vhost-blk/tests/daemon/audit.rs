// SPDX-License-Identifier: Apache-2.0
//! The log lines about commands.

use crate::common::{Daemon, Place, own_path, program, run};
use crate::mount::may_not_mount;
use crate::rig::Rig;
use std::os::unix::fs::MetadataExt;
use std::process::Command;

#[test]
fn each_change_by_a_client_is_logged_with_its_user_and_its_outcome() {
    let mut rig = Rig::with(&["--log-level", "info"]);
    let uid = std::fs::metadata(rig.path("ctl")).unwrap().uid();
    rig.add("a", "");
    rig.refused("resize none 5M", 1);
    rig.ok("status a");
    rig.refused("resize a 512", 1);
    rig.ok("pause");
    rig.ok("log-level info");
    rig.ok("remove a");
    rig.refused("backup none --to /x", 1);
    let mut audit = |words: &[&str]| {
        let line = rig.daemon.log_line(" command ");
        for words in [words, &["pid=", &format!("uid={uid}")]].concat() {
            assert!(line.contains(words), "{words}: {line}");
        }
        // The time is RFC 3339 in UTC.
        let time = line.split_whitespace().next().unwrap();
        assert!(time.starts_with("20") && time.ends_with('Z') && time.contains('T'), "{line}");
    };
    audit(&["method=\"Add\"", "disk=\"a\"", "outcome=\"ok\""]);
    audit(&["method=\"Resize\"", "disk=\"none\"", "outcome=\"error\"", "none of this name"]);
    audit(&["method=\"Resize\"", "disk=\"a\"", "outcome=\"error\"", "reason="]);
    // The disk that the client has not named.
    audit(&["method=\"Pause\"", "disk=\"a\"", "outcome=\"ok\""]);
    audit(&["method=\"SetLogLevel\"", "outcome=\"begun\""]);
    audit(&["method=\"SetLogLevel\"", "outcome=\"ok\""]);
    audit(&["method=\"Remove\"", "disk=\"a\"", "outcome=\"ok\""]);
    audit(&["method=\"Backup\"", "disk=\"none\"", "outcome=\"begun\""]);
    audit(&["method=\"Backup\"", "disk=\"none\"", "outcome=\"error\""]);
    rig.ok("stop");
    let line = rig.daemon.log_line(" command ");
    assert!(line.contains("method=\"Stop\"") && line.contains("outcome=\"ok\""), "{line}");
}

/// The kernel reports process 0 for a client that the PID namespace of the daemon does not have.
#[test]
fn a_client_of_another_pid_namespace_is_answered_and_logged() {
    if may_not_mount() {
        return;
    }
    let place = Place::new();
    let control = place.path("ctl");
    let mut command = Command::new("unshare");
    command.args(["--pid", "--fork", "--kill-child"]).arg(own_path());
    command.args(["daemon", "--log-level", "info", "--control-path"]).arg(&control);
    let mut daemon = Daemon::start(&mut command, &control);
    let ctl = |word| run(["ctl".as_ref(), "--control-path".as_ref(), control.as_os_str(), word]);
    for word in ["list", "stop"] {
        let output = ctl(word.as_ref());
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    }
    let line = daemon.log_line("method=\"Stop\"");
    assert!(line.contains("pid=0 ") && line.contains("outcome=\"ok\""), "{line}");
    assert!(daemon.wait().success());
}

#[test]
fn the_log_level_changes() {
    let mut rig = Rig::with(&["--log-level", "info"]);
    rig.add("a", "");
    rig.ok("log-level debug");
    drop(rig.guest("a"));
    let line = rig.daemon.log_line("DEBUG");
    assert!(line.contains("disk{disk=\"a\"}"), "{line}");
    rig.ok("log-level error");
    rig.ok("pause a");
    rig.ok("stop");
    rig.daemon.wait();
    let rest = rig.daemon.rest_of_stderr();
    assert!(!rest.contains("paused"), "{rest}");
    assert!(program().args(["ctl", "--control-path", "x", "log-level", "loud"]).status().is_ok());
}
