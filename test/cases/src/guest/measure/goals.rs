// SPDX-License-Identifier: Apache-2.0
//! Goals of the guest driver.

use kit::metric::{IOPS, Row, Set};
use kit::report::Goal;

use super::report::{INSTRUCTIONS, base, in_tree, name};
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
/// Least ratio of the request path to the kernel's own driver.
const REQUEST_MIN: f64 = 1.0;

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
    goals.extend([RAM, FAST, SLOW].into_iter().filter_map(|disk| request(set, disk)));
    goals
}

/// True if a load uses neither the page cache nor batches.
fn is_plain(load: &str, rw: &str) -> bool {
    load.strip_prefix(rw)
        .is_some_and(|rest| rest.starts_with(", depth") && !rest.contains("batches"))
}

/// The request path against the kernel's own driver, for all loads of a disk together: a single
/// load shows no difference but noise.
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
        assert_eq!(goals.len(), 1);
        assert!((goals[0].measured - 1.0).abs() < 1e-9, "{goals:?}");
        assert!(!paths(&measured(IOPS, &rows("a", 99.0)))[0].met);
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
