// SPDX-License-Identifier: Apache-2.0
//! Names, comparisons and tables of the drivers.

use kit::metric::{INTERRUPTS, IOPS, KICKS, Metric, P50, Row, Set};
use kit::report::{Column, Section};

use crate::guest::mode::Mode;

/// Instructions of each request; fewer are better.
pub(super) const INSTRUCTIONS: Metric = Metric::new("instructions", "instructions");

/// The generator of requests without I/O, in the place of a driver.
pub(super) const NO_IO: &str = "no I/O";

/// System calls of the generator for each request.
pub(super) const CALLS: Metric = Metric::new("system_calls", "1");

/// The columns, for the head of the report.
const COLUMNS: &str = "Medians over the rounds. `/in-tree`: over the kernel's own driver by \
    interrupts. `/base`: polled over the same driver by interrupts, the bio path over the request \
    path. Kicks and interrupts of the device: for each request before merges, in a round of its own.";

/// Name of a driver in tables.
pub(super) fn name(mode: Mode) -> &'static str {
    match mode {
        Mode::InTree => "in-tree, interrupts",
        Mode::InTreePoll => "in-tree, polled",
        Mode::Request => "ours, request, interrupts",
        Mode::RequestPoll => "ours, request, polled",
        Mode::Bio => "ours, bio, interrupts",
        Mode::BioPoll => "ours, bio, polled",
    }
}

/// The row of the kernel's own driver at the same point.
pub(super) fn in_tree<'a>(set: &'a Set, row: &Row) -> Option<&'a Row> {
    set.at(name(Mode::InTree), &row.point)
}

/// The row to compare a driver with at the same point: polling with the same driver with
/// interrupts, the bio path with the request path.
pub(super) fn base<'a>(set: &'a Set, row: &Row) -> Option<&'a Row> {
    let base = match Mode::ALL.iter().find(|&&mode| name(mode) == row.subject)? {
        Mode::InTree | Mode::Request => return None,
        Mode::InTreePoll => Mode::InTree,
        Mode::RequestPoll | Mode::Bio => Mode::Request,
        Mode::BioPoll => Mode::Bio,
    };
    set.at(name(base), &row.point)
}

/// The table of one comparison, by rates or by instructions.
pub(super) fn section(title: &str, method: &str, metric: Metric, set: &Set) -> Section {
    let (head, unit, digits) =
        if metric == IOPS { ("kIOPS", 1e3, 2) } else { ("instructions", 1.0, 0) };
    let columns = [
        Column::label("disk"),
        Column::label("load"),
        Column::subject("driver"),
        Column::median(head, metric, unit, digits),
        Column::range(metric, unit, digits),
        Column::over("/in-tree", metric, 3, |row| in_tree(set, row)),
        Column::over("/base", metric, 3, |row| base(set, row)),
        Column::median("p50 us", P50, 1.0, 0),
        Column::median("kicks", KICKS, 1.0, 3),
        Column::median("interrupts", INTERRUPTS, 1.0, 3),
    ];
    Section::new(title, &format!("{method}\n\n{COLUMNS}"), set, &columns)
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use kit::metric::point;

    /// Rows with one sample each.
    pub(in crate::guest::measure) fn measured(
        metric: Metric,
        rows: &[(&str, &str, Mode, f64)],
    ) -> Set {
        let mut set = Set::default();
        for (disk, load, mode, value) in rows {
            let point = point(&[("disk", disk), ("load", load)]);
            set.add(name(*mode), &point, vec![(metric, *value)]);
        }
        set
    }

    #[test]
    fn polled_is_compared_with_interrupts_and_bio_with_request_at_the_same_point() {
        let set = measured(
            IOPS,
            &[
                ("ram", "a", Mode::Request, 100.0),
                ("ram", "a", Mode::RequestPoll, 250.0),
                ("ram", "a", Mode::Bio, 200.0),
                ("ram", "b", Mode::BioPoll, 200.0),
            ],
        );
        let ratio = |row: &Row| base(&set, row).map(|base| row.over(base, IOPS));
        let ratios: Vec<_> = set.rows().iter().map(ratio).collect();
        assert_eq!(ratios, [None, Some(2.5), Some(2.0), None]);
    }
}
