// SPDX-License-Identifier: Apache-2.0
//! The configuration file: the same options by the same names.

mod common;

use common::{Daemon, Place, finish, one_line, program};
use std::path::PathBuf;
use std::process::Output;

/// A place and a configuration in it that serves it, with `more` lines.
fn configured(more: &str) -> (Place, PathBuf) {
    let place = Place::new();
    let path = place.path("disk.toml");
    let text = format!("blk-file = {:?}\nsocket-path = {:?}\n{more}\n", place.image, place.socket);
    std::fs::write(&path, text).unwrap();
    (place, path)
}

fn serve(path: &PathBuf, more: &[&str]) -> Output {
    finish(program().arg("serve").arg("--config").arg(path).args(more))
}

#[track_caller]
fn refused(more: &str, words: &[&str]) {
    let (place, path) = configured(more);
    let line = one_line(&serve(&path, &[]), 2);
    for word in words.iter().chain(&["disk.toml"]) {
        assert!(line.contains(word), "`{word}` is not in: {line}");
    }
    assert_eq!(place.files(), ["disk.img", "disk.toml"]);
}

#[test]
fn an_unknown_key_is_refused_and_the_known_ones_are_listed() {
    refused("queue_size = 256", &["queue_size", "queue-size", "blk-file", "wrap"]);
}

#[test]
fn a_file_cannot_name_another_file() {
    refused("config = 'other.toml'", &["unknown key `config`"]);
}

#[test]
fn a_wrong_value_is_refused_with_the_files_name() {
    refused("queue-size = 100", &["line 3: `queue-size` is '100'; give a power of two"]);
    refused("direct = 'yes'", &["line 3: `direct` is 'yes'; give one of on, off"]);
    refused("threads = 1.5", &["line 3: `threads` is '1.5'; give a number from 1 to 64"]);
    refused("threads = 1979-05-27", &["threads", "datetime"]);
    refused("wrap = [1]", &["wrap", "string"]);
}

#[test]
fn a_value_of_another_type_is_refused_with_its_line_and_the_wanted_type() {
    for (line, type_name, wanted) in [
        ("serial = 3", "integer", "give a string, in quotes"),
        ("socket-group = true", "boolean", "give a string, in quotes"),
        ("metrics = 9100", "integer", "give a string, in quotes"),
        ("read-only = 1", "integer", "give true or false"),
        ("format = true", "boolean", "give a string: raw, qcow2"),
        ("log-level = 1.5", "float", "give a string: error, warn"),
        ("queue-size = true", "boolean", "give a number, or a string"),
        ("queue-size = [1]", "array", "give a number, or a string"),
    ] {
        let key = line.split(' ').next().unwrap();
        refused(line, &[&format!("line 3: `{key}` is of type {type_name}; {wanted}")]);
    }
    // No file of the name `3` is opened.
    let place = Place::new();
    let path = place.path("disk.toml");
    std::fs::write(&path, "socket-path = 's'\n\nblk-file = 3\n").unwrap();
    let line = one_line(&serve(&path, &[]), 2);
    assert!(line.contains("line 3: `blk-file` is of type integer; give a string"), "{line}");
}

#[test]
fn a_file_that_is_none_is_a_wrong_configuration() {
    let place = Place::new();
    std::fs::create_dir(place.path("directory")).unwrap();
    std::os::unix::fs::symlink("nowhere", place.path("link")).unwrap();
    std::fs::write(place.path("bytes"), [0xff]).unwrap();
    for (name, told) in [
        ("none", "No such file or directory (os error 2); check --config"),
        ("directory", "it is a directory; write a file, or rename the directory"),
        ("link", "it is a link to a file that does not exist; make that file, or remove the link"),
        ("bytes", "it is not UTF-8; write it in UTF-8"),
    ] {
        let line = one_line(&serve(&place.path(name), &[]), 2);
        assert!(line.contains(told), "{name}: {line}");
    }
}

#[test]
fn a_mode_without_quotes_is_refused_because_its_base_is_unclear() {
    refused("socket-mode = 0o660", &["socket-mode", "quote it"]);
}

#[test]
fn broken_toml_is_refused_with_its_line() {
    refused("num-queues = ", &["line 3"]);
}

#[test]
fn the_command_line_wins_over_the_file() {
    // Each value that wins is wrong on purpose: the message tells which one was taken.
    let (_place, path) = configured("data-plane = 'kernel'\nqueue-size = 2048");
    assert!(one_line(&serve(&path, &[]), 1).contains("--queue-size is 2048"));
    let line = one_line(&serve(&path, &["--data-plane=auto", "--blk-file=/no/such"]), 1);
    assert!(line.contains("/no/such"), "{line}");
}

#[test]
fn a_socket_on_the_command_line_replaces_the_files_socket() {
    let (place, path) = configured("");
    let line = one_line(&serve(&path, &["--fd=912"]), 1);
    assert!(line.contains("descriptor 912"), "{line}");
    assert!(!place.socket.exists());
}

/// A right value for every option but the sockets and the image.
const EVERYTHING: &str = "\
allow-backing = 'same-dir'
backend = 'file'
batch-size = 8
cache = 'writethrough'
coalesce = 'off'
cpus = 0
data-plane = 'uring'
direct = false
discard = 'off'
format = 'raw'
incoming = 'on'
io-timeout = 30
iopoll = 'off'
limit-bandwidth = '1G'
limit-burst = 0.5
limit-iops = 100000
lock = 'auto'
log-format = 'json'
log-level = 'debug'
logical-block-size = 4096
metrics = '127.0.0.1:0'
name = 'db'
num-queues = 1
on-error = 'stop'
on-read-error = 'report'
packed = true
pin-memory = 'off'
poll-max-us = 0
queue-size = 128
read-only = true
serial = 'S1'
socket-group = '0'
socket-mode = '0640'
threads = 1
wrap = ['delay:us=1', 'limit:iops=1000']";

#[test]
fn every_option_may_stand_in_the_file() {
    let (place, path) = configured(EVERYTHING);
    let mut command = program();
    command.arg("--config").arg(&path);
    let mut daemon = Daemon::start(&mut command, &place.socket);
    let line = daemon.log_line("\"serving\"");
    let line: serde_json::Value = serde_json::from_str(&line).unwrap();
    assert_eq!(line["queues"], 1);
    assert_eq!(line["threads"], 1);
    assert_eq!(line["read_only"], true);
    use std::os::unix::fs::MetadataExt;
    assert_eq!(std::fs::metadata(&place.socket).unwrap().mode() & 0o777, 0o640);
}

#[test]
fn the_test_above_leaves_no_key_out() {
    let (_place, path) = configured("no-such-key = 1");
    let line = one_line(&serve(&path, &[]), 2);
    let known = line.split("use one of ").nth(1).unwrap().trim().split(", ");
    let tried: Vec<&str> =
        EVERYTHING.lines().map(|line| line.split(" = ").next().unwrap()).collect();
    let rest: Vec<&str> = known.filter(|key| !tried.contains(key)).collect();
    // `serve` refuses `limit-group`, which is for a daemon of several disks.
    let others = [
        "blk-file",
        "control-group",
        "control-mode",
        "control-path",
        "fd",
        "limit-group",
        // For a metrics socket on a path.
        "metrics-group",
        "metrics-mode",
        "pidfile",
        "size",
        "socket-path",
    ];
    assert_eq!(rest, others);
}
