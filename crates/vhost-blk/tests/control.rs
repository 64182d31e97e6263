// SPDX-License-Identifier: Apache-2.0
//! The control socket, and `vhost-blk ctl`.

mod common;

use common::{Daemon, Place, finish, one_line, run, stdout};
use driver::{Device, Options};
use serde_json::Value;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::Output;

/// A daemon with a control socket, on its own data plane.
fn served(place: &Place) -> (Daemon, PathBuf) {
    let control = place.path("control.sock");
    let mut command = place.serve();
    command.args(["--data-plane", "uring", "--num-queues", "2", "--control-path"]).arg(&control);
    // Made after the other one.
    let daemon = Daemon::start(&mut command, &control);
    (daemon, control)
}

fn ctl(control: &Path, words: &[&str]) -> Output {
    let mut arguments = vec!["ctl".into(), "--control-path".into(), control.to_path_buf()];
    arguments.extend(words.iter().map(PathBuf::from));
    run(arguments)
}

fn status(control: &Path) -> Value {
    let output = ctl(control, &["--json", "status"]);
    assert!(output.status.success());
    serde_json::from_slice(&output.stdout).unwrap()
}

const STATUS: &[u8] = b"{\"method\":\"io.vhostblk.Status\"}\0";

/// Reads one message, byte by byte as the protocol has it.
fn message(reader: &mut impl BufRead) -> Option<Value> {
    let mut bytes = Vec::new();
    reader.read_until(0, &mut bytes).ok()?;
    assert!(bytes.is_empty() || bytes.pop() == Some(0), "no end: {bytes:?}");
    (!bytes.is_empty()).then(|| serde_json::from_slice(&bytes).unwrap())
}

/// Sends bytes and reads the answer to them.
fn answer(control: &Path, bytes: &[u8]) -> Value {
    let mut stream = UnixStream::connect(control).unwrap();
    stream.write_all(bytes).unwrap();
    message(&mut BufReader::new(stream)).unwrap()
}

#[test]
fn the_status_follows_the_front_end_and_its_requests() {
    let place = Place::new();
    let (_daemon, control) = served(&place);
    let told = status(&control);
    assert_eq!(told["front_end_connected"], false);
    assert_eq!(told["data_plane"], "uring");
    let mut device = Device::connect(&place.socket, &Options::default()).unwrap();
    (0..5).for_each(|sector| device.write(sector, &[1; 512]).unwrap());
    let told = status(&control);
    assert_eq!(told["front_end_connected"], true);
    assert_eq!(told["queues"][0]["runs_on"], "uring");
    assert_eq!(told["queues"][0]["chains"], 5);
    assert_eq!(told["queues"][1]["runs_on"], Value::Null);
    let text = stdout(&ctl(&control, &["status"]));
    assert!(text.contains("queue 0     runs on uring, 128 descriptors, 5 chains"), "{text}");
}

#[test]
fn a_switch_to_where_it_is_moves_nothing_and_an_impossible_one_says_why() {
    let place = Place::new();
    let (_daemon, control) = served(&place);
    let mut device =
        Device::connect(&place.socket, &Options { packed: true, ..Options::default() }).unwrap();
    let output = ctl(&control, &["switch", "uring"]);
    assert_eq!(stdout(&output), "done; 0 running queues were moved\n");
    let line = one_line(&ctl(&control, &["switch", "kernel"]), 1);
    assert!(line.contains("packed"), "{line}");
    device.write(0, &[1; 512]).unwrap();
}

#[test]
fn one_connection_may_ask_again_and_again_and_others_meanwhile() {
    let place = Place::new();
    let (_daemon, control) = served(&place);
    let _silent = UnixStream::connect(&control).unwrap();
    let stream = UnixStream::connect(&control).unwrap();
    let mut reader = BufReader::new(stream.try_clone().unwrap());
    for _ in 0..20 {
        (&stream).write_all(STATUS).unwrap();
        let told = message(&mut reader).unwrap();
        assert_eq!(told["parameters"]["status"]["name"], "disk");
        assert_eq!(status(&control)["data_plane"], "uring");
    }
}

#[test]
fn nonsense_gets_an_error_and_harms_nothing() {
    let place = Place::new();
    let (_daemon, control) = served(&place);
    let long = "x".repeat(70_000);
    let deep = "[".repeat(10_000) + "\0";
    let old = "{\"command\":\"stop\"}\0";
    for line in ["\0", "hello\0", old, "{}\0", "[1", "\u{ff}\0", &deep, &long] {
        let mut stream = UnixStream::connect(&control).unwrap();
        // The daemon hangs up before the end of the long one.
        let _ = stream.write_all(line.as_bytes());
        let _ = stream.shutdown(std::net::Shutdown::Write);
        let mut text = String::new();
        // A connection that is ended with unread bytes in it may be reset.
        let _ = stream.read_to_string(&mut text);
        assert!(text.starts_with("{\"error\":\"io.vhostblk.Refused\""), "{line}: {text}");
    }
    assert_eq!(answer(&control, STATUS)["parameters"]["status"]["paused"], false);
}

