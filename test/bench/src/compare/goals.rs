// SPDX-License-Identifier: Apache-2.0
//! The goals of the io_uring plane.
//!
//! 4 KiB random reads have goals, and random writes on a real disk. Each compares with the best
//! variant of qemu-storage-daemon at the same point: the fastest one for rates, the one with the
//! least CPU time for CPU time.
//!
//! Random writes have goals, too, on a qcow2 image: it is compared with the raw file beside it, also with its
//! clusters in random order. So have writes that allocate, and writes with a FLUSH each, on files.

use kit::metric::{CPU, IOPS, Row, Set};
use kit::report::Goal;

use super::scaling::{APART, CPUS};
use crate::goals::{self, BEST_QSD};
use crate::load::Op;
use crate::plan::GOAL_BYTES;
use crate::server::{
    OURS, OURS_FRAGMENTED, OURS_QCOW2, is_bare, is_qsd, is_qsd_fragmented, is_qsd_qcow2,
};
use crate::syscalls::SYSCALLS;

/// Two queues over one: least gain if client and servers have cores of their own. If they share
/// them, the client takes its part, and less is scaling.
const SCALING_MIN: f64 = 1.9;
const SCALING_SHARED_MIN: f64 = 1.5;

/// The depth of this goal, of all that are measured.
const SCALING_DEPTH: u16 = 32;

/// On a real disk, at every depth: least rate over the best of qemu-storage-daemon.
const DISK_MIN: f64 = 1.15;

/// Writes with a FLUSH each: least rate over the best of qemu-storage-daemon.
const FLUSHES_MIN: f64 = 1.5;

/// Allocated clusters of a qcow2 image: least rate and greatest CPU time over the raw file's.
const QCOW2_RATE_MIN: f64 = 0.97;
const QCOW2_CPU_MAX: f64 = 1.05;

/// Writes that allocate clusters of a qcow2 image: least rate over the best of qemu-storage-daemon.
const ALLOCATION_MIN: f64 = 1.0;

/// All goals for which there are measurements.
pub(super) fn judge(points: &Set, scaling: &Set, idle: &Set) -> Vec<Goal> {
    let mut goals = Vec::new();
    for ours in points.of(OURS).filter(|row| has_goals(row)) {
        goals.extend(rate_against_qsd(points, ours));
        goals.extend(rate_against_fio(points, ours));
        goals.extend(cpu_against_qsd(points, ours));
    }
    for ours in points.of(OURS).filter(|row| is_random(row) && !has_goals(row)) {
        if ours.label("storage") == "disk" {
            goals.extend(rate_against_qsd(points, ours));
            goals.extend(rate_against_fio(points, ours));
        }
    }
    goals.extend(points.of(OURS).filter_map(|row| syscalls_against_qsd(points, row)));
    goals.extend(points.of(OURS).filter_map(|row| flushes_against_qsd(points, row)));
    for image in points.of(OURS_QCOW2).filter(|row| is_random(row)) {
        goals.extend(qcow2_against_raw(points, image, "qcow2"));
        goals.extend(qcow2_against_qsd(points, image, "qcow2", is_qsd_qcow2));
    }
    for image in points.of(OURS_FRAGMENTED).filter(|row| is_random(row)) {
        goals.extend(qcow2_against_raw(points, image, "fragmented qcow2"));
        goals.extend(qcow2_against_qsd(points, image, "fragmented qcow2", is_qsd_fragmented));
    }
    goals.extend(idle.of(OURS).map(|row| goals::idle(row.label("storage"), row)));
    goals.extend(two_queues(scaling));
    goals
}

/// The goals of writes that allocate.
pub(super) fn allocation(points: &Set) -> Vec<Goal> {
    let against_qsd = |ours: &Row| {
        let best = points.most(&ours.point, IOPS, is_qsd_qcow2)?;
        let name = name("rate, qcow2, allocation", ours, BEST_QSD);
        Some(Goal::at_least(name, ours.over(best, IOPS), ALLOCATION_MIN).over(&best.subject))
    };
    points.of(OURS_QCOW2).filter_map(against_qsd).collect()
}

