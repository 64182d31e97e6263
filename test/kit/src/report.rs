// SPDX-License-Identifier: Apache-2.0
//! Reports of measurements: tables and goals as Markdown, everything as JSON.

use std::fmt::Write;
use std::fs;
use std::path::Path;

use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};

use crate::metric::{Metric, Row, Set};

/// A column of a table.
pub struct Column<'a> {
    head: String,
    is_number: bool,
    cell: Box<dyn Fn(&Row) -> String + 'a>,
}

impl<'a> Column<'a> {
    /// A column of text.
    pub fn text(head: &str, cell: impl Fn(&Row) -> String + 'a) -> Self {
        Self { head: head.to_owned(), is_number: false, cell: Box::new(cell) }
    }

    /// A column of numbers.
    pub fn number(head: &str, cell: impl Fn(&Row) -> String + 'a) -> Self {
        Self { is_number: true, ..Self::text(head, cell) }
    }

    /// The subject of each row.
    pub fn subject(head: &str) -> Self {
        Self::text(head, |row| row.subject.clone())
    }

    /// A label, which names the column.
    pub fn label(name: &'static str) -> Self {
        Self::text(name, |row| row.label(name).to_owned())
    }

    /// A label that is a number.
    pub fn count(name: &'static str) -> Self {
        Self { is_number: true, ..Self::label(name) }
    }

    /// Medians in units of `unit` with `digits` behind the point; `-` if not measured.
    pub fn median(head: &str, metric: Metric, unit: f64, digits: usize) -> Self {
        Self::number(head, move |row| match row.values(metric) {
            [] => "-".to_owned(),
            _ => format!("{:.digits$}", row.median(metric) / unit),
        })
    }

    /// Least and greatest values.
    pub fn range(metric: Metric, unit: f64, digits: usize) -> Self {
        Self::number("min-max", move |row| {
            let (least, most) = row.range(metric);
            format!("{:.digits$}-{:.digits$}", least / unit, most / unit)
        })
    }

    /// Medians over that of another row; `-` if there is none or it is 0.
    pub fn over(
        head: &str,
        metric: Metric,
        digits: usize,
        other: impl Fn(&Row) -> Option<&'a Row> + 'a,
    ) -> Self {
        Self::number(head, move |row| match other(row) {
            Some(other) if other.median(metric) > 0.0 => {
                format!("{:.digits$}", row.over(other, metric))
            }
            _ => "-".to_owned(),
        })
    }
}

/// The rows as a table.
pub fn table(set: &Set, columns: &[Column<'_>]) -> String {
    let line = |cells: Vec<&str>| format!("| {} |\n", cells.join(" | "));
    let mut text = line(columns.iter().map(|column| column.head.as_str()).collect());
    for column in columns {
        text.push_str(if column.is_number { "|---:" } else { "|---" });
    }
    text.push_str("|\n");
    for row in set.rows() {
        let cells: Vec<_> = columns.iter().map(|column| (column.cell)(row)).collect();
        text.push_str(&line(cells.iter().map(String::as_str).collect()));
    }
    text
}

/// A bound on a ratio (or a percentage), and its outcome.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Goal {
    /// The compared quantities.
    pub name: String,
    /// The ratio.
    pub measured: f64,
    /// The bound.
    pub wanted: String,
    /// True if the goal is met.
    pub met: bool,
    /// The peer that was the best one in this run; empty if the name has it.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub peer: String,
}

impl Goal {
    fn new(name: String, measured: f64, wanted: String, met: bool) -> Self {
        Self { name, measured, wanted, met, peer: String::new() }
    }

    /// Names the peer. It may differ from run to run; the goal's name stays.
    pub fn over(self, peer: &str) -> Self {
        Self { peer: peer.to_owned(), ..self }
    }

    /// Met from `bound` up.
    pub fn at_least(name: String, measured: f64, bound: f64) -> Self {
        Self::new(name, measured, format!(">= {bound}"), measured >= bound)
    }

    /// The name, with the peer if there is one.
    pub fn title(&self) -> String {
        let Self { name, peer, .. } = self;
        if peer.is_empty() { name.clone() } else { format!("{name} ({peer})") }
    }

    /// Met up to `bound`.
    pub fn at_most(name: String, measured: f64, bound: f64) -> Self {
        Self::new(name, measured, format!("<= {bound}"), measured <= bound)
    }

    /// Met below `bound`.
    pub fn below(name: String, measured: f64, bound: f64) -> Self {
        Self::new(name, measured, format!("< {bound}"), measured < bound)
    }
}

/// One table of a report.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Section {
    /// Heading.
    pub title: String,
    /// Method of the measurement, and the meaning of the columns.
    pub method: String,
    /// The rows.
    pub rows: Set,
    #[serde(skip)]
    table: String,
}

impl Section {
    /// A section with a table of these columns.
    pub fn new(title: &str, method: &str, rows: &Set, columns: &[Column<'_>]) -> Self {
        let (title, method) = (title.to_owned(), method.to_owned());
        Self { title, method, rows: rows.clone(), table: table(rows, columns) }
    }
}

/// All results of a program.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Report {
    /// Heading.
    pub title: String,
    /// Machine, versions and command lines, as pairs of name and value.
    #[serde(default)]
    pub setup: Vec<(String, String)>,
    /// The tables.
    pub sections: Vec<Section>,
    /// Goals, judged.
    #[serde(default)]
    pub goals: Vec<Goal>,
    /// Goals that could not be judged, with the reasons.
    #[serde(default)]
    pub not_judged: Vec<String>,
    /// Measurements that a server, a program or the machine did not permit, with the reasons.
    #[serde(default)]
    pub left_out: Vec<String>,
}

