// SPDX-License-Identifier: Apache-2.0
//! Programs of the system, and the kernel's modules.

use std::io::ErrorKind;
use std::process::Command;

use anyhow::{Context, Result, bail};

use crate::outcome::skip;

/// Runs a program; returns what it printed. Skips the case where it is not installed.
pub fn run(program: &str, arguments: &[&str]) -> Result<String> {
    let output = match Command::new(program).args(arguments).output() {
        Err(why) if why.kind() == ErrorKind::NotFound => {
            return Err(skip(format!("{program} is not installed")));
        }
        output => output.with_context(|| format!("cannot run {program}"))?,
    };
    let said = String::from_utf8_lossy(&output.stdout).trim().to_owned();
    if !output.status.success() {
        let why = String::from_utf8_lossy(&output.stderr);
        bail!("{program} {}: {}: {} {said}", arguments.join(" "), output.status, why.trim());
    }
    Ok(said)
}

/// As [`run`], for clean-up: a failure is only told.
pub fn run_quietly(program: &str, arguments: &[&str]) {
    if let Err(why) = run(program, arguments) {
        eprintln!("clean-up: {why:#}");
    }
}

/// Loads a module, or skips the case where the kernel has none of that name.
pub fn modprobe(module: &str, parameters: &[&str]) -> Result<()> {
    let arguments = [&["-q", module], parameters].concat();
    run("modprobe", &arguments)
        .map(drop)
        .map_err(|_| skip(format!("this kernel has no module {module}")))
}
