// SPDX-License-Identifier: Apache-2.0
//! Goals of the guest driver.

use kit::metric::{INTERRUPTS, IOPS, Row, Set};
use kit::report::Goal;

use super::report::{INSTRUCTIONS, NO_IO, base, in_tree, name};
use super::{FAST, RAM, SLOW};
use crate::guest::mode::Mode;

/// Least ratio of polling to interrupts.
const POLLED_MIN: f64 = 1.14;
/// Least ratio of the bio path to the request path on the fastest disk, for sequential reads and
/// random writes.
const BIO_SEQ_READ_MIN: f64 = 1.28;
const BIO_RAND_WRITE_MIN: f64 = 1.16;
/// The same on the slow disk, where the bio path of 2012 was slower by a tenth.
const BIO_SLOW_MIN: f64 = 0.98;
/// Least ratio of the request path to the kernel's own driver, for each load and for the mean.
const REQUEST_MIN: f64 = 1.0;
/// Most instructions of the bio path over those of the request path, in driver and block layer.
const BIO_SHARE_MAX: f64 = 0.9;
/// Most interrupts for each request, over those of the kernel's own driver.
const INTERRUPTS_MAX: f64 = 1.0;

/// Goals of polling, for each of this project's drivers at each number of jobs.
pub(super) fn polled(set: &Set) -> Vec<Goal> {
    let ours = [Mode::RequestPoll, Mode::BioPoll].map(name);
    let rows = set.rows().iter().filter(|row| ours.contains(&row.subject.as_str()));
    rows.filter_map(|row| {
        let base = base(set, row)?;
        let name = format!("{}: {} over {}", place(row), row.subject, base.subject);
        Some(Goal::at_least(name, row.over(base, IOPS), POLLED_MIN))
    })
    .collect()
}

/// Goals of both paths against each other and against the kernel's own driver.
pub(super) fn paths(set: &Set) -> Vec<Goal> {
    let mut goals = Vec::new();
    for row in set.of(name(Mode::Bio)) {
        let bound = match (row.label("disk"), row.label("load")) {
            (SLOW, _) => BIO_SLOW_MIN,
            (RAM, load) if is_plain(load, "read") => BIO_SEQ_READ_MIN,
            (RAM, load) if is_plain(load, "randwrite") => BIO_RAND_WRITE_MIN,
            _ => continue,
        };
        let Some(base) = base(set, row) else { continue };
        let name = format!("{}: bio over request", place(row));
        goals.push(Goal::at_least(name, row.over(base, IOPS), bound));
    }
    goals.extend(set.of(name(Mode::Request)).filter_map(|row| request_cell(set, row)));
    goals.extend([RAM, FAST, SLOW].into_iter().filter_map(|disk| request(set, disk)));
    goals.extend(interrupts(set));
    goals
}

/// Interrupts of both paths against the kernel's own driver, for each load.
fn interrupts(set: &Set) -> impl Iterator<Item = Goal> {
    let ours = [Mode::Request, Mode::Bio].into_iter().flat_map(|mode| set.of(name(mode)));
    ours.filter_map(|row| {
        let theirs = in_tree(set, row).filter(|theirs| theirs.median(INTERRUPTS) > 0.0)?;
        let name = format!("{}: interrupts, {} over in-tree", place(row), row.subject);
        let is_measured = !row.values(INTERRUPTS).is_empty();
        is_measured.then(|| Goal::at_most(name, row.over(theirs, INTERRUPTS), INTERRUPTS_MAX))
    })
}

/// The request path against the kernel's own driver with one load.
fn request_cell(set: &Set, row: &Row) -> Option<Goal> {
    let theirs = in_tree(set, row).filter(|theirs| theirs.median(IOPS) > 0.0)?;
    let name = format!("{}: request over in-tree", place(row));
    Some(Goal::at_least(name, row.over(theirs, IOPS), REQUEST_MIN))
}

/// True if a load uses neither the page cache nor batches.
fn is_plain(load: &str, rw: &str) -> bool {
    load.strip_prefix(rw)
        .is_some_and(|rest| rest.starts_with(", depth") && !rest.contains("batches"))
}

/// The request path against the kernel's own driver, for all loads of a disk together: less noise
/// than a single load has.
fn request(set: &Set, disk: &str) -> Option<Goal> {
    let rows = set.of(name(Mode::Request)).filter(|row| row.label("disk") == disk);
    let ratios: Vec<f64> =
        rows.filter_map(|row| Some(row.over(in_tree(set, row)?, IOPS))).collect();
    if ratios.is_empty() {
        return None;
    }
    let mean = (ratios.iter().map(|ratio| ratio.ln()).sum::<f64>() / ratios.len() as f64).exp();
    let name = format!("{disk}: request over in-tree, mean of {} loads", ratios.len());
    Some(Goal::at_least(name, mean, REQUEST_MIN))
}

