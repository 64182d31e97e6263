// SPDX-License-Identifier: Apache-2.0
//! `vhost-blk check`: checks the tables of a qcow2 image.

use super::readable_bytes;
use crate::failure::Failure;
use crate::output::print;
use crate::values::LockMode;
use backend::lock::{Access, lock_image};
use clap::{Args, ValueEnum};
use qcow2::check::{self, Report};
use serde_json::json;
use std::fmt::Write as _;
use std::fs::{self, File};
use std::path::PathBuf;
use std::process::ExitCode;

/// Arguments of `vhost-blk check`.
#[derive(Args, Debug)]
pub struct CheckArgs {
    /// A qcow2 image; it is only read without --repair
    pub path: PathBuf,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
    /// Lock of the image; without it, changes by another program look like errors
    #[arg(long, value_name = "MODE", default_value = "auto")]
    pub lock: LockMode,
    /// Repair these, if there are no errors
    #[arg(long, value_name = "WHAT")]
    pub repair: Option<Repair>,
}

/// Findings that can be repaired.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Repair {
    /// Clusters that take space and hold no data.
    Leaks,
}

/// Runs `vhost-blk check`. The exit codes are those of `qemu-img check`.
///
/// # Errors
/// [`Failure`] if the image cannot be checked.
pub fn check(args: &CheckArgs) -> Result<ExitCode, Failure> {
    let report = report(args)?;
    let text = if args.json { as_json(args, &report) } else { as_text(args, &report) };
    print(text)?;
    Ok(ExitCode::from(match report {
        Report { errors: 1.., .. } => 2,
        Report { leaks: 1.., .. } => 3,
        _ => 0,
    }))
}

fn report(args: &CheckArgs) -> Result<Report, Failure> {
    let what = "check the image";
    let repairs = args.repair == Some(Repair::Leaks);
    if repairs && args.lock == LockMode::Off {
        let why = "a repair of an image in use destroys it";
        return Err(Failure::run(what, why, "leave --lock at auto"));
    }
    let shown = args.path.display();
    let failed = |why: std::io::Error| {
        let why = format!("{shown}: {why}");
        Failure::run(what, why, "check the path and its permissions")
    };
    if !fs::metadata(&args.path).map_err(failed)?.is_file() {
        let why = format!("{shown}: it is no regular file");
        return Err(Failure::run(what, why, "give a qcow2 image"));
    }
    let file = File::options().read(true).write(repairs).open(&args.path).map_err(failed)?;
    if args.lock == LockMode::Auto {
        let access = if repairs { Access::Write } else { Access::Read };
        lock_image(&file, &args.path, access).map_err(|why| Failure::told(what, why))?;
    }
    let checked = match repairs {
        true => qcow2::repair(&args.path, &file),
        false => check::check(&args.path, &file),
    };
    checked.map_err(|why| Failure::told(what, why))
}

fn as_text(args: &CheckArgs, report: &Report) -> String {
    let mut text = report.findings.join("\n");
    if !report.findings.is_empty() {
        text.push('\n');
    }
    let mut line = |line: String| writeln!(text, "{line}").expect("a string grows");
    let image = args.path.display();
    let untold = report.errors + report.leaks - report.findings.len() as u64;
    if untold > 0 {
        line(format!("and {untold} more"));
    }
    if report.errors > 0 {
        let errors = counted(report.errors, "error");
        let remedy = "repair a copy with `qemu-img check -r all`";
        line(format!("{errors}: data is damaged, or will be; {remedy}"));
    }
    if report.leaks > 0 {
        let space = readable_bytes(report.leaks.saturating_mul(report.cluster_bytes));
        let remedy = match report.errors {
            0 => format!("free them with `vhost-blk check --repair leaks {image}`"),
            _ => "errors come first".to_owned(),
        };
        let leaks = counted(report.leaks, "leaked cluster");
        line(format!("{leaks} without data ({space}); {remedy}"));
    }
    if report.repaired_leaks > 0 {
        line(format!("freed {}", counted(report.repaired_leaks, "leaked cluster")));
    }
    if report.is_dirty || report.is_marked_corrupt {
        let mark = if report.is_dirty { "not closed properly" } else { "corrupt" };
        line(format!("the image is marked {mark}; `qemu-img check -r all {image}` removes it"));
    }
    line(format!(
        "{} of {} clusters are allocated; the last one in use ends at {}",
        report.allocated_clusters, report.total_clusters, report.end_bytes
    ));
    if report.errors + report.leaks == 0 {
        line("no errors were found".to_owned());
    }
    text
}

fn counted(number: u64, what: &str) -> String {
    format!("{number} {what}{}", if number == 1 { "" } else { "s" })
}

fn as_json(args: &CheckArgs, report: &Report) -> String {
    let reply = json!({
        "path": args.path.display().to_string(),
        "errors": report.errors,
        "leaks": report.leaks,
        "repaired_leaks": report.repaired_leaks,
        "findings": report.findings,
        "allocated_clusters": report.allocated_clusters,
        "total_clusters": report.total_clusters,
        "cluster_bytes": report.cluster_bytes,
        "end_bytes": report.end_bytes,
        "dirty": report.is_dirty,
        "marked_corrupt": report.is_marked_corrupt,
    });
    format!("{reply:#}\n")
}
