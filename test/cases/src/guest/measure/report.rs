// SPDX-License-Identifier: Apache-2.0
//! Results: rows, their medians, and the tables.

use std::fmt::Write;

use bench::goals::Goal;
use bench::host::report::goals_table;
use bench::report::{Sample, median};
use serde::{Serialize, Serializer};

use super::signals::Signals;
use crate::guest::mode::Mode;

/// Unit of the figures.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(super) enum Unit {
    /// Thousands of requests per second; more is better.
    Kiops,
    /// Instructions per request; fewer is better.
    Instructions,
}

/// Point at which rows are comparable.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(super) struct Point {
    /// The disk.
    pub(super) disk: &'static str,
    /// The load.
    pub(super) load: String,
}

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

fn name_of<S: Serializer>(mode: &Mode, to: S) -> Result<S::Ok, S::Error> {
    to.serialize_str(mode.name())
}

/// The same driver without polled queues.
fn by_interrupts(mode: Mode) -> Mode {
    match mode {
        Mode::InTreePoll => Mode::InTree,
        Mode::RequestPoll => Mode::Request,
        Mode::BioPoll => Mode::Bio,
        mode => mode,
    }
}

/// All samples of one driver at one point.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Row {
    /// Point of the measurement.
    pub(super) point: Point,
    /// The driver.
    #[serde(serialize_with = "name_of")]
    pub(super) mode: Mode,
    /// One sample per round.
    pub(super) samples: Vec<Sample>,
    /// Kicks and interrupts, if the kernel could count them.
    pub(super) signals: Option<Signals>,
}

impl Row {
    /// A row without samples.
    pub(super) fn new(point: Point, mode: Mode) -> Self {
        Self { point, mode, samples: Vec::new(), signals: None }
    }
}

/// Rows of one comparison.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Table {
    /// Heading of the table.
    pub(super) title: &'static str,
    /// Method of the measurement.
    pub(super) method: String,
    /// Unit of the figures.
    pub(super) unit: Unit,
    /// Rows in the order of points, then of drivers.
    pub(super) rows: Vec<Row>,
}

/// All results of a comparison.
#[derive(Clone, Debug, Default, Serialize)]
pub(super) struct Report {
    /// Machine, versions and command line.
    pub(super) setup: Vec<(String, String)>,
    /// The measured tables.
    pub(super) tables: Vec<Table>,
    /// Goals and whether they were met.
    pub(super) goals: Vec<Goal>,
    /// Goals that could not be judged, with the reason.
    pub(super) not_judged: Vec<String>,
}

impl Table {
    /// The median of a row's figures over the rounds.
    pub(super) fn figure(&self, row: &Row) -> f64 {
        median(row.samples.iter().map(|sample| self.in_unit(sample)))
    }

    fn in_unit(&self, sample: &Sample) -> f64 {
        match self.unit {
            Unit::Kiops => sample.iops / 1e3,
            // The clock's nanosecond is an instruction.
            Unit::Instructions => 1e9 / sample.iops,
        }
    }

    /// The row of a driver at a point.
    pub(super) fn at(&self, point: &Point, mode: Mode) -> Option<&Row> {
        self.rows.iter().find(|row| row.point == *point && row.mode == mode)
    }

    /// The row to compare a driver with at the same point: polling with the same driver with
    /// interrupts, the bio path with the request path.
    pub(super) fn base(&self, row: &Row) -> Option<&Row> {
        match row.mode {
            Mode::Bio => self.at(&row.point, Mode::Request),
            mode if mode.polls() => self.at(&row.point, by_interrupts(mode)),
            _ => None,
        }
    }

    /// Ratio of one row's figure to that of another.
    pub(super) fn ratio(&self, row: &Row, over: &Row) -> f64 {
        self.figure(row) / self.figure(over)
    }

    fn markdown(&self) -> String {
        let (unit, digits) = match self.unit {
            Unit::Kiops => ("kIOPS", 2),
            Unit::Instructions => ("instructions", 0),
        };
        let mut text = format!(
            "\n### {}\n\n{}\n\n| disk | load | driver | {unit} | min-max | /in-tree | /base | p50 us \
             | kicks | interrupts |\n|---|---|---|---:|---:|---:|---:|---:|---:|---:|\n",
            self.title, self.method
        );
        for row in &self.rows {
            let ratio = |over: Option<&Row>| match over {
                Some(over) => format!("{:.3}", self.ratio(row, over)),
                None => "-".to_owned(),
            };
            let figures = row.samples.iter().map(|sample| self.in_unit(sample));
            let signals = row.signals.map_or("- | -".to_owned(), |signals| {
                format!("{:.3} | {:.3}", signals.kicks, signals.interrupts)
            });
            let low = figures.clone().fold(f64::INFINITY, f64::min);
            let high = figures.fold(0.0, f64::max);
            let _ = writeln!(
                text,
                "| {} | {} | {} | {:.digits$} | {low:.digits$}-{high:.digits$} | {} | {} | {:.0} | {signals} |",
                row.point.disk,
                row.point.load,
                name(row.mode),
                self.figure(row),
                ratio(self.at(&row.point, Mode::InTree)),
                ratio(self.base(row)),
                median(row.samples.iter().map(|sample| sample.p50_us)),
            );
        }
        text
    }
}

impl Report {
    /// The report as markdown.
    pub(super) fn markdown(&self) -> String {
        let mut text = String::from("## The guest's driver: set-up\n\n");
        for (name, value) in &self.setup {
            let _ = writeln!(text, "- {name}: `{value}`");
        }
        text.push_str(
            "\nMedians over the rounds. `/in-tree`: over the kernel's own driver by interrupts. \
             `/base`: polled over the same driver by interrupts, the bio path over the request \
             path. Kicks and interrupts of the device: for each request, in a round of its own.\n",
        );
        for table in &self.tables {
            text.push_str(&table.markdown());
        }
        text + &goals_table(&self.goals, &self.not_judged)
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    /// A row with one sample.
    pub(in crate::guest::measure) fn row(
        disk: &'static str,
        load: &str,
        mode: Mode,
        iops: f64,
    ) -> Row {
        let sample =
            Sample { iops, cpu_us_per_io: 0.0, p50_us: 0.0, p99_us: 0.0, waited_percent: 0.0 };
        let row = Row::new(Point { disk, load: load.to_owned() }, mode);
        Row { samples: vec![sample], ..row }
    }

    fn table(unit: Unit) -> Table {
        let rows = vec![
            row("ram", "a", Mode::Request, 100.0),
            row("ram", "a", Mode::RequestPoll, 250.0),
            row("ram", "a", Mode::Bio, 200.0),
            row("ram", "b", Mode::BioPoll, 200.0),
        ];
        Table { title: "", method: String::new(), unit, rows }
    }

    #[test]
    fn polled_is_compared_with_interrupts_and_bio_with_request_at_the_same_point() {
        let table = table(Unit::Kiops);
        let ratio = |row: &Row| table.base(row).map(|base| table.ratio(row, base));
        let ratios: Vec<_> = table.rows.iter().map(ratio).collect();
        assert_eq!(ratios, [None, Some(2.5), Some(2.0), None]);
    }

    #[test]
    fn instructions_are_the_reverse_of_rates() {
        let table = table(Unit::Instructions);
        assert_eq!(table.figure(&table.rows[0]), 1e7);
        assert_eq!(table.ratio(&table.rows[2], &table.rows[0]), 0.5);
    }
}
