// SPDX-License-Identifier: Apache-2.0
//! The VMM.

use super::{Finding, Outcome};
use std::process::Command;

/// Name of the QEMU program.
pub(super) const QEMU: &str = "qemu-system-x86_64";

pub(super) fn qemu() -> Finding {
    let install = "install it (Debian: qemu-system-x86), or use another VMM with vhost-user-blk";
    let Some(version) = output(&["--version"]) else {
        let message = format!("{QEMU} is not installed");
        return Finding::new("qemu", Outcome::Info, message).remedy(install);
    };
    let version = version.lines().next().unwrap_or_default().to_owned();
    match output(&["-device", "help"]) {
        Some(devices) if devices.contains("\"vhost-user-blk-pci\"") => {
            Finding::new("qemu", Outcome::Ok, format!("{version} has vhost-user-blk-pci"))
        }
        Some(_) => {
            Finding::new("qemu", Outcome::Warn, format!("{version} lacks vhost-user-blk-pci"))
                .remedy("install a QEMU built with vhost-user")
        }
        None => Finding::new("qemu", Outcome::Warn, format!("{version} does not list its devices"))
            .remedy("reinstall it"),
    }
}

fn output(arguments: &[&str]) -> Option<String> {
    let output = Command::new(QEMU).args(arguments).output().ok()?;
    output.status.success().then(|| String::from_utf8_lossy(&output.stdout).into_owned())
}
