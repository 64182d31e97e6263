// SPDX-License-Identifier: Apache-2.0
//! The goals of both planes on the host side only.

use kit::metric::{CPU, IOPS, P50, Row, Set};
use kit::report::{Goal, Report};

use super::subject::{Who, is_qsd};
use crate::bare::Engine;
use crate::goals::{self, BEST_QSD};
use crate::load::Op;
use crate::plan::GOAL_BYTES;
use crate::rig::Speed;
use crate::server::is_bare;

/// Rate over the best qemu-storage-daemon at 32 requests in flight.
const OVER_QSD_DEEP: f64 = 5.0;
/// The same at one request in flight, the client sleeping.
const OVER_QSD_SINGLE: f64 = 2.0;
/// Advantage over the shape of the in-kernel driver of 2022 at each point.
const OVER_2022: f64 = 1.3;
/// Kernel plane over the best of bare fio at 32 requests in flight, the client sleeping or spinning.
const OVER_FIO: [(&str, f64); 2] = [("event", 0.92), ("spin", 0.97)];
/// Kernel plane over io_uring plane at 128 requests in flight.
const OVER_URING_DEEP: f64 = 1.15;
/// Polling a device over its interrupts, one request in flight.
const POLLED_OVER_INTERRUPTS: f64 = 1.2;
/// io_uring plane with one request in flight at a device that takes as many microseconds: latency
/// over that of fio which spins, and cores used.
const STEADY_US: u32 = 80;
const LATENCY_MAX: f64 = 1.06;
const CORES_MAX: f64 = 0.5;
/// Devices that take as many microseconds stand for real ones: least rates of both planes over the
/// best qemu-storage-daemon and over the best of bare fio.
const REAL_US: [u32; 2] = [80, 200];
const REAL_OVER_QSD: f64 = 1.15;
const REAL_OVER_FIO: f64 = 0.9;
/// Two queues with two workers over one queue with one, client and server on the same CPUs. The
/// client takes its part of them, so that 1.9, the goal for CPUs of their own, is out of reach.
const SCALING_SHARED_MIN: f64 = 1.7;

/// Adds the goals and their outcomes to the report.
pub(super) fn judge(points: &Set, idle: &Set, report: &mut Report) {
    let kernel = Who::Kernel.name();
    let null = Speed::Null.name();
    // The other loads have no goals.
    let ours = |who: Who| points.of(who.name()).filter(|row| is_small_random(row));
    let rows = || ours(Who::Kernel).filter(|row| row.label("device") == null);
    for row in rows().filter(|row| row.label("CPUs") == "apart") {
        report.goals.extend(over_qsd(points, row));
        report.goals.extend(over_fio(points, row));
        report.goals.extend(over_uring(points, row));
        report.goals.extend(over_plain(points, row));
    }
    report.goals.extend(ours(Who::Uring).flat_map(|row| steady(points, row)));
    for who in [Who::Kernel, Who::Uring] {
        report.goals.extend(ours(who).flat_map(|row| real(points, who, row)));
        report.goals.extend(ours(who).filter_map(|row| polled(points, who, row)));
    }
    report.goals.extend(idle.of(kernel).map(|row| goals::idle("kernel plane", row)));
    let shared: Vec<_> = rows().filter(|row| row.label("CPUs") == "shared").collect();
    let scaling = scaling(&shared);
    if scaling.is_empty() {
        let why = "scaling: not measured (needs two CPUs and --queues 1,2)";
        report.not_judged.push(why.to_owned());
    }
    report.goals.extend(scaling);
    let why = "two queues over one at least 1.9, client and server on CPUs of their own: not \
               measured here (without a VM: make bench, with four CPUs)";
    report.not_judged.push(why.to_owned());
}

/// Random reads or writes of 4 KiB.
fn is_small_random(row: &Row) -> bool {
    let is = |op: Op| row.label("load") == op.to_string();
    (is(Op::Randread) || is(Op::Randwrite)) && row.label("block") == GOAL_BYTES.to_string()
}

/// Devices that take their time, at every depth.
fn real(points: &Set, who: Who, row: &Row) -> Vec<Goal> {
    let is_real = REAL_US.iter().any(|us| row.label("device") == Speed::Slow(*us).name());
    if !is_real || row.label("CPUs") != "apart" {
        return Vec::new();
    }
    let goal = |other: Option<&Row>, what: &str, bound| {
        let other = other.filter(|other| other.median(IOPS) > 0.0)?;
        let name = format!("{}: {} over {what}", place(row), who.name());
        Some(Goal::at_least(name, row.over(other, IOPS), bound).over(&other.subject))
    };
    let qsd = goal(points.most(&row.point, IOPS, is_qsd), BEST_QSD, REAL_OVER_QSD);
    let fio = goal(bare(points, row, is_bare), "the best of bare fio", REAL_OVER_FIO);
    qsd.into_iter().chain(fio).collect()
}

