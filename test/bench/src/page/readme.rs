// SPDX-License-Identifier: Apache-2.0
//! The figures of the README: a few rows of the part without a VM, kept in the repository.

use std::fmt::Write;

use anyhow::{Context, Result};
use kit::metric::{IOPS, Row, Set};
use kit::report::{Report, Section};

use crate::server::{OURS, is_qsd};
use crate::setup::{CORES_NAME, CPU_NAME, DATE_NAME, KERNEL_NAME, VM_NAME};

/// The figures of the present README.
#[cfg(test)]
pub(super) const KEPT: &str = include_str!("../../../../docs/measurements/readme.json");

/// Storage and its name in the README.
pub(super) const STORAGE: [(&str, &str); 3] =
    [("file", "file on tmpfs"), ("disk", "file on the disk"), ("null", "nothing (`null`)")];
/// Depths of the figure.
pub(super) const DEPTHS: [&str; 4] = ["1", "4", "32", "128"];
/// Depths of the table.
const IN_TABLE: [&str; 2] = ["1", "32"];
/// Name of the version of qemu-storage-daemon.
const QSD: &str = "qemu-storage-daemon";

/// The rows and the facts of the machine that the README has, without any path.
pub(super) fn kept(native: &Report) -> Result<Report> {
    let section = native.sections.first().context("the part without a VM has no rows")?;
    let mut rows = Set::default();
    for row in section.rows.rows().iter().filter(|row| is_kept(row)) {
        for &rate in row.values(IOPS) {
            rows.add(&row.subject, &row.point, vec![(IOPS, rate)]);
        }
    }
    let facts = [CPU_NAME, CORES_NAME, VM_NAME, KERNEL_NAME, DATE_NAME, QSD];
    let setup = native.setup.iter().filter(|(name, _)| facts.contains(&name.as_str()));
    let mut kept = Report::new(&native.title, setup.cloned().collect());
    kept.sections.push(Section::new(&section.title, "", &rows, &[]));
    Ok(kept)
}

fn is_kept(row: &Row) -> bool {
    let label = |name| row.label(name);
    (row.subject == OURS || is_qsd(&row.subject))
        && [label("load"), label("block"), label("queues")] == ["randread", "4096", "1"]
        && label("client") == "event"
        && DEPTHS.contains(&label("depth"))
}

/// The table and the line on the machine.
pub(super) fn section(kept: &Report) -> String {
    let mut text = "| Storage | Depth | vhost-blk | qemu-storage-daemon | Ratio |\n\
                    |---|---:|---:|---:|---:|\n"
        .to_owned();
    for (storage, name) in STORAGE {
        for depth in IN_TABLE {
            let Some((ours, peer)) = with_peer(kept, storage, depth) else { continue };
            let [here, there] = [ours, peer].map(|row| row.median(IOPS) / 1000.0);
            let ratio = ours.over(peer, IOPS);
            let _ = writeln!(text, "| {name} | {depth} | {here:.0} | {there:.0} | {ratio:.2} |");
        }
    }
    text + "\n" + &machine(kept)
}

/// Our row of a storage at a depth, and the fastest one of qemu-storage-daemon.
pub(super) fn with_peer<'a>(
    kept: &'a Report,
    storage: &str,
    depth: &str,
) -> Option<(&'a Row, &'a Row)> {
    let rows = &kept.sections.first()?.rows;
    let is_here = |row: &&Row| [row.label("storage"), row.label("depth")] == [storage, depth];
    let ours = rows.of(OURS).find(is_here)?;
    Some((ours, rows.most(&ours.point, IOPS, is_qsd)?))
}

fn machine(kept: &Report) -> String {
    let fact = |wanted: &str| {
        let found = kept.setup.iter().find(|(name, _)| name == wanted);
        found.map_or("unknown", |(_, value)| value)
    };
    let kind = if fact(VM_NAME) == "yes" { "a virtual machine" } else { "hardware" };
    let (cores, cpu, kernel) = (fact(CORES_NAME), fact(CPU_NAME), fact(KERNEL_NAME));
    let day = fact(DATE_NAME).split('T').next().unwrap_or_default();
    let is_number = |word: &&str| word.starts_with(|first: char| first.is_ascii_digit());
    let qsd = fact(QSD).split_whitespace().find(is_number).unwrap_or("of unknown version");
    format!(
        "Machine: {kind} with {cores} cores, {cpu}, Linux {kernel}. Peer: qemu-storage-daemon \
         {qsd}. Measured on {day}."
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use kit::metric::{Set, point};

    fn native() -> Report {
        let mut set = Set::default();
        let add = |set: &mut Set, subject: &str, storage: &str, client: &str, rate: f64| {
            let place = point(&[
                ("storage", &storage),
                ("load", &"randread"),
                ("block", &"4096"),
                ("queues", &"1"),
                ("depth", &"1"),
                ("client", &client),
            ]);
            set.add(subject, &place, vec![(IOPS, rate)]);
        };
        for (subject, rate) in
            [(OURS, 30_000.0), ("qsd native", 15_000.0), ("qsd threads", 20_000.0)]
        {
            add(&mut set, subject, "null", "event", rate);
        }
        add(&mut set, OURS, "null", "spin", 90_000.0);
        add(&mut set, OURS, "file", "event", 90_000.0);
        let setup = [
            (CPU_NAME, "Fast"),
            (CORES_NAME, "2"),
            (VM_NAME, "yes"),
            (DATE_NAME, "2026-01-02T03:04+00:00"),
            (QSD, "qemu-storage-daemon version 7.2.1 (Debian)"),
            ("ours, null", "/a/path/of/this/machine"),
        ];
        let setup = setup.map(|(name, value)| (name.to_owned(), value.to_owned()));
        let mut report = Report::new("Set-up", setup.to_vec());
        report.sections.push(Section::new("Measurements", "", &set, &[]));
        report
    }

    #[test]
    fn a_row_needs_a_peer_and_the_best_one_counts() {
        let text = section(&kept(&native()).unwrap());
        assert_eq!(
            text,
            "| Storage | Depth | vhost-blk | qemu-storage-daemon | Ratio |\n\
             |---|---:|---:|---:|---:|\n\
             | nothing (`null`) | 1 | 30 | 20 | 1.50 |\n\n\
             Machine: a virtual machine with 2 cores, Fast, Linux unknown. Peer: \
             qemu-storage-daemon 7.2.1. Measured on 2026-01-02."
        );
    }

    #[test]
    fn no_path_is_kept() {
        let kept = serde_json::to_string(&kept(&native()).unwrap()).unwrap();
        assert!(!kept.contains("/a/path") && !kept.contains("spin"), "{kept}");
    }

    #[test]
    fn the_readme_has_the_kept_figures() {
        let section = section(&serde_json::from_str(KEPT).unwrap());
        let readme = include_str!("../../../../README.md");
        let one_line = |text: &str| text.split_whitespace().collect::<Vec<_>>().join(" ");
        assert!(one_line(readme).contains(&one_line(&section)), "{section}");
    }
}
