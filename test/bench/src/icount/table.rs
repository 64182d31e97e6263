// SPDX-License-Identifier: Apache-2.0
//! The table of path lengths, its goals, and the comparison with a stored one.

use anyhow::{Context, Result, bail};
use kit::metric::{Metric, Row, Set};
use kit::outcome::PARTLY_SKIPPED;
use kit::report::{Column, Goal, Report, Section};

use crate::host::subject::Who;
use crate::setup::KERNEL_NAME;

/// From one request to the next: client, server, switches between them, interrupts.
pub(super) const WHOLE: Metric = Metric::new("whole", "instructions");
/// In the client's thread.
pub(super) const CLIENT: Metric = Metric::new("client", "instructions");
/// In the server's threads.
pub(super) const SERVER: Metric = Metric::new("server", "instructions");

/// Heading of the section.
pub const TITLE: &str = "Path lengths";
const METHOD: &str = "Instructions for each 4 KiB random read on null_blk, nothing polls. `whole`: \
    everything, client included; `server`: its threads alone.";
const KERNEL: &str = Who::Kernel.name();

/// The table of all paths.
pub(super) fn section(paths: &Set) -> Section {
    let columns = [
        Column::subject("server"),
        Column::count("depth"),
        Column::median("whole", WHOLE, 1.0, 0),
        Column::median("client", CLIENT, 1.0, 0),
        Column::median("server", SERVER, 1.0, 0),
        Column::over("whole, over the kernel plane's", WHOLE, 2, |row| {
            paths.at(KERNEL, &row.point)
        }),
    ];
    Section::new(TITLE, METHOD, paths, &columns)
}

/// The goal: fewer instructions than the io_uring plane and than vhost-scsi.
pub(super) fn goals(paths: &Set) -> Vec<Goal> {
    let mut goals = Vec::new();
    for ours in paths.of(KERNEL) {
        for other in [Who::Uring, Who::VhostScsi] {
            let Some(theirs) = paths.at(other.name(), &ours.point) else { continue };
            let (depth, other) = (ours.label("depth"), other.name());
            let name = format!("instructions, depth {depth}: kernel plane over {other}");
            goals.push(Goal::below(name, ours.over(theirs, WHOLE), 1.0));
        }
    }
    goals
}

/// Checks that no path of this project is longer than in the report `kept` by more than `tolerance`
/// percent. The kernel's share changes with the kernel: another one than `kernel` is not compared.
pub(super) fn check(paths: &Set, kernel: &str, kept: &str, tolerance: f64) -> Result<()> {
    let report = read(kept)?;
    let of = kernel_of(&report).context("path-lengths.json names no kernel")?;
    if of != kernel {
        println!(
            "{PARTLY_SKIPPED}path lengths were kept on {of} and this is {kernel}: keep new ones \
             (test/bench/path-lengths.json)"
        );
        return Ok(());
    }
    let kept = paths_of(report)?;
    if let Some(row) = ours(paths).find(|row| kept.at(&row.subject, &row.point).is_none()) {
        bail!("path-lengths.json has none for {}, depth {}", row.subject, row.label("depth"));
    }
    let longer = longer_than(paths, &kept, tolerance);
    if !longer.is_empty() {
        bail!("paths have grown by more than {tolerance} %: {}", longer.join("; "));
    }
    println!("No path has grown by more than {tolerance} % over those that are kept.");
    Ok(())
}

fn read(text: &str) -> Result<Report> {
    serde_json::from_str(text).context("path-lengths.json is no report")
}

/// The kernel that a report describes.
fn kernel_of(report: &Report) -> Option<&str> {
    let mut setup = report.setup.iter();
    setup.find(|(name, _)| name == KERNEL_NAME).map(|(_, kernel)| kernel.as_str())
}

/// The path lengths of a report.
fn paths_of(report: Report) -> Result<Set> {
    let section = report.sections.into_iter().find(|section| section.title == TITLE);
    Ok(section.context("path-lengths.json holds no path lengths")?.rows)
}

fn ours(paths: &Set) -> impl Iterator<Item = &Row> {
    paths.of(KERNEL).chain(paths.of(Who::Uring.name()))
}

fn longer_than(paths: &Set, kept: &Set, tolerance: f64) -> Vec<String> {
    ours(paths)
        .filter_map(|row| {
            let before = kept.at(&row.subject, &row.point)?.median(WHOLE);
            let now = row.median(WHOLE);
            (now > before * (1.0 + tolerance / 100.0)).then(|| {
                format!("{}, depth {}: {before} to {now}", row.subject, row.label("depth"))
            })
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use kit::metric::point;

    fn paths(kernel: f64, scsi: f64) -> Set {
        let mut set = Set::default();
        for (who, whole) in [(Who::Kernel, kernel), (Who::VhostScsi, scsi)] {
            set.add(who.name(), &point(&[("depth", &1)]), vec![(WHOLE, whole)]);
        }
        set
    }

    #[test]
    fn only_our_own_paths_are_kept_from_growing() {
        let kept = paths(1000.0, 1000.0);
        assert!(longer_than(&paths(1029.0, 5000.0), &kept, 3.0).is_empty());
        assert_eq!(longer_than(&paths(1031.0, 900.0), &kept, 3.0).len(), 1);
    }

    #[test]
    fn the_kept_path_lengths_can_be_read() {
        let report = read(super::super::KEPT).unwrap();
        assert!(kernel_of(&report).is_some());
        let kept = paths_of(report).unwrap();
        let at = |who: Who, depth: u16| kept.at(who.name(), &point(&[("depth", &depth)]));
        assert!(at(Who::Kernel, 1).is_some() && at(Who::Uring, 32).is_some());
    }

    #[test]
    fn a_shorter_path_than_vhost_scsi_passes() {
        assert!(goals(&paths(900.0, 1000.0))[0].met);
        assert!(!goals(&paths(1100.0, 1000.0))[0].met);
    }
}
