// SPDX-License-Identifier: Apache-2.0
//! fio: the arguments of its jobs, and its results.

use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use serde_json::Value;

use crate::outcome::skip;

/// True if fio is installed.
pub fn installed() -> bool {
    let probe = Command::new("fio").arg("--version").stdout(Stdio::null()).status();
    probe.is_ok_and(|status| status.success())
}

/// The arguments of one job, which begin a command line.
#[derive(Clone, Debug)]
pub struct Job(Vec<String>);

impl Job {
    /// A job on a file or a disk.
    pub fn new(name: &str, path: &str) -> Self {
        Self(vec![format!("--name={name}"), format!("--filename={path}")])
    }

    /// Adds arguments, separated by spaces.
    pub fn with(mut self, arguments: &str) -> Self {
        self.0.extend(arguments.split_whitespace().map(str::to_owned));
        self
    }

    /// Lets the job run for a time, without a map of the blocks that it has used and without the
    /// same numbers each time.
    pub fn timed(self, seconds: f64, ramp_ms: u32) -> Self {
        let runtime = (seconds * 1e3) as u64;
        self.with(&format!(
            "--time_based --runtime={runtime}ms --ramp_time={ramp_ms}ms --norandommap --randrepeat=0"
        ))
    }

    /// The arguments.
    pub fn arguments(&self) -> &[String] {
        &self.0
    }

    /// The command line of a measurement, for a shell.
    pub fn command_line(&self) -> String {
        format!("fio --output-format=json {}", self.0.join(" "))
    }

    /// Measures once. fio ends with this process, and is killed at the limit.
    pub fn measure(&self, limit: Duration) -> Result<Outcome> {
        let limit = format!("{}", limit.as_secs_f64());
        let output = Command::new("setpriv")
            .args(["--pdeathsig", "TERM", "--", "timeout", "--kill-after=5", &limit])
            .args(["fio", "--output-format=json"])
            .args(&self.0)
            .stdin(Stdio::null())
            .output()
            .context("cannot run fio")?;
        // The exit code of `timeout` for a program that does not exist.
        if output.status.code() == Some(127) {
            return Err(skip("fio is not installed"));
        }
        if !output.status.success() {
            let said = String::from_utf8_lossy(&output.stderr);
            bail!("fio: {}: {}", output.status, said.trim());
        }
        Outcome::parse(&String::from_utf8_lossy(&output.stdout))
    }
}

/// The result of a job (or of a group of jobs): the rate of both directions together, latencies of
/// the one with more requests.
#[derive(Clone, Copy, Debug)]
pub struct Outcome {
    /// Requests a second.
    pub iops: f64,
    /// CPU time in percent of the run time.
    pub busy_percent: f64,
    /// Median latency.
    pub p50_us: f64,
    /// 99th percentile of latency.
    pub p99_us: f64,
}

impl Outcome {
    /// Parses fio's JSON.
    pub fn parse(text: &str) -> Result<Self> {
        // Notes may precede the JSON.
        let json = &text[text.find('{').context("fio printed no JSON")?..];
        let output: Value = serde_json::from_str(json).context("fio's JSON is broken")?;
        let job = &output["jobs"][0];
        let ios = |side: &str| job[side]["total_ios"].as_u64().unwrap_or(0);
        let (side, other) =
            if ios("read") >= ios("write") { ("read", "write") } else { ("write", "read") };
        let number = |value: &Value, name: &str| {
            value.as_f64().with_context(|| format!("fio's JSON has no {name}"))
        };
        let other_iops = if ios(other) > 0 { number(&job[other]["iops"], "iops")? } else { 0.0 };
        let percentiles = &job[side]["clat_ns"]["percentile"];
        Ok(Self {
            iops: number(&job[side]["iops"], "iops")? + other_iops,
            busy_percent: number(&job["usr_cpu"], "usr_cpu")? + number(&job["sys_cpu"], "sys_cpu")?,
            p50_us: number(&percentiles["50.000000"], "median latency")? / 1e3,
            p99_us: number(&percentiles["99.000000"], "99th percentile")? / 1e3,
        })
    }

    /// CPU time for each request.
    pub fn cpu_us(&self) -> f64 {
        self.busy_percent / 100.0 * 1e6 / self.iops
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fio_output_gives_iops_cpu_and_latency() {
        let text = r#"note: something
            {"jobs": [{"usr_cpu": 20.0, "sys_cpu": 80.0,
              "read": {"total_ios": 5, "iops": 500000.0,
                "clat_ns": {"percentile": {"50.000000": 50000, "99.000000": 90000}}},
              "write": {"total_ios": 0}}]}"#;
        let outcome = Outcome::parse(text).unwrap();
        assert_eq!((outcome.iops, outcome.p50_us, outcome.p99_us), (500_000.0, 50.0, 90.0));
        assert!((outcome.cpu_us() - 2.0).abs() < 1e-9);
    }

    #[test]
    fn rates_of_both_directions_add_up() {
        let text = r#"{"jobs": [{"usr_cpu": 20.0, "sys_cpu": 80.0,
              "read": {"total_ios": 7, "iops": 700.0,
                "clat_ns": {"percentile": {"50.000000": 50000, "99.000000": 90000}}},
              "write": {"total_ios": 3, "iops": 300.0,
                "clat_ns": {"percentile": {"50.000000": 1000, "99.000000": 2000}}}}]}"#;
        let outcome = Outcome::parse(text).unwrap();
        assert_eq!((outcome.iops, outcome.p50_us), (1000.0, 50.0));
    }

    #[test]
    fn fio_output_without_json_is_an_error() {
        assert_eq!(
            Outcome::parse("fio: bad option").unwrap_err().to_string(),
            "fio printed no JSON"
        );
    }

    #[test]
    fn a_timed_job_ends_after_its_run_time() {
        let line =
            Job::new("a", "/dev/x").with("--rw=read  --bs=4k").timed(0.5, 200).command_line();
        assert!(line.starts_with("fio --output-format=json --name=a --filename=/dev/x --rw=read"));
        assert!(line.contains(" --time_based --runtime=500ms --ramp_time=200ms "), "{line}");
    }
}
