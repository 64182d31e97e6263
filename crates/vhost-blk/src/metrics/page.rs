// SPDX-License-Identifier: Apache-2.0
//! The metrics of all disks as OpenMetrics text.

use super::queues::{QueueLatencies, add_queues};
use super::rows::{add_jobs, add_losses, add_mirrors, add_starts, add_unmapped};
use crate::disks::{Row, RowState};
use data_plane::FailureKind;
use prometheus_client::encoding::text::encode;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::info::Info;
use prometheus_client::registry::{Registry, Unit};
use std::num::NonZeroU64;
use vhost_user::Status;

/// The label of a disk.
pub(super) type DiskLabels = [(&'static str, String); 1];

/// A gauge of a disk: name, unit, meaning, value.
type DiskGauge = (&'static str, Option<Unit>, &'static str, fn(&Status) -> u64);

const DISK_GAUGES: [DiskGauge; 8] = [
    ("capacity", Some(Unit::Bytes), "Size of the disk", |status| status.capacity_bytes),
    ("front_end_connected", None, "A front-end is connected", |status| status.connected.into()),
    ("paused", None, "No request is taken until the resume", |status| status.paused.into()),
    ("halted", None, "An error of the storage has halted the disk", |status| {
        status.health.halt.is_some().into()
    }),
    ("stalled_queues", None, "Queues with a request beyond --io-timeout", |status| {
        status.health.stalled.len() as u64
    }),
    ("limit_iops", None, "Most requests a second; 0: no limit", |status| rate(status.limits.iops)),
    ("limit_bandwidth", None, "Most bytes a second; 0: no limit", |status| {
        rate(status.limits.bytes)
    }),
    ("writeback", None, "The write-back cache is on", |status| status.writeback.into()),
];

/// A counter of a disk: name, meaning, value.
type DiskCounter = (&'static str, &'static str, fn(&Status) -> u64);

const DISK_COUNTERS: [DiskCounter; 3] = [
    ("front_ends", "Front-ends since the start of the disk", |status| status.front_ends),
    ("halts", "Halts by errors of the storage", |status| status.health.halts),
    ("stalls", "Requests beyond --io-timeout", |status| status.health.stalls),
];

/// The failures of the storage of each disk by kind.
fn add_failures(registry: &mut Registry, disks: &[(&str, &Status)]) {
    let family = Family::<[(&str, String); 2], Counter>::default();
    for (name, status) in disks {
        for (kind, count) in FailureKind::ALL.iter().zip(status.health.failures) {
            let labels = [("disk", (*name).to_owned()), ("kind", kind.name().to_owned())];
            family.get_or_create(&labels).inc_by(count);
        }
    }
    registry.register("storage_failures", "Requests that the storage has failed", family);
}

fn rate(limit: Option<NonZeroU64>) -> u64 {
    limit.map_or(0, NonZeroU64::get)
}

/// The page for these disks. One that has not answered is marked, and has no other metric. Disks that were given
/// up are counted only: others may have their names.
pub(super) fn of(mut rows: Vec<Row>) -> String {
    let all = rows.len();
    rows.retain(|row| row.state != RowState::GivenUp);
    let (given_up, rows) = (all - rows.len(), &rows[..]);
    let mut registry = Registry::with_prefix("vhost_blk");
    let version = Info::new([("version", env!("CARGO_PKG_VERSION"))]);
    registry.register("build", "The program that the daemon runs", version);
    let up = Family::<DiskLabels, Gauge>::default();
    for row in rows {
        up.get_or_create(&disk_label(&row.name)).set(row.status.is_some().into());
    }
    registry.register("disk_up", "The disk has answered within two seconds", up);
    add_starts(&mut registry, rows);
    let gauge = Gauge::<i64>::default();
    gauge.set(i64::try_from(given_up).unwrap_or(i64::MAX));
    let help = "Disks that were removed by force, and whose storage has not answered";
    registry.register("given_up_disks", help, gauge);
    let disks: Vec<(&str, &Status)> =
        rows.iter().filter_map(|row| Some((&*row.name, row.status.as_deref()?))).collect();
    add_disks(&mut registry, &disks);
    add_unmapped(&mut registry, rows);
    add_losses(&mut registry, rows);
    add_jobs(&mut registry, rows);
    add_mirrors(&mut registry, rows);
    add_failures(&mut registry, &disks);
    add_queues(&mut registry, &disks);
    registry.register_collector(Box::new(QueueLatencies::of(&disks)));
    let mut text = String::new();
    encode(&mut text, &registry).expect("a string grows");
    text
}

pub(super) fn disk_label(name: &str) -> DiskLabels {
    [("disk", name.to_owned())]
}

fn add_disks(registry: &mut Registry, disks: &[(&str, &Status)]) {
    let about = Family::<[(&str, String); 4], Gauge>::default();
    for (name, status) in disks {
        let labels = [
            ("disk", (*name).to_owned()),
            ("version", env!("CARGO_PKG_VERSION").to_owned()),
            ("image", status.disk.clone()),
            ("data_plane", status.plane.to_string()),
        ];
        about.get_or_create(&labels).set(1);
    }
    registry.register("disk_info", "The disk and its data plane", about);
    let groups = Family::<[(&str, String); 2], Gauge>::default();
    for (name, status) in disks {
        if let Some(group) = &status.limit_group {
            groups
                .get_or_create(&[("disk", (*name).to_owned()), ("group", group.to_string())])
                .set(1);
        }
    }
    registry.register("limit_group_info", "The group whose disks share the limits", groups);
    for (name, unit, help, value) in DISK_GAUGES {
        let family = Family::<DiskLabels, Gauge>::default();
        for (disk, status) in disks {
            let value = i64::try_from(value(status)).unwrap_or(i64::MAX);
            family.get_or_create(&disk_label(disk)).set(value);
        }
        match unit {
            Some(unit) => registry.register_with_unit(name, help, unit, family),
            None => registry.register(name, help, family),
        }
    }
    for (name, help, value) in DISK_COUNTERS {
        let family = Family::<DiskLabels, Counter>::default();
        for (disk, status) in disks {
            family.get_or_create(&disk_label(disk)).inc_by(value(status));
        }
        registry.register(name, help, family);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::disks::JobFacts;
    use crate::disks::Origin;
    use crate::disks::lost::Loss;
    use crate::disks::mirror::{Facts, Phase};
    use crate::events::Work;
    use crate::metrics::queues::{QUEUE_COUNTERS, QUEUE_GAUGES};
    use crate::metrics::rows::MIRROR_GAUGES;
    use crate::options::DiskArgs;
    use clap::{Args, FromArgMatches};
    use data_plane::{
        Choices, HealthReport, Limits, Operation, PlaneKind, QueueReport, QueueStats,
    };
    use std::time::SystemTime;
    use vhost_user::QueueStatus;

    fn total() -> QueueStats {
        let total = QueueStats { chains: 7, read_bytes: 4096, calls: 3, ..QueueStats::default() };
        let total = QueueStats { suppressed: 4, recovered: 2, polls: 9, polls_won: 8, ..total };
        let failures = [0, 0, 0, 0, 6];
        let mut total = QueueStats { poll_ns: 1_500_000_000, failures, ..total };
        let written = &mut total.latencies.0[Operation::Write as usize];
        (written.buckets[3], written.buckets[23], written.sum_us) = (6, 1, 2_500_000);
        total
    }

    fn page() -> String {
        let choices = Choices { batch_size: 16, coalescing: true };
        let report = QueueReport { inflight: 5, faulted: true, choices, ..QueueReport::default() };
        let status = Status {
            disk: "file \"a\\b\".img".into(),
            plane: PlaneKind::Uring,
            why: "--data-plane says so".into(),
            capacity_bytes: 1 << 20,
            connected: true,
            paused: false,
            limits: Limits { iops: NonZeroU64::new(500), ..Limits::NONE },
            limit_group: Some("g".into()),
            health: HealthReport { halts: 3, failures: [0, 4, 0, 0, 0], ..HealthReport::default() },
            image_lock: vhost_user::ImageLockState::Held,
            front_ends: 2,
            features: 0,
            writeback: false,
            cache_set: None,
            errors: data_plane::ErrorRules::default(),
            queues: vec![
                QueueStatus {
                    plane: Some(PlaneKind::Uring),
                    size: 128,
                    running: Some(report),
                    total: total(),
                },
                QueueStatus { plane: None, size: 0, running: None, total: QueueStats::default() },
            ],
            kernel_counters: Vec::new(),
        };
        let row = |name: &str, status| Row {
            name: name.to_owned(),
            args: Some(args()),
            origin: Origin::Command,
            state: RowState::Served,
            start: None,
            unmapped_bytes: 1 << 16,
            mirror: Some(Facts {
                target: "b".into(),
                phase: Phase::Ready,
                copied_bytes: 1 << 20,
                total_bytes: 1 << 20,
                changed_bytes: 512,
            }),
            jobs: vec![JobFacts {
                work: Work::Backup,
                target: "/c".to_owned(),
                state: "copying",
                done_bytes: 512,
                total_bytes: 4096,
                bandwidth: None,
                since: SystemTime::UNIX_EPOCH,
            }],
            loss: Some(Loss { since: SystemTime::UNIX_EPOCH, reason: "r".to_owned() }),
            status,
        };
        let given_up = |_| Row { state: RowState::GivenUp, ..row("a", None) };
        let failed = Row { state: RowState::Failed, ..row("b", None) };
        let rows = [row("a", Some(Box::new(status))), failed];
        of(rows.into_iter().chain((0..2).map(given_up)).collect())
    }

    fn args() -> DiskArgs {
        let command = DiskArgs::augment_args(clap::Command::new("disk"));
        DiskArgs::from_arg_matches(&command.get_matches_from(["disk"])).unwrap()
    }

    #[test]
    fn the_page_has_the_totals_of_each_queue() {
        let page = page();
        for line in [
            concat!("vhost_blk_build_info{version=\"", env!("CARGO_PKG_VERSION"), "\"} 1"),
            "vhost_blk_disk_up{disk=\"a\"} 1",
            "vhost_blk_disk_up{disk=\"b\"} 0",
            "vhost_blk_disk_failed{disk=\"a\"} 0",
            "vhost_blk_disk_failed{disk=\"b\"} 1",
            "vhost_blk_disk_starting{disk=\"b\"} 0",
            "vhost_blk_given_up_disks 2",
            "vhost_blk_capacity_bytes{disk=\"a\"} 1048576",
            "vhost_blk_front_end_connected{disk=\"a\"} 1",
            "vhost_blk_paused{disk=\"a\"} 0",
            "vhost_blk_halted{disk=\"a\"} 0",
            "vhost_blk_halts_total{disk=\"a\"} 3",
            "vhost_blk_storage_gone{disk=\"a\"} 1",
            "vhost_blk_job_running{disk=\"a\",kind=\"backup\"} 1",
            "vhost_blk_job_done_bytes{disk=\"a\",kind=\"backup\"} 512",
            "vhost_blk_job_total_bytes{disk=\"a\",kind=\"backup\"} 4096",
            "vhost_blk_unmapped_bytes_total{disk=\"a\"} 65536",
            "vhost_blk_stalled_queues{disk=\"a\"} 0",
            "vhost_blk_storage_failures_total{disk=\"a\",kind=\"io\"} 0",
            "vhost_blk_storage_failures_total{disk=\"a\",kind=\"no_space\"} 4",
            "vhost_blk_stalls_total{disk=\"a\"} 0",
            "vhost_blk_queue_kept_requests{disk=\"a\",queue=\"1\"} 0",
            "vhost_blk_limit_iops{disk=\"a\"} 500",
            "vhost_blk_limit_bandwidth{disk=\"a\"} 0",
            "vhost_blk_limit_group_info{disk=\"a\",group=\"g\"} 1",
            "vhost_blk_writeback{disk=\"a\"} 0",
            "vhost_blk_mirror_ready{disk=\"a\"} 1",
            "vhost_blk_mirror_copied_bytes{disk=\"a\"} 1048576",
            "vhost_blk_mirror_changed_bytes{disk=\"a\"} 512",
            "vhost_blk_front_ends_total{disk=\"a\"} 2",
            "vhost_blk_queue_running{disk=\"a\",queue=\"1\"} 0",
            "vhost_blk_queue_inflight_requests{disk=\"a\",queue=\"0\"} 5",
            "vhost_blk_queue_faulted{disk=\"a\",queue=\"0\"} 1",
            "vhost_blk_queue_requests_total{disk=\"a\",queue=\"0\"} 7",
            "vhost_blk_queue_read_bytes_total{disk=\"a\",queue=\"0\"} 4096",
            "vhost_blk_queue_calls_total{disk=\"a\",queue=\"1\"} 0",
            "vhost_blk_queue_suppressed_calls_total{disk=\"a\",queue=\"0\"} 4",
            "vhost_blk_queue_recovered_requests_total{disk=\"a\",queue=\"0\"} 2",
            "vhost_blk_queue_polls_total{disk=\"a\",queue=\"0\"} 9",
            "vhost_blk_queue_poll_hits_total{disk=\"a\",queue=\"0\"} 8",
            "vhost_blk_queue_poll_seconds_total{disk=\"a\",queue=\"0\"} 1.5",
            "vhost_blk_queue_poll_seconds_total{disk=\"a\",queue=\"1\"} 0.0",
            "vhost_blk_queue_storage_failures_total{disk=\"a\",queue=\"0\",kind=\"timeout\"} 6",
            "vhost_blk_queue_storage_failures_total{disk=\"a\",queue=\"1\",kind=\"timeout\"} 0",
            "vhost_blk_queue_batch_size{disk=\"a\",queue=\"0\"} 16",
            "vhost_blk_queue_coalescing{disk=\"a\",queue=\"0\"} 1",
            "vhost_blk_queue_coalescing{disk=\"a\",queue=\"1\"} 0",
            "vhost_blk_queue_latency_seconds_sum{disk=\"a\",queue=\"0\",operation=\"write\"} 2.5",
            "vhost_blk_queue_latency_seconds_count{disk=\"a\",queue=\"0\",operation=\"write\"} 7",
            "vhost_blk_queue_latency_seconds_bucket{le=\"0.000008\",disk=\"a\",queue=\"0\",operation=\"write\"} 6",
            "vhost_blk_queue_latency_seconds_bucket{le=\"+Inf\",disk=\"a\",queue=\"0\",operation=\"write\"} 7",
        ] {
            assert!(page.lines().any(|known| known == line), "{line} is not in:\n{page}");
        }
        assert!(page.contains(r#"image="file \"a\\b\".img""#), "{page}");
        assert_eq!(page.matches("disk=\"b\"").count(), 3, "{page}");
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
        let (text, names) = (file("docs/metrics.md"), names());
        assert_eq!(
            names.len(),
            DISK_GAUGES.len()
                + MIRROR_GAUGES.len()
                + DISK_COUNTERS.len()
                + 11
                + 3
                + QUEUE_GAUGES.len()
                + QUEUE_COUNTERS.len()
                + 5
        );
        for name in names {
            assert!(text.contains(&format!("`{name}`")), "{name} is not in docs/metrics.md");
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
