// SPDX-License-Identifier: Apache-2.0
//! The configuration file: every option of `serve` by its long name. A disk of `daemon` has a file
//! with the options of one disk, or the same table in a command.
//!
//! The file becomes command-line arguments: both have the same parser and the same checks. The
//! command line of `serve` overrides the file.

use crate::failure::Failure;
use crate::options::DiskArgs;
use clap::parser::ValueSource;
use clap::{ArgMatches, Args, Command, FromArgMatches};
use std::ffi::OsString;
use std::path::Path;
use toml::Value;

/// Options that exclude each other: one of them on the command line overrides all of them in the
/// file.
const SOCKET_CHOICES: [&str; 2] = ["fd", "socket-path"];

/// Options whose values are octal, which a number of TOML would not be.
const MODES: [&str; 3] = ["control-mode", "metrics-mode", "socket-mode"];

/// Options that a file must not contain.
const COMMAND_LINE_ONLY: [&str; 3] = ["config", "help", "print-capabilities"];

/// The arguments that the file `path` sets and the command line (`given`) does not.
///
/// # Errors
/// [`Failure`] if the file cannot be read, or a key or value is wrong.
pub fn arguments(
    path: &Path,
    serve: &Command,
    given: &ArgMatches,
) -> Result<Vec<OsString>, Failure> {
    let table = read(path, "check --config")?;
    let source = &source_of(path);
    check_keys(source, serve, &table)?;
    let mut arguments = Vec::new();
    let mut wanted = Vec::new();
    for (key, value) in &table {
        let these = one_option(source, key, value)?;
        if !is_overridden(key, given) {
            wanted.extend(these.iter().cloned());
        }
        arguments.extend(these);
    }
    // Check the values of the file separately: the message then names the file.
    let alone = [OsString::from("serve")].into_iter().chain(arguments);
    serve
        .clone()
        .try_get_matches_from(alone)
        .map_err(|error| Failure::from_clap(source, " serve", &error))?;
    Ok(wanted)
}

/// The options of a disk from its file.
///
/// # Errors
/// [`Failure`] if the file cannot be read, or a key or value is wrong.
pub fn disk_of_file(path: &Path) -> Result<DiskArgs, Failure> {
    disk_of_table(&source_of(path), &read(path, "check its permissions")?)
}

/// The options of a disk from the text of its file.
///
/// # Errors
/// [`Failure`] if a key or value is wrong.
pub fn disk_of_text(path: &Path, text: &str) -> Result<DiskArgs, Failure> {
    let source = source_of(path);
    disk_of_table(&source, &parsed(&source, text)?)
}

/// The options of a disk from a table of `source`.
///
/// # Errors
/// [`Failure`] if a key or value is wrong, or options contradict each other.
pub fn disk_of_table(source: &str, table: &toml::Table) -> Result<DiskArgs, Failure> {
    let command = DiskArgs::augment_args(Command::new("disk").no_binary_name(true));
    check_keys(source, &command, table)?;
    let mut arguments = Vec::new();
    for (key, value) in table {
        arguments.extend(one_option(source, key, value)?);
    }
    let of_clap = |error| Failure::from_clap(source, " serve", &error);
    let matches = command.try_get_matches_from(arguments).map_err(of_clap)?;
    let args = DiskArgs::from_arg_matches(&matches).map_err(of_clap)?;
    args.check()?;
    Ok(args)
}

fn source_of(path: &Path) -> String {
    format!("the configuration {}", path.display())
}

fn read(path: &Path, remedy: &str) -> Result<toml::Table, Failure> {
    let source = source_of(path);
    let text = std::fs::read_to_string(path)
        .map_err(|error| Failure::run(format!("read {source}"), error, remedy))?;
    parsed(&source, &text)
}

fn parsed(source: &str, text: &str) -> Result<toml::Table, Failure> {
    text.parse().map_err(|error: toml::de::Error| {
        let line = error.span().map_or(1, |at| 1 + text[..at.start].matches('\n').count());
        let why = format!("line {line}: {}", error.message());
        wrong(source, why, "write KEY = VALUE lines (TOML)")
    })
}

/// The valid keys of a file, sorted.
pub fn known_keys(serve: &Command) -> Vec<&str> {
    let mut keys: Vec<&str> = serve.get_arguments().filter_map(|arg| arg.get_long()).collect();
    keys.retain(|key| !COMMAND_LINE_ONLY.contains(key));
    keys.sort_unstable();
    keys
}

fn check_keys(source: &str, serve: &Command, table: &toml::Table) -> Result<(), Failure> {
    let known = known_keys(serve);
    match table.keys().find(|key| !known.contains(&key.as_str())) {
        None => Ok(()),
        Some(key) => {
            let remedy = format!("use one of {}", known.join(", "));
            Err(wrong(source, format!("unknown key `{key}`"), remedy))
        }
    }
}

/// Returns whether the command line overrides `key`.
fn is_overridden(key: &str, given: &ArgMatches) -> bool {
    let on_command_line =
        |key: &str| given.value_source(&key.replace('-', "_")) == Some(ValueSource::CommandLine);
    match SOCKET_CHOICES.contains(&key) {
        true => SOCKET_CHOICES.into_iter().any(on_command_line),
        false => on_command_line(key),
    }
}

/// Converts `key = value` to arguments.
fn one_option(source: &str, key: &str, value: &Value) -> Result<Vec<OsString>, Failure> {
    let argument = |text: &str| OsString::from(format!("--{key}={text}"));
    match value {
        Value::Array(items) if key == "wrap" => items
            .iter()
            .map(|item| match item {
                Value::String(text) => Ok(argument(text)),
                _ => Err(wrong(source, "`wrap` has an item that is no string", "quote each item")),
            })
            .collect(),
        Value::Integer(_) if MODES.contains(&key) => {
            Err(wrong(source, format!("`{key}` is a number"), "quote it: \"0660\""))
        }
        Value::String(text) => Ok(vec![argument(text)]),
        Value::Integer(number) => Ok(vec![argument(&number.to_string())]),
        Value::Float(number) => Ok(vec![argument(&number.to_string())]),
        Value::Boolean(yes) => Ok(vec![argument(if *yes { "on" } else { "off" })]),
        other => {
            let why = format!("`{key}` is of type {}", other.type_str());
            Err(wrong(source, why, "give a string, a number or true/false"))
        }
    }
}

fn wrong(source: &str, why: impl std::fmt::Display, remedy: impl std::fmt::Display) -> Failure {
    Failure::usage(format!("use {source}"), why, remedy)
}
