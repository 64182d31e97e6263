// SPDX-License-Identifier: Apache-2.0
//! The charts of a report.

use kit::metric::{CPU, EXITS, INTERRUPTS, IOPS, KICKS, Metric, P50, P99, Row, Set, point};

use super::cells::{device, is_device};
use super::chart::{BARE_BEST, Chart, Series};
use super::parts::{DENSITY, GUEST, HOST, ICOUNT, LOADS, NATIVE, NESTED, QUEUES};
use crate::density::MEMORY;
use crate::icount::{CLIENT, LENGTH, SERVER, USUAL, WHOLE};

/// Labels with their values.
type Labels<'a> = Vec<(&'a str, &'a str)>;

/// One chart: a metric over a label, with all other labels fixed.
struct View<'a> {
    title: String,
    metric: Metric,
    /// Divisor and unit of the values.
    unit: (f64, &'a str),
    /// The label along the axis.
    along: &'a str,
    /// The category of a value of that label; none: not in this chart.
    category: fn(&str) -> Option<String>,
    /// All other labels of the rows.
    fixed: Labels<'a>,
}

const RATE: (Metric, (f64, &str)) = (IOPS, (1e3, "kIOPS"));
const EACH: (f64, &str) = (1.0, "for each request");

/// The charts of one section of a part.
pub(super) fn of(part: &str, set: &Set) -> Vec<Chart> {
    let views = match part {
        NATIVE => of_native(set),
        HOST | LOADS | QUEUES => of_host(set),
        NESTED => of_nested(set),
        GUEST => of_guest(set),
        DENSITY => of_density(),
        ICOUNT => of_paths(),
        _ => Vec::new(),
    };
    views.iter().filter_map(|view| chart(set, view)).collect()
}

/// The values of a label, in the order of the rows.
fn values<'a>(set: &'a Set, label: &str) -> Vec<&'a str> {
    let mut values: Vec<&str> = Vec::new();
    for value in set.rows().iter().filter_map(|row| row.point.get(label)) {
        if !values.contains(&value.as_str()) {
            values.push(value);
        }
    }
    values
}

/// Each value of a label with each of another one.
fn pairs<'a>(set: &'a Set, first: &str, second: &str) -> Vec<(&'a str, &'a str)> {
    let seconds = values(set, second);
    let with = |value| seconds.iter().map(move |&other| (value, other)).collect::<Vec<_>>();
    values(set, first).into_iter().flat_map(with).collect()
}

fn any(value: &str) -> Option<String> {
    Some(value.to_owned())
}

/// Rate, latencies and CPU over depth, for a client that sleeps and one that spins.
fn over_depth<'a>(place: &str, what: &str, fixed: &Labels<'a>) -> Vec<View<'a>> {
    let mut views = Vec::new();
    for client in ["event", "spin"] {
        for (name, (metric, unit)) in [
            ("rate", RATE),
            ("median latency", (P50, (1.0, "us"))),
            ("99th percentile of latency", (P99, (1.0, "us"))),
            ("CPU of the server for each request", (CPU, (1.0, "us"))),
        ] {
            let title = format!("{place}: {name}, {what}, {client}");
            let fixed = [&fixed[..], &[("client", client)]].concat();
            views.push(View { title, metric, unit, along: "depth", category: any, fixed });
        }
    }
    views
}

/// The rate over another label than depth.
fn rate<'a>(title: String, along: &'a str, fixed: Labels<'a>) -> View<'a> {
    let (metric, unit) = RATE;
    View { title, metric, unit, along, category: any, fixed }
}

fn of_native(set: &Set) -> Vec<View<'_>> {
    let mut views = Vec::new();
    for place in values(set, "storage") {
        let reads = [("storage", place), ("load", "randread"), ("queues", "1")];
        let small = [&reads[..], &[("block", "4096")]].concat();
        views.extend(over_depth(place, "4 KiB random reads", &small));
        let title = format!("{place}: rate over block size, random reads, depth 32, event");
        let fixed = [&reads[..], &[("client", "event"), ("depth", "32")]].concat();
        views.push(rate(title, "block", fixed));
        for depth in values(set, "depth") {
            let title =
                format!("{place}: rate over queues, 4 KiB random reads, depth {depth}, event");
            let at = [("storage", place), ("load", "randread"), ("block", "4096")];
            let fixed = [&at[..], &[("client", "event"), ("depth", depth)]].concat();
            views.push(rate(title, "queues", fixed));
        }
    }
    views
}

