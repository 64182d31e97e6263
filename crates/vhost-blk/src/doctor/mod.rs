// SPDX-License-Identifier: Apache-2.0
//! `vhost-blk doctor`: looks at the machine and says what will and will not work.

mod host;
mod kvm;
mod module;
mod storage;
mod uring;
mod vmm;

use crate::values;
use clap::Args;
use serde_json::json;
use std::fmt;
use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;

/// Arguments of `vhost-blk doctor`.
#[derive(Args, Clone, Debug)]
pub struct DoctorArgs {
    /// Image or block device to look at, too; it is only read
    #[arg(long, value_name = "PATH")]
    pub blk_file: Option<PathBuf>,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
    /// Virtqueues that are meant to be served
    #[arg(long, value_name = "N", value_parser = values::num_queues)]
    pub num_queues: Option<u16>,
}

/// How a check went.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// Works.
    Ok,
    /// Nothing is wrong; good to know.
    Info,
    /// Serving works, something else does not.
    Warn,
    /// Serving does not work.
    Fail,
}

impl fmt::Display for Outcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Outcome::Ok => "ok",
            Outcome::Info => "info",
            Outcome::Warn => "warn",
            Outcome::Fail => "fail",
        })
    }
}

/// What one check found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Finding {
    /// The check's name.
    pub check: &'static str,
    /// How it went.
    pub outcome: Outcome,
    /// In plain words.
    pub message: String,
    /// What to do about it; empty where there is nothing to do.
    pub remedy: String,
}

impl Finding {
    fn new(check: &'static str, outcome: Outcome, message: impl Into<String>) -> Finding {
        Finding { check, outcome, message: message.into(), remedy: String::new() }
    }

    fn remedy(mut self, remedy: impl Into<String>) -> Finding {
        self.remedy = remedy.into();
        self
    }
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:<4}  {:<14}  {}", self.outcome, self.check, self.message)?;
        match self.remedy.is_empty() {
            true => Ok(()),
            false => write!(f, "; {}", self.remedy),
        }
    }
}

/// Runs `vhost-blk doctor`: exit code 0 if serving would work.
pub fn doctor(args: &DoctorArgs) -> ExitCode {
    let mut findings = vec![host::kernel(), uring::io_uring()];
    match &args.blk_file {
        Some(path) => findings.extend([storage::direct(path), storage::lock(path)]),
        None => findings.push(
            Finding::new("o_direct", Outcome::Info, "not tried: no image is given")
                .remedy("give --blk-file PATH"),
        ),
    }
    findings.extend([
        host::memlock(),
        module::module(args.blk_file.as_deref()),
        host::hugepages(),
        host::cpus(args.num_queues),
        vmm::qemu(),
        kvm::kvm(),
    ]);
    let works = findings.iter().all(|finding| finding.outcome != Outcome::Fail);
    let report = if args.json { as_json(&findings, works) } else { as_text(&findings, works) };
    // A reader that has seen enough is no failure of the machine.
    let _ = std::io::stdout().write_all(report.as_bytes());
    if works { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

fn as_text(findings: &[Finding], works: bool) -> String {
    let verdict = if works { "serving a disk works here" } else { "serving a disk fails here" };
    let mut lines: Vec<String> = findings.iter().map(Finding::to_string).collect();
    lines.push(verdict.to_owned());
    lines.join("\n") + "\n"
}

fn as_json(findings: &[Finding], works: bool) -> String {
    let checks: Vec<_> = findings
        .iter()
        .map(|finding| {
            json!({
                "check": finding.check,
                "outcome": finding.outcome.to_string(),
                "message": finding.message,
                "remedy": finding.remedy,
            })
        })
        .collect();
    format!("{}\n", json!({ "works": works, "checks": checks }))
}