/// Goals of fewer instructions: the request path against the kernel's own driver, the bio path
/// against the request path, polling against interrupts.
pub(super) fn instructions(set: &Set) -> Vec<Goal> {
    let theirs = [Mode::InTree, Mode::InTreePoll].map(name);
    let ours = set.rows().iter().filter(|row| !theirs.contains(&row.subject.as_str()));
    let goals = ours.filter_map(|row| {
        let is_request = row.subject == name(Mode::Request);
        let base = if is_request { in_tree(set, row) } else { base(set, row) }?;
        let name = format!("{}: {} over {}", place(row), row.subject, base.subject);
        Some(Goal::at_most(name, row.over(base, INSTRUCTIONS), 1.0))
    });
    goals.collect()
}

/// The bio path against the request path, without the instructions of the generator and of io_uring:
/// the share of driver and block layer.
pub(super) fn shares(set: &Set) -> Vec<Goal> {
    let goal = |row: &Row| {
        let [request, nothing] =
            [base(set, row)?, set.at(NO_IO, &row.point)?].map(|row| row.median(INSTRUCTIONS));
        let share = (row.median(INSTRUCTIONS) - nothing) / (request - nothing);
        let name = format!("{}: share of driver and block layer, bio over request", place(row));
        Some(Goal::at_most(name, share, BIO_SHARE_MAX))
    };
    set.of(name(Mode::Bio)).filter_map(goal).collect()
}

fn place(row: &Row) -> String {
    format!("{}, {}", row.label("disk"), row.label("load"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::guest::measure::report::tests::measured;

    #[test]
    fn the_bio_path_has_other_bounds_on_other_disks_and_none_on_the_fast_one() {
        let points = [(RAM, "read, depth 32"), (SLOW, "write, buffered"), (FAST, "read, depth 32")];
        let both =
            |(disk, load)| [(disk, load, Mode::Request, 100.0), (disk, load, Mode::Bio, 99.0)];
        let rows: Vec<_> = points.into_iter().flat_map(both).collect();
        let goals = paths(&measured(IOPS, &rows));
        let outcome: Vec<_> = goals.iter().map(|g| (g.wanted.as_str(), g.met)).collect();
        assert_eq!(outcome, [(">= 1.28", false), (">= 0.98", true)]);
    }

    #[test]
    fn the_request_path_is_judged_over_all_loads_of_a_disk() {
        let rows =
            |load, ours| [(RAM, load, Mode::InTree, 100.0), (RAM, load, Mode::Request, ours)];
        let goals = paths(&measured(IOPS, &[rows("a", 200.0), rows("b", 50.0)].concat()));
        let [cells @ .., mean] = &goals[..] else { panic!("{goals:?}") };
        let cells: Vec<_> = cells.iter().map(|goal| (goal.measured, goal.met)).collect();
        assert_eq!(cells, [(2.0, true), (0.5, false)]);
        assert!((mean.measured - 1.0).abs() < 1e-9, "{goals:?}");
        let missed = paths(&measured(IOPS, &rows("a", 99.0)));
        assert!(missed.len() == 2 && missed.iter().all(|goal| !goal.met), "{missed:?}");
    }

    #[test]
    fn no_path_may_have_more_interrupts_than_the_kernels_own_driver() {
        let rows = [
            (RAM, "a", Mode::InTree, 0.5),
            (RAM, "a", Mode::Request, 0.5),
            (RAM, "a", Mode::Bio, 0.6),
            (RAM, "b", Mode::Request, 0.5),
        ];
        let goals = paths(&measured(INTERRUPTS, &rows));
        let of_interrupts = goals.iter().filter(|goal| goal.name.contains("interrupts, ours"));
        let met: Vec<_> = of_interrupts.map(|goal| goal.met).collect();
        assert_eq!(met, [true, false]);
    }

    #[test]
    fn polling_must_gain_more_than_an_eighth() {
        let set = measured(
            IOPS,
            &[
                (RAM, "a", Mode::Bio, 100.0),
                (RAM, "a", Mode::BioPoll, 113.0),
                (RAM, "b", Mode::Request, 100.0),
                (RAM, "b", Mode::RequestPoll, 115.0),
            ],
        );
        let met: Vec<_> = polled(&set).iter().map(|g| g.met).collect();
        assert_eq!(met, [false, true]);
    }

    #[test]
    fn the_share_of_a_path_is_without_the_generator() {
        let point = kit::metric::point(&[("disk", &RAM), ("load", &"a")]);
        let of = |bio| {
            let rows = [(RAM, "a", Mode::Request, 600.0), (RAM, "a", Mode::Bio, bio)];
            let mut set = measured(INSTRUCTIONS, &rows);
            assert!(shares(&set).is_empty(), "there is nothing to take off");
            set.add(NO_IO, &point, vec![(INSTRUCTIONS, 100.0)]);
            shares(&set).iter().map(|goal| (goal.measured, goal.met)).collect::<Vec<_>>()
        };
        // 0.92 of the whole path, but less of the share.
        assert_eq!((of(550.0), of(551.0)), (vec![(0.9, true)], vec![(0.902, false)]));
    }

    #[test]
    fn a_longer_path_misses() {
        let set = measured(
            INSTRUCTIONS,
            &[
                (RAM, "a", Mode::InTree, 100.0),
                (RAM, "a", Mode::Request, 100.0),
                (RAM, "a", Mode::Bio, 110.0),
            ],
        );
        let met: Vec<_> = instructions(&set).iter().map(|g| g.met).collect();
        assert_eq!(met, [true, false]);
    }
}
