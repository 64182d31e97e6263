// SPDX-License-Identifier: Apache-2.0
//! Bare fio on the same file: the rate of the storage without any virtqueue.

use std::path::Path;
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail};

use crate::load::Op;
use crate::report::Sample;

/// True if fio is installed.
pub fn installed() -> bool {
    let probe = Command::new("fio").arg("--version").stdout(Stdio::null()).status();
    probe.is_ok_and(|status| status.success())
}

/// fio's arguments for one measurement.
pub fn arguments(
    file: &Path,
    op: Op,
    block_bytes: u32,
    depth: u16,
    cpus: &[usize],
    seconds: f64,
) -> Vec<String> {
    let rw = if op == Op::Randread { "randread" } else { "randwrite" };
    let mut args = vec![
        "--name=bare".to_owned(),
        format!("--filename={}", file.display()),
        format!("--rw={rw}"),
        format!("--bs={block_bytes}"),
        format!("--iodepth={depth}"),
        format!("--runtime={}ms", (seconds * 1e3) as u64),
        "--ramp_time=200ms".to_owned(),
    ];
    let fixed = "--ioengine=io_uring --fixedbufs --registerfiles --direct=1 --time_based \
                 --norandommap --randrepeat=0 --output-format=json";
    args.extend(fixed.split_whitespace().map(str::to_owned));
    if !cpus.is_empty() {
        let list: Vec<_> = cpus.iter().map(usize::to_string).collect();
        args.push(format!("--cpus_allowed={}", list.join(",")));
    }
    args
}

/// Runs fio once; it ends after its runtime, or with this process.
pub fn measure(args: &[String]) -> Result<Sample> {
    let output = Command::new("setpriv")
        .args(["--pdeathsig", "KILL", "--", "fio"])
        .args(args)
        .stdin(Stdio::null())
        .output()
        .context("cannot run fio")?;
    if !output.status.success() {
        bail!("fio failed: {}", String::from_utf8_lossy(&output.stderr).trim());
    }
    parse(&String::from_utf8_lossy(&output.stdout))
}

/// Parses the JSON of one run of fio.
pub fn parse(text: &str) -> Result<Sample> {
    // Notes may precede the JSON.
    let json = &text[text.find('{').context("fio printed no JSON")?..];
    let output: serde_json::Value = serde_json::from_str(json).context("fio's JSON is broken")?;
    let job = &output["jobs"][0];
    let side = if job["read"]["total_ios"].as_u64() > Some(0) { "read" } else { "write" };
    let number = |value: &serde_json::Value, name: &str| {
        value.as_f64().with_context(|| format!("fio's JSON has no {name}"))
    };
    let iops = number(&job[side]["iops"], "iops")?;
    let percentiles = &job[side]["clat_ns"]["percentile"];
    let busy = number(&job["usr_cpu"], "usr_cpu")? + number(&job["sys_cpu"], "sys_cpu")?;
    Ok(Sample {
        iops,
        cpu_us_per_io: busy / 100.0 * 1e6 / iops,
        p50_us: number(&percentiles["50.000000"], "median latency")? / 1e3,
        p99_us: number(&percentiles["99.000000"], "99th percentile")? / 1e3,
        // fio hardly sleeps here: when it did not run, it waited for a CPU or the host had taken
        // it.
        waited_percent: (100.0 - busy).max(0.0),
    })
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
        let sample = parse(text).unwrap();
        assert_eq!((sample.iops, sample.p50_us, sample.p99_us), (500_000.0, 50.0, 90.0));
        assert!((sample.cpu_us_per_io - 2.0).abs() < 1e-9);
    }

    #[test]
    fn fio_output_without_json_is_an_error() {
        assert_eq!(parse("fio: bad option").unwrap_err().to_string(), "fio printed no JSON");
    }
}
