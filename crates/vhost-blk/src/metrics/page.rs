// SPDX-License-Identifier: Apache-2.0
//! The metrics of a disk as OpenMetrics text.

use data_plane::{HealthReport, Histogram, Latencies, Operation, QueueReport, QueueStats};
use prometheus_client::collector::Collector;
use prometheus_client::encoding::text::encode;
use prometheus_client::encoding::{DescriptorEncoder, NoLabelSet};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::info::Info;
use prometheus_client::registry::{Registry, Unit};
use std::num::NonZeroU64;
use vhost_user::{QueueStatus, Status};

/// The label of a queue.
type Labels = [(&'static str, String); 1];

/// A counter of a queue: name, unit, meaning, value.
type QueueCounter = (&'static str, Option<Unit>, &'static str, fn(&QueueStats) -> u64);

/// The counters of each queue. They include starts that have ended: a connection or a switch of the
/// data plane resets none.
const QUEUE_COUNTERS: [QueueCounter; 9] = [
    ("queue_requests", None, "Requests taken from the queue", |stats| stats.chains),
    ("queue_completed_requests", None, "Requests returned to the guest", |stats| stats.completed),
    ("queue_refused_requests", None, "Wrong or unsupported requests", |stats| stats.refused),
    ("queue_failed_requests", None, "Requests whose I/O failed", |stats| stats.failed),
    ("queue_read", Some(Unit::Bytes), "Data read by the guest", |stats| stats.read_bytes),
    ("queue_written", Some(Unit::Bytes), "Data written by the guest", |stats| stats.write_bytes),
    ("queue_kicks", None, "Notifications from the guest", |stats| stats.kicks),
    ("queue_calls", None, "Notifications to the guest", |stats| stats.calls),
    ("queue_limit_waits", None, "Waits for a limit of the disk", |stats| stats.throttled),
];

/// A gauge of a running queue: name, meaning, value.
type QueueGauge = (&'static str, &'static str, fn(&QueueReport) -> u64);

const QUEUE_GAUGES: [QueueGauge; 3] = [
    ("queue_inflight_requests", "Requests in flight", |report| report.inflight),
    ("queue_faulted", "A ring fault stopped the queue until the device is reset", |report| {
        report.faulted.into()
    }),
    ("queue_kept_requests", "Requests that wait for the end of a halt", |report| report.kept),
];

/// The page for this status.
pub(super) fn of(status: &Status) -> String {
    let mut registry = Registry::with_prefix("vhost_blk");
    let about = [
        ("version", env!("CARGO_PKG_VERSION").to_owned()),
        ("disk", status.disk.clone()),
        ("data_plane", status.plane.to_string()),
    ];
    registry.register("disk", "The disk and its data plane", Info::new(about.to_vec()));
    let capacity = gauge(status.capacity_bytes);
    registry.register_with_unit("capacity", "Size of the disk", Unit::Bytes, capacity);
    let connected = gauge(status.connected.into());
    registry.register("front_end_connected", "A front-end is connected", connected);
    registry.register(
        "paused",
        "No request is taken until the resume",
        gauge(status.paused.into()),
    );
    add_health(&mut registry, &status.health);
    let rate = |limit: Option<NonZeroU64>| gauge(limit.map_or(0, NonZeroU64::get));
    let help = "Most requests a second; 0: no limit";
    registry.register("limit_iops", help, rate(status.limits.iops));
    let help = "Most bytes a second; 0: no limit";
    registry.register("limit_bandwidth", help, rate(status.limits.bytes));
    let writeback = gauge(status.writeback.into());
    registry.register("writeback", "The write-back cache is on", writeback);
    let front_ends = counter(status.front_ends);
    registry.register("front_ends", "Front-ends since the start of the daemon", front_ends);
    add_queues(&mut registry, &status.queues);
    let latencies = status.queues.iter().map(|queue| queue.total.latencies).collect();
    registry.register_collector(Box::new(QueueLatencies(latencies)));
    let mut text = String::new();
    encode(&mut text, &registry).expect("a string grows");
    text
}

fn gauge(value: u64) -> Gauge {
    let gauge = Gauge::default();
    gauge.set(i64::try_from(value).unwrap_or(i64::MAX));
    gauge
}

fn counter(value: u64) -> Counter {
    let counter = Counter::default();
    counter.inc_by(value);
    counter
}

fn add_health(registry: &mut Registry, health: &HealthReport) {
    let halted = gauge(health.halt.is_some().into());
    registry.register("halted", "An error of the storage has halted the disk", halted);
    registry.register("halts", "Halts by errors of the storage", counter(health.halts));
    let stalled = gauge(health.stalled.len() as u64);
    registry.register("stalled_queues", "Queues with a request beyond --io-timeout", stalled);
    registry.register("stalls", "Requests beyond --io-timeout", counter(health.stalls));
}

fn add_queues(registry: &mut Registry, queues: &[QueueStatus]) {
    let label = |index: usize| -> Labels { [("queue", index.to_string())] };
    let running = Family::<Labels, Gauge>::default();
    for (index, queue) in queues.iter().enumerate() {
        running.get_or_create(&label(index)).set(queue.plane.is_some().into());
    }
    registry.register("queue_running", "A data plane has the queue", running);
    for (name, help, value) in QUEUE_GAUGES {
        let family = Family::<Labels, Gauge>::default();
        for (index, queue) in queues.iter().enumerate() {
            let count = queue.running.as_ref().map_or(0, value);
            family.get_or_create(&label(index)).set(i64::try_from(count).unwrap_or(i64::MAX));
        }
        registry.register(name, help, family);
    }
    for (name, unit, help, value) in QUEUE_COUNTERS {
        let family = Family::<Labels, Counter>::default();
        for (index, queue) in queues.iter().enumerate() {
            family.get_or_create(&label(index)).inc_by(value(&queue.total));
        }
        match unit {
            Some(unit) => registry.register_with_unit(name, help, unit, family),
            None => registry.register(name, help, family),
        }
    }
}

/// The latencies of all queues, by operation.
#[derive(Debug)]
struct QueueLatencies(Vec<Latencies>);

impl Collector for QueueLatencies {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), std::fmt::Error> {
        let help = "Time from the taking of a request to its return, by operation";
        let (unit, kind) = (Unit::Seconds, MetricType::Histogram);
        let mut family = encoder.encode_descriptor("queue_latency", help, Some(&unit), kind)?;
        for (index, latencies) in self.0.iter().enumerate() {
            for operation in Operation::ALL {
                let labels =
                    [("queue", index.to_string()), ("operation", operation.name().to_owned())];
                let histogram = latencies.of(operation);
                let bound =
                    |bucket| Histogram::bound(bucket).map_or(f64::INFINITY, |b| b.as_secs_f64());
                let counts = histogram.buckets.iter().enumerate();
                let buckets: Vec<_> = counts.map(|(i, count)| (bound(i), *count)).collect();
                let (sum, count) = (histogram.sum_us as f64 / 1e6, histogram.count());
                let mut metric = family.encode_family(&labels)?;
                metric.encode_histogram::<NoLabelSet>(sum, count, &buckets, None)?;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use data_plane::{Limits, PlaneKind};

    fn page() -> String {
        let total = QueueStats { chains: 7, read_bytes: 4096, calls: 3, ..QueueStats::default() };
        let mut total = total;
        let written = &mut total.latencies.0[Operation::Write as usize];
        (written.buckets[3], written.buckets[23], written.sum_us) = (6, 1, 2_500_000);
        let report = QueueReport { inflight: 5, faulted: true, ..QueueReport::default() };
        of(&Status {
            disk: "file \"a\\b\".img".into(),
            plane: PlaneKind::Uring,
            why: "--data-plane says so".into(),
            capacity_bytes: 1 << 20,
            connected: true,
            paused: false,
            limits: Limits { iops: NonZeroU64::new(500), ..Limits::NONE },
            health: HealthReport { halts: 3, ..HealthReport::default() },
            image_lock: vhost_user::ImageLockState::Held,
            front_ends: 2,
            features: 0,
            writeback: false,
            queues: vec![
                QueueStatus {
                    plane: Some(PlaneKind::Uring),
                    size: 128,
                    running: Some(report),
                    total,
                },
                QueueStatus { plane: None, size: 0, running: None, total: QueueStats::default() },
            ],
            kernel_counters: Vec::new(),
        })
    }

    #[test]
    fn the_page_has_the_totals_of_each_queue() {
        let page = page();
        for line in [
            "vhost_blk_capacity_bytes 1048576",
            "vhost_blk_front_end_connected 1",
            "vhost_blk_paused 0",
            "vhost_blk_halted 0",
            "vhost_blk_halts_total 3",
            "vhost_blk_stalled_queues 0",
            "vhost_blk_stalls_total 0",
            "vhost_blk_queue_kept_requests{queue=\"1\"} 0",
            "vhost_blk_limit_iops 500",
            "vhost_blk_limit_bandwidth 0",
            "vhost_blk_writeback 0",
            "vhost_blk_front_ends_total 2",
            "vhost_blk_queue_running{queue=\"1\"} 0",
            "vhost_blk_queue_inflight_requests{queue=\"0\"} 5",
            "vhost_blk_queue_faulted{queue=\"0\"} 1",
            "vhost_blk_queue_requests_total{queue=\"0\"} 7",
            "vhost_blk_queue_read_bytes_total{queue=\"0\"} 4096",
            "vhost_blk_queue_calls_total{queue=\"1\"} 0",
            "vhost_blk_queue_latency_seconds_sum{queue=\"0\",operation=\"write\"} 2.5",
            "vhost_blk_queue_latency_seconds_count{queue=\"0\",operation=\"write\"} 7",
            "vhost_blk_queue_latency_seconds_bucket{le=\"0.000008\",queue=\"0\",operation=\"write\"} 6",
            "vhost_blk_queue_latency_seconds_bucket{le=\"+Inf\",queue=\"0\",operation=\"write\"} 7",
        ] {
            assert!(page.lines().any(|known| known == line), "{line} is not in:\n{page}");
        }
        assert!(page.contains(r#"disk="file \"a\\b\".img""#), "{page}");
        assert!(page.ends_with("# EOF\n"));
    }

    fn names() -> Vec<String> {
        let page = page();
        let samples = page.lines().filter(|line| !line.starts_with('#'));
        let mut names: Vec<String> =
            samples.map(|line| line.split(['{', ' ']).next().unwrap().to_owned()).collect();
        names.sort();
        names.dedup();
        names
    }

    fn file(path: &str) -> String {
        let root = concat!(env!("CARGO_MANIFEST_DIR"), "/../..");
        std::fs::read_to_string(format!("{root}/{path}")).unwrap()
    }

    #[test]
    fn the_documents_name_each_metric() {
        let (text, names) = (file("docs/operations.md"), names());
        assert_eq!(names.len(), 12 + 1 + QUEUE_GAUGES.len() + QUEUE_COUNTERS.len() + 3);
        for name in names {
            assert!(text.contains(&format!("`{name}`")), "{name} is not in docs/operations.md");
        }
    }

    #[test]
    fn alerts_and_dashboard_use_metrics_that_exist() {
        let names = names();
        let dashboard = file("packaging/grafana/vhost-blk.json");
        serde_json::from_str::<serde_json::Value>(&dashboard).unwrap();
        for text in [file("packaging/prometheus/vhost-blk.rules.yml"), dashboard] {
            let words = text.split(|c: char| !c.is_ascii_alphanumeric() && c != '_');
            let used: Vec<&str> = words.filter(|word| word.starts_with("vhost_blk_")).collect();
            assert!(used.len() > 3, "{used:?}");
            for word in used {
                assert!(names.iter().any(|name| name == word), "there is no metric {word}");
            }
        }
    }
}