/// The best of bare fio on the device of a row, at its depth.
fn bare<'a>(points: &'a Set, row: &Row, is: impl Fn(&str) -> bool) -> Option<&'a Row> {
    let mut point = row.point.clone();
    point.remove("client");
    points.most(&point, IOPS, is)
}

fn over_fio(points: &Set, row: &Row) -> Option<Goal> {
    let (_, bound) = OVER_FIO.iter().find(|(client, _)| *client == row.label("client"))?;
    let fio = bare(points, row, is_bare).filter(|_| row.label("depth") == "32")?;
    let name = format!("{}: kernel plane over the best of bare fio", place(row));
    Some(Goal::at_least(name, row.over(fio, IOPS), *bound).over(&fio.subject))
}

fn over_uring(points: &Set, row: &Row) -> Option<Goal> {
    let uring = points.at(Who::Uring.name(), &row.point).filter(|_| row.label("depth") == "128")?;
    let name = format!("{}: kernel plane over io_uring plane", place(row));
    Some(Goal::at_least(name, row.over(uring, IOPS), OVER_URING_DEEP))
}

/// A single request on a device with a steady latency: how soon the answer comes, and at which cost.
fn steady(points: &Set, row: &Row) -> Vec<Goal> {
    let at = ["device", "depth", "client"].map(|label| row.label(label));
    if at != [Speed::Slow(STEADY_US).name().as_str(), "1", "spin"] {
        return Vec::new();
    }
    let cores = row.median(CPU) * row.median(IOPS) / 1e6;
    let name = |what: &str| format!("{}: io_uring plane, {what}", place(row));
    let mut goals = vec![Goal::below(name("cores"), cores, CORES_MAX)];
    if let Some(fio) = bare(points, row, |name| name == Engine::UringSpin.name()) {
        let name = name("latency over fio that spins");
        goals.push(Goal::at_most(name, row.over(fio, P50), LATENCY_MAX));
    }
    goals
}

fn polled(points: &Set, who: Who, row: &Row) -> Option<Goal> {
    let interrupts = points.at(who.by_interrupts()?.name(), &row.point)?;
    let name = format!("{}: {}, polled over by interrupts", place(row), who.name());
    (row.label("depth") == "1" && row.label("CPUs") == "apart")
        .then(|| Goal::at_least(name, row.over(interrupts, IOPS), POLLED_OVER_INTERRUPTS))
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
    goals.into_iter().map(|goal| goal.over(&qsd.subject)).collect()
}

fn over_plain(points: &Set, row: &Row) -> Option<Goal> {
    let plain = points.at(Who::KernelPlain.name(), &row.point)?;
    let name = format!("{}: kernel plane over the shape of 2022", place(row));
    Some(Goal::at_least(name, row.over(plain, IOPS), OVER_2022))
}

fn place(row: &Row) -> String {
    let labels = ["device", "load", "depth", "client"].map(|label| row.label(label));
    let [device, load, depth, client] = labels;
    format!("{device}, {load}, depth {depth}, {client}")
}

