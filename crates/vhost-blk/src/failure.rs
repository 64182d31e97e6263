// SPDX-License-Identifier: Apache-2.0
//! The outermost form of an error: one line with cause and remedy, and an exit code.

use serde_json::{Value, json};
use std::fmt;
use std::io::Write;
use std::path::Path;
use std::process::ExitCode;

/// The sort of an error, for an exit code or an error of the control protocol.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sort {
    /// A failure at run time.
    Run,
    /// An error in the command line, the configuration or the options of a disk.
    Usage,
    /// There is no disk of this name.
    NoSuchDisk,
    /// The daemon serves as many others as it can.
    Busy,
    /// No daemon answers a client.
    NoAnswer,
}

/// An error that ends the program or a command. Displays as one line: `cannot WHAT: WHY; REMEDY`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failure {
    /// The failed act.
    pub what: String,
    /// The cause.
    pub why: String,
    /// The remedy; empty if `why` has it.
    pub remedy: String,
    /// The sort of the error.
    pub sort: Sort,
    /// The name of the error with which a daemon has answered; `None`: the failure is this program's own.
    pub error: Option<String>,
    /// The image that another program, or another disk, has; `None`: another failure.
    pub in_use: Option<Box<Path>>,
}

impl Failure {
    /// An error outside the command line (exit code 1).
    pub fn run(what: impl fmt::Display, why: impl fmt::Display, remedy: impl fmt::Display) -> Self {
        Failure {
            what: one_line(&what.to_string()),
            why: one_line(&why.to_string()),
            remedy: one_line(&remedy.to_string()),
            sort: Sort::Run,
            error: None,
            in_use: None,
        }
    }

    /// An error in the command line or the configuration file (exit code 2).
    pub fn usage(
        what: impl fmt::Display,
        why: impl fmt::Display,
        remedy: impl fmt::Display,
    ) -> Self {
        Failure { sort: Sort::Usage, ..Failure::run(what, why, remedy) }
    }

    /// As [`Failure::run`], where `why` already ends with the remedy.
    pub fn told(what: impl fmt::Display, why: impl fmt::Display) -> Self {
        let told = why.to_string();
        let (why, remedy) = told.rsplit_once("; ").unwrap_or((&told, ""));
        Failure::run(what, why, remedy)
    }

    /// The cause, with the remedy.
    pub fn cause(&self) -> String {
        match &*self.remedy {
            "" => self.why.clone(),
            remedy => format!("{}; {remedy}", self.why),
        }
    }

    /// The error of clap about the arguments of `command` from `source`, in one line.
    pub fn from_clap(source: &str, command: &str, error: &clap::Error) -> Self {
        let text = error.to_string();
        let told: Vec<&str> = text
            .lines()
            .map(str::trim)
            .take_while(|line| !line.starts_with("Usage:") && !line.starts_with("For more"))
            // No word of a command begins with a dash.
            .filter(|line| !line.is_empty() && !line.starts_with("tip: to pass "))
            .collect();
        let told = told.join(" ").replace(" tip: ", "; ");
        let why = told.strip_prefix("error: ").unwrap_or(&told);
        Failure::usage(format!("read {source}"), why, format!("see vhost-blk{command} --help"))
    }

    /// The process's exit code.
    pub fn exit_code(&self) -> ExitCode {
        ExitCode::from(self.status())
    }

    fn status(&self) -> u8 {
        match self.sort {
            Sort::Run | Sort::NoSuchDisk | Sort::Busy => 1,
            Sort::Usage => 2,
            Sort::NoAnswer => 3,
        }
    }

    /// Prints the failure on standard error.
    pub fn tell(&self, as_json: bool) {
        // A failed write to stderr has no remedy.
        let _ = match as_json {
            true => writeln!(std::io::stderr(), "{}", self.to_json()),
            false => writeln!(std::io::stderr(), "vhost-blk: {self}"),
        };
    }

    /// The error for a program that has asked for JSON.
    pub fn to_json(&self) -> Value {
        let Failure { what, why, remedy, error, .. } = self;
        json!({
            "what": what, "why": why, "remedy": remedy, "error": error, "exit_code": self.status(),
        })
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "cannot {}: {}", self.what, self.cause())
    }
}

impl std::error::Error for Failure {}

/// Replaces control characters (for example a line break in a file name) by spaces.
fn one_line(text: &str) -> String {
    text.chars().map(|c| if c.is_control() { ' ' } else { c }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_break_in_a_cause_does_not_break_the_line() {
        let failure = Failure::run("open a\nb", "it is odd", "rename it");
        assert_eq!(failure.to_string(), "cannot open a b: it is odd; rename it");
    }

    #[test]
    fn a_told_cause_is_parted_from_its_remedy_and_reads_the_same() {
        let failure = Failure::told("switch", "a; and b; do c");
        assert_eq!((&*failure.why, &*failure.remedy), ("a; and b", "do c"));
        assert_eq!(failure.to_string(), "cannot switch: a; and b; do c");
        assert_eq!(Failure::told("switch", "a").to_string(), "cannot switch: a");
    }
}
