// SPDX-License-Identifier: Apache-2.0
//! Each document says only what is true of the files and programs.

use clap::{Args, Command, CommandFactory};
use docs::{Document, documents, files, read, root};
use regex::Regex;
use std::collections::HashSet;
use std::path::Path;

/// Checks each document. `flaws` returns the sentences that are not true in it.
fn each_document(flaws: impl Fn(&Document) -> Vec<String>) {
    let found: Vec<String> = documents()
        .iter()
        .flat_map(|document| {
            flaws(document).into_iter().map(|flaw| format!("{}: {flaw}", document.path))
        })
        .collect();
    assert!(found.is_empty(), "{} flaws:\n{}", found.len(), found.join("\n"));
}

fn regex(pattern: &str) -> Regex {
    Regex::new(pattern).expect("a valid pattern")
}

#[test]
fn links_lead_to_files_and_headings() {
    let outside = regex("^(https?|mailto):");
    each_document(|document| {
        let inside = document.links.iter().filter(|link| !outside.is_match(link));
        inside.filter_map(|link| flaw_of_link(document, link)).collect()
    });
}

fn flaw_of_link(document: &Document, link: &str) -> Option<String> {
    let (path, heading) = match link.split_once('#') {
        Some((path, heading)) => (path, Some(heading)),
        None => (link, None),
    };
    let here = root().join(&document.path);
    let target = match path {
        "" => here,
        _ => here.parent().expect("a file is in a directory").join(path),
    };
    if !target.exists() {
        return Some(format!("the link {link} leads to nothing"));
    }
    let heading = heading?;
    let text = std::fs::read_to_string(&target).unwrap_or_default();
    let has_heading = Document::parse(path, &text).anchors().any(|anchor| anchor == heading);
    (!has_heading).then(|| format!("no heading for the link {link}"))
}

#[test]
fn named_files_exist_and_define_the_named_functions() {
    let (files, path) = (files(), regex("^([A-Za-z0-9_.@/-]+?)(?::([a-z0-9_]+))?$"));
    each_document(|document| {
        let parts = document.codes.iter().filter_map(|code| path.captures(code));
        parts
            .filter_map(|parts| {
                let function = parts.get(2).map(|function| function.as_str());
                flaw_of_path(&files, &parts[1], function)
            })
            .collect()
    });
}

fn flaw_of_path(files: &[String], named: &str, function: Option<&str>) -> Option<String> {
    let ours = "^(crates|test|scripts|packaging|docs|fuzz|kernel|LICENSES|\\.ci)/";
    let path = if regex(ours).is_match(named)
        || !named.contains('/') && (regex(r"\.(rs|sh)$").is_match(named) || named == "Makefile")
    {
        named.to_string()
    } else if !named.contains('/') && named.ends_with(".c") {
        // The documents of the kernel name its files by the last part.
        let last = format!("/{named}");
        let found = files.iter().find(|file| file.starts_with("kernel/") && file.ends_with(&last));
        match found {
            Some(file) => file.clone(),
            None => return Some(format!("below kernel/ there is no {named}")),
        }
    } else {
        return None;
    };
    if !root().join(&path).exists() {
        return Some(format!("there is no {path}"));
    }
    let function = function?;
    let definition = match Path::new(&path).extension().and_then(|extension| extension.to_str()) {
        Some("c" | "h") => format!(r"(?m)^[a-z].*[ *]{function}\("),
        _ => format!(r"\bfn {function}\b"),
    };
    let is_defined = regex(&definition).is_match(&read(&path));
    (!is_defined).then(|| format!("{path} has no function {function}"))
}

#[test]
fn named_make_targets_exist() {
    let (target, makefile) = (regex("^ *make ([a-z][a-z-]*)"), read("Makefile"));
    let rules: HashSet<&str> =
        makefile.lines().filter_map(|line| line.split_once(':')).map(|(name, _)| name).collect();
    each_document(|document| {
        let lines = document.codes.iter().cloned().chain(document.block_lines());
        lines
            .filter_map(|line| target.captures(&line).map(|found| found[1].to_string()))
            .filter(|target| !rules.contains(target.as_str()))
            .map(|target| format!("the Makefile has no target {target}"))
            .collect()
    });
}

/// The long options of a command, without those of its subcommands.
fn options_of(command: &Command) -> HashSet<String> {
    let own = command.get_arguments().filter_map(clap::Arg::get_long_and_visible_aliases);
    own.flatten().chain(["help"]).map(|long| format!("--{long}")).collect()
}

