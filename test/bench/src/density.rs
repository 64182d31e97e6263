// SPDX-License-Identifier: Apache-2.0
//! `bench density`: many lightly loaded disks, in one daemon and in a process each: memory, CPU while
//! nothing happens, latency and CPU of rare requests; and a busy disk beside a stalled one.

mod fleet;
mod stalled;

use std::path::PathBuf;
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use clap::Args as ClapArgs;
use driver::{Device, Request};
use kit::metric::{CPU, Figures, IDLE_CPU, Metric, P50, P99, Set, percentile, point};
use kit::report::{Column, Goal, Report, Section};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use virtio_spec::blk::S_OK;

use self::fleet::{Fleet, Kind, Programs};
use crate::one_daemon::{LIGHT_BYTES, light_driver};
use crate::setup;

/// Memory of the servers for each disk, without the guests' own.
pub(crate) const MEMORY: Metric = Metric::new("memory", "KiB");
/// Threads of all servers.
const THREADS: Metric = Metric::new("threads", "1");

const METHOD: &str = "Null disks of one queue, each with a connected driver. `memory`: the servers' proportional share \
    (PSS) for each disk, without memory that a guest shares; `idle`: CPU time of all servers while no disk is used, in \
    per cent of one core; then 4 KiB reads at a fixed rate over all disks in turn, one at a time, with a driver that \
    sleeps. Medians over the rounds.";

