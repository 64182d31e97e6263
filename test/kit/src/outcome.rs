// SPDX-License-Identifier: Apache-2.0
//! The end of a case, as an exit status and lines of its output.

use std::fmt;
use std::process::ExitCode;

use anyhow::Result;

/// Exit status of a case that cannot run here.
pub const SKIPPED: u8 = 4;

/// Begins the line that says why it cannot.
pub const SKIP: &str = "SKIP: ";

/// Begins a line by which a case that passes says what it had to leave out.
pub const PARTLY_SKIPPED: &str = "PARTLY SKIPPED: ";

/// Begins a line that says that a run was begun anew, because the emulator has failed.
pub const BOOTED_AGAIN: &str = "BOOTED AGAIN: ";

/// Begins a line that names a message which the case provokes in the kernel's log: a part of it.
pub const EXPECT_LOG: &str = "EXPECT-LOG: ";

/// Reason that a case cannot run here.
#[derive(Debug)]
pub struct Skip(String);

impl fmt::Display for Skip {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Skip {}

/// An error that ends the case as skipped.
pub fn skip(reason: impl Into<String>) -> anyhow::Error {
    anyhow::Error::new(Skip(reason.into()))
}

/// Says that the kernel's log will have a line with this, and that it is meant to.
pub fn expect_log(part: &str) {
    println!("{EXPECT_LOG}{part}");
}

/// Says that requests fail on purpose, and with them what the kernel reads or writes by itself.
pub fn expect_io_errors() {
    for part in ["I/O error, dev ", "Buffer I/O error on dev ", "critical target error, dev "] {
        expect_log(part);
    }
}

/// Says that a part of the case cannot run here, and why.
pub fn skip_part(reason: impl fmt::Display) {
    println!("{PARTLY_SKIPPED}{reason}");
}

/// Says why a case cannot run here; the program's exit status.
pub fn skipped(reason: impl fmt::Display) -> ExitCode {
    println!("{SKIP}{reason}");
    ExitCode::from(SKIPPED)
}

/// The reason not to run that lies at the root of an error, if that is what it is.
fn reason_to_skip(why: &anyhow::Error) -> Option<&Skip> {
    why.root_cause().downcast_ref()
}

/// The exit status of a program that ran `name`. A failure, or with [`Skip`] at its root the reason
/// not to run, is reported.
pub fn exit_code(name: &str, outcome: Result<()>) -> ExitCode {
    let Err(why) = outcome else { return ExitCode::SUCCESS };
    match reason_to_skip(&why) {
        Some(reason) => skipped(reason),
        None => {
            eprintln!("{name}: FAILED: {why:#}");
            ExitCode::FAILURE
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reason_to_skip_is_found_below_its_context() {
        // Not by exit_code(), which would print the reason as this test's own.
        let why = skip("no xfs").context("while it began");
        assert_eq!(reason_to_skip(&why).map(ToString::to_string).as_deref(), Some("no xfs"));
        assert!(reason_to_skip(&anyhow::anyhow!("no xfs")).is_none());
    }

    #[test]
    fn any_other_error_is_a_failure_and_none_is_success() {
        assert_eq!(exit_code("a-case", Err(anyhow::anyhow!("no"))), ExitCode::FAILURE);
        assert_eq!(exit_code("a-case", Ok(())), ExitCode::SUCCESS);
    }
}