/// A connection that was answered.
fn connected(control: &Path) -> Option<UnixStream> {
    let stream = UnixStream::connect(control).unwrap();
    let _ = (&stream).write_all(STATUS); // refused ones are hung up on
    let told = message(&mut BufReader::new(&stream))?;
    told.get("error").is_none().then_some(stream)
}

#[test]
fn too_many_operators_are_told_so_and_room_comes_back() {
    let place = Place::new();
    let (_daemon, control) = served(&place);
    // The connection that looked whether the socket is there may still count.
    let mut many = Vec::new();
    while many.len() < 32 {
        many.extend(connected(&control));
    }
    let line = one_line(&ctl(&control, &["status"]), 1);
    assert!(line.contains("others are connected"), "{line}");
    drop(many);
    place.wait_until("room comes back", || ctl(&control, &["status"]).status.success());
}

#[test]
fn only_its_user_may_use_the_control_socket_and_it_goes_with_the_daemon() {
    let place = Place::new();
    let (mut daemon, control) = served(&place);
    let mode = std::fs::metadata(&control).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o600);
    daemon.signal(libc::SIGTERM);
    assert_eq!(daemon.wait().code(), Some(0));
    assert_eq!(place.files(), ["disk.img"]);
}

#[test]
fn a_control_socket_that_cannot_be_made_leaves_no_other_socket_behind() {
    let place = Place::new();
    let (_daemon, control) = served(&place);
    let mut second = common::program();
    second.args(["serve", "--backend", "null", "--size", "1M", "--socket-path"]);
    second.arg(place.path("other.sock")).arg("--control-path").arg(&control);
    let line = one_line(&common::finish(&mut second), 1);
    assert!(line.contains("another process serves this socket"), "{line}");
    assert!(!place.path("other.sock").exists());
}

#[test]
fn a_daemon_that_is_not_there_is_named() {
    let place = Place::new();
    let line = one_line(&ctl(&place.path("nobody.sock"), &["status"]), 3);
    assert!(line.contains("nobody.sock") && line.contains("--control-path"), "{line}");
}

/// The option, then the variable, then the path of the packaged daemon.
#[test]
fn ctl_and_top_find_the_socket_without_an_option() {
    let place = Place::new();
    let (_daemon, control) = served(&place);
    let run = |words: &[&str], variable: Option<&Path>| {
        let mut command = common::program();
        command.args(words).env_remove("VHOST_BLK_CONTROL");
        if let Some(path) = variable {
            command.env("VHOST_BLK_CONTROL", path);
        }
        common::finish(&mut command)
    };
    let top = ["top", "--once", "--interval", "0.1"];
    assert!(run(&["ctl", "status"], Some(&control)).status.success());
    assert!(run(&top, Some(&control)).status.success());
    let option = ["ctl", "--control-path", control.to_str().unwrap(), "status"];
    assert!(run(&option, Some(&place.path("nobody"))).status.success());
    let line = one_line(&run(&["ctl", "status"], Some(&place.path("nobody"))), 3);
    assert!(line.contains("nobody: ") && line.contains("VHOST_BLK_CONTROL"), "{line}");
    let usual = "/run/vhost-blk/control";
    for words in [&["ctl", "--help"][..], &["top", "--help"], &["daemon", "--help"]] {
        let help = common::stdout(&run(words, None));
        assert!(help.contains(usual), "{help}");
    }
    if Path::new(usual).exists() {
        println!("PARTLY SKIPPED: a daemon of this machine serves {usual}");
        return;
    }
    for words in [&["ctl", "status"][..], &top] {
        let line = one_line(&run(words, None), 3);
        assert!(line.contains(usual) && line.contains("--control-path"), "{line}");
    }
}

#[test]
fn a_daemon_that_does_not_answer_is_not_waited_for_longer_than_wanted() {
    let place = Place::new();
    let silent = place.path("silent.sock");
    let _listener = UnixListener::bind(&silent).unwrap();
    let line = one_line(&ctl(&silent, &["--timeout", "1", "status"]), 3);
    assert!(line.contains("no answer in 1 s") && line.contains("--timeout"), "{line}");
}

