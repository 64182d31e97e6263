// SPDX-License-Identifier: Apache-2.0
//! `bench operations`: how long a busy driver waits while its disk is operated.

mod operation;

use std::path::PathBuf;
use std::thread;
use std::time::Duration;

use anyhow::{Result, ensure};
use clap::Args as ClapArgs;
use kit::metric::{Figures, Metric, Set, percentile, point};
use kit::report::{Column, Goal, Report, Section};

use crate::client::Client;
use crate::load::{Load, Op};
use crate::one_daemon::program;
use crate::setup;
use operation::{Operation, Rig};

/// Longest latency of a window: its median over all windows, 99th percentile and maximum.
const WAIT_P50: Metric = Metric::new("wait p50", "ms");
const WAIT_P99: Metric = Metric::new("wait p99", "ms");
const WAIT_MAX: Metric = Metric::new("wait max", "ms");
/// The pause that `ctl` tells.
const PAUSE_P50: Metric = Metric::new("pause p50", "ms");
const PAUSE_P99: Metric = Metric::new("pause p99", "ms");

const WITH: &str = "with it";
const WITHOUT: &str = "without";
/// The goal of `docs/backup.md` and `docs/images.md` for the 99th percentile.
const WAIT_GOAL_MS: f64 = 100.0;

const METHOD: &str = "Raw files in the temporary directory, one `vhost-blk daemon`, each disk with a connected \
    driver; one driver keeps 4 KiB requests in flight and sleeps. Windows with the operation on its disk and windows \
    without take turns. `wait`: the longest latency of a window, over all windows; `pause`: what `ctl` tells. An \
    upgrade replaces the program by itself; a snapshot is committed before the next one; a commit has what one window \
    wrote; a mirror and a backup copy the whole disk.";

/// Options of `bench operations`.
#[derive(Clone, Debug, ClapArgs)]
pub struct Args {
    /// Operations
    #[arg(
        long = "operation",
        value_delimiter = ',',
        default_value = "upgrade,snapshot,commit,mirror,backup,resize"
    )]
    operations: Vec<Operation>,
    /// Numbers of disks of an upgraded daemon; the other operations have one disk
    #[arg(long, value_delimiter = ',', default_value = "1,16,64")]
    disks: Vec<u16>,
    /// Windows with each operation
    #[arg(long, default_value_t = 100)]
    windows: u32,
    /// Requests of the busy driver
    #[arg(long, default_value = "randrw")]
    op: Op,
    /// Requests that the busy driver keeps in flight
    #[arg(long, default_value_t = 32)]
    depth: u16,
    /// Seconds of a window, at least; the operation begins after a quarter of it
    #[arg(long, default_value_t = 0.4)]
    seconds: f64,
    /// The vhost-blk program [default: next to this program]
    #[arg(long, value_name = "PATH")]
    vhost_blk: Option<PathBuf>,
    /// Also write everything as JSON
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

/// Measures and prints the table.
pub fn run(args: &Args) -> Result<()> {
    ensure!(args.windows > 0, "--windows must be at least 1");
    let program = program(args.vhost_blk.as_deref())?;
    let mut set = Set::default();
    for &operation in &args.operations {
        let disks = if operation == Operation::Upgrade { &args.disks[..] } else { &[1] };
        for &disks in disks {
            measure(args, operation, &mut Rig::start(&program, disks)?, &mut set)?;
            eprintln!("bench: {operation}, {disks} disks");
        }
    }
    let mut report = Report::new("Operations on a running disk", setup::describe());
    report.goals = goals(&set);
    report.sections.push(section(&set));
    report.publish(args.json.as_deref())
}

