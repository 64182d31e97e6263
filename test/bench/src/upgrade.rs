// SPDX-License-Identifier: Apache-2.0
//! `bench upgrade`: how long a busy driver waits while `ctl upgrade` replaces the program.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use clap::Args as ClapArgs;
use driver::Device;
use kit::metric::{Figures, Metric, Set, percentile, point};
use kit::report::{Column, Goal, Report, Section};
use tempfile::TempDir;

use crate::client::Client;
use crate::load::Load;
use crate::one_daemon::{OneDaemon, light_driver, program};
use crate::setup;

/// Longest latency of a window: its median over all windows, 99th percentile and maximum.
const WAIT_P50: Metric = Metric::new("wait p50", "ms");
const WAIT_P99: Metric = Metric::new("wait p99", "ms");
const WAIT_MAX: Metric = Metric::new("wait max", "ms");
/// The pause that `ctl upgrade` tells.
const PAUSE_P50: Metric = Metric::new("pause p50", "ms");
const PAUSE_P99: Metric = Metric::new("pause p99", "ms");

const UPGRADES: &str = "with an upgrade";
const NOTHING: &str = "without";
const SIZE_BYTES: u64 = 256 << 20;
/// The goal of `docs/operations.md` for the 99th percentile.
const PAUSE_GOAL_MS: f64 = 100.0;

const METHOD: &str = "Raw files on the folder for temporary files, one `vhost-blk daemon`, each disk with a connected \
    driver; one driver keeps 4 KiB random reads in flight and sleeps. Windows with an upgrade to the same program and \
    windows without take turns. `wait`: the longest latency of a window, over all windows; `pause`: what `ctl upgrade` \
    tells.";

/// Options of `bench upgrade`.
#[derive(Clone, Debug, ClapArgs)]
pub struct Args {
    /// Numbers of disks
    #[arg(long, value_delimiter = ',', default_value = "1,16,64")]
    disks: Vec<u16>,
    /// Upgrades with each number of disks
    #[arg(long, default_value_t = 100)]
    upgrades: u32,
    /// Requests that the busy driver keeps in flight
    #[arg(long, default_value_t = 32)]
    depth: u16,
    /// Seconds of a window, at least; the upgrade begins after a quarter of it
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
    ensure!(args.upgrades > 0, "--upgrades must be at least 1");
    let program = program(args.vhost_blk.as_deref())?;
    let mut set = Set::default();
    for &disks in &args.disks {
        measure(args, &Rig::start(&program, disks)?, disks, &mut set)?;
        eprintln!("bench: upgrade, {disks} disks");
    }
    let mut report = Report::new("Upgrade", setup::describe());
    report.goals = goals(&set);
    report.sections.push(section(&set));
    report.publish(args.json.as_deref())
}

/// A daemon whose disks all have drivers.
struct Rig {
    served: OneDaemon,
    _idle: Vec<Device>,
    /// Images, sockets and the log; removed after the daemon has ended.
    _folder: TempDir,
}

impl Rig {
    fn start(program: &Path, disks: u16) -> Result<Self> {
        let folder = tempfile::Builder::new().prefix("bench-upgrade-").tempdir()?;
        let image = |disk| {
            let image = folder.path().join(format!("{disk}.img"));
            std::fs::File::create(&image)?.set_len(SIZE_BYTES)?;
            Ok(format!("blk-file = \"{}\"\nnum-queues = 1\n", image.display()))
        };
        let images = (0..disks).map(image).collect::<Result<Vec<_>>>()?;
        let served = OneDaemon::start(program, folder.path(), &images)?;
        let others = served.sockets.iter().skip(1);
        let idle = others.map(|socket| light_driver(socket)).collect::<Result<_>>()?;
        Ok(Self { served, _idle: idle, _folder: folder })
    }

