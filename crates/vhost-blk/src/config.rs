// SPDX-License-Identifier: Apache-2.0
//! The configuration file: every option of `serve` by its long name. A disk of `daemon` has a file
//! with the options of one disk, or the same table in a command.
//!
//! The file becomes command-line arguments: both have the same parser and the same checks. The
//! command line of `serve` overrides the file.

use crate::failure::Failure;
use crate::options::DiskArgs;
use crate::values::MetricsAddress;
use clap::error::{ContextKind, ContextValue};
use clap::parser::ValueSource;
use clap::{Arg, ArgMatches, Args, Command, FromArgMatches};
use std::any::TypeId;
use std::error::Error as _;
use std::ffi::OsString;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
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
    let text = read(path, "check --config")?;
    let from = Origin { source: &source_of(path), text: &text };
    let table = from.table()?;
    check_keys(&from, serve, &table)?;
    let mut arguments = Vec::new();
    let mut wanted = Vec::new();
    for (key, value) in &table {
        let these = one_option(&from, serve, key, value)?;
        if !is_overridden(key, given) {
            wanted.extend(these.iter().cloned());
        }
        arguments.extend(these);
    }
    // Check the values of the file separately: the message then names the file.
    let alone = [OsString::from("serve")].into_iter().chain(arguments);
    serve.clone().try_get_matches_from(alone).map_err(|error| from.refused(&error))?;
    Ok(wanted)
}

/// The options of a disk from its file.
///
/// # Errors
/// [`Failure`] if the file cannot be read, or a key or value is wrong.
pub fn disk_of_file(path: &Path) -> Result<DiskArgs, Failure> {
    disk_of_text(path, &read(path, "check its permissions")?)
}

/// The options of a disk from the text of its file.
///
/// # Errors
/// [`Failure`] if a key or value is wrong.
pub fn disk_of_text(path: &Path, text: &str) -> Result<DiskArgs, Failure> {
    let from = Origin { source: &source_of(path), text };
    let args = disk_of(&from, &from.table()?)?;
    args.check().map_err(|failure| of_file(path, failure))?;
    Ok(args)
}

/// The options of a disk from a table of `source`.
///
/// # Errors
/// [`Failure`] if a key or value is wrong, or options contradict each other.
pub fn disk_of_table(source: &str, table: &toml::Table) -> Result<DiskArgs, Failure> {
    let args = disk_of(&Origin { source, text: "" }, table)?;
    args.check()?;
    Ok(args)
}

fn disk_of(from: &Origin<'_>, table: &toml::Table) -> Result<DiskArgs, Failure> {
    let mut command = DiskArgs::augment_args(Command::new("disk").no_binary_name(true));
    command.build();
    check_keys(from, &command, table)?;
    let mut arguments = Vec::new();
    for (key, value) in table {
        arguments.extend(one_option(from, &command, key, value)?);
    }
    let of_clap = |error| from.refused(&error);
    let matches = command.try_get_matches_from(arguments).map_err(of_clap)?;
    DiskArgs::from_arg_matches(&matches).map_err(of_clap)
}

/// A failure of options, as one of the file that has them: with its path, and with keys in place of options of the
/// command line.
pub fn of_file(path: &Path, failure: Failure) -> Failure {
    let source = source_of(path);
    if failure.what.contains(&source) {
        return failure;
    }
    let what = format!("use {source}");
    let why = as_keys(&format!("cannot {}: {}", failure.what, failure.why));
    Failure { what, why, remedy: as_keys(&failure.remedy), ..failure }
}

/// The text with keys, in backquotes, in place of options of the command line and of the names of their values.
fn as_keys(text: &str) -> String {
    let mut words = text.split(' ').peekable();
    let mut told = Vec::new();
    while let Some(word) = words.next() {
        let Some(option) = word.strip_prefix("--") else {
            told.push(word.to_owned());
            continue;
        };
        let is_key = |c: char| c.is_ascii_lowercase() || c == '-';
        let (key, rest) = option.split_at(option.find(|c| !is_key(c)).unwrap_or(option.len()));
        told.push(format!("`{key}`{rest}"));
        words.next_if(|next| !next.is_empty() && next.bytes().all(|b| b.is_ascii_uppercase()));
    }
    told.join(" ")
}

fn source_of(path: &Path) -> String {
    format!("the configuration {}", path.display())
}

/// The text of a file. A file that is none is a wrong configuration; any other failure may pass.
fn read(path: &Path, remedy: &str) -> Result<String, Failure> {
    let what = format!("read {}", source_of(path));
    std::fs::read_to_string(path).map_err(|error| match error.kind() {
        ErrorKind::NotFound if path.symlink_metadata().is_ok() => Failure::usage(
            what,
            "it is a link to a file that does not exist",
            "make that file, or remove the link",
        ),
        ErrorKind::NotFound => Failure::usage(what, error, remedy),
        ErrorKind::IsADirectory => {
            Failure::usage(what, "it is a directory", "write a file, or rename the directory")
        }
        ErrorKind::InvalidData => Failure::usage(what, "it is not UTF-8", "write it in UTF-8"),
        _ => Failure::run(what, error, remedy),
    })
}

/// The place of options, for errors.
struct Origin<'a> {
    source: &'a str,
    /// The text of a file; empty for other tables.
    text: &'a str,
}