fn of_host(set: &Set) -> Vec<View<'_>> {
    let mut views = Vec::new();
    for (place, load) in pairs(set, "device", "load") {
        let at = [("device", place), ("load", load), ("block", "4096")];
        let fixed = [&at[..], &[("queues", "1"), ("CPUs", "apart")]].concat();
        views.extend(over_depth(place, &format!("{load} of 4 KiB"), &fixed));
        for depth in values(set, "depth") {
            let title = format!("{place}: rate over queues, {load} of 4 KiB, depth {depth}, event");
            let client = [("client", "event"), ("CPUs", "shared"), ("depth", depth)];
            views.push(rate(title, "queues", [&at[..], &client].concat()));
        }
    }
    views
}

/// Rate, exits and signals over depth: a chart for each load and number of virtual CPUs.
fn of_nested(set: &Set) -> Vec<View<'_>> {
    let mut views = Vec::new();
    for place in values(set, "device") {
        for rw in values(set, "rw") {
            for vcpus in values(set, "vcpus") {
                for (name, (metric, unit)) in [
                    ("rate", RATE),
                    ("exits", (EXITS, EACH)),
                    ("kicks", (KICKS, EACH)),
                    ("interrupts", (INTERRUPTS, EACH)),
                ] {
                    let title = format!("{place}: {name}, {rw} of 4 KiB, {vcpus} virtual CPUs");
                    let fixed = vec![("device", place), ("rw", rw), ("vcpus", vcpus)];
                    views.push(View { title, metric, unit, along: "depth", category: any, fixed });
                }
            }
        }
    }
    views
}

/// A load of `guest` with single requests.
fn single(load: &str) -> Option<String> {
    load.strip_suffix(", depth 32").map(str::to_owned)
}

/// A load of `guest` that can be merged.
fn merged(load: &str) -> Option<String> {
    let can_merge = load.contains("batches") || load.contains("buffered");
    can_merge.then(|| load.replace(", depth 32", ""))
}

fn jobs(load: &str) -> Option<String> {
    load.strip_prefix("randread, depth 64, ").map(str::to_owned)
}

type Category = fn(&str) -> Option<String>;

fn of_guest(set: &Set) -> Vec<View<'_>> {
    let mut views = Vec::new();
    for place in values(set, "disk") {
        let groups: [(&str, Category); 3] = [
            ("4 KiB, depth 32", single),
            ("4 KiB, batches or page cache", merged),
            ("512 bytes, depth 64", jobs),
        ];
        for (group, category) in groups {
            for (name, (metric, unit)) in
                [("rate", RATE), ("kicks", (KICKS, EACH)), ("interrupts", (INTERRUPTS, EACH))]
            {
                let title = format!("{place}: {name}, {group}");
                let fixed = vec![("disk", place)];
                views.push(View { title, metric, unit, along: "load", category, fixed });
            }
        }
    }
    views
}

/// Cost of each disk over the number of disks.
fn of_density<'a>() -> Vec<View<'a>> {
    let metrics = [
        ("memory of each disk", MEMORY, (1.0, "KiB")),
        ("99th percentile of latency", P99, (1.0, "us")),
        ("CPU of the servers for each request", CPU, (1.0, "us")),
    ];
    let view = |(name, metric, unit)| {
        let title = format!("{name}, lightly loaded disks");
        View { title, metric, unit, along: "disks", category: any, fixed: Vec::new() }
    };
    metrics.map(view).into()
}

/// Instructions over depth.
fn of_paths<'a>() -> Vec<View<'a>> {
    let parts = [("whole", WHOLE), ("server's threads", SERVER), ("client", CLIENT)];
    let view = |(name, metric)| {
        let title = format!("instructions for each random read of null_blk: {name}, one queue");
        let (unit, fixed) = ((1e3, "thousands"), USUAL.to_vec());
        View { title, metric, unit, along: "depth", category: any, fixed }
    };
    parts.map(view).into()
}

