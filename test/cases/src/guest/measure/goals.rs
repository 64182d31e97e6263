// SPDX-License-Identifier: Apache-2.0
//! Goals of the guest driver.

use bench::goals::{Goal, at_least};

use super::report::{Row, Table, Unit, name};
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
pub(super) fn polled(table: &Table) -> Vec<Goal> {
    let ours = [Mode::RequestPoll, Mode::BioPoll];
    let rows = table.rows.iter().filter(|row| ours.contains(&row.mode));
    rows.filter_map(|row| {
        let base = table.base(row)?;
        let name = format!("{}: {} over {}", place(row), name(row.mode), name(base.mode));
        Some(at_least(name, table.ratio(row, base), POLLED_MIN))
    })
    .collect()
}

/// Goals of both paths against each other and against the kernel's own driver.
pub(super) fn paths(table: &Table) -> Vec<Goal> {
    let mut goals = Vec::new();
    for row in table.rows.iter().filter(|row| row.mode == Mode::Bio) {
        let bound = match (row.point.disk, row.point.load.as_str()) {
            (SLOW, _) => BIO_SLOW_MIN,
            (RAM, load) if is_plain(load, "read") => BIO_SEQ_READ_MIN,
            (RAM, load) if is_plain(load, "randwrite") => BIO_RAND_WRITE_MIN,
            _ => continue,
        };
        let Some(base) = table.base(row) else { continue };
        let name = format!("{}: bio over request", place(row));
        goals.push(at_least(name, table.ratio(row, base), bound));
    }
    goals.extend([RAM, FAST, SLOW].into_iter().filter_map(|disk| request(table, disk)));
    goals
}

/// True if a load uses neither the page cache nor batches.
fn is_plain(load: &str, rw: &str) -> bool {
    load.strip_prefix(rw)
        .is_some_and(|rest| rest.starts_with(", depth") && !rest.contains("batches"))
}

/// The request path against the kernel's own driver, for all loads of a disk together: a single
/// load shows no difference but noise.
fn request(table: &Table, disk: &str) -> Option<Goal> {
    let rows = table.rows.iter().filter(|row| row.point.disk == disk);
    let rows = rows.filter(|row| row.mode == Mode::Request);
    let ratios: Vec<f64> = rows.filter_map(|row| over_in_tree(table, row)).collect();
    if ratios.is_empty() {
        return None;
    }
    let mean = (ratios.iter().map(|ratio| ratio.ln()).sum::<f64>() / ratios.len() as f64).exp();
    let name = format!("{disk}: request over in-tree, mean of {} loads", ratios.len());
    Some(at_least(name, mean, REQUEST_MIN))
}

fn over_in_tree(table: &Table, row: &Row) -> Option<f64> {
    Some(table.ratio(row, table.at(&row.point, Mode::InTree)?))
}

/// Goals of fewer instructions: the request path against the kernel's own driver, the bio path
/// against the request path, polling against interrupts.
pub(super) fn instructions(table: &Table) -> Vec<Goal> {
    assert_eq!(table.unit, Unit::Instructions, "a table of instructions");
    let ours = table.rows.iter().filter(|row| !row.mode.is_in_tree());
    let goals = ours.filter_map(|row| {
        let in_tree = || table.at(&row.point, Mode::InTree);
        let base = if row.mode == Mode::Request { in_tree() } else { table.base(row) }?;
        let name = format!("{}: {} over {}", place(row), name(row.mode), name(base.mode));
        let measured = table.ratio(row, base);
        Some(Goal { name, measured, wanted: "<= 1".to_owned(), met: measured <= 1.0 })
    });
    goals.collect()
}

fn place(row: &Row) -> String {
    format!("{}, {}", row.point.disk, row.point.load)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::guest::measure::report::tests::row;

    fn table(unit: Unit, rows: Vec<Row>) -> Table {
        Table { title: "", method: String::new(), unit, rows }
    }

    #[test]
    fn the_bio_path_has_other_bounds_on_other_disks_and_none_on_the_fast_one() {
        let points = [(RAM, "read, depth 32"), (SLOW, "write, buffered"), (FAST, "read, depth 32")];
        let both = |(disk, load)| {
            [(Mode::Request, 100.0), (Mode::Bio, 99.0)]
                .map(|(mode, iops)| row(disk, load, mode, iops))
        };
        let table = table(Unit::Kiops, points.into_iter().flat_map(both).collect());
        let goals = paths(&table);
        let outcome: Vec<_> = goals.iter().map(|g| (g.wanted.as_str(), g.met)).collect();
        assert_eq!(outcome, [(">= 1.28", false), (">= 0.98", true)]);
    }

    #[test]
    fn the_request_path_is_judged_over_all_loads_of_a_disk() {
        let rows = |load, ours| {
            [(Mode::InTree, 100.0), (Mode::Request, ours)]
                .map(|(mode, iops)| row(RAM, load, mode, iops))
        };
        let all = [rows("a", 200.0), rows("b", 50.0)].into_iter().flatten().collect();
        let goals = paths(&table(Unit::Kiops, all));
        assert_eq!(goals.len(), 1);
        assert!((goals[0].measured - 1.0).abs() < 1e-9, "{goals:?}");
        let worse = rows("a", 99.0).into_iter().collect();
        assert!(!paths(&table(Unit::Kiops, worse))[0].met);
    }

    #[test]
    fn polling_must_gain_more_than_an_eighth() {
        let rows = vec![
            row(RAM, "a", Mode::Bio, 100.0),
            row(RAM, "a", Mode::BioPoll, 113.0),
            row(RAM, "b", Mode::Request, 100.0),
            row(RAM, "b", Mode::RequestPoll, 115.0),
        ];
        let met: Vec<_> = polled(&table(Unit::Kiops, rows)).iter().map(|g| g.met).collect();
        assert_eq!(met, [false, true]);
    }

    #[test]
    fn a_longer_path_misses() {
        let rows = vec![
            row(RAM, "a", Mode::InTree, 100.0),
            row(RAM, "a", Mode::Request, 100.0),
            row(RAM, "a", Mode::Bio, 90.0),
        ];
        let met: Vec<_> =
            instructions(&table(Unit::Instructions, rows)).iter().map(|g| g.met).collect();
        assert_eq!(met, [true, false]);
    }
}