/// True for 4 KiB random reads.
fn has_goals(row: &Row) -> bool {
    row.label("load") == Op::Randread.to_string() && row.label("block") == GOAL_BYTES.to_string()
}

/// True for random reads and writes of 4 KiB.
fn is_random(row: &Row) -> bool {
    let is = |op: Op| row.label("load") == op.to_string();
    (is(Op::Randread) || is(Op::Randwrite)) && row.label("block") == GOAL_BYTES.to_string()
}

fn qcow2_against_raw(points: &Set, image: &Row, kind: &str) -> impl IntoIterator<Item = Goal> {
    points.at(OURS, &image.point).into_iter().flat_map(move |raw| {
        let name = |what| name(&format!("{what}, {kind}, {}", image.label("load")), image, "raw");
        [
            Goal::at_least(name("rate"), image.over(raw, IOPS), QCOW2_RATE_MIN),
            Goal::at_most(name("CPU per I/O"), image.over(raw, CPU), QCOW2_CPU_MAX),
        ]
    })
}

fn qcow2_against_qsd(
    points: &Set,
    image: &Row,
    kind: &str,
    is_peer: fn(&str) -> bool,
) -> Option<Goal> {
    let best = points.most(&image.point, IOPS, is_peer)?;
    let name = name(&format!("rate, {kind}, {}", image.label("load")), image, BEST_QSD);
    Some(Goal::at_least(name, image.over(best, IOPS), 1.0).over(&best.subject))
}

fn name(what: &str, ours: &Row, other: &str) -> String {
    let [storage, depth, client] = ["storage", "depth", "client"].map(|label| ours.label(label));
    format!("{what}, {storage} depth {depth} {client}: ours over {other}")
}

/// The rate in names of goals; those of random reads do not name the load.
fn rate_of(ours: &Row) -> String {
    if has_goals(ours) { "rate".to_owned() } else { format!("rate, {}", ours.label("load")) }
}

fn rate_against_qsd(points: &Set, ours: &Row) -> Option<Goal> {
    let best = points.most(&ours.point, IOPS, is_qsd)?;
    let bound = match ["storage", "depth", "client"].map(|label| ours.label(label)) {
        // A real device takes most of the time.
        ["disk", ..] => DISK_MIN,
        [_, "1", "event"] => 2.0,
        [_, "1", _] => 1.0,
        ["file", "32", _] => 1.5,
        ["null", ..] => 1.0,
        _ => return None,
    };
    let name = name(&rate_of(ours), ours, BEST_QSD);
    Some(Goal::at_least(name, ours.over(best, IOPS), bound).over(&best.subject))
}

fn flushes_against_qsd(points: &Set, ours: &Row) -> Option<Goal> {
    let of_files =
        ours.label("load") == Op::Writeflush.to_string() && ours.label("storage") != "null";
    let best = points.most(&ours.point, IOPS, is_qsd).filter(|_| of_files)?;
    let name = name("rate, writes with FLUSH", ours, BEST_QSD);
    Some(Goal::at_least(name, ours.over(best, IOPS), FLUSHES_MIN).over(&best.subject))
}

fn rate_against_fio(points: &Set, ours: &Row) -> Option<Goal> {
    if ours.label("depth") != "32" && ours.label("storage") != "disk" {
        return None;
    }
    let mut point = ours.point.clone();
    point.remove("client");
    let bare = points.most(&point, IOPS, is_bare)?;
    let name = name(&rate_of(ours), ours, "the best of bare fio");
    Some(Goal::at_least(name, ours.over(bare, IOPS), 0.9).over(&bare.subject))
}

