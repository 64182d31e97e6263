// SPDX-License-Identifier: Apache-2.0
//! The charts of a report.

use std::collections::BTreeSet;

use kit::metric::{CPU, IOPS, Metric, P50, P99, Row, Set};

use super::cells::{device, is_device};
use super::chart::{BARE_BEST, Chart, Series};

/// One chart: a metric over a label, with the other labels fixed.
struct View<'a> {
    title: &'a str,
    metric: Metric,
    /// Divisor and unit of the values.
    unit: (f64, &'a str),
    /// The label along the axis.
    along: &'a str,
    fixed: &'a [(&'a str, &'a str)],
}

/// The charts of a set with a label `place` (storage or device), for each of its values.
pub(super) fn of(set: &Set, place: &str) -> Vec<Chart> {
    let mut places: Vec<&str> = Vec::new();
    for value in set.rows().iter().filter_map(|row| row.point.get(place)) {
        if !places.contains(&value.as_str()) {
            places.push(value);
        }
    }
    places.into_iter().flat_map(|value| of_place(set, (place, value))).collect()
}

fn of_place(set: &Set, at: (&str, &str)) -> Vec<Chart> {
    let named = |what: &str| format!("{}: {what}", at.1);
    let mut charts = Vec::new();
    let reads = [at, ("load", "randread"), ("block", "4096"), ("queues", "1"), ("CPUs", "apart")];
    for client in ["event", "spin"] {
        let fixed = [&reads[..], &[("client", client)]].concat();
        for (what, metric, unit) in [
            ("rate", IOPS, (1e3, "kIOPS")),
            ("median latency", P50, (1.0, "us")),
            ("99th percentile of latency", P99, (1.0, "us")),
            ("CPU of the server for each request", CPU, (1.0, "us")),
        ] {
            let title = named(&format!("{what}, 4 KiB random reads, {client}"));
            let view = View { title: &title, metric, unit, along: "depth", fixed: &fixed };
            charts.extend(chart(set, &view));
        }
    }
    let blocks = [at, ("load", "randread"), ("client", "event"), ("depth", "32"), ("queues", "1")];
    let title = named("rate over block size, random reads, depth 32, event");
    let unit = (1e3, "kIOPS");
    charts.extend(chart(
        set,
        &View { title: &title, metric: IOPS, unit, along: "block", fixed: &blocks },
    ));
    let shared = [at, ("client", "event"), ("CPUs", "shared"), ("depth", "32")];
    let title = named("rate over queues, 4 KiB random reads, depth 32, event");
    charts.extend(chart(
        set,
        &View { title: &title, metric: IOPS, unit, along: "queues", fixed: &shared },
    ));
    charts
}

/// True if a row has these labels; one that its point lacks does not count.
fn is_at(row: &Row, fixed: &[(&str, &str)]) -> bool {
    fixed.iter().all(|(name, value)| row.point.get(*name).is_none_or(|label| label == value))
}

/// The chart, if there are at least two categories.
fn chart(set: &Set, view: &View<'_>) -> Option<Chart> {
    let rows: Vec<&Row> = set
        .rows()
        .iter()
        .filter(|row| !is_device(&row.subject) && is_at(row, view.fixed))
        .filter(|row| !row.values(view.metric).is_empty())
        .collect();
    let number = |row: &Row| row.label(view.along).parse::<u64>().ok();
    let categories: Vec<u64> =
        rows.iter().filter_map(|row| number(row)).collect::<BTreeSet<_>>().into_iter().collect();
    if categories.len() < 2 {
        return None;
    }
    let index = |row: &Row| categories.iter().position(|c| Some(*c) == number(row));
    let mut series: Vec<Series> = Vec::new();
    let mut add = |name: &str, x: usize, value: f64| {
        let value = value / view.unit.0;
        match series.iter_mut().find(|series| series.name == name) {
            Some(series) if series.points.iter().all(|point| point.0 != x) => {
                series.points.push((x, value));
            }
            Some(_) => {}
            None => series.push(Series { name: name.to_owned(), points: vec![(x, value)] }),
        }
    };
    for row in &rows {
        let Some(x) = index(row) else { continue };
        add(&row.subject, x, row.median(view.metric));
        let bare = device(set, &row.point).filter(|bare| !bare.values(view.metric).is_empty());
        if let Some(bare) = bare {
            add(BARE_BEST, x, bare.median(view.metric));
        }
    }
    series.iter_mut().for_each(|series| series.points.sort_by_key(|point| point.0));
    Some(Chart {
        title: view.title.to_owned(),
        x: view.along.to_owned(),
        y: view.unit.1.to_owned(),
        categories: categories.iter().map(u64::to_string).collect(),
        series,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::page::tests::native;

    #[test]
    fn each_storage_has_its_charts_with_the_bare_device_as_a_line() {
        let report = native();
        let charts = of(&report.sections[0].rows, "storage");
        let rate = &charts[0];
        assert_eq!(rate.title, "disk: rate, 4 KiB random reads, event");
        assert_eq!(rate.categories, ["1", "32", "128"]);
        let names: Vec<_> = rate.series.iter().map(|series| series.name.as_str()).collect();
        assert_eq!(names, ["ours", BARE_BEST, "qsd native"]);
        // The faster one of fio's two engines.
        assert_eq!(rate.series[1].points[0], (0, 2.0));
    }
}
