// SPDX-License-Identifier: Apache-2.0
//! The types of the interface as JSON.

use crate::clock;
use crate::disks::lost::Loss;
use crate::disks::snapshot::Space;
use crate::disks::{JobFacts, Row, RowState, Start};
use crate::events::{failure_value, limits_value};
use crate::failure::Failure;
use data_plane::{
    FailureKind, HealthReport, Histogram, Latencies, Operation, QueueReport, QueueStats,
};
use qcow2::inspect::FileFacts;
use serde_json::{Map, Value, json};
use vhost_user::{ImageLockState, QueueStatus, Status};

/// The state of a disk (`Status`).
pub(super) fn status_value(name: &str, status: &Status) -> Value {
    let queues = status.queues.iter().enumerate().map(|(index, queue)| queue_value(index, queue));
    let mut value = json!({
        "name": name,
        "version": env!("CARGO_PKG_VERSION"),
        "pid": std::process::id(),
        "disk": status.disk,
        "data_plane": status.plane.to_string(),
        "why": status.why,
        "capacity_bytes": status.capacity_bytes,
        "front_end_connected": status.connected,
        "front_ends": status.front_ends,
        "paused": status.paused,
        "halted": status.health.halt.as_ref().map(|halt| {
            json!({ "reason": halt.reason, "since": clock::told(halt.since) })
        }),
        "halts": status.health.halts,
        "stalled_queues": status.health.stalled.keys().collect::<Vec<_>>(),
        "stalls": status.health.stalls,
        "failures": failures_value(&status.health),
        "last_failure": status.health.last_failure.as_ref().map(|(failure, at)| {
            json!({ "failure": failure_value(failure), "at": clock::told(*at) })
        }),
        "limits": limits_of(status),
        "image_lock": match status.image_lock {
            ImageLockState::Off => "off",
            ImageLockState::Held => "held",
            ImageLockState::Released => "released",
        },
        "features": format!("{:#x}", status.features),
        "writeback": status.writeback,
        "queues": queues.collect::<Vec<_>>(),
    });
    if !status.kernel_counters.is_empty() {
        let lines = status.kernel_counters.iter();
        let lines: Map<_, _> = lines.map(|(name, text)| (name.clone(), json!(text))).collect();
        value["kernel"] = Value::Object(lines);
    }
    value
}

/// Work in progress on a disk (`Job`).
pub(super) fn job_value(disk: &str, job: &JobFacts) -> Value {
    json!({
        "disk": disk,
        "kind": job.work.name(),
        "target": job.target,
        "state": job.state,
        "done_bytes": job.done_bytes,
        "total_bytes": job.total_bytes,
        "bytes_per_s": job.bytes_per_s(),
        "bandwidth": job.bandwidth,
        "since": clock::told(job.since),
    })
}

/// The loss of the block device of a disk (`StorageLoss`); null: it is there.
pub(super) fn loss_value(loss: Option<&Loss>) -> Value {
    loss.map(|loss| json!({"reason": loss.reason, "since": clock::told(loss.since)})).into()
}

/// Number of failed requests by kind.
fn failures_value(health: &HealthReport) -> Value {
    let counts = FailureKind::ALL.iter().zip(health.failures);
    Value::Object(counts.map(|(kind, count)| (kind.name().into(), count.into())).collect())
}

/// The limits of a disk (`Limits`).
pub(super) fn limits_of(status: &Status) -> Value {
    limits_value(&status.limits, status.limit_group.as_deref())
}

fn queue_value(index: usize, queue: &QueueStatus) -> Value {
    let mut value = json!({
        "index": index,
        "runs_on": queue.plane.map(|plane| plane.to_string()),
        "size": queue.size,
    });
    for (name, count) in queue.running.iter().flat_map(QueueReport::counters) {
        value[name] = count.into();
    }
    value["latency"] = latencies_value(&queue.total.latencies);
    value
}

/// The counters of all queues since the start of the disk, and the present choices (`QueueTotals`).
pub(super) fn totals_value(status: &Status) -> Value {
    let totals = status.queues.iter().enumerate().map(|(index, queue)| {
        let mut value = json!({"index": index});
        for (name, count) in queue.total.counters() {
            value[name] = count.into();
        }
        let choices = queue.running.as_ref().map(|report| report.choices);
        value["batch_size"] = choices.map(|choices| choices.batch_size).into();
        value["coalescing"] = choices.map(|choices| u64::from(choices.coalescing)).into();
        value["latency"] = latencies_value(&queue.total.latencies);
        value
    });
    Value::Array(totals.collect())
}

