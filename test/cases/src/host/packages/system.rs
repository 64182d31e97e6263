// SPDX-License-Identifier: Apache-2.0
//! The Debian system of the machine: its packages, services and files.

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};
use kit::system::run;

/// Directory with the packages of two versions.
const PACKAGES: &str = "/lab/packages";

/// A part of the newer version's file names.
const NEWER: &str = "+newer";

/// Places whose files are no package's: logs, caches and states of apt, dpkg and systemd.
const NOT_COMPARED: &[&str] = &[
    "/lab",
    "/root",
    "/tmp",
    "/var/tmp",
    "/var/log",
    "/var/cache/apt",
    "/var/cache/debconf",
    "/var/cache/ldconfig",
    "/var/lib/apt",
    "/var/lib/dpkg",
    "/var/lib/systemd",
];

/// A version of the packages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Version {
    /// The version of the sources.
    Old,
    /// The same programs with a newer version.
    New,
}

/// Installs or upgrades packages; returns the output of apt and of the packages' scripts.
pub(super) fn install(names: &[&str], version: Version) -> Result<String> {
    let paths: Result<Vec<String>> = names.iter().map(|name| package(name, version)).collect();
    apt(&format!("install {}", paths?.join(" ")))
}

/// The path of a package.
fn package(name: &str, version: Version) -> Result<String> {
    for entry in fs::read_dir(PACKAGES).context(PACKAGES)? {
        let path = entry?.path();
        let file = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        if file.starts_with(&format!("{name}_"))
            && file.contains(NEWER) == (version == Version::New)
        {
            return Ok(path.to_string_lossy().into_owned());
        }
    }
    bail!("{PACKAGES} has no package {name} of the version {version:?}")
}

/// Runs apt-get as an operator does, without the lab's directory in `$PATH`.
pub(super) fn apt(arguments: &str) -> Result<String> {
    let said = sh(&format!(
        "PATH=/usr/sbin:/usr/bin:/sbin:/bin DEBIAN_FRONTEND=noninteractive \
         apt-get -q -y --no-install-recommends -o Dpkg::Use-Pty=0 {arguments} 2>&1"
    ))?;
    println!("apt-get {arguments}\n{said}");
    Ok(said)
}

/// Runs a line of the shell.
pub(super) fn sh(line: &str) -> Result<String> {
    run("sh", &["-c", line])
}

/// A property of a unit.
pub(super) fn property(unit: &str, name: &str) -> Result<String> {
    run("systemctl", &["show", "--value", "--property", name, unit])
}

/// Fails if the unit is not in the given state.
pub(super) fn expect_state(unit: &str, expected: &str) -> Result<()> {
    let state = property(unit, "ActiveState")?;
    ensure!(state == expected, "{unit} is {state}, not {expected}");
    Ok(())
}

/// The main process of a unit.
pub(super) fn main_pid(unit: &str) -> Result<u32> {
    let pid = property(unit, "MainPID")?;
    pid.parse().with_context(|| format!("{unit}: the process `{pid}`"))
}

/// True if the unit's process runs the program that is installed now.
pub(super) fn runs_installed_program(unit: &str) -> Result<bool> {
    let program = fs::read_link(format!("/proc/{}/exe", main_pid(unit)?))?;
    Ok(program == Path::new("/usr/bin/vhost-blk"))
}

/// Fails if a file has another mode or group.
pub(super) fn expect_access(path: &str, mode: u32, group: &str) -> Result<()> {
    let metadata = fs::metadata(path).with_context(|| path.to_owned())?;
    let has = metadata.permissions().mode() & 0o7777;
    ensure!(has == mode, "{path} has the mode {has:o}, not {mode:o}");
    let entry = run("getent", &["group", group]).with_context(|| format!("no group {group}"))?;
    let gid = entry.split(':').nth(2).unwrap_or_default();
    ensure!(metadata.gid().to_string() == gid, "{path} does not belong to the group {group}");
    Ok(())
}

/// The names of all files that packages may have made.
pub(super) fn files() -> Result<BTreeSet<PathBuf>> {
    let list = run("find", &["/", "/usr/lib/modules", "-xdev"])?;
    let all = list.lines().map(PathBuf::from);
    Ok(all.filter(|file| !NOT_COMPARED.iter().any(|place| file.starts_with(place))).collect())
}

/// Fails if files came or went.
pub(super) fn expect_same_files(before: &BTreeSet<PathBuf>) -> Result<()> {
    let now = files()?;
    let left: Vec<_> = now.difference(before).collect();
    ensure!(left.is_empty(), "the purge left {left:?}");
    let lost: Vec<_> = before.difference(&now).collect();
    ensure!(lost.is_empty(), "the purge took {lost:?}");
    let running = sh("ls -d /run/vhost-blk* 2>/dev/null || true")?;
    ensure!(running.is_empty(), "the purge left {running}");
    Ok(())
}
