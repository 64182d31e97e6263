// SPDX-License-Identifier: Apache-2.0
//! The goals of the kernel plane on the host side only.

use super::report::{Point, Report, Row};
use super::subject::Who;
use crate::goals::{Goal, at_least, below};
use crate::load::Mode;

/// Rate over the best qemu-storage-daemon at 32 requests in flight.
const OVER_QSD_DEEP: f64 = 5.0;
/// The same at one request in flight, the client sleeping.
const OVER_QSD_SINGLE: f64 = 2.0;
/// Advantage over the in-kernel design of 2022, both relative to qemu-storage-daemon.
const OVER_2022: f64 = 1.3;
/// Two queues with two workers over one queue with one.
const SCALING_MIN: f64 = 1.7;
/// Idle CPU in percent.
const IDLE_PERCENT_MAX: f64 = 0.1;

/// Ratios of a port of the 2022 design to Linux 6.12 to the best qemu-storage-daemon 10.0 in the
/// same boot on null_blk, 4 KiB random reads (depth, client, ratio; the middle of its range).
const DESIGN_2022: [(u16, Mode, f64); 6] = [
    (1, Mode::Event, 5.95 / 4.8),
    (4, Mode::Event, 34.5 / 26.0),
    (32, Mode::Event, 91.0 / 22.0),
    (1, Mode::Spin, 88.5 / 32.0),
    (4, Mode::Spin, 108.0 / 31.0),
    (32, Mode::Spin, 113.5 / 35.0),
];

/// Adds the goals and their outcomes to the report.
pub(super) fn judge(report: &mut Report, null: &str) {
    let rows = report.rows.iter().filter(|row| row.who == Some(Who::Kernel));
    let on_null = rows.filter(|row| row.point.device == null && !row.point.shared_cpus);
    let mut goals: Vec<_> = on_null.flat_map(|row| over_qsd(report, row)).collect();
    let idle = report.idle.iter().find(|idle| idle.who == Who::Kernel);
    goals.extend(idle.map(|idle| {
        below("idle CPU percent, kernel plane".to_owned(), idle.cpu_percent, IDLE_PERCENT_MAX)
    }));
    let scaling = scaling(report, null);
    report.goals = goals;
    match scaling {
        Ok(goals) => report.goals.extend(goals),
        Err(why) => report.not_judged.push(why),
    }
}

fn over_qsd(report: &Report, row: &Row) -> Vec<Goal> {
    let Some((qsd, mode)) = report.best_qsd(&row.point).zip(row.point.mode) else {
        return Vec::new();
    };
    let ratio = row.iops() / qsd.iops();
    let name = |what: &str| format!("{}: kernel plane over {what}", place(&row.point));
    let mut goals = Vec::new();
    match (row.point.depth, mode) {
        (32, _) => goals.push(at_least(name(qsd.name()), ratio, OVER_QSD_DEEP)),
        (1, Mode::Event) => goals.push(at_least(name(qsd.name()), ratio, OVER_QSD_SINGLE)),
        _ => {}
    }
    let design = DESIGN_2022.iter().find(|(depth, m, _)| (*depth, *m) == (row.point.depth, mode));
    if let Some((_, _, theirs)) = design {
        let what = "the 2022 design, both relative to qsd";
        goals.push(at_least(name(what), ratio / theirs, OVER_2022));
    }
    goals
}

fn place(point: &Point) -> String {
    let mode = point.mode.map_or("", crate::report::mode_name);
    format!("{}, depth {}, {mode}", point.device, point.depth)
}

/// Rate of two queues on two CPUs over one on one CPU, the driver included.
fn scaling(report: &Report, null: &str) -> Result<Vec<Goal>, String> {
    let rows = |queues| {
        report.rows.iter().filter(move |row| {
            let point = &row.point;
            row.who == Some(Who::Kernel)
                && point.shared_cpus
                && point.device == null
                && point.queues == queues
        })
    };
    let mut goals = Vec::new();
    for two in rows(2) {
        let one = rows(1).find(|one| one.point.depth == two.point.depth);
        let Some(one) = one else { continue };
        let name = format!("{}: two queues on two CPUs over one on one", place(&two.point));
        goals.push(at_least(name, two.iops() / one.iops(), SCALING_MIN));
    }
    if goals.is_empty() {
        return Err("scaling: not measured (needs two CPUs and --queues 1,2)".to_owned());
    }
    Ok(goals)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host::report::Sample;

    fn row(who: Who, depth: u16, iops: f64) -> Row {
        let point = Point {
            device: "null".to_owned(),
            mode: Some(Mode::Event),
            queues: 1,
            depth,
            shared_cpus: false,
        };
        let sample = Sample { iops, cpu_us: 0.0, machine_us: 0.0, p50_us: 0.0, p99_us: 0.0 };
        Row { point, who: Some(who), samples: vec![sample] }
    }

    #[test]
    fn the_kernel_plane_is_judged_against_the_best_peer_and_the_earlier_design() {
        let rows = vec![
            row(Who::Kernel, 32, 60.0),
            row(Who::QsdNative, 32, 5.0),
            row(Who::QsdUring, 32, 10.0),
        ];
        let mut report = Report { rows, ..Report::default() };
        judge(&mut report, "null");
        let met: Vec<_> = report.goals.iter().map(|goal| goal.met).collect();
        assert_eq!(met, [true, true]);
        assert_eq!(report.goals[0].measured, 6.0);
        assert_eq!(report.not_judged.len(), 1, "scaling was not measured");
    }
}