#[test]
fn the_two_sockets_cannot_be_one() {
    let place = Place::new();
    let mut command = place.serve();
    command.arg("--control-path").arg(&place.socket);
    let line = one_line(&common::finish(&mut command), 2);
    assert!(line.contains("--control-path"), "{line}");
}

#[test]
fn the_kernel_data_plane_for_a_disk_that_it_cannot_serve_is_refused_with_the_reason() {
    let place = Place::new();
    let mut command = place.serve();
    command.args(["--data-plane", "kernel", "--wrap", "delay:us=1"]);
    let line = one_line(&common::finish(&mut command), 1);
    assert!(line.contains("without --wrap"), "{line}");
    let mut command = place.serve();
    command.args(["--data-plane", "kernel", "--queue-size", "2048"]);
    let line = one_line(&common::finish(&mut command), 1);
    assert!(line.contains("--queue-size is 2048"), "{line}");
    assert!(!place.socket.exists());
}

#[test]
fn the_kernel_data_plane_without_the_module_names_the_module() {
    if std::path::Path::new("/dev/vhost-blk").exists() {
        println!("SKIP: the module is loaded here");
        return;
    }
    let place = Place::new();
    let mut command = place.serve();
    command.args(["--data-plane", "kernel"]);
    let line = one_line(&common::finish(&mut command), 1);
    assert!(line.contains("modprobe vhost_blk"), "{line}");
}

#[test]
fn a_disk_grows_while_it_is_served() {
    let place = Place::new();
    let (_daemon, control) = served(&place);
    let mut device = Device::connect(&place.socket, &Options::default()).unwrap();
    let output = ctl(&control, &["resize", "3M"]);
    assert_eq!(stdout(&output), "done; the disk has 3145728 bytes (3M)\n");
    device.write(3 * 2048 - 1, &[7; 512]).unwrap();
    std::fs::OpenOptions::new().write(true).open(&place.image).unwrap().set_len(4 << 20).unwrap();
    let output = ctl(&control, &["--json", "resize"]);
    assert_eq!(stdout(&output), "{\"capacity_bytes\":4194304}\n");
    assert_eq!(status(&control)["capacity_bytes"], 4 << 20);
    let text = stdout(&ctl(&control, &["status"]));
    assert!(text.contains("size        4194304 bytes\nstate       serving\n"), "{text}");
    device.write(4 * 2048 - 1, &[7; 512]).unwrap();
    let line = one_line(&ctl(&control, &["resize", "1M"]), 1);
    assert!(line.contains("resize the disk") && line.contains("cut its end off"), "{line}");
    for wrong in ["1X", "-1", ""] {
        assert_eq!(ctl(&control, &["resize", wrong]).status.code(), Some(2), "{wrong}");
    }
    assert_eq!(status(&control)["capacity_bytes"], 4 << 20);
}

/// Serves the image with a limit of 512 KiB on the size of files, which is half of a raw one.
fn limited(place: &Place, format: &str) -> (Daemon, PathBuf) {
    let control = place.path("control.sock");
    let mut served = place.serve();
    served.args(["--data-plane", "uring", "--format", format, "--control-path"]).arg(&control);
    let mut command = std::process::Command::new("sh");
    command.args(["-c", "ulimit -f 1024; exec \"$@\"", "sh"]); // blocks of 512 bytes
    command.arg(served.get_program()).args(served.get_args());
    (Daemon::start(&mut command, &control), control)
}

#[test]
fn a_growth_beyond_the_limit_on_file_sizes_fails_and_so_does_a_write_there() {
    let place = Place::new();
    let (mut daemon, control) = limited(&place, "raw");
    let line = one_line(&ctl(&control, &["resize", "2M"]), 1);
    assert!(line.contains("LimitFSIZE="), "{line}");
    let mut device = Device::connect(&place.socket, &Options::default()).unwrap();
    device.write(0, &[1; 512]).unwrap();
    assert!(device.write(1024, &[1; 512]).is_err());
    device.write(1, &[1; 512]).unwrap();
    daemon.signal(libc::SIGTERM);
    assert_eq!(daemon.wait().code(), Some(0));
}

