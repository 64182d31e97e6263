// SPDX-License-Identifier: Apache-2.0
//! The table of path lengths, its goals, and the comparison with a stored one.

use anyhow::{Context, Result, bail};
use kit::metric::{Metric, Row, Set};
use kit::outcome::PARTLY_SKIPPED;
use kit::report::{Column, Goal, Report, Section};

use super::path::{LOAD, QUEUES, STORAGE, is_usual, place};
use crate::host::subject::Who;
use crate::setup::KERNEL_NAME;

/// From one request to the next: client, server, switches between them, interrupts.
pub(crate) const WHOLE: Metric = Metric::new("whole", "instructions");
/// In the client's thread.
pub(crate) const CLIENT: Metric = Metric::new("client", "instructions");
/// In the server's threads.
pub(crate) const SERVER: Metric = Metric::new("server", "instructions");

/// Growth of a path that queues and threads without work may cause.
const GROWTH: f64 = 1.03;

/// Whole path of the kernel plane with this many requests in flight.
const LENGTH_DEPTH: &str = "32";
const LENGTH_MAX: f64 = 5200.0;
/// The goal for polling, which is not measured.
pub(super) const POLLED_NOT_JUDGED: &str = "instructions, depth 32, polled: kernel plane at most \
    4700: not measured (with one CPU a thread that polls keeps the driver from running)";

/// Heading of the section.
pub const TITLE: &str = "Path lengths";
const METHOD: &str = "Instructions for each request of 4 KiB; no thread polls for requests. `whole`: everything, \
    client included; `server`: its threads alone. One queue is busy; with more queues 16 threads serve them. \
    `writeflush`: a write and its FLUSH are one request. `file` and `qcow2`: images on a tmpfs, all allocated. With \
    poll queues completions are polled for.";
const KERNEL: &str = Who::Kernel.name();

/// The table of all paths.
pub(super) fn section(paths: &Set) -> Section {
    let columns = [
        Column::subject("server"),
        Column::count("depth"),
        Column::count(QUEUES),
        Column::label(STORAGE),
        Column::label(LOAD),
        Column::median("whole", WHOLE, 1.0, 0),
        Column::median("client", CLIENT, 1.0, 0),
        Column::median("server", SERVER, 1.0, 0),
        Column::over("whole, over the kernel plane's", WHOLE, 2, |row| {
            paths.at(KERNEL, &row.point)
        }),
    ];
    Section::new(TITLE, METHOD, paths, &columns)
}

/// The goals: fewer instructions than the io_uring plane and than vhost-scsi, a bound of the kernel
/// plane's own, and no cost of idle queues.
pub(super) fn goals(paths: &Set) -> Vec<Goal> {
    let mut goals = Vec::new();
    for ours in paths.of(KERNEL) {
        for other in [Who::Uring, Who::VhostScsi] {
            let Some(theirs) = paths.at(other.name(), &ours.point) else { continue };
            let name = format!("instructions, {}, over {}", place(ours), other.name());
            goals.push(Goal::below(name, ours.over(theirs, WHOLE), 1.0));
        }
    }
    goals.extend(paths.of(KERNEL).filter_map(length));
    goals.extend(ours(paths).filter_map(|row| growth(paths, row)));
    goals
}

/// The goal of one busy queue, client included.
fn length(row: &Row) -> Option<Goal> {
    let is_judged = row.label("depth") == LENGTH_DEPTH && is_usual(row);
    let name = format!("instructions, depth {LENGTH_DEPTH}: kernel plane with client");
    is_judged.then(|| Goal::at_most(name, row.median(WHOLE), LENGTH_MAX))
}

/// The goal of a row of many queues: idle queues and threads cost nothing.
fn growth(paths: &Set, row: &Row) -> Option<Goal> {
    let queues = row.label(QUEUES);
    let mut point = row.point.clone();
    point.insert(QUEUES.to_owned(), "1".to_owned());
    let one = paths.at(&row.subject, &point).filter(|_| queues != "1")?;
    let name = format!("instructions, {}, over one queue", place(row));
    Some(Goal::at_most(name, row.over(one, WHOLE), GROWTH))
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
        bail!("path-lengths.json has none for {}", place(row));
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
            (now > before * (1.0 + tolerance / 100.0))
                .then(|| format!("{}: {before} to {now}", place(row)))
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::icount::path::USUAL;
    use kit::metric::{Point, point};

    /// The point of random reads of a null_blk.
    fn usual(depth: u16, queues: u16) -> Point {
        let [_, (storage, null), (load, reads)] = USUAL;
        point(&[("depth", &depth), (QUEUES, &queues), (storage, &null), (load, &reads)])
    }

    /// The same with one queue.
    fn one(depth: u16) -> Point {
        usual(depth, 1)
    }

    fn paths(kernel: f64, scsi: f64) -> Set {
        let mut set = Set::default();
        for (who, whole) in [(Who::Kernel, kernel), (Who::VhostScsi, scsi)] {
            set.add(who.name(), &one(1), vec![(WHOLE, whole)]);
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
        let at = |who: Who, depth: u16| kept.at(who.name(), &one(depth));
        assert!(at(Who::Kernel, 1).is_some() && at(Who::Uring, 32).is_some());
    }

    #[test]
    fn a_shorter_path_than_vhost_scsi_passes() {
        assert!(goals(&paths(900.0, 1000.0))[0].met);
        assert!(!goals(&paths(1100.0, 1000.0))[0].met);
    }

    #[test]
    fn one_busy_queue_with_32_requests_has_a_bound_of_its_own() {
        let of = |depth, queues, whole| {
            let mut set = Set::default();
            let point = usual(depth, queues);
            set.add(Who::Kernel.name(), &point, vec![(WHOLE, whole)]);
            goals(&set).iter().map(|goal| goal.met).collect::<Vec<_>>()
        };
        assert_eq!(of(32, 1, 5200.0), [true]);
        assert_eq!(of(32, 1, 5201.0), [false]);
        assert_eq!([of(4, 1, 9000.0), of(32, 64, 9000.0)], [[false; 0]; 2]);
    }

    #[test]
    fn idle_queues_that_lengthen_a_path_miss_their_goal() {
        let of = |wide| {
            let mut set = paths(1000.0, 3000.0);
            let wide_point = usual(1, 64);
            set.add(Who::Kernel.name(), &wide_point, vec![(WHOLE, wide)]);
            goals(&set).last().expect("there are goals").met
        };
        assert!(of(1020.0));
        assert!(!of(1040.0));
    }
}
