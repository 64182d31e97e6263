// SPDX-License-Identifier: Apache-2.0
//! `vhost-blk doctor`: checks the machine and reports what works.

mod device;
mod engine;
mod host;
mod image;
mod kvm;
mod module;
mod name;
mod parts;
mod setting;
mod speed;
mod storage;
mod uring;
mod vmm;

use crate::output::print;
use crate::values;
use clap::Args;
use serde_json::json;
use std::fmt;
use std::path::PathBuf;
use std::process::ExitCode;

/// Arguments of `vhost-blk doctor`.
#[derive(Args, Clone, Debug)]
pub struct DoctorArgs {
    /// Image or block device to check as well; it is only read
    #[arg(long, value_name = "PATH")]
    pub blk_file: Option<PathBuf>,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
    /// Intended number of virtqueues
    #[arg(long, value_name = "N", value_parser = values::num_queues)]
    pub num_queues: Option<u16>,
}

/// Result of a check.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// It works.
    Ok,
    /// Information without a problem.
    Info,
    /// A problem that does not prevent serving.
    Warn,
    /// A problem that prevents serving.
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

/// The finding of one check.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Finding {
    /// Name of the check.
    pub check: &'static str,
    /// Result.
    pub outcome: Outcome,
    /// Description of the result.
    pub message: String,
    /// Remedy; empty if none is needed.
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

/// Runs `vhost-blk doctor`. The exit code is 0 if serving would work.
pub fn doctor(args: &DoctorArgs) -> ExitCode {
    let mut findings = vec![host::kernel(), uring::io_uring()];
    let found = args.blk_file.as_deref().map(image::inspect);
    match (&args.blk_file, &found) {
        (Some(path), Some(Ok(found))) => {
            findings.extend([
                image::image(path, found),
                storage::direct(path),
                storage::lock(path),
            ]);
            findings.extend(device::device(path));
        }
        // Nothing else is tried with it.
        (_, Some(Err(unreadable))) => findings.push(unreadable.clone()),
        _ => findings.push(
            Finding::new("o_direct", Outcome::Info, "not tried: no image is given")
                .remedy("give --blk-file PATH"),
        ),
    }
    findings.extend([
        host::memlock(),
        match (&args.blk_file, &found) {
            (Some(path), Some(Ok(found))) if image::is_qcow2(found) => module::of_qcow2(path),
            (path, _) => module::module(path.as_deref()),
        },
        host::hugepages(),
        host::cpus(args.num_queues),
        vmm::qemu(),
        kvm::kvm(),
    ]);
    let works = findings.iter().all(|finding| finding.outcome != Outcome::Fail);
    let report = if args.json { as_json(&findings, works) } else { as_text(&findings, works) };
    match print(report) {
        Err(failure) => {
            failure.tell(args.json);
            ExitCode::FAILURE
        }
        Ok(()) if works => ExitCode::SUCCESS,
        Ok(()) => ExitCode::FAILURE,
    }
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