impl Report {
    /// A report without tables.
    pub fn new(title: &str, setup: Vec<(String, String)>) -> Self {
        Self { title: title.to_owned(), setup, ..Self::default() }
    }

    /// The report as Markdown.
    pub fn markdown(&self) -> String {
        let mut text = format!("## {}\n", self.title);
        text.push_str(if self.setup.is_empty() { "" } else { "\n" });
        for (name, value) in &self.setup {
            let _ = writeln!(text, "- {name}: `{value}`");
        }
        for section in &self.sections {
            let _ = writeln!(text, "\n### {}\n", section.title);
            if !section.method.is_empty() {
                let _ = writeln!(text, "{}\n", section.method);
            }
            text.push_str(&section.table);
        }
        if !self.goals.is_empty() || !self.not_judged.is_empty() {
            self.write_goals(&mut text);
        }
        if !self.left_out.is_empty() {
            let _ = writeln!(text, "\n### Left out\n\n- {}", self.left_out.join("\n- "));
        }
        text
    }

    fn write_goals(&self, text: &mut String) {
        text.push_str("\n### Goals\n\n| | goal | measured | wanted |\n|---|---|---:|---:|\n");
        for goal in &self.goals {
            let Goal { measured, wanted, .. } = goal;
            let (verdict, name) = (if goal.met { "PASS" } else { "MISS" }, goal.title());
            let _ = writeln!(text, "| {verdict} | {name} | {measured:.3} | {wanted} |");
        }
        for reason in &self.not_judged {
            let _ = writeln!(text, "| - | {reason} | | |");
        }
    }

    /// Reads the JSON form.
    pub fn read(path: &Path) -> Result<Self> {
        let text =
            fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))?;
        serde_json::from_str(&text).with_context(|| format!("{} is no report", path.display()))
    }

    /// Prints the report; writes its JSON form if a file is given.
    pub fn publish(&self, json: Option<&Path>) -> Result<()> {
        println!("{}", self.markdown());
        let Some(path) = json else { return Ok(()) };
        let text = serde_json::to_string_pretty(self)? + "\n";
        fs::write(path, text).with_context(|| format!("cannot write {}", path.display()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::metric::{CPU, IOPS, point};

    fn set() -> Set {
        let mut set = Set::default();
        let here = point(&[("depth", &32)]);
        for rate in [1000.0, 3000.0] {
            set.add("ours", &here, vec![(IOPS, rate), (CPU, 1.0)]);
            set.add("theirs", &here, vec![(IOPS, rate / 2.0)]);
        }
        set
    }

    #[test]
    fn a_table_has_labels_medians_ranges_and_ratios() {
        let set = set();
        let columns = [
            Column::count("depth"),
            Column::subject("server"),
            Column::median("kIOPS", IOPS, 1e3, 1),
            Column::range(IOPS, 1e3, 1),
            Column::over("/ours", IOPS, 2, |row| set.at("ours", &row.point)),
            Column::median("CPU us/IO", CPU, 1.0, 3),
        ];
        let expected = "| depth | server | kIOPS | min-max | /ours | CPU us/IO |\n\
             |---:|---|---:|---:|---:|---:|\n\
             | 32 | ours | 2.0 | 1.0-3.0 | 1.00 | 1.000 |\n\
             | 32 | theirs | 1.0 | 0.5-1.5 | 0.50 | - |\n";
        assert_eq!(table(&set, &columns), expected);
    }

    #[test]
    fn a_goal_is_met_on_its_side_of_the_bound() {
        let met = |bound: fn(String, f64, f64) -> Goal| {
            [0.9, 1.0, 1.1].map(|measured| bound(String::new(), measured, 1.0).met)
        };
        assert_eq!(met(Goal::at_least), [false, true, true]);
        assert_eq!(met(Goal::at_most), [true, true, false]);
        assert_eq!(met(Goal::below), [true, false, false]);
    }

    #[test]
    fn a_report_has_a_set_up_tables_and_verdicts_in_markdown_and_json() {
        let mut report = Report::new("Test", vec![("CPU".to_owned(), "fast".to_owned())]);
        report.sections.push(Section::new("Rates", "By hand.", &set(), &[Column::subject("who")]));
        report.goals.push(Goal::below("idle".to_owned(), 0.25, 0.1));
        report.not_judged.push("scaling: not measured".to_owned());
        report.goals[0] = report.goals[0].clone().over("theirs");
        report.left_out.push("FLUSH: not offered".to_owned());
        let text = report.markdown();
        for part in [
            "## Test\n\n- CPU: `fast`\n\n### Rates\n\nBy hand.\n\n| who |\n|---|\n| ours |\n",
            "| MISS | idle (theirs) | 0.250 | < 0.1 |\n| - | scaling: not measured | | |\n",
            "\n### Left out\n\n- FLUSH: not offered\n",
        ] {
            assert!(text.contains(part), "{text}");
        }
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("result.json");
        report.publish(Some(&path)).unwrap();
        let read = Report::read(&path).unwrap();
        assert_eq!(read.sections[0].rows, set());
        assert_eq!(read.goals[0].peer, "theirs");
    }
}
