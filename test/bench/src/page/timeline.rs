// SPDX-License-Identifier: Apache-2.0
//! The time of requests: the stages of each path, and time lines.

use std::collections::BTreeMap;

use kit::metric::{Metric, Row, Set};
use kit::report::Section;

use super::chart::{Chart, Series};
use super::document::Block;
use super::flow::Flow;
use super::parts::{Parts, STAGES as VM, TIMELINE};
use crate::timeline::{FIXED, PART, PARTS, PASSED, REST, STAGES_TITLE, WINDOW_TITLE};

const ABOUT: &str = "Each stairs count the requests that have passed a stage, from the middle of a \
    run of a second on. Two stairs are apart by the requests between these stages (upwards), and by \
    their time (to the right). High steps are a convoy: device, server and client wait for each other. \
    `batches of 32` is the server before it tries batch sizes (fixed), `vhost-blk io_uring` the \
    one that does (adaptive).";

/// The time lines of all parts.
pub(super) fn blocks(parts: &Parts) -> Vec<Block> {
    let mut blocks = vec![Block::Text(ABOUT.to_owned())];
    for (name, section) in sections(parts, WINDOW_TITLE) {
        let flows = flows(&section.rows);
        if !flows.is_empty() {
            blocks.push(Block::Heading(3, format!("Time lines, part {name}")));
            blocks.push(Block::Flows(flows));
        }
    }
    if blocks.len() == 1 {
        blocks.push(Block::Text(format!(
            "Not measured in this report. `{FIXED}` and the others need root and trace events: \
             `make bench ARGS=timeline`."
        )));
    }
    blocks
}

/// The sections with this title, each with the name of its part.
pub(super) fn sections<'a>(
    parts: &'a Parts,
    title: &'a str,
) -> impl Iterator<Item = (&'static str, &'a Section)> {
    [TIMELINE, VM].into_iter().filter_map(move |name| {
        let sections = &parts.of(name)?.sections;
        Some((name, sections.iter().find(|s| s.title == title && !s.rows.rows().is_empty())?))
    })
}

/// A time line for each storage, depth and server.
fn flows(set: &Set) -> Vec<Flow> {
    let mut flows: Vec<Flow> = Vec::new();
    for row in set.rows() {
        let title =
            format!("{}, depth {}: {}", row.label("storage"), row.label("depth"), row.subject);
        let found = flows.iter().position(|flow| flow.title == title);
        let index = found.unwrap_or_else(|| {
            let curves = PASSED.iter().map(|stage| (stage.name, Vec::new())).collect();
            flows.push(Flow { title, curves });
            flows.len() - 1
        });
        for ((_, times), stage) in flows[index].curves.iter_mut().zip(PASSED) {
            times.push(row.median(stage));
        }
    }
    flows
}

/// The stages of all paths in time, for each part.
pub(super) fn stages(parts: &Parts) -> Vec<(&'static str, &Section, Vec<Chart>)> {
    let all: Vec<&str> = PARTS.iter().copied().chain([REST]).collect();
    let of = |(name, section): (&'static str, &'_ Section)| {
        (name, stage_charts(&section.rows, crate::timeline::TIME, &all))
    };
    sections(parts, STAGES_TITLE)
        .map(|found| {
            let (name, charts) = of(found);
            (name, found.1, charts)
        })
        .collect()
}

/// A chart over stages for each point, with all subjects in their colours.
pub(super) fn stage_charts(set: &Set, metric: Metric, order: &[&str]) -> Vec<Chart> {
    let mut points: BTreeMap<(String, u64), Vec<&Row>> = BTreeMap::new();
    for row in set.rows() {
        let depth = row.label("depth").parse().unwrap_or(0);
        points.entry((row.label("storage").to_owned(), depth)).or_default().push(row);
    }
    let chart = |((storage, depth), rows): ((String, u64), Vec<&Row>)| {
        let is_there = |stage: &&&str| rows.iter().any(|row| row.label(PART) == **stage);
        let categories: Vec<String> =
            order.iter().filter(is_there).map(|stage| (*stage).to_owned()).collect();
        let mut series: Vec<Series> = Vec::new();
        for row in rows {
            let category = categories.iter().position(|category| category == row.label(PART));
            let Some(point) = category.map(|index| (index, row.median(metric))) else { continue };
            match series.iter_mut().find(|series| series.name == row.subject) {
                Some(series) => series.points.push(point),
                None => series.push(Series { name: row.subject.clone(), points: vec![point] }),
            }
        }
        Chart {
            title: format!("{storage}, depth {depth}: {} of each stage", metric.unit),
            x: PART.to_owned(),
            y: metric.unit.to_owned(),
            categories,
            is_scale: false,
            series,
        }
    };
    points.into_iter().map(chart).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::timeline::TIME;
    use kit::metric::point;

    #[test]
    fn a_time_line_has_the_times_of_its_requests_at_each_stage() {
        let mut set = Set::default();
        for request in [1, 2] {
            let figures = (0..).zip(PASSED).map(|(n, stage)| (stage, f64::from(10 * request + n)));
            let place = point(&[("storage", &"disk"), ("depth", &"32"), ("request", &request)]);
            set.add(FIXED, &place, figures.collect());
        }
        let flows = flows(&set);
        assert_eq!(flows.len(), 1);
        assert_eq!(flows[0].title, format!("disk, depth 32: {FIXED}"));
        assert_eq!(flows[0].curves[0], ("available", vec![10.0, 20.0]));
        assert_eq!(flows[0].curves[5], ("seen", vec![15.0, 25.0]));
    }

    #[test]
    fn the_stages_of_a_path_are_in_the_order_of_a_request() {
        let mut set = Set::default();
        for (subject, stage, time) in [
            ("ours", "device", 7.0),
            ("ours", "ring", 3.0),
            ("bare fio io_uring fixed", "device", 6.0),
            ("bare fio io_uring fixed", REST, 2.0),
        ] {
            let place = point(&[("storage", &"disk"), ("depth", &"1"), (PART, &stage)]);
            set.add(subject, &place, vec![(TIME, time)]);
        }
        let order: Vec<&str> = PARTS.iter().copied().chain([REST]).collect();
        let charts = stage_charts(&set, TIME, &order);
        assert_eq!(charts.len(), 1);
        assert_eq!(charts[0].categories, ["ring", "device", REST]);
        let points: Vec<_> = charts[0].series.iter().map(|s| s.points.clone()).collect();
        assert_eq!(points, [vec![(1, 7.0), (0, 3.0)], vec![(1, 6.0), (2, 2.0)]]);
    }
}
