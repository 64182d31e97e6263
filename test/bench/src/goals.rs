// SPDX-License-Identifier: Apache-2.0
//! The project's performance goals, and the check of a report against them.
//!
//! Each goal compares with the best variant of qemu-storage-daemon at the same point: the fastest
//! one for rates, the one with the least CPU time for CPU time.

use serde::Serialize;

use crate::load::Mode;
use crate::report::{Report, Row, mode_name, storage_name};
use crate::server::{Family, Storage};

/// Idle CPU of a server with a connected client, in percent of one core.
const IDLE_PERCENT_MAX: f64 = 0.1;
/// Two queues on two cores: least gain over one queue that counts as scaling.
const SCALING_MIN: f64 = 1.5;

/// A goal and its outcome.
#[derive(Clone, Debug, Serialize)]
pub struct Goal {
    /// The compared quantities.
    pub name: String,
    /// The ratio (or the percentage).
    pub measured: f64,
    /// The bound.
    pub wanted: String,
    /// True if the goal is met.
    pub met: bool,
}

/// A goal that is met if `measured` is at least `bound`.
pub fn at_least(name: String, measured: f64, bound: f64) -> Goal {
    Goal { name, measured, wanted: format!(">= {bound}"), met: measured >= bound }
}

pub(crate) fn below(name: String, measured: f64, bound: f64) -> Goal {
    Goal { name, measured, wanted: format!("< {bound}"), met: measured < bound }
}

/// All goals for which the report has measurements.
pub fn judge(report: &Report) -> Vec<Goal> {
    let mut goals = Vec::new();
    for ours in report.rows.iter().filter(|r| r.family == Some(Family::Ours)) {
        goals.extend(rate_against_qsd(report, ours));
        goals.extend(rate_against_fio(report, ours));
        goals.extend(cpu_against_qsd(report, ours));
    }
    goals.extend(idle(report));
    goals.extend(scaling(report));
    goals
}

fn qsd_at<'a>(report: &'a Report, ours: &'a Row) -> impl Iterator<Item = &'a Row> {
    report.rows.iter().filter(|r| r.family == Some(Family::Qsd) && r.same_point(ours))
}

fn point(row: &Row) -> String {
    let mode = row.mode.map_or("", mode_name);
    format!("{} depth {} {mode}", storage_name(row.storage), row.depth)
}

fn rate_against_qsd(report: &Report, ours: &Row) -> Option<Goal> {
    let best = qsd_at(report, ours).max_by(|a, b| a.iops().total_cmp(&b.iops()))?;
    let bound = match (ours.storage, ours.depth, ours.mode?) {
        (_, 1, Mode::Event) => 2.0,
        (_, 1, Mode::Spin) => 1.0,
        (Storage::File, 32, _) => 1.5,
        (Storage::Null, _, _) => 1.0,
        _ => return None,
    };
    let name = format!("rate, {}: ours over {}", point(ours), best.server);
    Some(at_least(name, ours.iops() / best.iops(), bound))
}

fn rate_against_fio(report: &Report, ours: &Row) -> Option<Goal> {
    let bare = report.rows.iter().find(|r| {
        r.family.is_none() && r.storage == ours.storage && r.depth == ours.depth && r.depth == 32
    })?;
    let name = format!("rate, {}: ours over {}", point(ours), bare.server);
    Some(at_least(name, ours.iops() / bare.iops(), 0.9))
}

fn cpu_against_qsd(report: &Report, ours: &Row) -> Option<Goal> {
    let least =
        qsd_at(report, ours).min_by(|a, b| a.cpu_us_per_io().total_cmp(&b.cpu_us_per_io()))?;
    let name = format!("CPU per I/O, {}: ours over {}", point(ours), least.server);
    Some(below(name, ours.cpu_us_per_io() / least.cpu_us_per_io(), 1.0))
}

fn idle(report: &Report) -> impl Iterator<Item = Goal> {
    report.idle.iter().filter(|idle| idle.family == Family::Ours).map(|idle| {
        let name = format!("idle CPU percent, {}", storage_name(idle.storage));
        below(name, idle.cpu_percent, IDLE_PERCENT_MAX)
    })
}

fn scaling(report: &Report) -> impl Iterator<Item = Goal> {
    let rows = || report.scaling.iter().filter(|r| r.family == Some(Family::Ours));
    rows().filter(|r| r.queues == 1).filter_map(move |one| {
        let two = rows().find(|r| r.queues == 2 && r.storage == one.storage)?;
        let name = format!("two queues on two cores over one, {}", storage_name(one.storage));
        Some(at_least(name, two.iops() / one.iops(), SCALING_MIN))
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::{Idle, Sample};

    fn row(server: &str, family: Option<Family>, depth: u16, iops: f64, cpu: f64) -> Row {
        let sample =
            Sample { iops, cpu_us_per_io: cpu, p50_us: 0.0, p99_us: 0.0, waited_percent: 0.0 };
        Row {
            storage: Storage::File,
            mode: family.map(|_| Mode::Event),
            depth,
            queues: 1,
            server: server.to_owned(),
            family,
            samples: vec![sample],
        }
    }

    #[test]
    fn rates_are_compared_with_the_fastest_and_cpu_with_the_thriftiest_variant() {
        let rows = vec![
            row("ours", Some(Family::Ours), 32, 150.0, 3.0),
            row("fast", Some(Family::Qsd), 32, 100.0, 5.0),
            row("thrifty", Some(Family::Qsd), 32, 50.0, 2.0),
        ];
        let goals = judge(&Report { rows, ..Report::default() });
        let outcome: Vec<_> = goals.iter().map(|g| (g.measured, g.met)).collect();
        assert_eq!(outcome, [(1.5, true), (1.5, false)]);
    }

    #[test]
    fn bare_fio_bounds_depth_32_only() {
        let rows = vec![
            row("ours", Some(Family::Ours), 32, 80.0, 1.0),
            row("ours", Some(Family::Ours), 4, 10.0, 1.0),
            row("fio", None, 32, 100.0, 1.0),
        ];
        let goals = judge(&Report { rows, ..Report::default() });
        assert_eq!(goals.len(), 1);
        assert!(!goals[0].met);
    }

    #[test]
    fn an_idle_server_may_use_less_than_a_tenth_of_a_percent() {
        let idle = |cpu_percent| Idle {
            storage: Storage::Null,
            server: "ours".to_owned(),
            family: Family::Ours,
            cpu_percent,
        };
        let goals = judge(&Report { idle: vec![idle(0.05), idle(0.1)], ..Report::default() });
        assert_eq!([goals[0].met, goals[1].met], [true, false]);
    }
}