impl Origin<'_> {
    fn table(&self) -> Result<toml::Table, Failure> {
        self.text.parse().map_err(|error: toml::de::Error| {
            let before = |at: std::ops::Range<usize>| self.text[..at.start].matches('\n').count();
            let line = error.span().map_or(1, |at| 1 + before(at));
            let why = format!("line {line}: {}", error.message());
            Failure::usage(self.act(), why, "write KEY = VALUE lines (TOML)")
        })
    }

    /// An error of `key`, on its line.
    fn wrong(
        &self,
        key: &str,
        why: impl std::fmt::Display,
        remedy: impl std::fmt::Display,
    ) -> Failure {
        Failure::usage(self.act(), format!("{}{why}", self.line_of(key)), remedy)
    }

    /// The error of the parser of the command line.
    fn refused(&self, error: &clap::Error) -> Failure {
        let context = |kind| match error.get(kind) {
            Some(ContextValue::String(text)) => Some(text.as_str()),
            _ => None,
        };
        let option = context(ContextKind::InvalidArg).and_then(|it| it.strip_prefix("--"));
        let key = option.and_then(|option| option.split([' ', '=', '[']).next());
        let remedy = match (error.source(), error.get(ContextKind::ValidValue)) {
            (Some(why), _) => Some(why.to_string()),
            (None, Some(ContextValue::Strings(words))) => {
                Some(format!("give one of {}", words.join(", ")))
            }
            _ => None,
        };
        match (key, context(ContextKind::InvalidValue), remedy) {
            (Some(key), Some(value), Some(remedy)) => {
                self.wrong(key, format!("`{key}` is '{value}'"), remedy)
            }
            _ => Failure::from_clap(self.source, " serve", error),
        }
    }

    fn act(&self) -> String {
        format!("use {}", self.source)
    }

    /// The line of a key, as the begin of an error; empty if there is none.
    fn line_of(&self, key: &str) -> String {
        let has_key = |line: &str| {
            let rest = line.trim_start().strip_prefix(key);
            rest.is_some_and(|rest| rest.trim_start().starts_with('='))
        };
        let at = self.text.lines().position(has_key);
        at.map_or_else(String::new, |at| format!("line {}: ", at + 1))
    }
}

/// The valid keys of a file, sorted.
pub fn known_keys(serve: &Command) -> Vec<&str> {
    let mut keys: Vec<&str> = serve.get_arguments().filter_map(|arg| arg.get_long()).collect();
    keys.retain(|key| !COMMAND_LINE_ONLY.contains(key));
    keys.sort_unstable();
    keys
}

fn check_keys(from: &Origin<'_>, serve: &Command, table: &toml::Table) -> Result<(), Failure> {
    let known = known_keys(serve);
    match table.keys().find(|key| !known.contains(&key.as_str())) {
        None => Ok(()),
        Some(key) => {
            let remedy = format!("use one of {}", known.join(", "));
            Err(from.wrong(key, format!("unknown key `{key}`"), remedy))
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
fn one_option(
    from: &Origin<'_>,
    command: &Command,
    key: &str,
    value: &Value,
) -> Result<Vec<OsString>, Failure> {
    let argument = |text: &str| OsString::from(format!("--{key}={text}"));
    let wanted = || {
        let mut all = command.get_arguments();
        all.find(|arg| arg.get_long() == Some(key)).map_or(Wanted::Text, Wanted::of)
    };
    let text = match value {
        Value::Array(items) if key == "wrap" => {
            let each = items.iter().map(|item| match item {
                Value::String(text) => Ok(argument(text)),
                _ => {
                    Err(from.wrong(key, "`wrap` has an item that is no string", "quote each item"))
                }
            });
            return each.collect();
        }
        Value::Integer(_) if MODES.contains(&key) => {
            return Err(from.wrong(key, format!("`{key}` is a number"), "quote it: \"0660\""));
        }
        // Its parser judges it.
        Value::String(text) => Some(text.clone()),
        Value::Integer(number) if wanted() == Wanted::Number => Some(number.to_string()),
        Value::Float(number) if wanted() == Wanted::Number => Some(number.to_string()),
        Value::Boolean(yes) => match (wanted(), if *yes { "on" } else { "off" }) {
            (Wanted::Word(words), word) if words.iter().any(|it| it == word) => Some(word.into()),
            _ => None,
        },
        _ => None,
    };
    match text {
        Some(text) => Ok(vec![argument(&text)]),
        None => {
            let why = format!("`{key}` is of type {}", value.type_str());
            Err(from.wrong(key, why, format!("give {}", wanted().told())))
        }
    }
}

/// The type of the value of a key. A string is right for each of them.
#[derive(PartialEq)]
enum Wanted {
    /// A path, a name, or another text.
    Text,
    /// One of these words.
    Word(Vec<String>),
    /// A number, which may have a unit.
    Number,
}

impl Wanted {
    fn of(arg: &Arg) -> Wanted {
        let words = arg.get_possible_values();
        let parser = arg.get_value_parser().type_id();
        let texts =
            [TypeId::of::<String>(), TypeId::of::<PathBuf>(), TypeId::of::<MetricsAddress>()];
        match words.is_empty() {
            false => Wanted::Word(words.iter().map(|word| word.get_name().to_owned()).collect()),
            true if texts.iter().any(|text| parser == *text) => Wanted::Text,
            true => Wanted::Number,
        }
    }

    fn told(&self) -> String {
        match self {
            Wanted::Text => "a string, in quotes".to_owned(),
            Wanted::Word(words) if *words == ["on", "off"] => "true or false".to_owned(),
            Wanted::Word(words) => format!("a string: {}", words.join(", ")),
            Wanted::Number => "a number, or a string".to_owned(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options_in_an_error_become_the_keys_of_a_file() {
        for (text, told) in [
            ("give --socket-path PATH", "give `socket-path`"),
            ("--size is for null and mem", "`size` is for null and mem"),
            ("give --socket-path, or drop --fd N", "give `socket-path`, or drop `fd`"),
        ] {
            assert_eq!(as_keys(text), told);
        }
    }
}
