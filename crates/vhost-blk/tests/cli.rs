// SPDX-License-Identifier: Apache-2.0
//! The command line: what is accepted, what is refused and in which words.

mod common;

use common::{Place, finish, one_line, program, run, stdout};

/// A rule, an option of `serve` that breaks it, the exit code, and words of the error.
type Wrong = (&'static str, &'static [&'static str], i32, &'static [&'static str]);

const WRONG: &[Wrong] = &[
    (
        "a queue size that is no power of two is refused",
        &["--queue-size", "100"],
        2,
        &["--queue-size", "power of two from 2 to 32768"],
    ),
    (
        "a queue size above the specification is refused",
        &["--queue-size=65536"],
        2,
        &["power of two"],
    ),
    ("no queues are refused", &["--num-queues", "0"], 2, &["--num-queues", "1 to 64"]),
    ("too many queues are refused", &["--num-queues", "65"], 2, &["1 to 64"]),
    ("no threads are refused", &["--threads", "0"], 2, &["--threads", "1 to 64"]),
    (
        "a serial of 21 bytes is refused",
        &["--serial", "123456789012345678901"],
        2,
        &["--serial", "21 bytes", "at most 20"],
    ),
    ("a serial beyond ascii is refused", &["--serial", "é"], 2, &["ASCII"]),
    (
        "an odd block size is refused",
        &["--logical-block-size", "1024"],
        2,
        &["--logical-block-size", "512 or 4096"],
    ),
    (
        "a cpu that is not there is refused",
        &["--cpus", "0,8000"],
        2,
        &["--cpus", "CPU 8000 is not online", "choose from"],
    ),
    ("a backward cpu range is refused", &["--cpus", "3-1"], 2, &["numbers and ranges"]),
    (
        "a mode that is not octal is refused",
        &["--socket-mode", "0888"],
        2,
        &["--socket-mode", "octal"],
    ),
    (
        "a group that is not there is refused",
        &["--socket-group", "no-such-group"],
        2,
        &["no-such-group", "no such group"],
    ),
    ("a switch is on or off", &["--direct", "yes"], 2, &["--direct", "on, off"]),
    ("read only takes on or off", &["--read-only=maybe"], 2, &["--read-only", "on, off"]),
    ("discard takes on or off", &["--discard", "1"], 2, &["--discard", "on, off"]),
    ("packed takes on or off", &["--packed", ""], 2, &["--packed"]),
    ("pin memory takes on or off", &["--pin-memory", "auto"], 2, &["--pin-memory", "on, off"]),
    ("iopoll takes three words", &["--iopoll", "maybe"], 2, &["--iopoll", "auto, on, off"]),
    (
        "iopoll on a file without poll queues is refused",
        &["--iopoll", "on"],
        1,
        &["poll queues", "--iopoll auto"],
    ),
    ("lock takes two words", &["--lock", "on"], 2, &["--lock", "auto, off"]),
    ("a cache mode is known", &["--cache", "none"], 2, &["--cache", "writeback, writethrough"]),
    ("a backend is known", &["--backend", "qcow2"], 2, &["--backend", "file, mem, null"]),
    ("a log level is known", &["--log-level", "loud"], 2, &["error, warn, info, debug, trace"]),
    ("a log format is known", &["--log-format", "xml"], 2, &["json, text"]),
    ("a data plane is known", &["--data-plane", "fpga"], 2, &["auto, kernel, uring"]),
    (
        "polling for more than a second is refused",
        &["--poll-max-us", "1000001"],
        2,
        &["--poll-max-us", "0 to 1000000"],
    ),
    ("a size for a file is refused", &["--size", "1M"], 2, &["--size", "file"]),
    ("a size of half a sector is refused", &["--size", "256"], 2, &["--size", "multiple of 512"]),
    (
        "an image for a null disk is refused",
        &["--backend", "null", "--size", "1M"],
        2,
        &["--blk-file", "null"],
    ),
    ("a null disk needs a size", &["--backend", "mem"], 2, &["mem"]),
    ("an unknown wrapper is refused", &["--wrap", "shrink"], 2, &["--wrap", "shrink"]),
    ("two sockets are refused", &["--fd", "7"], 2, &["--fd", "--socket-path"]),
    (
        "a misspelt option is named with the right one",
        &["--qeue-size", "8"],
        2,
        &["--qeue-size", "'--queue-size'"],
    ),
    ("a missing configuration is refused", &["--config", "/no/such.toml"], 2, &["/no/such.toml"]),
    (
        "an option given twice is refused",
        &["--threads", "1", "--threads", "2"],
        2,
        &["--threads", "multiple times"],
    ),
];

#[test]
fn each_wrong_option_of_an_otherwise_right_command_is_refused_with_a_reason_and_a_remedy() {
    for (rule, option, code, words) in WRONG {
        println!("{rule}");
        let place = Place::new();
        let line = one_line(&finish(place.serve().args(*option)), *code);
        for word in *words {
            assert!(line.contains(word), "{rule}: `{word}` is not in: {line}");
        }
        assert_eq!(place.files(), ["disk.img"], "{rule}");
    }
}

#[test]
fn no_socket_is_refused() {
    let line = one_line(&run(["serve", "--backend", "null", "--size", "1M"]), 2);
    assert!(line.contains("--socket-path PATH or --fd N"), "{line}");
}

#[test]
fn no_image_is_refused() {
    let place = Place::new();
    let line = one_line(&finish(program().arg("--socket-path").arg(&place.socket)), 2);
    assert!(line.contains("--blk-file PATH"), "{line}");
    assert!(!place.socket.exists());
}

#[test]
fn socket_mode_without_a_socket_file_is_refused() {
    let line = one_line(&run(["--backend=null", "--size=1M", "--fd=0", "--socket-mode=0600"]), 2);
    assert!(line.contains("--socket-path"), "{line}");
}

#[test]
fn a_missing_image_is_refused_and_how_to_make_one_is_said() {
    let place = Place::new();
    std::fs::remove_file(&place.image).unwrap();
    let line = one_line(&finish(&mut place.serve()), 1);
    assert!(line.contains("vhost-blk create"), "{line}");
    assert!(place.files().is_empty());
}

#[test]
fn a_directory_as_image_is_refused() {
    let place = Place::new();
    std::fs::remove_file(&place.image).unwrap();
    std::fs::create_dir(&place.image).unwrap();
    let line = one_line(&finish(&mut place.serve()), 1);
    assert!(line.contains("regular file"), "{line}");
    assert_eq!(place.files(), ["disk.img"]);
}

#[test]
fn no_command_is_refused_in_one_line() {
    let line = one_line(&run::<&str>([]), 2);
    assert!(line.contains("vhost-blk needs a command; give one of check, convert,"), "{line}");
    one_line(&run(["destroy"]), 2);
    for (command, verbs) in [("ctl", "add, backup,"), ("generate", "completions, man,")] {
        let line = one_line(&run([command]), 2);
        let told = format!("vhost-blk {command} needs a command; give one of {verbs}");
        assert!(line.contains(&told), "{line}");
        assert!(line.ends_with(&format!("and see vhost-blk {command} --help\n")), "{line}");
    }
}

#[test]
fn a_wrong_value_of_ctl_is_refused_with_the_right_ones() {
    for (line, told) in [
        ("ctl --timeout x list", "give a whole number of seconds, or 0 for no limit"),
        ("ctl set-errors --io-timeout 0.01", "from 0.1 to 86400, or 0 for none"),
        ("ctl limit --iops 0", "from 1 to 1000000000, or off for no limit"),
        ("ctl limit --bandwidth 0", "give at least 1, or off for no limit"),
        ("ctl pause -f", "unexpected argument '-f' found; see vhost-blk ctl pause --help"),
    ] {
        let line_told = one_line(&run(line.split(' ')), 2);
        assert!(line_told.contains(told), "{line}: {line_told}");
    }
}

#[test]
fn capabilities_are_printed_whatever_else_is_given() {
    let wanted = "{\"type\":\"block\",\"features\":[\"read-only\",\"blk-file\"]}\n";
    for arguments in [
        vec!["--print-capabilities"],
        vec!["serve", "--print-capabilities"],
        vec!["--print-capabilities", "--queue-size=7", "--no-such-option", "stray"],
        vec!["--socket-path=/no/such/directory/x", "--blk-file=/none", "--print-capabilities"],
    ] {
        let output = run(&arguments);
        assert_eq!(stdout(&output), wanted, "{arguments:?}");
        assert!(output.status.success() && output.stderr.is_empty(), "{arguments:?}");
    }
}

#[test]
fn help_and_version_go_to_stdout() {
    assert!(stdout(&run(["--help"])).contains("serve"));
    assert!(stdout(&run(["--version"])).starts_with("vhost-blk "));
    assert!(stdout(&run(["serve", "--help"])).contains("--blk-file"));
}

#[test]
fn help_is_alphabetical_within_each_heading() {
    let help = stdout(&run(["serve", "--help"]));
    let mut headings = 0;
    for section in help.split("\n\n").collect::<Vec<_>>().join("\n").split_inclusive(":\n") {
        let options: Vec<&str> = section
            .lines()
            .filter_map(|line| line.trim_start().strip_prefix("--"))
            .map(|line| line.split([' ', '[']).next().unwrap())
            .collect();
        assert!(options.is_sorted(), "{options:?}");
        headings += usize::from(!options.is_empty());
    }
    assert!(headings >= 5, "{help}");
}

#[test]
fn the_page_of_options_is_what_the_program_writes() {
    let page = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/options.md");
    let page = std::fs::read_to_string(page).unwrap();
    let written = stdout(&run(["generate", "options-table"]));
    assert!(page == written, "run: vhost-blk generate options-table > docs/options.md");
}

#[test]
fn man_pages_are_written_for_every_command() {
    let place = Place::new();
    let dir = place.path("man");
    assert!(program().args(["generate", "man"]).arg(&dir).status().unwrap().success());
    for command in ["", "-create", "-doctor", "-generate", "-serve"] {
        let page = dir.join(format!("vhost-blk{command}.1"));
        assert!(std::fs::read_to_string(&page).unwrap().contains(".SH NAME"), "{command}");
    }
    let page = std::fs::read_to_string(dir.join("vhost-blk-serve.1")).unwrap();
    assert!(page.contains("pin\\-memory"));
}

#[test]
fn man_pages_into_a_file_are_refused() {
    let place = Place::new();
    one_line(&finish(program().args(["generate", "man"]).arg(&place.image)), 1);
}

#[test]
fn completions_know_the_options_in_every_shell() {
    for shell in ["bash", "elvish", "fish", "powershell", "zsh"] {
        let script = stdout(&run(["generate", "completions", shell]));
        assert!(script.contains("queue-size"), "{shell}");
    }
    one_line(&run(["generate", "completions", "dos"]), 2);
}

#[test]
fn the_capability_file_for_vmms_says_what_the_program_says() {
    let file = include_str!("../../../packaging/50-vhost-blk.json");
    let file: serde_json::Value = serde_json::from_str(file).unwrap();
    let printed = stdout(&run(["--print-capabilities"]));
    let printed: serde_json::Value = serde_json::from_str(&printed).unwrap();
    assert_eq!(file["features"], printed["features"]);
    assert_eq!(file["type"], printed["type"]);
}