/// Rate of two queues on two CPUs over one on one CPU, the driver included.
fn scaling(rows: &[&Row]) -> Vec<Goal> {
    let with = |queues| rows.iter().filter(move |row| row.label("queues") == queues);
    with("2")
        .filter_map(|two| {
            let is_same = |one: &&&Row| {
                ["load", "depth"].iter().all(|label| one.label(label) == two.label(label))
            };
            let one = with("1").find(is_same)?;
            let name = format!(
                "{}: two queues over one, client and server sharing a CPU for each",
                place(two)
            );
            Some(Goal::at_least(name, two.over(one, IOPS), SCALING_SHARED_MIN))
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
                ("device", &Speed::Null.name()),
                ("load", &"randread"),
                ("block", &4096),
                ("client", &"event"),
                ("queues", queues),
                ("CPUs", cpus),
                ("depth", &32),
            ]);
            set.add(who.name(), &point, vec![(IOPS, *rate)]);
        }
        let mut report = Report::default();
        judge(&set, &Set::default(), &mut report);
        report
    }

    #[test]
    fn the_kernel_plane_is_judged_against_the_best_peer_and_the_shape_of_2022() {
        let report = judged(&[
            (Who::Kernel, "apart", 1, 60.0),
            (Who::QsdNative, "apart", 1, 5.0),
            (Who::QsdUring, "apart", 1, 10.0),
            (Who::KernelPlain, "apart", 1, 50.0),
        ]);
        let met: Vec<_> = report.goals.iter().map(|goal| goal.met).collect();
        assert_eq!(met, [true, false]);
        assert_eq!([0, 1].map(|goal| report.goals[goal].measured), [6.0, 1.2]);
        assert_eq!(report.not_judged.len(), 2, "scaling was not measured");
    }

    #[test]
    fn two_queues_are_compared_with_one_on_shared_cpus() {
        let report = judged(&[(Who::Kernel, "shared", 1, 10.0), (Who::Kernel, "shared", 2, 16.0)]);
        let goals: Vec<_> = report.goals.iter().map(|goal| (goal.measured, goal.met)).collect();
        assert_eq!(goals, [(1.6, false)]);
        assert_eq!(report.not_judged.len(), 1, "CPUs of their own");
    }

    /// A measured rate, latency and CPU time, and its goals' outcomes.
    type Cell<'a> = (&'a str, f64, f64, f64);

    /// The goals of servers and of bare fio on a device, one queue, CPUs apart.
    fn outcomes(speed: Speed, depth: u16, client: &str, cells: &[Cell<'_>]) -> Vec<(f64, bool)> {
        let mut set = Set::default();
        for (subject, rate, p50, cpu) in cells {
            let device = speed.name();
            let mut labels: Vec<(&str, &dyn std::fmt::Display)> = vec![
                ("device", &device),
                ("load", &"randwrite"),
                ("block", &4096),
                ("queues", &1),
                ("CPUs", &"apart"),
                ("depth", &depth),
            ];
            if !is_bare(subject) {
                labels.push(("client", &client));
            }
            set.add(subject, &point(&labels), vec![(IOPS, *rate), (P50, *p50), (CPU, *cpu)]);
        }
        let mut report = Report::default();
        judge(&set, &Set::default(), &mut report);
        report.goals.iter().map(|goal| (goal.measured, goal.met)).collect()
    }

    #[test]
    fn the_kernel_plane_is_judged_against_the_best_of_bare_fio() {
        let [slow, fast] = [Engine::UringFixed, Engine::UringBatch].map(Engine::name);
        let cells =
            [(Who::Kernel.name(), 95.0, 1.0, 1.0), (slow, 50.0, 1.0, 1.0), (fast, 100.0, 1.0, 1.0)];
        assert_eq!(outcomes(Speed::Null, 32, "event", &cells), [(0.95, true)]);
        assert_eq!(outcomes(Speed::Null, 32, "spin", &cells), [(0.95, false)]);
        assert_eq!(outcomes(Speed::Null, 4, "spin", &cells), []);
    }

    #[test]
    fn at_depth_128_the_planes_are_compared() {
        let cells = [(Who::Kernel.name(), 110.0, 1.0, 1.0), (Who::Uring.name(), 100.0, 1.0, 1.0)];
        assert_eq!(outcomes(Speed::Null, 128, "event", &cells), [(1.1, false)]);
        assert_eq!(outcomes(Speed::Null, 32, "event", &cells), []);
    }

    #[test]
    fn a_single_request_is_judged_by_its_latency_and_the_cores_that_it_costs() {
        let spin = Engine::UringSpin.name();
        // 10,000 requests a second of 40 us CPU time.
        let cells = [(Who::Uring.name(), 1e4, 90.0, 40.0), (spin, 1e4, 80.0, 100.0)];
        assert_eq!(
            outcomes(Speed::Slow(STEADY_US), 1, "spin", &cells),
            [(0.4, true), (1.125, false), (1.0, true)]
        );
        // Not its latency, but its rate over bare fio.
        assert_eq!(outcomes(Speed::Slow(STEADY_US), 1, "event", &cells), [(1.0, true)]);
    }

    #[test]
    fn both_planes_are_judged_on_devices_that_take_their_time() {
        let cells = [
            (Who::Kernel.name(), 12.0, 1.0, 1.0),
            (Who::Uring.name(), 11.0, 1.0, 1.0),
            (Who::QsdNative.name(), 10.0, 1.0, 1.0),
            (Who::QsdUring.name(), 5.0, 1.0, 1.0),
            (Engine::Psync.name(), 12.5, 1.0, 1.0),
            (Engine::UringFixed.name(), 8.0, 1.0, 1.0),
        ];
        let expected = [(1.2, true), (0.96, true), (1.1, false), (0.88, false)];
        for (us, depth) in [(80, 16), (200, 64)] {
            for client in ["event", "spin"] {
                assert_eq!(outcomes(Speed::Slow(us), depth, client, &cells), expected);
            }
        }
        assert_eq!(outcomes(Speed::Slow(10), 16, "event", &cells), []);
    }

    #[test]
    fn each_plane_that_polls_a_device_is_compared_with_itself_by_interrupts() {
        let name = |who: Who| who.by_interrupts().unwrap().name();
        let cells = [
            (Who::Kernel.name(), 13.0, 1.0, 1.0),
            (name(Who::Kernel), 10.0, 1.0, 1.0),
            (Who::Uring.name(), 11.0, 1.0, 1.0),
            (name(Who::Uring), 10.0, 1.0, 1.0),
        ];
        assert_eq!(outcomes(Speed::Polled, 1, "event", &cells), [(1.3, true), (1.1, false)]);
        assert_eq!(outcomes(Speed::Polled, 4, "event", &cells), []);
    }
}