fn cpu_against_qsd(points: &Set, ours: &Row) -> Option<Goal> {
    let least = points.least(&ours.point, CPU, is_qsd)?;
    let name = name("CPU per I/O", ours, "the thriftiest of qemu-storage-daemon");
    Some(Goal::below(name, ours.over(least, CPU), 1.0).over(&least.subject))
}

/// On a real disk: system calls of ours over those of the fastest qemu-storage-daemon, if they were
/// counted.
fn syscalls_against_qsd(points: &Set, ours: &Row) -> Option<Goal> {
    let counted = |row: &Row| !row.values(SYSCALLS).is_empty();
    let is_goal = ours.label("storage") == "disk" && is_random(ours) && counted(ours);
    let best = points.most(&ours.point, IOPS, is_qsd).filter(|best| is_goal && counted(best))?;
    let name = name(&format!("system calls per I/O, {}", ours.label("load")), ours, BEST_QSD);
    Some(Goal::below(name, ours.over(best, SYSCALLS), 1.0).over(&best.subject))
}

/// The goals of two queues, at the depth 32 or the deepest one below.
fn two_queues(scaling: &Set) -> impl Iterator<Item = Goal> {
    let depth = |row: &Row| row.label("depth").parse().unwrap_or(0_u16);
    let judged = scaling.of(OURS).map(depth).filter(|depth| *depth <= SCALING_DEPTH).max();
    let is_judged = move |row: &&Row| row.label("queues") == "1" && Some(depth(row)) == judged;
    scaling.of(OURS).filter(is_judged).filter_map(|one| {
        let mut point = one.point.clone();
        point.insert("queues".to_owned(), "2".to_owned());
        let two = scaling.at(OURS, &point)?;
        let (what, bound) = match one.label(CPUS) {
            APART => ("client and server on two each", SCALING_MIN),
            _ => ("shared with the client", SCALING_SHARED_MIN),
        };
        let name = format!("two queues on two cores over one, {}, {what}", one.label("storage"));
        Some(Goal::at_least(name, two.over(one, IOPS), bound))
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bare::Engine;
    use kit::metric::{IDLE_CPU, point};

    fn measured(rows: &[(&str, u16, f64, f64)]) -> Set {
        let mut set = Set::default();
        for (server, depth, rate, cpu) in rows {
            let mut labels: Vec<(&str, &dyn std::fmt::Display)> =
                vec![("storage", &"file"), ("load", &"randread"), ("block", &4096)];
            labels.push(("depth", depth));
            if !is_bare(server) {
                labels.push(("client", &"event"));
            }
            set.add(server, &point(&labels), vec![(IOPS, *rate), (CPU, *cpu)]);
        }
        set
    }

    fn goals(points: &Set) -> Vec<Goal> {
        judge(points, &Set::default(), &Set::default())
    }

    #[test]
    fn rates_are_compared_with_the_fastest_and_cpu_with_the_thriftiest_variant() {
        let rows =
            [(OURS, 32, 150.0, 3.0), ("qsd fast", 32, 100.0, 5.0), ("qsd thrifty", 32, 50.0, 2.0)];
        let outcome: Vec<_> = goals(&measured(&rows)).iter().map(|g| (g.measured, g.met)).collect();
        assert_eq!(outcome, [(1.5, true), (1.5, false)]);
    }

    #[test]
    fn a_qcow2_image_is_compared_with_the_raw_file_and_with_qcow2_of_qsd() {
        let rows = [
            (OURS, 32, 100.0, 1.0),
            (OURS_QCOW2, 32, 98.0, 1.06),
            ("qsd qcow2 native +iothread", 32, 49.0, 2.0),
        ];
        let goals = goals(&measured(&rows));
        let of_image = goals.iter().filter(|goal| goal.name.contains("qcow2, randread"));
        let outcome: Vec<_> = of_image.clone().map(|goal| (goal.measured, goal.met)).collect();
        assert_eq!(outcome, [(0.98, true), (1.06, false), (2.0, true)]);
        // The raw file is compared with raw files only, so it has no goal here.
        assert_eq!(goals.len(), of_image.count());
    }

    #[test]
    fn a_fragmented_image_has_the_goals_of_an_image_and_is_compared_with_its_like() {
        let rows = [
            (OURS, 32, 100.0, 1.0),
            (OURS_FRAGMENTED, 32, 96.0, 1.0),
            ("qsd qcow2 native +iothread", 32, 200.0, 2.0),
            ("qsd fragmented qcow2 native +iothread", 32, 48.0, 2.0),
        ];
        let goals = goals(&measured(&rows));
        let outcome: Vec<_> = goals.iter().map(|goal| (goal.measured, goal.met)).collect();
        assert_eq!(outcome, [(0.96, false), (1.0, true), (2.0, true)]);
        assert!(goals.iter().all(|goal| goal.name.contains("fragmented qcow2, randread")));
    }

    #[test]
    fn writes_that_allocate_are_compared_with_the_fastest_variant() {
        let rows = [
            (OURS_QCOW2, 1, 90.0, 1.0),
            ("qsd qcow2 native +iothread", 1, 100.0, 2.0),
            ("qsd qcow2 io_uring +iothread", 1, 50.0, 2.0),
        ];
        let goals = allocation(&measured(&rows));
        assert_eq!(goals.len(), 1);
        assert_eq!((goals[0].measured, goals[0].met), (0.9, false));
        assert!(goals[0].name.starts_with("rate, qcow2, allocation, file depth 1"));
    }

    #[test]
    fn counted_calls_on_a_disk_are_compared_with_the_fastest_variant() {
        let mut set = Set::default();
        let mut place = point(&[("storage", &"disk"), ("load", &"randread"), ("block", &4096)]);
        for (label, value) in [("depth", "4"), ("client", "event")] {
            place.insert(label.to_owned(), value.to_owned());
        }
        for (server, rate, calls) in [(OURS, 2.0, 0.5), ("qsd a", 1.0, 1.0), ("qsd b", 0.9, 0.1)] {
            set.add(server, &place, vec![(IOPS, rate), (CPU, 1.0), (SYSCALLS, calls)]);
        }
        let goals = goals(&set);
        let of_calls: Vec<_> = goals.iter().filter(|goal| goal.name.contains("calls")).collect();
        assert_eq!((of_calls.len(), of_calls[0].measured, of_calls[0].met), (1, 0.5, true));
    }

    #[test]
    fn bare_fio_bounds_depth_32_only() {
        let [psync, uring] = [Engine::Psync, Engine::Uring].map(Engine::name);
        let mut rows = vec![(OURS, 32, 92.0, 1.0), (OURS, 4, 10.0, 1.0), (psync, 4, 100.0, 1.0)];
        rows.extend([(psync, 32, 90.0, 1.0), (uring, 32, 100.0, 1.0)]);
        let goals = goals(&measured(&rows));
        assert_eq!(goals.len(), 1);
        assert_eq!((goals[0].measured, goals[0].peer.as_str()), (0.92, uring));
    }

    #[test]
    fn a_real_disk_has_bounds_of_its_own_at_every_depth() {
        let mut set = Set::default();
        for (server, rate) in [(OURS, 120.0), ("qsd native", 100.0), ("bare fio psync", 125.0)] {
            let mut labels: Vec<(&str, &dyn std::fmt::Display)> =
                vec![("storage", &"disk"), ("load", &"randread"), ("block", &4096), ("depth", &1)];
            if !is_bare(server) {
                labels.push(("client", &"event"));
            }
            set.add(server, &point(&labels), vec![(IOPS, rate)]);
        }
        let goals: Vec<_> = goals(&set).into_iter().map(|g| (g.measured, g.wanted)).collect();
        assert_eq!(goals[..2], [(1.2, ">= 1.15".to_owned()), (0.96, ">= 0.9".to_owned())]);
    }

    #[test]
    fn random_writes_have_goals_on_a_real_disk_only() {
        for (storage, expected) in [("disk", vec![(1.2, true), (0.8, false)]), ("file", vec![])] {
            let mut set = Set::default();
            for (server, rate) in [(OURS, 120.0), ("qsd native", 100.0), ("bare fio psync", 150.0)]
            {
                let mut labels: Vec<(&str, &dyn std::fmt::Display)> =
                    vec![("storage", &storage), ("load", &"randwrite"), ("block", &4096)];
                labels.push(("depth", &32));
                if !is_bare(server) {
                    labels.push(("client", &"event"));
                }
                set.add(server, &point(&labels), vec![(IOPS, rate), (CPU, 1.0)]);
            }
            let goals = goals(&set);
            let outcome: Vec<_> = goals.iter().map(|goal| (goal.measured, goal.met)).collect();
            assert_eq!(outcome, expected);
            assert!(goals.iter().all(|goal| goal.name.starts_with("rate, randwrite, disk")));
        }
    }

    #[test]
    fn an_idle_server_may_use_less_than_a_tenth_of_a_percent() {
        let mut idle = Set::default();
        for (storage, percent) in [("file", 0.05), ("null", 0.1)] {
            idle.add(OURS, &point(&[("storage", &storage)]), vec![(IDLE_CPU, percent)]);
        }
        let goals = judge(&Set::default(), &Set::default(), &idle);
        assert_eq!([goals[0].met, goals[1].met], [true, false]);
    }

    #[test]
    fn two_queues_are_compared_with_one_on_the_same_storage() {
        let mut scaling = Set::default();
        for (storage, queues, rate) in [("file", 1, 10.0), ("null", 1, 10.0), ("null", 2, 14.0)] {
            let labels: [(&str, &dyn std::fmt::Display); 2] =
                [("storage", &storage), ("queues", &queues)];
            scaling.add(OURS, &point(&labels), vec![(IOPS, rate)]);
        }
        let goals = judge(&Set::default(), &scaling, &Set::default());
        assert_eq!(goals.len(), 1);
        assert_eq!((goals[0].measured, goals[0].met), (1.4, false));
    }

    #[test]
    fn two_queues_have_their_goal_at_one_depth() {
        let mut scaling = Set::default();
        for (depth, gain) in [(1, 1.0), (32, 1.8), (128, 1.1)] {
            for (queues, rate) in [(1, 10.0), (2, 10.0 * gain)] {
                let labels: [(&str, &dyn std::fmt::Display); 3] =
                    [("storage", &"null"), ("queues", &queues), ("depth", &depth)];
                scaling.add(OURS, &point(&labels), vec![(IOPS, rate)]);
            }
        }
        let goals = judge(&Set::default(), &scaling, &Set::default());
        assert_eq!(goals.iter().map(|goal| goal.measured).collect::<Vec<_>>(), [1.8]);
    }

    #[test]
    fn two_queues_on_cores_of_their_own_must_nearly_double() {
        let mut scaling = Set::default();
        for (cpus, queues, rate) in
            [(None, 1, 10.0), (None, 2, 18.0), (Some(APART), 1, 10.0), (Some(APART), 2, 18.0)]
        {
            let mut labels: Vec<(&str, &dyn std::fmt::Display)> =
                vec![("storage", &"null"), ("queues", &queues)];
            if let Some(cpus) = &cpus {
                labels.push((CPUS, cpus));
            }
            scaling.add(OURS, &point(&labels), vec![(IOPS, rate)]);
        }
        let goals = judge(&Set::default(), &scaling, &Set::default());
        let outcome: Vec<_> = goals.iter().map(|g| (g.wanted.as_str(), g.met)).collect();
        assert_eq!(outcome, [(">= 1.5", true), (">= 1.9", false)]);
    }
}
