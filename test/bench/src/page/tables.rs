// SPDX-License-Identifier: Apache-2.0
//! Tables of measurements.

use std::collections::BTreeSet;

use kit::metric::{CPU, Set, median};
use kit::report::Report;

use super::cells::{Cell, is_peer};
use super::document::Table;
use super::parts::Parts;
use super::reasons::Reason;

/// Digits that a figure of any size deserves.
fn figure(value: f64) -> String {
    match value.abs() {
        size if size >= 100.0 => format!("{value:.0}"),
        size if size >= 10.0 => format!("{value:.1}"),
        _ => format!("{value:.3}"),
    }
}

fn ratio(value: Option<f64>) -> String {
    value.map_or("-".to_owned(), |value| format!("{value:.2}"))
}

/// Every row with all metrics: median, spread (greatest less least, in percent of the median), and
/// the number of samples.
pub(super) fn rows(set: &Set) -> Table {
    let labels: BTreeSet<&str> =
        set.rows().iter().flat_map(|row| row.point.keys().map(String::as_str)).collect();
    let metrics: BTreeSet<(&str, &str)> = set
        .rows()
        .iter()
        .flat_map(|row| row.metrics().map(|(name, unit, _)| (name, unit)))
        .collect();
    let mut table = Table::default();
    table.head.extend(labels.iter().map(|&label| label.to_owned()));
    table.head.push("subject".to_owned());
    for (name, unit) in &metrics {
        table.head.extend([format!("{name} ({unit})"), "spread".to_owned()]);
    }
    table.head.push("samples".to_owned());
    for row in set.rows() {
        let mut cells: Vec<String> =
            labels.iter().map(|label| row.label(label).to_owned()).collect();
        cells.push(row.subject.clone());
        let mut samples = 0;
        for (name, _) in &metrics {
            let values = row.metrics().find(|(known, ..)| known == name).map_or(&[][..], |m| m.2);
            samples = samples.max(values.len());
            cells.extend(if values.is_empty() {
                ["-".to_owned(), "-".to_owned()]
            } else {
                summary(values)
            });
        }
        cells.push(samples.to_string());
        table.rows.push(cells);
    }
    table
}

/// Median and spread.
fn summary(values: &[f64]) -> [String; 2] {
    let middle = median(values.iter().copied());
    let (least, most) = values
        .iter()
        .fold((f64::INFINITY, f64::NEG_INFINITY), |(least, most), v| (least.min(*v), most.max(*v)));
    let spread = if middle > 0.0 { 100.0 * (most - least) / middle } else { 0.0 };
    [figure(middle), format!("{spread:.0} %")]
}

/// Cells that are behind, with their ratios and reasons.
pub(super) fn cells(cells: &[Cell<'_>]) -> Table {
    let head = [
        "part",
        "subject",
        "point",
        "over the best peer",
        "best peer",
        "over the bare device",
        "reason",
    ];
    let mut table = Table::new(&head);
    for cell in cells {
        table.rows.push(vec![
            cell.part.to_owned(),
            cell.row.subject.clone(),
            cell.place(),
            ratio(cell.ratio()),
            cell.peer.map_or("-".to_owned(), |peer| peer.subject.clone()),
            ratio(cell.of_device()),
            Reason::of(cell).text(),
        ]);
    }
    table
}

/// 4 KiB random reads without a VM.
pub(super) fn summary_of(all: &[Cell<'_>], report: &Report) -> Table {
    let head = [
        "storage",
        "client",
        "depth",
        "over the best peer",
        "over the bare device",
        "CPU, over the thriftiest peer",
    ];
    let mut table = Table::new(&head);
    let Some(section) = report.sections.first() else { return table };
    let is_summary = |cell: &&Cell<'_>| {
        let label = |name| cell.row.label(name);
        [label("load"), label("block")] == ["randread", "4096"]
    };
    for cell in all.iter().filter(is_summary) {
        let Some(row) = section.rows.at(&cell.row.subject, &cell.row.point) else { continue };
        let thriftiest = section.rows.least(&row.point, CPU, is_peer);
        let mut cells: Vec<_> =
            ["storage", "client", "depth"].iter().map(|name| row.label(name).to_owned()).collect();
        cells.extend([ratio(cell.ratio()), ratio(cell.of_device())]);
        cells.push(ratio(thriftiest.map(|peer| row.over(peer, CPU))));
        table.rows.push(cells);
    }
    table
}

/// The goals of all parts.
pub(super) fn goals(parts: &Parts) -> Table {
    let mut table = Table::new(&["part", "goal", "measured", "wanted", "verdict"]);
    for (part, report) in parts.measured() {
        for goal in &report.goals {
            let verdict = if goal.met { "met" } else { "MISSED" };
            table.rows.push(vec![
                part.name.to_owned(),
                goal.title(),
                figure(goal.measured),
                goal.wanted.clone(),
                verdict.to_owned(),
            ]);
        }
        for reason in &report.not_judged {
            let dash = || "-".to_owned();
            table.rows.push(vec![
                part.name.to_owned(),
                reason.clone(),
                dash(),
                dash(),
                "not judged".to_owned(),
            ]);
        }
    }
    table
}
