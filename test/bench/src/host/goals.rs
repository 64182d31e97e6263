// SPDX-License-Identifier: Apache-2.0
//! The goals of the kernel plane on the host side only.

use kit::metric::{IOPS, Row, Set};
use kit::report::{Goal, Report};

use super::subject::{Who, is_qsd};
use crate::goals::{self, BEST_QSD};

/// Rate over the best qemu-storage-daemon at 32 requests in flight.
const OVER_QSD_DEEP: f64 = 5.0;
/// The same at one request in flight, the client sleeping.
const OVER_QSD_SINGLE: f64 = 2.0;
/// Advantage over the in-kernel design of 2022, both relative to qemu-storage-daemon.
const OVER_2022: f64 = 1.3;
/// Two queues with two workers over one queue with one.
const SCALING_MIN: f64 = 1.7;

/// Ratios of a port of the 2022 design to Linux 6.12 to the best qemu-storage-daemon 10.0 in the
/// same boot on null_blk, 4 KiB random reads (depth, client, ratio; the middle of its range).
const DESIGN_2022: [(&str, &str, f64); 6] = [
    ("1", "event", 5.95 / 4.8),
    ("4", "event", 34.5 / 26.0),
    ("32", "event", 91.0 / 22.0),
    ("1", "spin", 88.5 / 32.0),
    ("4", "spin", 108.0 / 31.0),
    ("32", "spin", 113.5 / 35.0),
];

/// Adds the goals and their outcomes to the report.
pub(super) fn judge(points: &Set, idle: &Set, null: &str, report: &mut Report) {
    let kernel = Who::Kernel.name();
    let rows = || points.of(kernel).filter(|row| row.label("device") == null);
    let apart = rows().filter(|row| row.label("CPUs") == "apart");
    report.goals.extend(apart.flat_map(|row| over_qsd(points, row)));
    report.goals.extend(idle.of(kernel).map(|row| goals::idle("kernel plane", row)));
    let shared: Vec<_> = rows().filter(|row| row.label("CPUs") == "shared").collect();
    let scaling = scaling(&shared);
    if scaling.is_empty() {
        let why = "scaling: not measured (needs two CPUs and --queues 1,2)";
        report.not_judged.push(why.to_owned());
    }
    report.goals.extend(scaling);
}

fn over_qsd(points: &Set, row: &Row) -> Vec<Goal> {
    let Some(qsd) = points.most(&row.point, IOPS, is_qsd) else { return Vec::new() };
    let ratio = row.over(qsd, IOPS);
    let name = |what: &str| format!("{}: kernel plane over {what}", place(row));
    let mut goals = Vec::new();
    let at = (row.label("depth"), row.label("client"));
    match at {
        ("32", _) => goals.push(Goal::at_least(name(BEST_QSD), ratio, OVER_QSD_DEEP)),
        ("1", "event") => goals.push(Goal::at_least(name(BEST_QSD), ratio, OVER_QSD_SINGLE)),
        _ => {}
    }
    let mut goals: Vec<_> = goals.into_iter().map(|goal| goal.over(&qsd.subject)).collect();
    if let Some((.., theirs)) = DESIGN_2022.iter().find(|(depth, mode, _)| (*depth, *mode) == at) {
        let name = name("the 2022 design, both relative to qsd");
        goals.push(Goal::at_least(name, ratio / theirs, OVER_2022));
    }
    goals
}

fn place(row: &Row) -> String {
    let [device, depth, client] = ["device", "depth", "client"].map(|label| row.label(label));
    format!("{device}, depth {depth}, {client}")
}

/// Rate of two queues on two CPUs over one on one CPU, the driver included.
fn scaling(rows: &[&Row]) -> Vec<Goal> {
    let with = |queues| rows.iter().filter(move |row| row.label("queues") == queues);
    with("2")
        .filter_map(|two| {
            let one = with("1").find(|one| one.label("depth") == two.label("depth"))?;
            let name = format!("{}: two queues on two CPUs over one on one", place(two));
            Some(Goal::at_least(name, two.over(one, IOPS), SCALING_MIN))
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use kit::metric::point;

    fn judged(rows: &[(Who, &str, u16, f64)]) -> Report {
        let mut set = Set::default();
        for (who, cpus, queues, rate) in rows {
            let point = point(&[
                ("device", &"null"),
                ("client", &"event"),
                ("queues", queues),
                ("CPUs", cpus),
                ("depth", &32),
            ]);
            set.add(who.name(), &point, vec![(IOPS, *rate)]);
        }
        let mut report = Report::default();
        judge(&set, &Set::default(), "null", &mut report);
        report
    }

    #[test]
    fn the_kernel_plane_is_judged_against_the_best_peer_and_the_earlier_design() {
        let report = judged(&[
            (Who::Kernel, "apart", 1, 60.0),
            (Who::QsdNative, "apart", 1, 5.0),
            (Who::QsdUring, "apart", 1, 10.0),
        ]);
        let met: Vec<_> = report.goals.iter().map(|goal| goal.met).collect();
        assert_eq!(met, [true, true]);
        assert_eq!(report.goals[0].measured, 6.0);
        assert_eq!(report.not_judged.len(), 1, "scaling was not measured");
    }

    #[test]
    fn two_queues_are_compared_with_one_on_shared_cpus() {
        let report = judged(&[(Who::Kernel, "shared", 1, 10.0), (Who::Kernel, "shared", 2, 16.0)]);
        let goals: Vec<_> = report.goals.iter().map(|goal| (goal.measured, goal.met)).collect();
        assert_eq!(goals, [(1.6, false)]);
        assert!(report.not_judged.is_empty());
    }
}
