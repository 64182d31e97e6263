// SPDX-License-Identifier: Apache-2.0
//! The outermost form of an error: one line with cause and remedy, and an exit code.

use std::fmt;
use std::process::ExitCode;

/// An error that ends the program. Displays as one line: `cannot WHAT: WHY; REMEDY`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failure {
    line: String,
    code: u8,
}

impl Failure {
    /// An error outside the command line (exit code 1).
    pub fn run(what: impl fmt::Display, why: impl fmt::Display, remedy: impl fmt::Display) -> Self {
        Failure { line: one_line(&format!("cannot {what}: {why}; {remedy}")), code: 1 }
    }

    /// An error in the command line or the configuration file (exit code 2).
    pub fn usage(
        what: impl fmt::Display,
        why: impl fmt::Display,
        remedy: impl fmt::Display,
    ) -> Self {
        Failure { code: 2, ..Failure::run(what, why, remedy) }
    }

    /// As [`Failure::run`], where `why` already ends with the remedy.
    pub fn told(what: impl fmt::Display, why: impl fmt::Display) -> Self {
        Failure { line: one_line(&format!("cannot {what}: {why}")), code: 1 }
    }

    /// The error of clap about the arguments of `command` from `source`, in one line.
    pub fn from_clap(source: &str, command: &str, error: &clap::Error) -> Self {
        let text = error.to_string();
        let told: Vec<&str> = text
            .lines()
            .map(str::trim)
            .take_while(|line| !line.starts_with("Usage:") && !line.starts_with("For more"))
            .filter(|line| !line.is_empty())
            .collect();
        let told = told.join(" ").replace(" tip: ", "; ");
        let why = told.strip_prefix("error: ").unwrap_or(&told);
        Failure::usage(format!("read {source}"), why, format!("see vhost-blk{command} --help"))
    }

    /// The process's exit code.
    pub fn exit_code(&self) -> ExitCode {
        ExitCode::from(self.code)
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.line)
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
}
