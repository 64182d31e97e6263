// SPDX-License-Identifier: Apache-2.0
//! Measurements: figures of subjects at points, their medians, ranges and ratios.
//!
//! A subject is a measured server, driver or disk. A point is everything else that a figure depends
//! on: labels such as depth and queues. Figures of two subjects are comparable at the same point
//! only. [`crate::report`] makes tables and JSON of them.

use std::collections::BTreeMap;
use std::fmt::Display;
use std::time::Duration;

use serde::{Deserialize, Serialize};

/// A measured quantity.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Metric {
    /// Name in the JSON form.
    pub name: &'static str,
    /// Unit of its values.
    pub unit: &'static str,
}

impl Metric {
    /// A quantity with its unit.
    pub const fn new(name: &'static str, unit: &'static str) -> Self {
        Self { name, unit }
    }
}

/// Requests a second.
pub const IOPS: Metric = Metric::new("iops", "1/s");
/// CPU time of the server's threads for each request.
pub const CPU: Metric = Metric::new("cpu", "us");
/// Median latency.
pub const P50: Metric = Metric::new("p50", "us");
/// 99th percentile of latency.
pub const P99: Metric = Metric::new("p99", "us");
/// Kicks for each request: notifications of the device.
pub const KICKS: Metric = Metric::new("kicks", "1");
/// Interrupts of the device for each request.
pub const INTERRUPTS: Metric = Metric::new("interrupts", "1");
/// Exits of a guest for each request, for any reason.
pub const EXITS: Metric = Metric::new("exits", "1");
/// Share of one CPU that an idle server takes.
pub const IDLE_CPU: Metric = Metric::new("idle_cpu", "%");

/// Labels by their names.
pub type Point = BTreeMap<String, String>;

/// A point with these labels.
pub fn point(labels: &[(&str, &dyn Display)]) -> Point {
    labels.iter().map(|(name, value)| ((*name).to_owned(), value.to_string())).collect()
}

/// The figures of one sample.
pub type Figures = Vec<(Metric, f64)>;

/// All values of one metric.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
struct Values {
    unit: String,
    /// One for each round.
    values: Vec<f64>,
}

/// All samples of one subject at one point.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Row {
    /// The subject.
    pub subject: String,
    /// The point.
    pub point: Point,
    metrics: BTreeMap<String, Values>,
}

impl Row {
    /// A label of the point; `-` if the point lacks it.
    pub fn label(&self, name: &str) -> &str {
        self.point.get(name).map_or("-", String::as_str)
    }

    /// The values of a metric, one for each round.
    pub fn values(&self, metric: Metric) -> &[f64] {
        self.metrics.get(metric.name).map_or(&[], |metric| &metric.values)
    }

    /// All metrics: name, unit, values.
    pub fn metrics(&self) -> impl Iterator<Item = (&str, &str, &[f64])> {
        self.metrics.iter().map(|(name, all)| (name.as_str(), all.unit.as_str(), &all.values[..]))
    }

    /// Median of a metric; 0 if it was not measured.
    pub fn median(&self, metric: Metric) -> f64 {
        median(self.values(metric).iter().copied())
    }

    /// Least and greatest value of a metric.
    pub fn range(&self, metric: Metric) -> (f64, f64) {
        let values = || self.values(metric).iter().copied();
        (values().fold(f64::INFINITY, f64::min), values().fold(0.0, f64::max))
    }

    /// Ratio of the medians of two rows.
    pub fn over(&self, other: &Self, metric: Metric) -> f64 {
        self.median(metric) / other.median(metric)
    }
}

/// Rows, in the order in which their first samples were taken.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Set {
    rows: Vec<Row>,
}

impl Set {
    /// Adds one sample.
    pub fn add(&mut self, subject: &str, point: &Point, figures: Figures) {
        let known = |row: &Row| row.subject == subject && row.point == *point;
        let index = self.rows.iter().position(known).unwrap_or_else(|| {
            let (subject, point) = (subject.to_owned(), point.clone());
            self.rows.push(Row { subject, point, ..Row::default() });
            self.rows.len() - 1
        });
        for (metric, value) in figures {
            let all = self.rows[index].metrics.entry(metric.name.to_owned()).or_default();
            metric.unit.clone_into(&mut all.unit);
            all.values.push(value);
        }
    }

    /// All rows.
    pub fn rows(&self) -> &[Row] {
        &self.rows
    }

    /// The rows of one subject.
    pub fn of(&self, subject: &str) -> impl Iterator<Item = &Row> {
        self.rows.iter().filter(move |row| row.subject == subject)
    }

    /// The row of a subject at a point.
    pub fn at(&self, subject: &str, point: &Point) -> Option<&Row> {
        self.of(subject).find(|row| row.point == *point)
    }

    /// The row at a point with the greatest median among the chosen subjects.
    pub fn most(
        &self,
        point: &Point,
        metric: Metric,
        chosen: impl Fn(&str) -> bool,
    ) -> Option<&Row> {
        self.chosen(point, chosen).max_by(|a, b| a.median(metric).total_cmp(&b.median(metric)))
    }