/// The long options of a command and its subcommands.
fn all_options_of(command: &Command) -> HashSet<String> {
    let below = command.get_subcommands().flat_map(all_options_of);
    options_of(command).into_iter().chain(below).collect()
}

/// The options of `bench` and its subcommands.
fn bench() -> Command {
    let bench = bench::compare::Args::augment_args(Command::new("bench"));
    let with = |bench: Command, command| bench.subcommand(command);
    let bench = with(bench, bench::changes::Args::augment_args(Command::new("compare")));
    let bench = with(bench, bench::page::Args::augment_args(Command::new("report")));
    let bench = with(bench, bench::socket::Args::augment_args(Command::new("socket")));
    let bench = with(bench, bench::host::Args::augment_args(Command::new("host")));
    with(bench, bench::icount::Args::augment_args(Command::new("icount")))
}

#[test]
fn options_of_a_command_line_are_options_of_its_command() {
    let program = vhost_blk::cli::Cli::command();
    let (call, option) = (regex("vhost-blk ([a-z]+) (.*)"), regex("--[a-z][a-z0-9-]*"));
    each_document(|document| {
        let mut flaws = Vec::new();
        for line in document.codes.iter().cloned().chain(document.block_lines()) {
            let Some(call) = call.captures(&line) else { continue };
            let Some(command) = program.find_subcommand(&call[1]) else { continue };
            let known = all_options_of(command);
            let used = option.find_iter(&call[2]).map(|option| option.as_str());
            for option in used.filter(|option| !known.contains(*option)) {
                flaws.push(format!("vhost-blk {} has no option {option}", &call[1]));
            }
        }
        flaws
    });
}

#[test]
fn no_line_of_a_block_begins_with_an_option() {
    each_document(|document| {
        let lines = document.block_lines().into_iter();
        let cut = lines.filter(|line| line.trim_start().starts_with("--"));
        cut.map(|line| format!("the rest of a command is on a line of its own: {line}")).collect()
    });
}

#[test]
fn an_option_alone_is_one_of_some_program() {
    let programs = [vhost_blk::cli::Cli::command(), lab::cli::Cli::command(), bench()];
    let known: HashSet<String> = programs.iter().flat_map(all_options_of).collect();
    let option = regex("^--[a-z][a-z0-9-]*");
    each_document(|document| {
        let used = document.codes.iter().filter_map(|code| option.find(code));
        used.filter(|option| !known.contains(option.as_str()))
            .map(|option| format!("no program has an option {}", option.as_str()))
            .collect()
    });
}

#[test]
fn no_path_is_of_one_machine() {
    let path = regex("(?:^|[^a-zA-Z0-9_.])/(?:work|root|home)/");
    each_document(|document| {
        let lines = document.text.lines().filter(|line| path.is_match(line));
        lines.map(|line| format!("a path of one machine: {line}")).collect()
    });
}

#[test]
fn lines_of_text_have_at_most_120_characters() {
    each_document(|document| {
        let long = document.text_lines().filter(|(_, line)| line.chars().count() > 120);
        long.map(|(number, _)| format!("line {number} has more than 120 characters")).collect()
    });
}

/// The rows of a document that end with the name of a constant, its value and its file.
fn bounds(document: &Document) -> Vec<[&str; 3]> {
    let name = regex("^[A-Z0-9_]+$");
    let rows = document.tables.iter().flat_map(|table| &table.rows);
    rows.filter_map(|row| {
        let [.., constant, value, file] = row.as_slice() else { return None };
        Some([constant.only_code()?, value.only_code()?, file.only_code()?])
    })
    .filter(|[constant, ..]| name.is_match(constant))
    .collect()
}

#[test]
fn bounds_have_the_values_of_their_constants() {
    let spaces = regex(r"\s+");
    each_document(|document| {
        let is_true = |[name, value, file]: &[&str; 3]| {
            let definition = match file.ends_with(".rs") {
                true => regex(&format!(r"(?m)\bconst {name}: [^=]* = (.*);$")),
                false => regex(&format!(r"(?m)^#define {name}\s+(.*)$")),
            };
            root().join(file).is_file()
                && definition
                    .captures_iter(&read(file))
                    .any(|found| spaces.replace_all(&found[1], " ") == *value)
        };
        let wrong = bounds(document).into_iter().filter(|bound| !is_true(bound));
        wrong.map(|[name, value, file]| format!("{file} does not say {name} = {value}")).collect()
    });
}

