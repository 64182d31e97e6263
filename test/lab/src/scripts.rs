// SPDX-License-Identifier: Apache-2.0
//! The shell scripts that fetch kernels, build modules (`scripts/kernel`) and packages, for people and
//! for the lab alike.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail};

/// The checkout this program was built from: the lab tests a working tree.
pub(crate) fn checkout() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// Runs a script of `scripts/kernel`, its messages going to ours, and gives the directory that it prints.
pub(crate) fn directory_from(script: &str, args: &[&str]) -> Result<PathBuf> {
    let text = output_of(Command::new(checkout().join("scripts/kernel").join(script)).args(args))?;
    let line = text.lines().last().with_context(|| format!("{script} printed no directory"))?;
    Ok(PathBuf::from(line))
}

/// Builds the Debian packages of a build of the daemon into a directory; gives their paths. Debugging
/// symbols are left out.
pub(crate) fn packages(program: &Path, output: &Path, suffix: &str) -> Result<Vec<PathBuf>> {
    let mut build = Command::new(checkout().join("scripts/deb.sh"));
    build.arg("--program").arg(program).arg("--output").arg(output);
    if !suffix.is_empty() {
        build.args(["--suffix", suffix]);
    }
    let text = output_of(build.env("DEB_BUILD_OPTIONS", "noautodbgsym"))?;
    Ok(text.lines().map(PathBuf::from).collect())
}

fn output_of(command: &mut Command) -> Result<String> {
    let name = Path::new(command.get_program()).display().to_string();
    let output = command
        .stdin(Stdio::null())
        .stderr(Stdio::inherit())
        .output()
        .with_context(|| format!("cannot start {name}"))?;
    if !output.status.success() {
        bail!("{name} failed ({}): see above", output.status);
    }
    String::from_utf8(output.stdout).context("a path that is not UTF-8")
}