/// The tables are as before, so that the rest of the disk goes on.
#[test]
fn a_new_cluster_beyond_the_limit_on_file_sizes_fails_alone() {
    const CLUSTER: u64 = 128;
    let place = Place::new();
    std::fs::remove_file(&place.image).unwrap();
    let path = place.image.to_str().unwrap();
    assert!(run(["create", "--format", "qcow2", path, "4M"]).status.success());
    let (mut daemon, _control) = limited(&place, "qcow2");
    let mut device = Device::connect(&place.socket, &Options::default()).unwrap();
    device.write(0, &[1; 512]).unwrap();
    let failed = (1..8).find(|cluster| device.write(cluster * CLUSTER, &[1; 512]).is_err());
    assert!(failed.is_some(), "the file has more than its limit");
    for _ in 0..2 {
        device.write(1, &[2; 512]).unwrap();
        device.flush().unwrap();
    }
    let mut data = [0; 512];
    device.read(1, &mut data).unwrap();
    assert_eq!(data, [2; 512]);
    daemon.signal(libc::SIGTERM);
    assert_eq!(daemon.wait().code(), Some(0));
    let checked = run(["check", path]);
    assert_eq!(checked.status.code(), Some(0), "{checked:?}");
}

#[test]
fn a_pause_keeps_requests_waiting_until_the_resume_and_ends_with_the_daemon() {
    let place = Place::new();
    let (mut daemon, control) = served(&place);
    let mut device = Device::connect(&place.socket, &Options::default()).unwrap();
    let layout = device.layout();
    assert_eq!(stdout(&ctl(&control, &["pause"])), "done\n");
    assert_eq!(stdout(&ctl(&control, &["pause"])), "nothing to do\n");
    let request = driver::Request::write(5, &[5; 512]);
    device.queue(0).submit(&request, &layout).unwrap();
    let told = status(&control);
    assert_eq!(
        (&told["paused"], &told["queues"][0]["runs_on"]),
        (&Value::Bool(true), &Value::Null)
    );
    assert!(stdout(&ctl(&control, &["status"])).contains("state       paused"));
    assert_eq!(stdout(&ctl(&control, &["--json", "resume"])), "{\"changed\":true}\n");
    device.queue(0).collect().unwrap();
    ctl(&control, &["pause"]);
    daemon.signal(libc::SIGTERM);
    assert_eq!(daemon.wait().code(), Some(0));
}

#[test]
fn limits_are_set_at_the_start_and_changed_while_the_disk_is_served() {
    let place = Place::new();
    let control = place.path("control.sock");
    let mut command = place.serve();
    command.args(["--data-plane", "uring", "--limit-iops", "1000", "--limit-bandwidth", "5M"]);
    let _daemon = Daemon::start(command.arg("--control-path").arg(&control), &control);
    let text = || stdout(&ctl(&control, &["status"]));
    assert!(text().contains("limits      1000 requests/s, 5 MiB/s, burst 100 ms"), "{}", text());
    let limit = ["limit", "--iops", "20", "--burst-seconds", "1.5"];
    let in_force = "limits: 20 requests/s, 5 MiB/s, burst 1500 ms\n";
    assert_eq!(stdout(&ctl(&control, &limit)), format!("done; {in_force}"));
    assert_eq!(stdout(&ctl(&control, &limit)), format!("nothing to do; {in_force}"));
    let told = serde_json::json!({
        "group": null, "iops": 20, "bandwidth": 5 << 20, "burst_ms": 1500,
    });
    assert_eq!(status(&control)["limits"], told);
    let none: serde_json::Value =
        serde_json::from_str(&stdout(&ctl(&control, &["--json", "limit", "--none"]))).unwrap();
    let limits = serde_json::json!({
        "group": null, "iops": null, "bandwidth": null, "burst_ms": 100,
    });
    assert_eq!(none, serde_json::json!({"changed": true, "limits": limits}));
    assert!(text().contains("limits      none"), "{}", text());
    for wrong in [
        &["limit"][..],
        &["limit", "--iops", "0"],
        &["limit", "--bandwidth", "0"],
        &["limit", "--iops", "1", "--burst-seconds", "0.001"],
        &["limit", "--iops", "1", "--burst-seconds", "1h"],
        &["limit", "--iops", "1", "--none"],
        &["limit", "--burst-seconds", "1", "--none"],
        &["limit", "--iops", "Off"],
        &["limit", "--group", "g", "--none"],
        &["limit", "--group", "/"],
    ] {
        assert_eq!(ctl(&control, wrong).status.code(), Some(2), "{wrong:?}");
    }
    // A group of one disk would share nothing.
    let line = one_line(&ctl(&control, &["limit", "--group", "g", "--iops", "1"]), 1);
    assert!(line.contains("share limits between disks: `vhost-blk serve`"), "{line}");
    let mut command = place.serve();
    let line = one_line(&finish(command.args(["--limit-group", "g", "--limit-iops", "1"])), 2);
    assert!(line.contains("use vhost-blk daemon, or drop --limit-group"), "{line}");
    let negative = b"{\"method\":\"io.vhostblk.Limit\",\"parameters\":{\"iops\":-1}}\0";
    assert_eq!(answer(&control, negative)["parameters"]["parameter"], "iops");
}
