// SPDX-License-Identifier: Apache-2.0
//! The table of path lengths and its goals.

use kit::metric::{Metric, Row, Set};
use kit::report::{Column, Goal, Section};

use super::path::{LOAD, QUEUES, STORAGE, is_usual, place};
use crate::host::subject::Who;

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

/// The lengths of the paths of this project, which the repository keeps.
pub(super) fn ours(paths: &Set) -> impl Iterator<Item = &Row> {
    paths.of(KERNEL).chain(paths.of(Who::Uring.name()))
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
        let paths = paths(1000.0, 1000.0);
        let subjects = Vec::from_iter(ours(&paths).map(|row| row.subject.as_str()));
        assert_eq!(subjects, [KERNEL]);
    }

    #[test]
    fn the_kept_path_lengths_can_be_read() {
        let sections = super::super::KEPT.report().unwrap().sections;
        let kept = &sections.iter().find(|section| section.title == TITLE).unwrap().rows;
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
