// SPDX-License-Identifier: Apache-2.0
//! The machine and the versions, so that numbers can be reproduced.

use std::fs;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result};

/// Names of facts in the report's head: the processor, its cores, if it is a virtual machine, the
/// kernel's release, and the time.
pub const CPU_NAME: &str = "CPU";
/// See [`CPU_NAME`].
pub const CORES_NAME: &str = "cores";
/// See [`CPU_NAME`].
pub const VM_NAME: &str = "virtual machine";
/// See [`CPU_NAME`].
pub const KERNEL_NAME: &str = "kernel";
/// See [`CPU_NAME`].
pub const DATE_NAME: &str = "date";

/// The kernel's release.
pub fn kernel() -> String {
    let release = fs::read_to_string("/proc/sys/kernel/osrelease");
    release.map_or_else(|_| "unknown".to_owned(), |release| release.trim().to_owned())
}

/// Names and values for the report's head.
pub fn describe() -> Vec<(String, String)> {
    let line_of = |path: &str, start: &str| {
        let text = fs::read_to_string(path).unwrap_or_default();
        let line = text.lines().find(|line| line.starts_with(start));
        line.and_then(|line| line.split_once(':')).map(|(_, value)| value.trim().to_owned())
    };
    let unknown = || "unknown".to_owned();
    let cores = std::thread::available_parallelism().map(|n| n.to_string());
    let hypervisor = line_of("/proc/cpuinfo", "flags")
        .is_some_and(|flags| flags.split(' ').any(|flag| flag == "hypervisor"));
    let setup = [
        (CPU_NAME, line_of("/proc/cpuinfo", "model name").unwrap_or_else(unknown)),
        (CORES_NAME, cores.unwrap_or_else(|_| unknown())),
        (VM_NAME, if hypervisor { "yes" } else { "no" }.to_owned()),
        ("memory", line_of("/proc/meminfo", "MemTotal").unwrap_or_else(unknown)),
        (KERNEL_NAME, kernel()),
        (DATE_NAME, date()),
        ("fio", version("fio")),
        ("bench", env!("CARGO_PKG_VERSION").to_owned()),
        ("command", std::env::args().collect::<Vec<_>>().join(" ")),
    ];
    setup.into_iter().map(|(name, value)| (name.to_owned(), value)).collect()
}

/// The time, for the record.
fn date() -> String {
    let output = Command::new("date").args(["-u", "-Iminutes"]).output();
    let text = output.map(|output| String::from_utf8_lossy(&output.stdout).trim().to_owned());
    text.unwrap_or_else(|_| "unknown".to_owned())
}

/// File system and device of a file.
pub fn storage_of(path: &Path) -> Result<String> {
    let output = Command::new("df").arg("--output=fstype,source").arg(path).output()?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let line = text.lines().nth(1).context("df printed no file system")?;
    let (kind, device) = line.split_once(char::is_whitespace).unwrap_or((line, ""));
    let name = device.trim().trim_start_matches("/dev/");
    let of = |what: &str| {
        let text = fs::read_to_string(format!("/sys/class/block/{name}/queue/{what}"));
        text.map_or_else(|_| "unknown".to_owned(), |text| text.trim().to_owned())
    };
    Ok(format!(
        "{kind} on {name}, scheduler {}, nr_requests {}, write cache {}",
        of("scheduler"),
        of("nr_requests"),
        of("write_cache")
    ))
}

/// First line of what a program says about its version.
pub fn version(program: &str) -> String {
    let output = Command::new(program).arg("--version").output();
    let text = output.map(|o| String::from_utf8_lossy(&o.stdout).into_owned());
    let text = text.unwrap_or_else(|e| format!("not usable ({e})"));
    text.lines().next().unwrap_or("unknown").to_owned()
}
