// SPDX-License-Identifier: Apache-2.0
//! The metrics of each queue. They have the same names on both data planes.

use data_plane::{FailureKind, Histogram, Latencies, Operation, QueueReport, QueueStats};
use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, NoLabelSet};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::{Registry, Unit};
use std::sync::atomic::AtomicU64;
use vhost_user::{QueueStatus, Status};

/// The labels of a queue.
type Labels = [(&'static str, String); 2];

/// A counter of a queue: name, unit, meaning, value.
pub(super) type QueueCounter = (&'static str, Option<Unit>, &'static str, fn(&QueueStats) -> u64);

/// The counters of each queue. They include starts that have ended: a connection or a switch of the
/// data plane resets none.
pub(super) const QUEUE_COUNTERS: [QueueCounter; 16] = [
    ("queue_requests", None, "Requests taken from the queue", |stats| stats.chains),
    ("queue_completed_requests", None, "Requests returned to the guest", |stats| stats.completed),
    ("queue_refused_requests", None, "Wrong or unsupported requests", |stats| stats.refused),
    ("queue_failed_requests", None, "Requests whose I/O failed", |stats| stats.failed),
    ("queue_read", Some(Unit::Bytes), "Data read by the guest", |stats| stats.read_bytes),
    ("queue_written", Some(Unit::Bytes), "Data written by the guest", |stats| stats.write_bytes),
    ("queue_discards", None, "Successful DISCARDs of the guest", |stats| stats.discards),
    ("queue_discarded", Some(Unit::Bytes), "Data discarded by the guest", |stats| {
        stats.discarded_bytes
    }),
    ("queue_kicks", None, "Notifications from the guest", |stats| stats.kicks),
    ("queue_calls", None, "Notifications to the guest", |stats| stats.calls),
    ("queue_coalesced_calls", None, "Notifications that came with a later one", |stats| {
        stats.coalesced
    }),
    ("queue_suppressed_calls", None, "Notifications that the guest did not want", |stats| {
        stats.suppressed
    }),
    ("queue_limit_waits", None, "Waits for a limit of the disk", |stats| stats.throttled),
    (
        "queue_recovered_requests",
        None,
        "Requests carried out again after another daemon",
        |stats| stats.recovered,
    ),
    ("queue_polls", None, "Polls before a sleep", |stats| stats.polls),
    ("queue_poll_hits", None, "Polls that found work", |stats| stats.polls_won),
];

/// A gauge of a running queue: name, meaning, value.
pub(super) type QueueGauge = (&'static str, &'static str, fn(&QueueReport) -> u64);

pub(super) const QUEUE_GAUGES: [QueueGauge; 5] = [
    ("queue_inflight_requests", "Requests in flight", |report| report.inflight),
    ("queue_faulted", "A ring fault stopped the queue until the device is reset", |report| {
        report.faulted.into()
    }),
    ("queue_kept_requests", "Requests that wait for the end of a halt", |report| report.kept),
    ("queue_batch_size", "Requests handed to the storage at a time", |report| {
        report.choices.batch_size
    }),
    ("queue_coalescing", "Notifications to the guest are held for later ones", |report| {
        report.choices.coalescing.into()
    }),
];

/// Calls `each` for each queue with its labels.
fn for_queues(disks: &[(&str, &Status)], mut each: impl FnMut(&Labels, &QueueStatus)) {
    for (disk, status) in disks {
        for (index, queue) in status.queues.iter().enumerate() {
            each(&[("disk", (*disk).to_owned()), ("queue", index.to_string())], queue);
        }
    }
}

pub(super) fn add_queues(registry: &mut Registry, disks: &[(&str, &Status)]) {
    let running = Family::<Labels, Gauge>::default();
    for_queues(disks, |labels, queue| {
        running.get_or_create(labels).set(queue.plane.is_some().into());
    });
    registry.register("queue_running", "A data plane has the queue", running);
    for (name, help, value) in QUEUE_GAUGES {
        let family = Family::<Labels, Gauge>::default();
        for_queues(disks, |labels, queue| {
            let count = queue.running.as_ref().map_or(0, value);
            family.get_or_create(labels).set(i64::try_from(count).unwrap_or(i64::MAX));
        });
        registry.register(name, help, family);
    }
    for (name, unit, help, value) in QUEUE_COUNTERS {
        let family = Family::<Labels, Counter>::default();
        for_queues(disks, |labels, queue| {
            family.get_or_create(labels).inc_by(value(&queue.total));
        });
        match unit {
            Some(unit) => registry.register_with_unit(name, help, unit, family),
            None => registry.register(name, help, family),
        }
    }
    add_poll_time(registry, disks);
    add_failures(registry, disks);
}

/// The time of the polls of each queue.
fn add_poll_time(registry: &mut Registry, disks: &[(&str, &Status)]) {
    let family = Family::<Labels, Counter<f64, AtomicU64>>::default();
    for_queues(disks, |labels, queue| {
        family.get_or_create(labels).inc_by(queue.total.poll_ns as f64 / 1e9);
    });
    registry.register_with_unit("queue_poll", "Time spent in polls", Unit::Seconds, family);
}

/// The failures of the storage on each queue by kind.
fn add_failures(registry: &mut Registry, disks: &[(&str, &Status)]) {
    let family = Family::<[(&'static str, String); 3], Counter>::default();
    for_queues(disks, |[disk, queue], status| {
        for (kind, count) in FailureKind::ALL.iter().zip(status.total.failures) {
            let labels = [disk.clone(), queue.clone(), ("kind", kind.name().to_owned())];
            family.get_or_create(&labels).inc_by(count);
        }
    });
    let help = "Requests of the queue that the storage has failed";
    registry.register("queue_storage_failures", help, family);
}

/// The latencies of the queues of each disk, by operation.
#[derive(Debug)]
pub(super) struct QueueLatencies(Vec<(String, Vec<Latencies>)>);

impl QueueLatencies {
    pub(super) fn of(disks: &[(&str, &Status)]) -> Self {
        let latencies = disks.iter().map(|(name, status)| {
            let queues = status.queues.iter().map(|queue| queue.total.latencies);
            ((*name).to_owned(), queues.collect())
        });
        QueueLatencies(latencies.collect())
    }
}

impl Collector for QueueLatencies {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), std::fmt::Error> {
        let help = "Time from the taking of a request to its return, by operation";
        let (unit, kind) = (Unit::Seconds, MetricType::Histogram);
        let mut family = encoder.encode_descriptor("queue_latency", help, Some(&unit), kind)?;
        let queues = self.0.iter().flat_map(|(disk, queues)| {
            queues.iter().enumerate().map(move |(index, latencies)| (disk, index, latencies))
        });
        for (disk, index, latencies) in queues {
            for operation in Operation::ALL {
                let labels = [
                    ("disk", disk.clone()),
                    ("queue", index.to_string()),
                    ("operation", operation.name().to_owned()),
                ];
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
