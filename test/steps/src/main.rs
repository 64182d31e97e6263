// SPDX-License-Identifier: Apache-2.0
//! Runs all steps. The last line of the output is `N passed, N failed, N skipped`; the exit code is
//! 0 only if nothing failed.

use std::path::Path;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, Result};
use steps::run::{Run, new_log_directory};

/// Limit of the whole run: CI allows 90 minutes.
const RUN_MAX: Duration = Duration::from_secs(88 * 60);
/// Exit code after Ctrl-C, as shells have it.
const INTERRUPTED: u8 = 130;

fn main() -> ExitCode {
    match all() {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("make test: {error:#}");
            ExitCode::from(if kit::interrupt::check().is_err() { INTERRUPTED } else { 1 })
        }
    }
}

fn all() -> Result<bool> {
    kit::interrupt::install()?;
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).ancestors().nth(2).context("no checkout")?;
    let logs = new_log_directory()?;
    let mut run = Run::new(root, std::io::stdout(), &logs, RUN_MAX)?;
    steps::plan::run_all(&mut run)?;
    run.finish()
}