    /// The row at a point with the least median among the chosen subjects.
    pub fn least(
        &self,
        point: &Point,
        metric: Metric,
        chosen: impl Fn(&str) -> bool,
    ) -> Option<&Row> {
        self.chosen(point, chosen).min_by(|a, b| a.median(metric).total_cmp(&b.median(metric)))
    }

    fn chosen(&self, point: &Point, chosen: impl Fn(&str) -> bool) -> impl Iterator<Item = &Row> {
        self.rows.iter().filter(move |row| row.point == *point && chosen(&row.subject))
    }
}

/// Median of the values (mean of the two middle ones); 0 if there are none.
pub fn median(values: impl IntoIterator<Item = f64>) -> f64 {
    let mut values: Vec<_> = values.into_iter().collect();
    values.sort_by(f64::total_cmp);
    let middle = values.len() / 2;
    match values.len() {
        0 => 0.0,
        n if n % 2 == 1 => values[middle],
        _ => f64::midpoint(values[middle - 1], values[middle]),
    }
}

/// The smallest value that is not below `percent` of all; `sorted` is not empty.
pub fn percentile(sorted: &[Duration], percent: usize) -> Duration {
    let rank = (sorted.len() * percent).div_ceil(100);
    sorted[rank.max(1) - 1]
}

/// Returns the subjects of a comparison in the order of a round. Each round begins with another one,
/// so that a change of the load does not always meet the same one.
pub fn in_turn<T>(subjects: &[T], round: u32) -> impl Iterator<Item = &T> {
    let first = round as usize % subjects.len().max(1);
    subjects[first..].iter().chain(&subjects[..first])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_round_begins_with_another_subject() {
        let round = |round| in_turn(&["a", "b", "c"], round).copied().collect::<String>();
        assert_eq!([0, 1, 2, 3].map(round), ["abc", "bca", "cab", "abc"]);
        assert_eq!(in_turn::<u8>(&[], 1).count(), 0);
    }

    #[test]
    fn percentiles_are_values_that_occurred() {
        let sorted: Vec<_> = (1..=10).map(Duration::from_millis).collect();
        let at = |percent| percentile(&sorted, percent).as_millis();
        assert_eq!((at(50), at(90), at(99), at(100)), (5, 9, 10, 10));
        assert_eq!(percentile(&sorted[..1], 50).as_millis(), 1);
    }

    #[test]
    fn the_median_is_the_middle_or_the_mean_of_the_two_middle_values() {
        assert_eq!(median([3.0, 1.0, 2.0]), 2.0);
        assert_eq!(median([4.0, 1.0, 2.0, 3.0]), 2.5);
        assert_eq!(median([]), 0.0);
    }

    #[test]
    fn samples_of_one_subject_at_one_point_are_one_row() {
        let mut set = Set::default();
        let points = [1, 32].map(|depth| point(&[("depth", &depth)]));
        for round in [1.0, 3.0] {
            for point in &points {
                set.add("a", point, vec![(IOPS, round), (P50, 7.0)]);
                set.add("b", point, vec![(IOPS, 4.0 * round)]);
            }
        }
        let names: Vec<_> =
            set.rows().iter().map(|row| (row.subject.as_str(), row.label("depth"))).collect();
        assert_eq!(names, [("a", "1"), ("b", "1"), ("a", "32"), ("b", "32")]);
        let row = set.at("a", &points[1]).unwrap();
        assert_eq!((row.median(IOPS), row.range(IOPS)), (2.0, (1.0, 3.0)));
        assert_eq!(row.over(set.at("b", &points[1]).unwrap(), IOPS), 0.25);
        assert!(row.values(CPU).is_empty());
    }

    #[test]
    fn the_best_is_chosen_among_comparable_rows_only() {
        let mut set = Set::default();
        let [here, there] = [1, 32].map(|depth| point(&[("depth", &depth)]));
        set.add("a", &here, vec![(IOPS, 1.0)]);
        set.add("b", &here, vec![(IOPS, 2.0)]);
        set.add("c", &here, vec![(IOPS, 3.0)]);
        set.add("b", &there, vec![(IOPS, 9.0)]);
        let most = set.most(&here, IOPS, |name| name != "c").unwrap();
        assert_eq!((most.subject.as_str(), most.median(IOPS)), ("b", 2.0));
        assert_eq!(set.least(&here, IOPS, |_| true).unwrap().subject, "a");
        assert!(set.most(&there, IOPS, |name| name == "a").is_none());
    }

    #[test]
    fn the_json_form_can_be_read_again() {
        let mut set = Set::default();
        set.add("a", &point(&[("depth", &1)]), vec![(IOPS, 1.5)]);
        let text = serde_json::to_string(&set).unwrap();
        assert_eq!(
            text,
            r#"[{"subject":"a","point":{"depth":"1"},"metrics":{"iops":{"unit":"1/s","values":[1.5]}}}]"#
        );
        assert_eq!(serde_json::from_str::<Set>(&text).unwrap(), set);
    }
}