    /// Replaces the program by itself; returns the pause that it tells.
    fn upgrade(&self) -> Result<Duration> {
        let mut command = Command::new(&self.served.program);
        command.args(["ctl", "--json", "--control-path"]).arg(&self.served.control).arg("upgrade");
        let output = command.output().context("cannot run `vhost-blk ctl`")?;
        let words = String::from_utf8_lossy(&output.stderr);
        ensure!(output.status.success(), "`ctl upgrade` failed: {words}");
        let reply: serde_json::Value = serde_json::from_slice(&output.stdout)?;
        let pause = reply["pause_us"].as_u64();
        Ok(Duration::from_micros(pause.context("`ctl upgrade` tells no pause")?))
    }
}

/// Measures windows with an upgrade and without one in turn.
fn measure(args: &Args, rig: &Rig, disks: u16, set: &mut Set) -> Result<()> {
    let socket = rig.served.sockets[0].display().to_string();
    let mut client = Client::connect(&socket, &Load::random_reads(args.depth))?;
    let (mut with, mut without, mut pauses) = (Vec::new(), Vec::new(), Vec::new());
    let window = Duration::from_secs_f64(args.seconds);
    for _ in 0..args.upgrades {
        without.push(longest(&mut client, window)?);
        let (wait, pause) = during_upgrade(rig, &mut client, window)?;
        with.push(wait);
        pauses.push(pause);
    }
    let point = point(&[("disks", &disks)]);
    let waits = |sorted: &[Duration]| -> Figures {
        let of = |percent| milliseconds(percentile(sorted, percent));
        vec![(WAIT_P50, of(50)), (WAIT_P99, of(99)), (WAIT_MAX, of(100))]
    };
    [&mut with, &mut without, &mut pauses].into_iter().for_each(|times| times.sort_unstable());
    let mut figures = waits(&with);
    let pause = |percent| milliseconds(percentile(&pauses, percent));
    figures.extend([(PAUSE_P50, pause(50)), (PAUSE_P99, pause(99))]);
    set.add(UPGRADES, &point, figures);
    set.add(NOTHING, &point, waits(&without));
    Ok(())
}

/// Upgrades in a window that lasts until the upgrade has ended; returns its longest latency and the
/// pause that the upgrade tells.
fn during_upgrade(
    rig: &Rig,
    client: &mut Client,
    window: Duration,
) -> Result<(Duration, Duration)> {
    thread::scope(|scope| {
        let upgrade = scope.spawn(|| {
            thread::sleep(window / 4);
            rig.upgrade()
        });
        let mut wait = longest(client, window)?;
        while !upgrade.is_finished() {
            wait = wait.max(longest(client, window)?);
        }
        Ok((wait, upgrade.join().expect("the thread does not panic")?))
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
        Column::subject("window"),
        Column::count("disks"),
        Column::median("wait p50 ms", WAIT_P50, 1.0, 1),
        Column::median("wait p99 ms", WAIT_P99, 1.0, 1),
        Column::median("wait max ms", WAIT_MAX, 1.0, 1),
        Column::median("pause p50 ms", PAUSE_P50, 1.0, 1),
        Column::median("pause p99 ms", PAUSE_P99, 1.0, 1),
    ];
    Section::new("Pause of an upgrade", METHOD, set, &columns)
}

fn goals(set: &Set) -> Vec<Goal> {
    let goal = |row: &kit::metric::Row| {
        let name = format!("{} disks: p99 of the longest wait in ms", row.label("disks"));
        Goal::below(name, row.median(WAIT_P99), PAUSE_GOAL_MS)
    };
    set.of(UPGRADES).map(goal).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_windows_with_an_upgrade_can_miss_the_goal() {
        let mut set = Set::default();
        for (subject, disks, wait) in
            [(UPGRADES, 1, 99.0), (UPGRADES, 16, 101.0), (NOTHING, 1, 300.0)]
        {
            set.add(subject, &point(&[("disks", &disks)]), vec![(WAIT_P99, wait)]);
        }
        let met: Vec<bool> = goals(&set).iter().map(|goal| goal.met).collect();
        assert_eq!(met, [true, false]);
    }
}
