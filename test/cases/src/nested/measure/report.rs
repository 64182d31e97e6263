// SPDX-License-Identifier: Apache-2.0
//! The table and the goals of the measurement in an inner guest.

use kit::metric::{EXITS, INTERRUPTS, IOPS, KICKS, Metric, Row, Set};
use kit::report::{Column, Goal, Section};

use super::attach::{Way, is_qemu};
use super::exits::HALTS;

/// Least ratio to the best QEMU virtio-blk with one request in flight, with 32, and anywhere.
const OVER_QEMU_SINGLE: f64 = 1.2;
const OVER_QEMU_DEEP: f64 = 1.5;
const OVER_QEMU_ANY: f64 = 1.0;
/// Least ratio to the bare device if the device is the limit.
const OF_BARE: f64 = 0.98;
/// Least ratio to vhost-scsi.
const OVER_SCSI: f64 = 1.5;
/// Most exits and interrupts for each request, relative to QEMU's least.
const SIGNALS_OF_QEMU: f64 = 1.0;

/// The subject of fio in the VM itself, on the bare device.
pub(super) const NO_GUEST: &str = "no guest";

const SCSI: &str = Way::VhostScsi.name();

const METHOD: &str = "4 KiB random I/O by fio (io_uring) in a guest, a job for each virtual CPU, a \
    queue for each job. Medians over the rounds. `/QEMU`: over the best of QEMU's own; `no guest`: \
    fio in the VM that runs the guest, on the bare device. Exits (those for an idle CPU are halts, \
    too), kicks and interrupts: for each request, in a round of its own.";

/// The table of all points.
pub(super) fn section(set: &Set) -> Section {
    let columns = [
        Column::label("device"),
        Column::label("rw"),
        Column::count("vcpus"),
        Column::count("depth"),
        Column::subject("disk"),
        Column::median("IOPS", IOPS, 1.0, 0),
        Column::over("/QEMU", IOPS, 2, |row| set.most(&row.point, IOPS, is_qemu)),
        Column::over("/scsi", IOPS, 2, |row| set.at(SCSI, &row.point)),
        Column::over("/no guest", IOPS, 2, |row| set.at(NO_GUEST, &row.point)),
        Column::median("exits", EXITS, 1.0, 3),
        Column::median("halts", HALTS, 1.0, 3),
        Column::median("kicks", KICKS, 1.0, 3),
        Column::median("interrupts", INTERRUPTS, 1.0, 3),
    ];
    Section::new("Measurements", METHOD, set, &columns)
}

/// Judges the kernel plane's rates by the goals, and the signals of both planes; the device `capped`
/// is itself the limit.
pub(super) fn judge(set: &Set, capped: &str) -> Vec<Goal> {
    let rates = set.of(Way::Kernel.name()).flat_map(|row| goals_of(set, row, capped));
    let ours = [Way::Kernel, Way::Uring].into_iter().flat_map(|way| set.of(way.name()));
    rates.chain(ours.flat_map(|row| signal_goals(set, row))).collect()
}

/// Exits and interrupts for each request: at most those of QEMU's best.
fn signal_goals(set: &Set, ours: &Row) -> Vec<Goal> {
    let goal = |metric: Metric| {
        let least = set.least(&ours.point, metric, is_qemu)?;
        if ours.values(metric).is_empty() || least.values(metric).is_empty() {
            return None;
        }
        let [device, rw, vcpus, depth] =
            ["device", "rw", "vcpus", "depth"].map(|label| ours.label(label));
        let name = format!(
            "{device}, {rw}, {vcpus} vcpus, depth {depth}: {} of {} over the least of QEMU",
            metric.name, ours.subject
        );
        Some(Goal::at_most(name, ours.over(least, metric), SIGNALS_OF_QEMU).over(&least.subject))
    };
    [EXITS, INTERRUPTS].into_iter().filter_map(goal).collect()
}

fn goals_of(set: &Set, ours: &Row, capped: &str) -> Vec<Goal> {
    let [device, rw, vcpus, depth] =
        ["device", "rw", "vcpus", "depth"].map(|label| ours.label(label));
    let goal = |other: Option<&Row>, bound| {
        let other = other?;
        let what = match other.subject.as_str() {
            NO_GUEST => "the bare device",
            SCSI => SCSI,
            _ => "the best of QEMU",
        };
        let name =
            format!("{device}, {rw}, {vcpus} vcpus, depth {depth}: kernel plane over {what}");
        Some(Goal::at_least(name, ours.over(other, IOPS), bound).over(&other.subject))
    };
    if device == capped {
        let is_deep = depth.parse::<u16>().is_ok_and(|depth| depth >= 32);
        let bare = set.at(NO_GUEST, &ours.point).filter(|_| is_deep);
        return goal(bare, OF_BARE).into_iter().collect();
    }
    let bound = match depth {
        "1" => OVER_QEMU_SINGLE,
        "32" => OVER_QEMU_DEEP,
        _ => OVER_QEMU_ANY,
    };
    let qemu = goal(set.most(&ours.point, IOPS, is_qemu), bound);
    qemu.into_iter().chain(goal(set.at(SCSI, &ours.point), OVER_SCSI)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use kit::metric::point;

    fn judged(rows: &[(&str, f64)], capped: &str) -> Vec<(f64, bool)> {
        let point = point(&[("device", &"x"), ("rw", &"randread"), ("vcpus", &1), ("depth", &32)]);
        let mut set = Set::default();
        for (subject, rate) in rows {
            set.add(subject, &point, vec![(IOPS, *rate)]);
        }
        judge(&set, capped).iter().map(|goal| (goal.measured, goal.met)).collect()
    }

    #[test]
    fn the_kernel_plane_is_judged_against_the_best_of_qemu_and_vhost_scsi() {
        let rows = [
            (Way::Kernel.name(), 15.0),
            (Way::QemuNative.name(), 5.0),
            (Way::QemuUring.name(), 10.0),
            (Way::VhostScsi.name(), 12.0),
        ];
        assert_eq!(judged(&rows, "y"), [(1.5, true), (1.25, false)]);
    }

    #[test]
    fn exits_and_interrupts_of_both_planes_are_judged_against_qemus_least() {
        let point = point(&[("device", &"x"), ("rw", &"randread"), ("vcpus", &1), ("depth", &8)]);
        let mut set = Set::default();
        for (way, exits) in [(Way::Uring, 3.0), (Way::QemuNative, 2.0), (Way::QemuUring, 4.0)] {
            set.add(way.name(), &point, vec![(IOPS, 1.0), (EXITS, exits), (INTERRUPTS, 0.5)]);
        }
        let goals: Vec<_> = judge(&set, "y").iter().map(|goal| (goal.measured, goal.met)).collect();
        assert_eq!(goals, [(1.5, false), (1.0, true)]);
    }

    #[test]
    fn where_the_device_is_the_limit_the_bare_device_is_the_measure() {
        let rows = [(Way::Kernel.name(), 97.0), (NO_GUEST, 100.0), (SCSI, 10.0)];
        assert_eq!(judged(&rows, "x"), [(0.97, false)]);
    }
}
