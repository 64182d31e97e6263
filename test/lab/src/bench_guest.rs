// SPDX-License-Identifier: Apache-2.0
//! `lab bench-guest`: all ways to attach a disk to a guest, compared on this machine itself under KVM.

use std::ffi::OsString;
use std::os::unix::fs::symlink;
use std::process::Command;

use anyhow::{Context, Result, bail};

use crate::accel::Accel;
use crate::qemu;
use crate::run::Lab;

/// Program with the comparison, beside the lab's own.
const CASES: &str = "cases";

/// Runs `cases nested-bench` with `more` options; returns its exit code.
///
/// # Errors
/// No guest boots under KVM here, the program was not built, or it was killed.
pub fn run(lab: &Lab, more: &[String]) -> Result<u8> {
    let reason = &lab.choice.reason;
    if lab.choice.accel != Accel::Kvm {
        bail!(
            "{reason}: emulation would distort the comparison; take a machine with KVM, or measure in \
             a VM of the lab (make bench-lab ARGS=\"--only nested\")"
        );
    }
    let own = std::env::current_exe()?;
    let cases = own.with_file_name(CASES);
    if !cases.exists() {
        bail!("{} is missing: build it (cargo build --release -p cases)", cases.display());
    }
    // One directory for the boot files of guests, and for what is made from them.
    let directory = tempfile::Builder::new().prefix("bench-guest-").tempdir()?;
    symlink(lab.base.kernel.vmlinuz(), directory.path().join("vmlinuz"))?;
    symlink(lab.base.image.path(), directory.path().join("root.img"))?;
    let mut command = Command::new(&cases);
    command.args(["nested-bench", "--on-host", "--bin"]).arg(own.parent().unwrap_or(&own));
    command.arg("--guest").arg(directory.path()).arg("--work").arg(directory.path()).args(more);
    if let Some(programs) = qemu::missing_programs_directory(&lab.cache)? {
        command.env("PATH", with_directory(programs.into_os_string()));
    }
    let status = command.status().with_context(|| cases.display().to_string())?;
    let code = status.code().with_context(|| format!("{CASES} was ended: {status}"))?;
    Ok(u8::try_from(code).unwrap_or(1))
}

/// `$PATH` with one more directory at the end.
fn with_directory(directory: OsString) -> OsString {
    let mut path = std::env::var_os("PATH").unwrap_or_default();
    path.push(":");
    path.push(directory);
    path
}