/// The value of a constant, in bytes or as a number.
fn value_of(name: &str, file: &str) -> u64 {
    let text = read(file);
    let definition = match file.ends_with(".rs") {
        true => regex(&format!(r"(?m)\bconst {name}: [^=]* = (\d+)(?: << (\d+))?;$")),
        false => regex(&format!(r"(?m)^#define {name}\s+(\d+)u?()$")),
    };
    let found = definition.captures(&text).unwrap_or_else(|| panic!("no {name} in {file}"));
    let number = |at: usize| found.get(at).and_then(|part| part.as_str().parse::<u64>().ok());
    number(1).expect("digits") << number(2).unwrap_or(0)
}

/// The rows of the table of limits in the page of operation, and the constants that each of them tells.
const LIMITS: [(&str, &[(&str, &str)]); 13] = [
    ("disks of a daemon", &[("DISKS_MAX", "crates/vhost-blk/src/disks/mod.rs")]),
    ("data-plane threads", &[("THREADS_MAX", "crates/vhost-blk/src/values.rs")]),
    ("characters of a disk's name", &[("DISK_NAME_MAX", "crates/vhost-blk/src/values.rs")]),
    ("length of a socket's path", &[("PATH_BYTES_MAX", "crates/vhost-blk/src/socket_file.rs")]),
    ("queues", &[("QUEUES_MAX", "crates/vhost-user/src/lib.rs")]),
    (
        "descriptors in a queue",
        &[
            ("QUEUE_SIZE_MAX", "crates/virtio-spec/src/split.rs"),
            ("VHOST_BLK_QUEUE_SIZE_MAX", "kernel/include/uapi/vhost_blk.h"),
        ],
    ),
    ("bytes of a request", &[("REQUEST_BYTES_MAX", "crates/virtio-blk/src/request.rs")]),
    ("bytes in flight of a queue", &[("INFLIGHT_BYTES_MAX", "crates/data-plane/src/running.rs")]),
    (
        "clients of the control socket",
        &[
            ("CONNECTIONS_MAX", "crates/vhost-blk/src/control/places.rs"),
            ("WORK_MAX", "crates/vhost-blk/src/control/places.rs"),
            ("CLIENTS_WITH_ENDS_MAX", "crates/vhost-blk/src/control/places.rs"),
        ],
    ),
    ("requests in flight per queue", &[("DEPTH_MAX", "crates/data-plane/src/request_table.rs")]),
    ("wrappers", &[("LAYERS_MAX", "crates/backend/src/wrap/spec.rs")]),
    ("memory regions", &[("SLOTS_MAX", "crates/vhost-user/src/mem_table.rs")]),
    (
        "bytes of guest memory",
        &[
            ("TABLE_BYTES_MAX", "crates/vhost-user/src/mem_table.rs"),
            ("MAPPED_BYTES_MAX", "crates/virtqueue/src/address_space.rs"),
        ],
    ),
];

#[test]
fn the_limits_for_operators_are_the_values_of_the_constants() {
    let document = Document::parse("docs/operations.md", &read("docs/operations.md"));
    let table = document.tables.iter().find(|table| table.heading == "Limits").expect("limits");
    for row in &table.rows {
        let [what, limit] = row.as_slice() else { panic!("not two columns") };
        let told = LIMITS.iter().find(|(name, _)| what.text.starts_with(name));
        let Some((_, constants)) = told else {
            assert_eq!(what.text, "size of the image", "a limit without a constant");
            continue;
        };
        for (name, file) in *constants {
            let value = value_of(name, file);
            let shown = match (what.text.starts_with("bytes"), value >> 30) {
                (false, _) => value.to_string(),
                (true, 0) => format!("{} MiB", value >> 20),
                (true, gib) => format!("{gib} GiB"),
            };
            let words = regex(&format!(r"(^|[^0-9]){shown}($|[^0-9])"));
            assert!(words.is_match(&limit.text), "{}: no {shown} ({name})", what.text);
        }
    }
    assert_eq!(table.rows.len(), LIMITS.len() + 1);
}

#[test]
fn the_tables_of_bounds_are_recognized() {
    for (path, least) in [("docs/bounds.md", 30), ("docs/kernel.md", 5)] {
        let rows = bounds(&Document::parse(path, &read(path))).len();
        assert!(rows >= least, "{path}: {rows} rows of bounds");
    }
}
