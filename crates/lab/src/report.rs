// SPDX-License-Identifier: Apache-2.0
//! Measurements of the guest and the table that compares them.

use std::collections::BTreeMap;
use std::fmt;

use anyhow::{Context, Result};

use crate::guest::GuestReport;

/// One kind of load: fio's pattern and iodepth.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Load {
    /// fio's `rw=`.
    pub pattern: String,
    /// fio's `iodepth=`.
    pub depth: u32,
}

/// I/O per second for each load, as one guest measured it.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Measurement {
    iops: BTreeMap<Load, f64>,
}

impl Measurement {
    /// Reads the `fio` lines of a guest.
    pub fn from_report(report: &GuestReport) -> Result<Self> {
        let mut iops = BTreeMap::new();
        for line in report.values("fio") {
            let (load, value) = parse_line(line).context("fio's report cannot be read")?;
            iops.insert(load, value);
        }
        Ok(Self { iops })
    }
}

/// Reads `PATTERN DEPTH JSON`.
fn parse_line(line: &str) -> Result<(Load, f64)> {
    let mut parts = line.splitn(3, ' ');
    let pattern = parts.next().context("no pattern")?.to_owned();
    let depth = parts.next().context("no iodepth")?.parse()?;
    // fio may print notes before its JSON.
    let text = parts.next().context("no report")?;
    let text = &text[text.find('{').context("no JSON")?..];
    let json: serde_json::Value = serde_json::from_str(text)?;
    let direction = if pattern.ends_with("read") { "read" } else { "write" };
    let iops = json["jobs"][0][direction]["iops"].as_f64().context("no iops")?;
    Ok((Load { pattern, depth }, iops))
}

/// Both sides of the comparison, each as a list of measurements.
#[derive(Debug, Clone, Default)]
pub struct Comparison {
    /// The name of the server that was measured.
    pub server: String,
    /// The disk served by it.
    pub ours: Vec<Measurement>,
    /// QEMU's own virtio-blk, by its `aio=` setting.
    pub qemu: BTreeMap<&'static str, Vec<Measurement>>,
}

impl fmt::Display for Comparison {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "  {:<20} {:>20} {:>18} {:>9}   QEMU's aio=",
            "4 KiB, IOPS", self.server, "QEMU virtio-blk", "ratio"
        )?;
        let loads = self.ours.first().map(|first| first.iops.keys()).into_iter().flatten();
        for load in loads {
            let ours = median_of(&self.ours, load);
            let (aio, qemu) = self
                .qemu
                .iter()
                .map(|(aio, runs)| (*aio, median_of(runs, load)))
                .max_by(|left, right| left.1.total_cmp(&right.1))
                .unwrap_or(("-", 0.0));
            let name = format!("{} iodepth {}", load.pattern, load.depth);
            let ratio = ours / qemu;
            writeln!(f, "  {name:<20} {ours:>20.0} {qemu:>18.0} {ratio:>9.2}   {aio}")?;
        }
        Ok(())
    }
}

fn median_of(runs: &[Measurement], load: &Load) -> f64 {
    let mut values: Vec<f64> = runs.iter().filter_map(|run| run.iops.get(load)).copied().collect();
    values.sort_by(f64::total_cmp);
    let middle = values.len() / 2;
    match values.len() {
        0 => 0.0,
        length if length % 2 == 1 => values[middle],
        _ => (values[middle - 1] + values[middle]) / 2.0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn measured(iops: f64) -> Measurement {
        let load = Load { pattern: "randread".into(), depth: 1 };
        Measurement { iops: [(load, iops)].into() }
    }

    #[test]
    fn iops_are_read_from_the_direction_that_the_pattern_names() {
        let json = r#"note {"jobs":[{"read":{"iops":1.5},"write":{"iops":2.5}}]}"#;
        let (load, iops) = parse_line(&format!("randwrite 32 {json}")).unwrap();
        assert_eq!((load.pattern.as_str(), load.depth, iops), ("randwrite", 32, 2.5));
        assert_eq!(parse_line(&format!("randread 1 {json}")).unwrap().1, 1.5);
        assert!(parse_line("randread 1 nothing").is_err());
    }

    #[test]
    fn the_table_compares_medians_with_the_better_of_qemus_settings() {
        let comparison = Comparison {
            server: "vhost-blk".to_owned(),
            ours: vec![measured(100.0), measured(300.0)],
            qemu: [("io_uring", vec![measured(50.0)]), ("native", vec![measured(80.0)])].into(),
        };
        let table = comparison.to_string();
        let row = table.lines().nth(1).unwrap();
        for word in ["200", "80", "2.50", "native"] {
            assert!(row.contains(word), "{word} is not in: {row}");
        }
    }

    #[test]
    fn the_median_of_an_even_number_is_between_the_middle_two() {
        let runs = [measured(1.0), measured(9.0), measured(3.0), measured(5.0)];
        let load = Load { pattern: "randread".into(), depth: 1 };
        assert_eq!(median_of(&runs, &load), 4.0);
        assert_eq!(median_of(&runs[..3], &load), 3.0);
    }
}
