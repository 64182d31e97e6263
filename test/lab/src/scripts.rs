// SPDX-License-Identifier: Apache-2.0
//! The shell scripts of `scripts/kernel`: they fetch kernels and build modules, for people and for
//! the lab alike.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail};

/// The checkout this program was built from: the lab tests a working tree.
pub(crate) fn checkout() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// Runs a script, its messages going to ours, and gives the folder that it prints.
pub(crate) fn folder_from(script: &str, args: &[&str]) -> Result<PathBuf> {
    let path = checkout().join("scripts/kernel").join(script);
    let output = Command::new(&path)
        .args(args)
        .stdin(Stdio::null())
        .stderr(Stdio::inherit())
        .output()
        .with_context(|| format!("cannot start {}", path.display()))?;
    if !output.status.success() {
        bail!("scripts/kernel/{script} failed ({}): see above", output.status);
    }
    let text = String::from_utf8(output.stdout).context("a path that is not UTF-8")?;
    let line = text.lines().last().with_context(|| format!("{script} printed no folder"))?;
    Ok(PathBuf::from(line))
}
