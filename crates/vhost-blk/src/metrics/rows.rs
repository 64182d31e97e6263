// SPDX-License-Identifier: Apache-2.0
//! The metrics that the daemon itself knows of its disks: their start, their work and their storage.

use super::page::{DiskLabels, disk_label};
use crate::disks::mirror::{Facts, Phase};
use crate::disks::{JobFacts, Row, RowState};
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::{Registry, Unit};

/// A gauge of a mirrored disk: name, unit, meaning, value.
pub(super) type MirrorGauge = (&'static str, Option<Unit>, &'static str, fn(&Facts) -> u64);

pub(super) const MIRROR_GAUGES: [MirrorGauge; 3] = [
    ("mirror_ready", None, "Everything was copied once", |facts| {
        (facts.phase != Phase::Copying).into()
    }),
    ("mirror_copied", Some(Unit::Bytes), "Data that was copied at least once", |facts| {
        facts.copied_bytes
    }),
    ("mirror_changed", Some(Unit::Bytes), "Data that was changed since its copy", |facts| {
        facts.changed_bytes
    }),
];

/// The disks that are not served.
pub(super) fn add_starts(registry: &mut Registry, rows: &[Row]) {
    let states = [
        ("disk_starting", "The disk is being opened", RowState::Starting),
        ("disk_failed", "The disk could not be opened, and is tried again", RowState::Failed),
    ];
    for (name, help, state) in states {
        let family = Family::<DiskLabels, Gauge>::default();
        for row in rows {
            family.get_or_create(&disk_label(&row.name)).set((row.state == state).into());
        }
        registry.register(name, help, family);
    }
}

pub(super) fn add_unmapped(registry: &mut Registry, rows: &[Row]) {
    let family = Family::<DiskLabels, Counter>::default();
    for row in rows.iter().filter(|row| row.status.is_some()) {
        family.get_or_create(&disk_label(&row.name)).inc_by(row.unmapped_bytes);
    }
    let help = "Discarded data whose places in qcow2 images were freed";
    registry.register_with_unit("unmapped", help, Unit::Bytes, family);
}

/// The work in progress on each disk.
pub(super) fn add_jobs(registry: &mut Registry, rows: &[Row]) {
    let values: [fn(&JobFacts) -> u64; 3] = [|_| 1, |job| job.done_bytes, |job| job.total_bytes];
    let families = values.map(|value| {
        let family = Family::<[(&'static str, String); 2], Gauge>::default();
        for row in rows.iter().filter(|row| row.status.is_some()) {
            for job in &row.jobs {
                let kind = job.work.name().to_owned();
                let value = i64::try_from(value(job)).unwrap_or(i64::MAX);
                family.get_or_create(&[("disk", row.name.clone()), ("kind", kind)]).set(value);
            }
        }
        family
    });
    let [running, done, total] = families;
    registry.register("job_running", "A backup, a commit or a mirror is in progress", running);
    let help = "Data that the work has copied at least once, holes included";
    registry.register_with_unit("job_done", help, Unit::Bytes, done);
    registry.register_with_unit("job_total", "Data of the work", Unit::Bytes, total);
}

pub(super) fn add_losses(registry: &mut Registry, rows: &[Row]) {
    let family = Family::<DiskLabels, Gauge>::default();
    for row in rows.iter().filter(|row| row.status.is_some()) {
        family.get_or_create(&disk_label(&row.name)).set(row.loss.is_some().into());
    }
    registry.register("storage_gone", "The block device of the disk has gone", family);
}

/// The gauges of the disks that are mirrored.
pub(super) fn add_mirrors(registry: &mut Registry, rows: &[Row]) {
    let answered = rows.iter().filter(|row| row.status.is_some());
    let mirrors: Vec<_> =
        answered.filter_map(|row| Some((&row.name, row.mirror.as_ref()?))).collect();
    for (name, unit, help, value) in MIRROR_GAUGES {
        let family = Family::<DiskLabels, Gauge>::default();
        for (disk, facts) in &mirrors {
            let value = i64::try_from(value(facts)).unwrap_or(i64::MAX);
            family.get_or_create(&disk_label(disk)).set(value);
        }
        match unit {
            Some(unit) => registry.register_with_unit(name, help, unit, family),
            None => registry.register(name, help, family),
        }
    }
}