/// Options of `bench density`.
#[derive(Clone, Debug, ClapArgs)]
pub struct Args {
    /// Numbers of disks
    #[arg(long, value_delimiter = ',', default_value = "1,16,64,256")]
    disks: Vec<u16>,
    /// Rounds; each measures all servers once with each number of disks
    #[arg(long, default_value_t = 3)]
    rounds: u32,
    /// Seconds of each measurement
    #[arg(long, default_value_t = 3.0)]
    seconds: f64,
    /// Requests a second over all disks
    #[arg(long, default_value_t = 1000)]
    rate: u32,
    /// The vhost-blk program [default: next to this program]
    #[arg(long, value_name = "PATH")]
    vhost_blk: Option<PathBuf>,
    /// The qemu-storage-daemon program, or `none`
    #[arg(long, value_name = "PATH", default_value = "qemu-storage-daemon")]
    qsd: String,
    /// Also write everything as JSON
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

/// Measures and prints the table.
pub fn run(args: &Args) -> Result<()> {
    raise_file_limit()?;
    let (programs, left_out) = Programs::find(args.vhost_blk.as_deref(), &args.qsd)?;
    let mut set = Set::default();
    for round in 1..=args.rounds {
        for &disks in &args.disks {
            for kind in programs.kinds() {
                let figures = measure(args, &programs, kind, disks)?;
                set.add(kind.name(), &point(&[("disks", &disks)]), figures);
            }
        }
        eprintln!("bench: density, round {round} of {}", args.rounds);
    }
    let (mut beside, window) = (Set::default(), Duration::from_secs_f64(args.seconds));
    stalled::measure(&programs.ours, args.rounds, window, &mut beside)?;
    let mut report = Report::new("Density", setup::describe());
    report.left_out = left_out;
    report.goals = goals(&set);
    report.goals.extend(stalled::goals(&beside));
    report.sections.extend([section(&set), stalled::section(&beside)]);
    report.publish(args.json.as_deref())
}

/// Lets this process and the servers open enough descriptors for all disks.
fn raise_file_limit() -> Result<()> {
    let Rlimit { maximum, .. } = getrlimit(Resource::Nofile);
    Ok(setrlimit(Resource::Nofile, Rlimit { current: maximum, maximum })?)
}

fn measure(args: &Args, programs: &Programs, kind: Kind, disks: u16) -> Result<Figures> {
    let fleet = Fleet::start(programs, kind, disks)?;
    let mut devices = fleet.sockets().map(light_driver).collect::<Result<Vec<_>>>()?;
    // Each disk has served a request, so that nothing is counted that only happens once.
    devices.iter_mut().try_for_each(|device| read(device).map(drop))?;
    let time = Duration::from_secs_f64(args.seconds);
    let (before, start) = (fleet.times()?, Instant::now());
    sleep(time);
    let idle = fleet.times()?.since(&before).busy.as_secs_f64() / start.elapsed().as_secs_f64();
    let before = fleet.times()?;
    let latencies = light_load(&mut devices, args.rate, time)?;
    let busy = fleet.times()?.since(&before).busy;
    let each = |duration: Duration| duration.as_secs_f64() * 1e6;
    Ok(vec![
        (MEMORY, fleet.memory_kib()? as f64 / f64::from(disks)),
        (THREADS, fleet.threads()? as f64),
        (IDLE_CPU, idle * 100.0),
        (P50, each(percentile(&latencies, 50))),
        (P99, each(percentile(&latencies, 99))),
        (CPU, each(busy) / latencies.len() as f64),
    ])
}

/// Reads a block; returns the time that it took.
fn read(device: &mut Device) -> Result<Duration> {
    let layout = device.layout();
    let start = Instant::now();
    let done = device.queue(0).execute(&Request::read(0, LIGHT_BYTES), &layout)?;
    ensure!(done.status == Some(S_OK), "a read ended with {:?}", done.status);
    Ok(start.elapsed())
}

/// Reads from one disk after another at this rate; returns the latencies in order.
fn light_load(devices: &mut [Device], rate: u32, time: Duration) -> Result<Vec<Duration>> {
    let (start, interval) = (Instant::now(), Duration::from_secs(1) / rate);
    let mut latencies = Vec::new();
    let mut next = start;
    for at in (0..devices.len()).cycle() {
        next += interval;
        if next > start + time {
            break;
        }
        sleep(next.saturating_duration_since(Instant::now()));
        latencies.push(read(&mut devices[at])?);
    }
    ensure!(!latencies.is_empty(), "the time is too short for a request");
    latencies.sort_unstable();
    Ok(latencies)
}

fn section(set: &Set) -> Section {
    let columns = [
        Column::subject("servers"),
        Column::count("disks"),
        Column::median("threads", THREADS, 1.0, 0),
        Column::median("memory KiB", MEMORY, 1.0, 0),
        Column::median("idle %", IDLE_CPU, 1.0, 3),
        Column::median("p50 us", P50, 1.0, 1),
        Column::median("p99 us", P99, 1.0, 1),
        Column::median("CPU us", CPU, 1.0, 1),
    ];
    Section::new("Many disks", METHOD, set, &columns)
}

/// One daemon takes less memory than a process each, no CPU while idle, and answers as soon.
fn goals(set: &Set) -> Vec<Goal> {
    let mut goals = Vec::new();
    for ours in set.of(Kind::Daemon.name()) {
        let disks = ours.label("disks");
        let name = format!("{disks} disks in one daemon: idle CPU in %");
        goals.push(Goal::below(name, ours.median(IDLE_CPU), 0.1));
        for other in [Kind::Serve, Kind::Qsd] {
            let Some(theirs) = set.at(other.name(), &ours.point) else { continue };
            let name = |what| format!("{disks} disks in one daemon: {what} over {}", other.name());
            if disks != "1" {
                goals.push(Goal::below(name("memory"), ours.over(theirs, MEMORY), 1.0));
            }
            goals.push(Goal::at_most(name("p99"), ours.over(theirs, P99), 1.1));
        }
    }
    goals
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_daemon_that_takes_more_memory_or_time_misses_its_goals() {
        let mut set = Set::default();
        let mut add = |kind: Kind, memory, p99| {
            let figures = vec![(MEMORY, memory), (P99, p99), (IDLE_CPU, 0.0)];
            set.add(kind.name(), &point(&[("disks", &16)]), figures);
        };
        add(Kind::Daemon, 200.0, 120.0);
        add(Kind::Serve, 100.0, 100.0);
        add(Kind::Qsd, 400.0, 200.0);
        let met: Vec<bool> = goals(&set).iter().map(|goal| goal.met).collect();
        assert_eq!(met, [true, false, false, true, true]);
    }
}
