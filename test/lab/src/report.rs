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

/// Measurements on each side from which a claim may follow: with this many, all of one side are
/// better than all of the other by chance in less than one comparison of a hundred.
const ROUNDS_FOR_A_CLAIM: usize = 5;

/// The summary of repeated measurements of one load, in I/O per second.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Spread {
    count: usize,
    least: f64,
    median: f64,
    most: f64,
}

impl Spread {
    /// `None` if no run has the load.
    fn of(runs: &[Measurement], load: &Load) -> Option<Self> {
        let mut values: Vec<f64> =
            runs.iter().filter_map(|run| run.iops.get(load)).copied().collect();
        values.sort_by(f64::total_cmp);
        let (least, most) = (*values.first()?, *values.last()?);
        let count = values.len();
        let median = (values[(count - 1) / 2] + values[count / 2]) / 2.0;
        Some(Self { count, least, median, most })
    }

    /// The statement that the difference to `other` allows.
    fn against(self, other: Self) -> &'static str {
        let apart = self.least > other.most || self.most < other.least;
        match (apart, self.count.min(other.count) >= ROUNDS_FOR_A_CLAIM) {
            (false, _) => "within the noise",
            (true, false) => "too few rounds",
            (true, true) if self.median > other.median => "faster",
            (true, true) => "slower",
        }
    }
}

impl fmt::Display for Spread {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&format!("{:.0} ({:.0}-{:.0})", self.median, self.least, self.most))
    }
}

impl fmt::Display for Comparison {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "  {:<20} {:>22} {:>22} {:>6}  {:<17} QEMU's aio=",
            "4 KiB, IOPS", self.server, "QEMU virtio-blk", "ratio", "difference"
        )?;
        let loads = self.ours.first().map(|first| first.iops.keys()).into_iter().flatten();
        for load in loads {
            let best = self
                .qemu
                .iter()
                .filter_map(|(aio, runs)| Some((*aio, Spread::of(runs, load)?)))
                .max_by(|left, right| left.1.median.total_cmp(&right.1.median));
            let (Some(ours), Some((aio, qemu))) = (Spread::of(&self.ours, load), best) else {
                continue;
            };
            let name = format!("{} iodepth {}", load.pattern, load.depth);
            let (ratio, verdict) = (ours.median / qemu.median, ours.against(qemu));
            writeln!(f, "  {name:<20} {ours:>22} {qemu:>22} {ratio:>6.2}  {verdict:<17} {aio}")?;
        }
        writeln!(
            f,
            "  Medians (least-most). A difference counts if the ranges of at least \
             {ROUNDS_FOR_A_CLAIM} rounds\n  do not overlap: ARGS=\"--rounds {ROUNDS_FOR_A_CLAIM}\"."
        )
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

    fn compared(ours: &[f64], native: &[f64]) -> String {
        let all = |values: &[f64]| values.iter().copied().map(measured).collect();
        let comparison = Comparison {
            server: "vhost-blk".to_owned(),
            ours: all(ours),
            qemu: [("io_uring", vec![measured(50.0)]), ("native", all(native))].into(),
        };
        comparison.to_string().lines().nth(1).unwrap().to_owned()
    }

    #[test]
    fn the_table_compares_medians_and_ranges_with_the_better_of_qemus_settings() {
        let row = compared(&[100.0, 300.0], &[80.0]);
        for word in ["200 (100-300)", "80 (80-80)", "2.50", "native"] {
            assert!(row.contains(word), "{word} is not in: {row}");
        }
    }

    #[test]
    fn a_difference_counts_only_if_enough_rounds_do_not_overlap() {
        let (low, high) =
            ([100.0, 101.0, 102.0, 103.0, 104.0], [105.0, 106.0, 107.0, 108.0, 109.0]);
        assert!(compared(&high, &low).contains("faster"));
        assert!(compared(&low, &high).contains("slower"));
        assert!(compared(&high[..2], &low[..2]).contains("too few rounds"));
        let overlapping = [109.0, 106.0, 107.0, 108.0, 103.5];
        assert!(compared(&overlapping, &low).contains("within the noise"));
    }

    #[test]
    fn the_median_of_an_even_number_is_between_the_middle_two() {
        let runs = [measured(1.0), measured(9.0), measured(3.0), measured(5.0)];
        let load = Load { pattern: "randread".into(), depth: 1 };
        let median = |runs: &[Measurement]| Spread::of(runs, &load).unwrap().median;
        assert_eq!((median(&runs), median(&runs[..3])), (4.0, 3.0));
        assert_eq!(Spread::of(&[], &load), None);
    }
}
