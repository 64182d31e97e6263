// SPDX-License-Identifier: Apache-2.0
//! Measurements of the guest and the table that compares them.

use std::fmt;

use anyhow::{Context, Result};
use kit::fio::Outcome;
use kit::metric::{IOPS, Point, Row, Set, point};

use crate::guest::GuestReport;

/// Reads `DISK PATTERN DEPTH JSON`: the number of a disk, a load and its requests a second.
fn parse_line(line: &str) -> Result<(usize, Point, f64)> {
    let mut parts = line.splitn(4, ' ');
    let disk = parts.next().context("no disk")?.parse()?;
    let pattern = parts.next().context("no pattern")?;
    let depth: u32 = parts.next().context("no iodepth")?.parse()?;
    let outcome = Outcome::parse(parts.next().context("no report")?)?;
    Ok((disk, point(&[("pattern", &pattern), ("depth", &depth)]), outcome.iops))
}

/// Both sides of the comparison.
#[derive(Debug, Clone)]
pub struct Comparison {
    /// The disks by number: the server's, then QEMU's own virtio-blk by its `aio=` settings.
    names: Vec<String>,
    loads: Set,
}

/// Measurements on each side from which a claim may follow: with this many, all of one side are
/// better than all of the other by chance in less than one comparison of a hundred.
const ROUNDS_FOR_A_CLAIM: usize = 5;

impl Comparison {
    /// A comparison without measurements: of a server and of QEMU's own device with each `aio`.
    pub fn new(server: &str, aio: &[&str]) -> Self {
        let own = aio.iter().map(|aio| format!("{QEMU}{aio}"));
        Self { names: [server.to_owned()].into_iter().chain(own).collect(), loads: Set::default() }
    }

    /// The names of the disks, by number.
    pub fn names(&self) -> &[String] {
        &self.names
    }

    /// Adds the measurements of a guest.
    pub fn add(&mut self, report: &GuestReport) -> Result<()> {
        for line in report.values("fio") {
            let (disk, load, iops) = parse_line(line).context("fio's report cannot be read")?;
            self.add_one(disk, &load, iops)?;
        }
        Ok(())
    }

    fn add_one(&mut self, disk: usize, load: &Point, iops: f64) -> Result<()> {
        let name =
            self.names.get(disk).with_context(|| format!("no disk has the number {disk}"))?;
        self.loads.add(name, load, vec![(IOPS, iops)]);
        Ok(())
    }
}

/// The beginning of the names of QEMU's devices.
const QEMU: &str = "QEMU virtio-blk aio=";

/// The statement that the difference of two rows allows.
fn verdict(ours: &Row, other: &Row) -> &'static str {
    let ((least, most), (other_least, other_most)) = (ours.range(IOPS), other.range(IOPS));
    let apart = least > other_most || most < other_least;
    let rounds = ours.values(IOPS).len().min(other.values(IOPS).len());
    match (apart, rounds >= ROUNDS_FOR_A_CLAIM) {
        (false, _) => "within the noise",
        (true, false) => "too few rounds",
        (true, true) if ours.median(IOPS) > other.median(IOPS) => "faster",
        (true, true) => "slower",
    }
}

/// The verdict on the goal of a row: no slower than QEMU. A lower median is a miss if no value
/// reaches those of QEMU.
fn goal(ours: &Row, other: &Row) -> &'static str {
    let (most, other_least) = (ours.range(IOPS).1, other.range(IOPS).0);
    match ours.over(other, IOPS) >= 1.0 {
        true => "met",
        false if most < other_least => "missed",
        false => "within the noise",
    }
}

fn spread(row: &Row) -> String {
    let (least, most) = row.range(IOPS);
    format!("{:.0} ({least:.0}-{most:.0})", row.median(IOPS))
}

impl fmt::Display for Comparison {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "  {:<20} {:>22} {:>22} {:>6}  {:<17} {:<17} QEMU's aio=",
            "4 KiB, IOPS", self.names[0], "QEMU virtio-blk", "ratio", "difference", "goal: >= 1.00"
        )?;
        for ours in self.loads.of(&self.names[0]) {
            let best = self.loads.most(&ours.point, IOPS, |name| name.starts_with(QEMU));
            let Some(best) = best else { continue };
            let name = format!("{} iodepth {}", ours.label("pattern"), ours.label("depth"));
            let (ratio, verdict) = (ours.over(best, IOPS), verdict(ours, best));
            let goal = goal(ours, best);
            let aio = best.subject.trim_start_matches(QEMU);
            let (ours, qemu) = (spread(ours), spread(best));
            writeln!(
                f,
                "  {name:<20} {ours:>22} {qemu:>22} {ratio:>6.2}  {verdict:<17} {goal:<17} {aio}"
            )?;
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

    #[test]
    fn a_line_of_the_guest_gives_a_load_and_its_rate() {
        let json = r#"note {"jobs":[{"usr_cpu": 1.0, "sys_cpu": 1.0, "read": {"total_ios": 0},
            "write": {"total_ios": 9, "iops": 2.5,
            "clat_ns": {"percentile": {"50.000000": 1, "99.000000": 2}}}}]}"#;
        let (disk, load, iops) = parse_line(&format!("2 randwrite 32 {json}")).unwrap();
        assert_eq!(disk, 2);
        assert_eq!((load["pattern"].as_str(), load["depth"].as_str()), ("randwrite", "32"));
        assert_eq!(iops, 2.5);
        assert!(parse_line("0 randread 1 nothing").is_err());
    }

    fn compared(ours: &[f64], native: &[f64]) -> String {
        let load = point(&[("pattern", &"randread"), ("depth", &1)]);
        let mut comparison = Comparison::new("vhost-blk", &["io_uring", "native"]);
        for (disk, values) in [(0, ours), (1, &[50.0]), (2, native)] {
            values.iter().for_each(|&iops| comparison.add_one(disk, &load, iops).unwrap());
        }
        assert!(comparison.add_one(3, &load, 1.0).is_err());
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
    fn each_row_has_the_verdict_on_its_goal() {
        let goal = |ours: &[f64], native: &[f64]| {
            let row = compared(ours, native);
            let (_, goal) = row.trim_end_matches("native").trim_end().rsplit_once("  ").unwrap();
            goal.trim().to_owned()
        };
        assert_eq!(goal(&[100.0, 120.0], &[105.0, 115.0]), "met");
        assert_eq!(goal(&[99.0, 101.0], &[100.0, 104.0]), "within the noise");
        assert_eq!(goal(&[98.0, 99.0], &[100.0, 104.0]), "missed");
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
}
