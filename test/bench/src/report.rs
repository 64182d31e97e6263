// SPDX-License-Identifier: Apache-2.0
//! Results: samples, their medians, the tables and the JSON form.

use std::fmt::Write;

use serde::Serialize;

use crate::goals::Goal;
use crate::load::{Load, Mode};
use crate::server::{Family, Server, Storage};

const MEASUREMENTS_HEAD: &str = "\n## Measurements\n\nMedians over the rounds. `ours/it`: rate of \
    ours over that server's. `CPU wait`: time that server and client were ready to run while \
    something else had their CPU; more than a few percent means a disturbed machine.\n\n";

/// One measurement of one server.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Sample {
    /// Requests a second.
    pub iops: f64,
    /// The server's CPU time for each request.
    pub cpu_us_per_io: f64,
    /// Median latency.
    pub p50_us: f64,
    /// 99th percentile of latency.
    pub p99_us: f64,
    /// Share of the time that server and client waited for a CPU which another task had, in
    /// percent; a sample above a limit is disturbed.
    pub waited_percent: f64,
}

/// Median of the values (mean of the two middle ones); 0 if there are none.
pub fn median(values: impl IntoIterator<Item = f64>) -> f64 {
    let mut values: Vec<_> = values.into_iter().collect();
    values.sort_by(f64::total_cmp);
    let middle = values.len() / 2;
    match values.len() {
        0 => 0.0,
        n if n % 2 == 1 => values[middle],
        _ => (values[middle - 1] + values[middle]) / 2.0,
    }
}

/// All samples of one server at one point.
#[derive(Clone, Debug, Serialize)]
pub struct Row {
    /// Backing storage of the server.
    pub storage: Storage,
    /// Wait of the client; fio has no such choice.
    pub mode: Option<Mode>,
    /// Requests in flight on each queue.
    pub depth: u16,
    /// Queues.
    pub queues: u16,
    /// Name of the server.
    pub server: String,
    /// Family of the server; none for bare fio.
    pub family: Option<Family>,
    /// One for each round.
    pub samples: Vec<Sample>,
}

impl Row {
    /// A row of a server without samples yet.
    pub fn new(storage: Storage, load: &Load, server: &Server) -> Self {
        Self {
            storage,
            mode: Some(load.mode),
            depth: load.depth,
            queues: load.queues,
            server: server.name.clone(),
            family: Some(server.family),
            samples: Vec::new(),
        }
    }

    /// A row of bare fio without samples yet.
    pub fn bare(storage: Storage, depth: u16) -> Self {
        let server = "bare fio io_uring".to_owned();
        Self { storage, mode: None, depth, queues: 1, server, family: None, samples: Vec::new() }
    }

    /// Median of requests a second.
    pub fn iops(&self) -> f64 {
        median(self.samples.iter().map(|s| s.iops))
    }

    /// Median of CPU time for each request.
    pub fn cpu_us_per_io(&self) -> f64 {
        median(self.samples.iter().map(|s| s.cpu_us_per_io))
    }

    fn extremes(&self) -> (f64, f64) {
        let iops = self.samples.iter().map(|s| s.iops);
        (iops.clone().fold(f64::INFINITY, f64::min), iops.fold(0.0, f64::max))
    }

    /// True if another row was measured at the same point.
    pub fn same_point(&self, other: &Self) -> bool {
        (self.storage, self.mode, self.depth, self.queues)
            == (other.storage, other.mode, other.depth, other.queues)
    }
}

/// CPU time of a server with a connected client that does nothing.
#[derive(Clone, Debug, Serialize)]
pub struct Idle {
    /// Backing storage of the server.
    pub storage: Storage,
    /// Name of the server.
    pub server: String,
    /// Family of the server.
    pub family: Family,
    /// Share of one core, in percent.
    pub cpu_percent: f64,
}

/// All results of a comparison.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Report {
    /// Machine, versions and command lines.
    pub setup: Vec<(String, String)>,
    /// All points.
    pub rows: Vec<Row>,
    /// N queues on N cores; see `scaling`.
    pub scaling: Vec<Row>,
    /// Idle servers.
    pub idle: Vec<Idle>,
    /// Goals and their outcomes.
    pub goals: Vec<Goal>,
}

impl Report {
    /// The report as markdown.
    pub fn markdown(&self) -> String {
        let mut text = String::from("## Set-up\n\n");
        for (name, value) in &self.setup {
            let _ = writeln!(text, "- {name}: `{value}`");
        }
        text.push_str(MEASUREMENTS_HEAD);
        write_rows(&mut text, &self.rows);
        if !self.scaling.is_empty() {
            let _ = writeln!(text, "\n## Queues\n\n{}\n", crate::scaling::METHOD);
            write_rows(&mut text, &self.scaling);
        }
        text.push_str("\n## Idle, a client connected\n\n| storage | server | CPU % of a core |\n");
        text.push_str("|---|---|---:|\n");
        for idle in &self.idle {
            let _ = writeln!(
                text,
                "| {} | {} | {:.3} |",
                storage_name(idle.storage),
                idle.server,
                idle.cpu_percent
            );
        }
        self.write_goals(&mut text);
        text
    }

    fn write_goals(&self, text: &mut String) {
        if self.goals.is_empty() {
            return;
        }
        text.push_str("\n## Goals\n\n| | goal | measured | wanted |\n|---|---|---:|---:|\n");
        for goal in &self.goals {
            let verdict = if goal.met { "PASS" } else { "MISS" };
            let _ = writeln!(
                text,
                "| {verdict} | {} | {:.3} | {} |",
                goal.name, goal.measured, goal.wanted
            );
        }
    }
}

/// One table; `ours/it` is the rate of our server over that server's at the same point.
fn write_rows(text: &mut String, rows: &[Row]) {
    text.push_str(
        "| storage | client | queues | depth | server | kIOPS | min-max | ours/it | CPU us/IO \
         | p50 us | p99 us | CPU wait % |\n\
         |---|---|---:|---:|---|---:|---:|---:|---:|---:|---:|---:|\n",
    );
    for row in rows {
        let (min, max) = row.extremes();
        let ours = rows
            .iter()
            .find(|r| r.family == Some(Family::Ours) && r.same_point(row))
            .map_or_else(|| "-".to_owned(), |ours| format!("{:.2}", ours.iops() / row.iops()));
        let _ = writeln!(
            text,
            "| {} | {} | {} | {} | {} | {:.1} | {:.1}-{:.1} | {ours} | {:.3} | {:.1} | {:.1} \
             | {:.0} |",
            storage_name(row.storage),
            row.mode.map_or("-", mode_name),
            row.queues,
            row.depth,
            row.server,
            row.iops() / 1e3,
            min / 1e3,
            max / 1e3,
            row.cpu_us_per_io(),
            median(row.samples.iter().map(|s| s.p50_us)),
            median(row.samples.iter().map(|s| s.p99_us)),
            median(row.samples.iter().map(|s| s.waited_percent)),
        );
    }
}

/// Name of a storage kind in tables.
pub fn storage_name(storage: Storage) -> &'static str {
    match storage {
        Storage::File => "file",
        Storage::Null => "null",
    }
}

/// Name of a client mode in tables.
pub fn mode_name(mode: Mode) -> &'static str {
    match mode {
        Mode::Event => "event",
        Mode::Spin => "spin",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_median_is_the_middle_or_the_mean_of_the_two_middle_values() {
        assert_eq!(median([3.0, 1.0, 2.0]), 2.0);
        assert_eq!(median([4.0, 1.0, 2.0, 3.0]), 2.5);
        assert_eq!(median([]), 0.0);
    }
}