/// Measures windows with the operation and without it in turn.
fn measure(args: &Args, operation: Operation, rig: &mut Rig, set: &mut Set) -> Result<()> {
    let load = Load { op: args.op, ..Load::random_reads(args.depth) };
    let mut client = Client::connect(&rig.socket(), &load)?;
    let (mut with, mut without, mut pauses) = (Vec::new(), Vec::new(), Vec::new());
    let window = Duration::from_secs_f64(args.seconds);
    for _ in 0..args.windows {
        without.push(longest(&mut client, window)?);
        rig.prepare(operation, || longest(&mut client, window).map(drop))?;
        let (wait, pause) = during(rig, operation, &mut client, window)?;
        with.push(wait);
        pauses.extend(pause);
        rig.undo(operation)?;
    }
    let point = point(&[("operation", &operation), ("disks", &rig.disks())]);
    let waits = |sorted: &[Duration]| -> Figures {
        let of = |percent| milliseconds(percentile(sorted, percent));
        vec![(WAIT_P50, of(50)), (WAIT_P99, of(99)), (WAIT_MAX, of(100))]
    };
    [&mut with, &mut without, &mut pauses].into_iter().for_each(|times| times.sort_unstable());
    let mut figures = waits(&with);
    if !pauses.is_empty() {
        let pause = |percent| milliseconds(percentile(&pauses, percent));
        figures.extend([(PAUSE_P50, pause(50)), (PAUSE_P99, pause(99))]);
    }
    set.add(WITH, &point, figures);
    set.add(WITHOUT, &point, waits(&without));
    Ok(())
}

/// Operates the disk in a window that lasts until the operation has ended; returns its longest latency
/// and the pause that the operation tells.
fn during(
    rig: &Rig,
    operation: Operation,
    client: &mut Client,
    window: Duration,
) -> Result<(Duration, Option<Duration>)> {
    thread::scope(|scope| {
        let operated = scope.spawn(|| {
            thread::sleep(window / 4);
            rig.operate(operation)
        });
        let mut wait = longest(client, window)?;
        while !operated.is_finished() {
            wait = wait.max(longest(client, window)?);
        }
        Ok((wait, operated.join().expect("the thread does not panic")?))
    })
}

/// The longest latency of a window.
fn longest(client: &mut Client, window: Duration) -> Result<Duration> {
    Ok(Duration::from_nanos(client.run(window, &[])?.latency_ns.max()))
}

fn milliseconds(duration: Duration) -> f64 {
    duration.as_secs_f64() * 1e3
}

fn section(set: &Set) -> Section {
    let columns = [
        Column::label("operation"),
        Column::count("disks"),
        Column::subject("window"),
        Column::median("wait p50 ms", WAIT_P50, 1.0, 1),
        Column::median("wait p99 ms", WAIT_P99, 1.0, 1),
        Column::median("wait max ms", WAIT_MAX, 1.0, 1),
        Column::median("pause p50 ms", PAUSE_P50, 1.0, 1),
        Column::median("pause p99 ms", PAUSE_P99, 1.0, 1),
    ];
    Section::new("Pause of operations", METHOD, set, &columns)
}

fn goals(set: &Set) -> Vec<Goal> {
    let goal = |row: &kit::metric::Row| {
        let (operation, disks) = (row.label("operation"), row.label("disks"));
        let name = format!("{operation}, {disks} disks: p99 of the longest wait in ms");
        Goal::below(name, row.median(WAIT_P99), WAIT_GOAL_MS)
    };
    set.of(WITH).map(goal).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_windows_with_an_operation_can_miss_the_goal() {
        let mut set = Set::default();
        for (subject, operation, wait) in [
            (WITH, Operation::Snapshot, 99.0),
            (WITH, Operation::Commit, 101.0),
            (WITHOUT, Operation::Snapshot, 300.0),
        ] {
            let point = point(&[("operation", &operation), ("disks", &1)]);
            set.add(subject, &point, vec![(WAIT_P99, wait)]);
        }
        let goals = goals(&set);
        let met: Vec<_> = goals.iter().map(|goal| (goal.name.as_str(), goal.met)).collect();
        let name = |operation| format!("{operation}, 1 disks: p99 of the longest wait in ms");
        assert_eq!(met, [(name("snapshot").as_str(), true), (name("commit").as_str(), false)]);
    }
}
