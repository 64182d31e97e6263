// SPDX-License-Identifier: Apache-2.0
//! Results of the measurement in an inner guest.

use std::fmt::Write;

use bench::goals::{Goal, at_least};
use bench::report::median;
use serde::Serialize;

use super::attach::Way;

/// Least ratio to the best QEMU virtio-blk with one request in flight, with 32, and anywhere.
const OVER_QEMU_SINGLE: f64 = 1.2;
const OVER_QEMU_DEEP: f64 = 1.5;
const OVER_QEMU_ANY: f64 = 1.0;
/// Least ratio to the bare device if the device is the limit.
const OF_BARE: f64 = 0.98;
/// Least ratio to vhost-scsi.
const OVER_SCSI: f64 = 1.5;

/// Point at which rows are comparable.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(super) struct Point {
    /// The device.
    pub(super) device: String,
    /// The limit is the device itself, not the path to it.
    pub(super) device_is_limit: bool,
    /// fio's `rw`.
    pub(super) rw: String,
    /// Virtual CPUs, queues and jobs.
    pub(super) vcpus: u16,
    /// Requests in flight per job.
    pub(super) depth: u16,
}

/// All samples of one way at one point.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Row {
    /// Point of the measurement.
    pub(super) point: Point,
    /// Way in which the disk is attached; `None` for fio in the VM itself, without a guest.
    pub(super) way: Option<Way>,
    /// Requests per second, one figure per round.
    pub(super) iops: Vec<f64>,
}

impl Row {
    fn median(&self) -> f64 {
        median(self.iops.iter().copied())
    }
}

/// All results of the measurement.
#[derive(Clone, Debug, Default, Serialize)]
pub(super) struct Report {
    /// Machine and versions, as pairs of name and value.
    pub(super) setup: Vec<(String, String)>,
    /// Rows of all points.
    pub(super) rows: Vec<Row>,
    /// Goals, judged.
    pub(super) goals: Vec<Goal>,
}

impl Report {
    fn at(&self, point: &Point, way: Option<Way>) -> Option<&Row> {
        self.rows.iter().find(|row| row.way == way && row.point == *point)
    }

    fn best_qemu(&self, point: &Point) -> Option<&Row> {
        let rows = self.rows.iter().filter(|row| row.point == *point);
        let qemu = rows.filter(|row| row.way.is_some_and(Way::is_qemu));
        qemu.max_by(|a, b| a.median().total_cmp(&b.median()))
    }

    /// Judges the kernel plane by the goals.
    pub(super) fn judge(&mut self) {
        let ours = self.rows.iter().filter(|row| row.way == Some(Way::Kernel));
        self.goals = ours.flat_map(|row| self.goals_of(row)).collect();
    }

    fn goals_of(&self, ours: &Row) -> Vec<Goal> {
        let point = &ours.point;
        let name = |what: &str| format!("{}: kernel plane over {what}", place(point));
        let goal = |other: Option<&Row>, what: &str, bound| {
            other.map(|other| at_least(name(what), ours.median() / other.median(), bound))
        };
        if point.device_is_limit {
            let bare = self.at(point, None).filter(|_| point.depth >= 32);
            return goal(bare, "the bare device", OF_BARE).into_iter().collect();
        }
        let bound = match point.depth {
            1 => OVER_QEMU_SINGLE,
            32 => OVER_QEMU_DEEP,
            _ => OVER_QEMU_ANY,
        };
        let best = self.best_qemu(point);
        let qemu = goal(best, best.and_then(|row| row.way).map_or("QEMU", Way::name), bound);
        let scsi = goal(self.at(point, Some(Way::VhostScsi)), "vhost-scsi", OVER_SCSI);
        qemu.into_iter().chain(scsi).collect()
    }

    /// The report as markdown.
    pub(super) fn markdown(&self) -> String {
        let mut text = String::from("## In a guest: set-up\n\n");
        for (name, value) in &self.setup {
            let _ = writeln!(text, "- {name}: `{value}`");
        }
        text.push_str(HEAD);
        for row in &self.rows {
            let ratio = |other: Option<&Row>| match other {
                Some(other) => format!("{:.2}", row.median() / other.median()),
                None => "-".to_owned(),
            };
            let point = &row.point;
            let _ = writeln!(
                text,
                "| {} | {} | {} | {} | {} | {:.0} | {} | {} | {} |",
                point.device,
                point.rw,
                point.vcpus,
                point.depth,
                row.way.map_or("no guest", Way::name),
                row.median(),
                ratio(self.best_qemu(point)),
                ratio(self.at(point, Some(Way::VhostScsi))),
                ratio(self.at(point, None)),
            );
        }
        text + &bench::host::report::goals_table(&self.goals, &[])
    }
}

fn place(point: &Point) -> String {
    format!("{}, {}, {} vcpus, depth {}", point.device, point.rw, point.vcpus, point.depth)
}

const HEAD: &str = "\n### Measurements\n\n4 KiB random I/O by fio (io_uring) in a guest, a job for \
    each virtual CPU, a queue for each job. Medians over the rounds. `/QEMU`: over the best of \
    QEMU's own; `no guest`: fio in the VM that runs the guest, on the bare device.\n\n\
    | device | rw | vcpus | depth | disk | IOPS | /QEMU | /scsi | /no guest |\n\
    |---|---|---:|---:|---|---:|---:|---:|---:|\n";

#[cfg(test)]
mod tests {
    use super::*;

    fn row(way: Option<Way>, iops: f64, device_is_limit: bool) -> Row {
        let (device, rw) = ("x".to_owned(), "randread".to_owned());
        let point = Point { device, device_is_limit, rw, vcpus: 1, depth: 32 };
        Row { point, way, iops: vec![iops] }
    }

    #[test]
    fn the_kernel_plane_is_judged_against_the_best_of_qemu_and_vhost_scsi() {
        let rows = vec![
            row(Some(Way::Kernel), 15.0, false),
            row(Some(Way::QemuNative), 5.0, false),
            row(Some(Way::QemuUring), 10.0, false),
            row(Some(Way::VhostScsi), 12.0, false),
        ];
        let mut report = Report { rows, ..Report::default() };
        report.judge();
        let judged: Vec<_> = report.goals.iter().map(|g| (g.measured, g.met)).collect();
        assert_eq!(judged, [(1.5, true), (1.25, false)]);
    }

    #[test]
    fn where_the_device_is_the_limit_the_bare_device_is_the_measure() {
        let rows = vec![row(Some(Way::Kernel), 97.0, true), row(None, 100.0, true)];
        let mut report = Report { rows, ..Report::default() };
        report.judge();
        assert_eq!(report.goals.len(), 1);
        assert!(!report.goals[0].met);
    }
}
