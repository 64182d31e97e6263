// SPDX-License-Identifier: Apache-2.0
//! Programs of the system, and the kernel's modules.

use anyhow::Result;

use crate::outcome::skip;
use crate::process::run_to_end;

/// Runs a program; returns its output. Skips the case if it is not installed.
pub fn run(program: &str, arguments: &[&str]) -> Result<String> {
    run_to_end(&[&[program], arguments].concat()).map(|said| said.trim().to_owned())
}

/// As [`run`], for clean-up: a failure is only told.
pub fn run_quietly(program: &str, arguments: &[&str]) {
    if let Err(why) = run(program, arguments) {
        eprintln!("clean-up: {why:#}");
    }
}

/// Loads a module, or skips the case if the kernel has none of that name.
pub fn modprobe(module: &str, parameters: &[&str]) -> Result<()> {
    let arguments = [&["-q", module], parameters].concat();
    run("modprobe", &arguments)
        .map(drop)
        .map_err(|_| skip(format!("this kernel has no module {module}")))
}