/// The discards of a disk, and the space that its files take (`DiscardStats`).
pub(super) fn discards_value(name: &str, status: &Status, space: &Space) -> Value {
    let sum = |count: fn(&QueueStats) -> u64| -> u64 {
        status.queues.iter().map(|queue| count(&queue.total)).sum()
    };
    let file = |file: &FileFacts| {
        json!({
            "path": file.path.display().to_string(),
            "format": if file.qcow2.is_some() { "qcow2" } else { "raw" },
            "virtual_bytes": file.virtual_bytes,
            "allocated_bytes": (!file.is_device).then_some(file.disk_bytes),
        })
    };
    json!({
        "name": name,
        "virtual_bytes": status.capacity_bytes,
        "discards": sum(|stats| stats.discards),
        "discarded_bytes": sum(|stats| stats.discarded_bytes),
        "unmapped_bytes": space.unmapped_bytes,
        "files": space.files.iter().map(file).collect::<Vec<_>>(),
    })
}

/// A row of the list of disks (`Summary`).
pub(super) fn summary_value(row: &Row) -> Value {
    let status = row.status.as_deref();
    let state = match (row.state, status) {
        (RowState::Starting, _) => "starting",
        (RowState::Failed, _) => "failed",
        (RowState::GivenUp, _) => "given_up",
        (RowState::Stopping, _) => "stopping",
        (RowState::Served, None) => "silent",
        (_, Some(status)) if status.health.halt.is_some() => "halted",
        (_, Some(status)) if status.paused => "paused",
        (_, Some(_)) => "serving",
    };
    json!({
        "name": row.name,
        "origin": row.origin,
        "socket": row.args.as_ref().and_then(|args| args.socket_path.as_ref()),
        "disk": status.map(|status| &status.disk),
        "state": state,
        "start": row.start.as_ref().map(start_value),
        "capacity_bytes": status.map(|status| status.capacity_bytes),
        "limits": status.map(limits_of),
        "mirror": row.mirror.as_ref().map(super::mirror::value),
        "jobs": row.jobs.iter().map(|job| job_value(&row.name, job)).collect::<Vec<_>>(),
        "data_plane": status.map(|status| status.plane.to_string()),
        "front_end_connected": status.map(|status| status.connected),
    })
}

/// The start of a disk that is not served (`Start`).
fn start_value(start: &Start) -> Value {
    let failure = |Failure { what, why, remedy, .. }: &Failure| json!({"what": what, "why": why, "remedy": remedy});
    json!({
        "since": clock::told(start.since),
        "failed_tries": start.tries,
        "failure": start.failure.as_ref().map(failure),
    })
}

fn latencies_value(latencies: &Latencies) -> Value {
    let each = Operation::ALL
        .map(|operation| (operation.name().to_owned(), latency_value(latencies.of(operation))));
    Value::Object(each.into_iter().collect())
}

/// Number and mean of requests, and the bounds below which half and 99 % of them are.
fn latency_value(histogram: &Histogram) -> Value {
    let count = histogram.count();
    let mean = histogram.sum_us.checked_div(count);
    json!({
        "count": count,
        "mean_us": mean,
        "p50_below_us": percentile_below_us(histogram, 50),
        "p99_below_us": percentile_below_us(histogram, 99),
        "buckets": histogram.buckets,
    })
}

/// The bound in microseconds below which so many percent of the latencies are. `None`: there are none,
/// or they have no bound.
pub(crate) fn percentile_below_us(histogram: &Histogram, percent: u64) -> Option<u64> {
    let count = histogram.count();
    let wanted = (count * percent).div_ceil(100);
    let mut seen = 0;
    let full = |requests: &u64| {
        seen += requests;
        seen >= wanted
    };
    let bound = histogram.buckets.iter().position(full).and_then(Histogram::bound)?;
    (count > 0).then_some(bound.as_micros() as u64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn latencies_are_told_by_the_bounds_of_their_buckets() {
        let mut histogram = Histogram::default();
        let nothing = json!({
            "count": 0, "mean_us": null, "p50_below_us": null, "p99_below_us": null,
            "buckets": vec![0; 24],
        });
        assert_eq!(latency_value(&histogram), nothing);
        (histogram.buckets[4], histogram.buckets[10], histogram.sum_us) = (98, 2, 4000);
        let told = json!({
            "count": 100, "mean_us": 40, "p50_below_us": 16, "p99_below_us": 1024,
            "buckets": histogram.buckets,
        });
        assert_eq!(latency_value(&histogram), told);
        histogram.buckets[23] = 100;
        assert_eq!(latency_value(&histogram)["p99_below_us"], Value::Null);
    }
}