/// Instructions from one trace event of the kernel plane to the next.
pub(super) fn of_stages(set: &Set) -> Option<Chart> {
    let mut stages = Set::default();
    for row in set.rows() {
        let place = point(&[("stage", &row.label("from"))]);
        for &length in row.values(LENGTH) {
            stages.add(&row.subject, &place, vec![(LENGTH, length)]);
        }
    }
    let (title, unit) = ("instructions of each stage, by its first event", (1.0, "instructions"));
    let (title, fixed) = (title.to_owned(), Vec::new());
    chart(&stages, &View { title, metric: LENGTH, unit, along: "stage", category: any, fixed })
}

/// The category of a row that has exactly the labels of the view. A row with another label, or
/// without one of these, belongs to another chart.
fn category(row: &Row, view: &View<'_>) -> Option<String> {
    let value = row.point.get(view.along)?;
    let has = |(name, value): &(&str, &str)| row.point.get(*name).is_some_and(|is| is == value);
    let is_here = row.point.len() == view.fixed.len() + 1 && view.fixed.iter().all(has);
    (view.category)(value).filter(|_| is_here)
}

/// The chart, if there are at least two categories.
fn chart(set: &Set, view: &View<'_>) -> Option<Chart> {
    let rows = set.rows().iter().filter(|row| !is_device(&row.subject));
    let rows = rows.filter(|row| !row.values(view.metric).is_empty());
    let rows: Vec<(String, &Row)> =
        rows.filter_map(|row| Some((category(row, view)?, row))).collect();
    let mut categories: Vec<String> = Vec::new();
    for (category, _) in &rows {
        if !categories.contains(category) {
            categories.push(category.clone());
        }
    }
    if categories.len() < 2 {
        return None;
    }
    let number = |category: &String| category.split(' ').next()?.parse::<u64>().ok();
    let is_scale = categories.iter().all(|category| number(category).is_some());
    if is_scale {
        categories.sort_by_key(number);
    }
    let mut series: Vec<Series> = Vec::new();
    let mut add = |name: &str, x: usize, value: f64| {
        let point = (x, value / view.unit.0);
        match series.iter_mut().find(|series| series.name == name) {
            // All subjects at a point have the same bare device.
            Some(series) if name == BARE_BEST && series.points.contains(&point) => {}
            Some(series) => series.points.push(point),
            None => series.push(Series { name: name.to_owned(), points: vec![point] }),
        }
    };
    for (category, row) in &rows {
        let Some(x) = categories.iter().position(|known| known == category) else { continue };
        add(&row.subject, x, row.median(view.metric));
        let bare = device(set, &row.point).filter(|bare| !bare.values(view.metric).is_empty());
        if let Some(bare) = bare {
            add(BARE_BEST, x, bare.median(view.metric));
        }
    }
    series.iter_mut().for_each(|series| series.points.sort_by_key(|point| point.0));
    Some(Chart {
        title: view.title.clone(),
        x: view.along.to_owned(),
        y: view.unit.1.to_owned(),
        categories,
        is_scale,
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
        let charts = of(NATIVE, &report.sections[0].rows);
        let rate = &charts[0];
        assert_eq!(rate.title, "disk: rate, 4 KiB random reads, event");
        assert_eq!(rate.categories, ["1", "32", "128"]);
        let names: Vec<_> = rate.series.iter().map(|series| series.name.as_str()).collect();
        assert_eq!(names, ["ours", BARE_BEST, "qsd native"]);
        // The faster one of fio's two engines.
        assert_eq!(rate.series[1].points[0], (0, 2.0));
    }

    fn rows(labels: &[&[(&str, &str)]], subjects: &[(&str, f64)]) -> Set {
        let mut set = Set::default();
        for labels in labels {
            let point = labels.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect();
            for (subject, rate) in subjects {
                set.add(subject, &point, vec![(IOPS, 1e3 * rate), (EXITS, *rate)]);
            }
        }
        set
    }

    #[test]
    fn rows_of_a_guest_have_charts_of_their_own_for_each_load_and_number_of_cpus() {
        let mut set = Set::default();
        for (rw, vcpus, factor) in
            [("randread", "1", 1.0), ("randwrite", "1", 10.0), ("randread", "2", 100.0)]
        {
            for depth in ["1", "4"] {
                let labels = [("device", "d"), ("rw", rw), ("vcpus", vcpus), ("depth", depth)];
                let point =
                    labels.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect();
                set.add("vhost-blk kernel", &point, vec![(IOPS, 1e3 * factor)]);
            }
        }
        let charts = of(NESTED, &set);
        let all: Vec<_> =
            charts.iter().map(|c| (c.title.as_str(), c.series[0].points.clone())).collect();
        let flat = |y| vec![(0, y), (1, y)];
        assert_eq!(
            all,
            [
                ("d: rate, randread of 4 KiB, 1 virtual CPUs", flat(1.0)),
                ("d: rate, randread of 4 KiB, 2 virtual CPUs", flat(100.0)),
                ("d: rate, randwrite of 4 KiB, 1 virtual CPUs", flat(10.0)),
            ]
        );
        // They have neither a client that sleeps nor one that spins.
        assert_eq!(of(HOST, &set), []);
    }

    #[test]
    fn one_queue_with_cpus_of_its_own_is_not_in_the_chart_over_queues() {
        let at = |queues, cpus| {
            [
                ("device", "d"),
                ("load", "randread"),
                ("block", "4096"),
                ("client", "event"),
                ("queues", queues),
                ("CPUs", cpus),
                ("depth", "32"),
            ]
        };
        let mut set = rows(&[&at("1", "apart")], &[("vhost-blk kernel", 9.0)]);
        for (queues, rate) in [("1", 1.0), ("2", 2.0)] {
            let point = at(queues, "shared").map(|(k, v)| (k.to_owned(), v.to_owned())).into();
            set.add("vhost-blk kernel", &point, vec![(IOPS, 1e3 * rate)]);
        }
        let charts = of(QUEUES, &set);
        assert_eq!(charts.len(), 1, "{charts:?}");
        assert_eq!(charts[0].series[0].points, [(0, 1.0), (1, 2.0)]);
    }

    #[test]
    fn path_lengths_and_stages_have_charts() {
        let mut set = Set::default();
        for depth in ["1", "32"] {
            let mut place = point(&[("depth", &depth)]);
            place.extend(USUAL.map(|(label, value)| (label.to_owned(), value.to_owned())));
            set.add("vhost-blk kernel", &place, vec![(WHOLE, 5e3), (CLIENT, 1e3)]);
            // Another path, which these charts leave out.
            place.insert("load".to_owned(), "randwrite".to_owned());
            set.add("vhost-blk kernel", &place, vec![(WHOLE, 6e3), (CLIENT, 2e3)]);
        }
        let charts = of(ICOUNT, &set);
        let all: Vec<_> = charts.iter().map(|chart| chart.series[0].points.clone()).collect();
        assert_eq!(all, [vec![(0, 5.0), (1, 5.0)], vec![(0, 1.0), (1, 1.0)]]);
        let mut stages = Set::default();
        for (from, to, length) in [("chain", "request", 7.0), ("request", "submit", 8.0)] {
            let place = point(&[("from", &from), ("to", &to)]);
            stages.add("vhost-blk kernel", &place, vec![(LENGTH, length)]);
        }
        let chart = of_stages(&stages).unwrap();
        assert_eq!((chart.categories.join(" "), chart.is_scale), ("chain request".into(), false));
        assert_eq!(chart.series[0].points, [(0, 7.0), (1, 8.0)]);
        assert_eq!(of_stages(&set), None);
    }

    #[test]
    fn the_guests_driver_has_charts_over_loads_and_over_jobs() {
        let loads = [
            "read, depth 32",
            "write, depth 32",
            "read, depth 32, batches of 16",
            "write, buffered",
            "randread, depth 64, 1 jobs",
            "randread, depth 64, 4 jobs",
        ];
        let labels = loads.map(|load| [("disk", "ram"), ("load", load)]);
        let labels: Vec<&[(&str, &str)]> = labels.iter().map(|labels| &labels[..]).collect();
        let charts = of(GUEST, &rows(&labels, &[("ours, bio, interrupts", 1.0)]));
        let all: Vec<_> = charts.iter().map(|c| (c.categories.join("; "), c.is_scale)).collect();
        let all: Vec<_> = all.iter().map(|(text, is_scale)| (text.as_str(), *is_scale)).collect();
        assert_eq!(
            all,
            [
                ("read; write", false),
                ("read, batches of 16; write, buffered", false),
                ("1 jobs; 4 jobs", true),
            ]
        );
    }
}
