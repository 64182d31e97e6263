// SPDX-License-Identifier: Apache-2.0
//! Results of the comparison inside of a VM.

use std::fmt::Write;

use serde::Serialize;

use super::subject::Who;
use crate::goals::Goal;
use crate::load::Mode;
use crate::report::{median, mode_name};

/// One measurement.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Sample {
    /// Requests a second.
    pub iops: f64,
    /// CPU time of the server's threads (vhost workers too) for each request.
    pub cpu_us: f64,
    /// CPU time of the whole VM without the client, for each request.
    pub machine_us: f64,
    /// Median latency.
    pub p50_us: f64,
    /// 99th percentile of latency.
    pub p99_us: f64,
}

/// A point of measurement: two rows at the same point can be compared.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Point {
    /// The device.
    pub device: String,
    /// Wait of the client; bare fio has no such choice.
    pub mode: Option<Mode>,
    /// Queues.
    pub queues: u16,
    /// Requests in flight on each.
    pub depth: u16,
    /// Client and server have the same CPUs, one for each queue.
    pub shared_cpus: bool,
}

/// All samples of one subject at one point.
#[derive(Clone, Debug, Serialize)]
pub struct Row {
    /// The point of measurement.
    pub point: Point,
    /// The subject; none for bare fio.
    pub who: Option<Who>,
    /// One for each round.
    pub samples: Vec<Sample>,
}

impl Row {
    /// A median over the rounds.
    pub fn median(&self, of: impl Fn(&Sample) -> f64) -> f64 {
        median(self.samples.iter().map(of))
    }

    /// Median of requests a second.
    pub fn iops(&self) -> f64 {
        self.median(|s| s.iops)
    }

    /// Name in tables.
    pub fn name(&self) -> &'static str {
        self.who.map_or("bare fio", Who::name)
    }
}

/// CPU time of a server with a connected client that does nothing.
#[derive(Clone, Debug, Serialize)]
pub struct Idle {
    /// The subject.
    pub who: Who,
    /// Share of one CPU, in percent.
    pub cpu_percent: f64,
}

/// All results of the comparison.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Report {
    /// Machine, versions and command lines.
    pub setup: Vec<(String, String)>,
    /// All points.
    pub rows: Vec<Row>,
    /// Idle servers.
    pub idle: Vec<Idle>,
    /// Goals.
    pub goals: Vec<Goal>,
    /// Goals that could not be judged, with the reasons.
    pub not_judged: Vec<String>,
}

impl Report {
    /// The row of a subject at a point.
    pub fn at(&self, point: &Point, who: Who) -> Option<&Row> {
        self.rows.iter().find(|row| row.who == Some(who) && row.point == *point)
    }

    /// The fastest variant of qemu-storage-daemon at a point.
    pub fn best_qsd(&self, point: &Point) -> Option<&Row> {
        let rows = self.rows.iter().filter(|row| row.point == *point);
        let qsd = rows.filter(|row| row.who.is_some_and(Who::is_qsd));
        qsd.max_by(|a, b| a.iops().total_cmp(&b.iops()))
    }

    /// The report as markdown.
    pub fn markdown(&self) -> String {
        let mut text = String::from("## Host side alone: set-up\n\n");
        for (name, value) in &self.setup {
            let _ = writeln!(text, "- {name}: `{value}`");
        }
        text.push_str(HEAD);
        for row in &self.rows {
            self.write_row(&mut text, row);
        }
        text.push_str("\n### Idle, a client connected\n\n| server | CPU % |\n|---|---:|\n");
        for idle in &self.idle {
            let _ = writeln!(text, "| {} | {:.3} |", idle.who.name(), idle.cpu_percent);
        }
        text.push_str(&goals_table(&self.goals, &self.not_judged));
        text
    }

    fn write_row(&self, text: &mut String, row: &Row) {
        let ratio = |other: Option<&Row>| match other {
            Some(other) if other.iops() > 0.0 => format!("{:.2}", row.iops() / other.iops()),
            _ => "-".to_owned(),
        };
        let point = &row.point;
        let cpus = if point.shared_cpus { "shared" } else { "apart" };
        let _ = writeln!(
            text,
            "| {} | {} | {} | {cpus} | {} | {} | {:.1} | {} | {} | {:.1} | {:.1} | {:.0} | {:.0} |",
            point.device,
            point.mode.map_or("-", mode_name),
            point.queues,
            point.depth,
            row.name(),
            row.iops() / 1e3,
            ratio(self.best_qsd(point)),
            ratio(self.at(point, Who::VhostScsi)),
            row.median(|s| s.cpu_us),
            row.median(|s| s.machine_us),
            row.median(|s| s.p50_us),
            row.median(|s| s.p99_us),
        );
    }
}

const HEAD: &str = "\n### Measurements\n\nMedians over the rounds. `/qsd`, `/scsi`: rate over the \
    best variant of qemu-storage-daemon, over vhost-scsi. CPU: threads of the server, vhost workers \
    among them; VM: everything but the client. CPUs `apart`: the client on one, the server on \
    another; `shared`: both on as many CPUs as there are queues.\n\n\
    | device | client | queues | CPUs | depth | server | kIOPS | /qsd | /scsi | CPU us/IO \
    | VM us/IO | p50 us | p99 us |\n|---|---|---:|---|---:|---|---:|---:|---:|---:|---:|---:|---:|\n";

/// Goals as a table, with those that could not be judged below it.
pub fn goals_table(goals: &[Goal], not_judged: &[String]) -> String {
    let mut text =
        String::from("\n### Goals\n\n| | goal | measured | wanted |\n|---|---|---:|---:|\n");
    for goal in goals {
        let verdict = if goal.met { "PASS" } else { "MISS" };
        let _ = writeln!(
            text,
            "| {verdict} | {} | {:.3} | {} |",
            goal.name, goal.measured, goal.wanted
        );
    }
    for reason in not_judged {
        let _ = writeln!(text, "| - | {reason} | | |");
    }
    text
}
