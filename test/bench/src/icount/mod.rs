// SPDX-License-Identifier: Apache-2.0
//! `bench icount`: path lengths in instructions.
//!
//! In a VM with one CPU whose clock counts instructions (QEMU's `-icount shift=0,sleep=off`) a
//! nanosecond is an instruction, and two runs agree. No thread polls for requests: every one takes
//! the whole path, with kick, wake-up and call.

mod path;
mod stages;
mod table;

use std::path::PathBuf;

use anyhow::{Context, Result, bail};
use clap::Args as ClapArgs;
use kit::metric::{Figures, Set};
use kit::report::{Report, Section};

use self::path::Path;
pub(crate) use self::path::{USUAL, is_usual};
pub(crate) use self::stages::LENGTH;
pub use self::stages::TITLE as STAGES_TITLE;
pub use self::table::TITLE as PATHS_TITLE;
pub(crate) use self::table::{CLIENT, SERVER, WHOLE};

use crate::host::disk::Storage;
use crate::host::subject::{Programs, Servers, Subject, Who};
use crate::load::Load;
use crate::rig::Speed;
use crate::worker::Until;
use crate::{cpu, setup};

/// The reference for `--check`: the output of `--json` on the lab's 6.12 kernel.
pub const KEPT: &str = include_str!("../../path-lengths.json");
/// Requests before the measured ones.
const WARM_UP_IOS: u64 = 300;

/// Options of `bench icount`.
#[derive(Clone, Debug, ClapArgs)]
pub struct Args {
    /// Requests of each measurement
    #[arg(long, default_value_t = 2000)]
    ios: u64,
    /// Measurements of each path, each with a server of its own; the shortest counts
    #[arg(long, default_value_t = 5)]
    rounds: usize,
    /// Requests in flight
    #[arg(long = "depth", value_delimiter = ',', default_value = "1,4,32")]
    depths: Vec<u16>,
    /// Queues of this project's wide disk, of which one is busy; 16 threads serve them
    #[arg(long, default_value_t = 64)]
    queues: u16,
    #[command(flatten)]
    servers: Servers,
    /// Also write the path lengths as JSON
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Compare with the path lengths kept in `test/bench/path-lengths.json`; a longer path of this
    /// project is a failure
    #[arg(long)]
    check: bool,
    /// Percent by which a path may grow
    #[arg(long, default_value_t = 3.0)]
    tolerance: f64,
    /// Measure even though the clock does not count instructions
    #[arg(long)]
    any_clock: bool,
}

/// Measures and prints the tables.
pub fn run(args: &Args) -> Result<()> {
    let mut args = args.clone();
    if cpu::usable()?.len() != 1 && !args.any_clock {
        bail!("this VM has more than one CPU: use the lab's --icount");
    }
    let (mut programs, _folder) = args.servers.programs()?;
    programs.polling = false;
    // The daemon's trials of batch sizes begin with a small one and take longer than a measurement.
    if !programs.ours_args.iter().any(|arg| arg.starts_with("--batch-size")) {
        programs.ours_args.push("--batch-size=32".to_owned());
    }
    let mut paths = Set::default();
    for path in path::all(&args.servers.who, args.queues) {
        lengths(&args, &programs, &path, &mut paths)?;
    }
    let mut report = Report::new("Instructions", setup::describe());
    report.sections.push(table::section(&paths));
    report.goals = table::goals(&paths);
    if args.servers.who.contains(&Who::Kernel) {
        report.not_judged.push(table::POLLED_NOT_JUDGED.to_owned());
    }
    let stages = args.servers.who.contains(&Who::Kernel).then(|| per_stage(&args, &programs));
    // A trace that cannot be read is an error after the report of the path lengths.
    let stages = stages.transpose().map(|section| report.sections.extend(section));
    report.publish(args.json.as_deref())?;
    stages?;
    if !args.check {
        return Ok(());
    }
    table::check(&paths, &setup::kernel(), KEPT, args.tolerance)
}

/// Lengths of a path at all depths: the shortest of all rounds. With several requests in flight client
/// and worker now and then alternate in a worse way, for as long as both live.
fn lengths(args: &Args, programs: &Programs, path: &Path, paths: &mut Set) -> Result<()> {
    let (programs, depths) = (&path.programs(programs), path.depths(&args.depths));
    let mut shortest = vec![Vec::new(); depths.len()];
    for _ in 0..path.rounds(args.rounds) {
        let subject = Subject::start(path.who, programs, path.storage, path.queues)
            .with_context(|| format!("starting {}", path.who.name()))?;
        for (shortest, depth) in shortest.iter_mut().zip(&depths) {
            let figures = length(args, &subject, &path.load(*depth))?;
            if shortest.is_empty() || whole(&figures) < whole(shortest) {
                *shortest = figures;
            }
        }
    }
    for (figures, depth) in shortest.into_iter().zip(&depths) {
        paths.add(path.who.name(), &path.point(*depth), figures);
    }
    Ok(())
}

/// The whole path of a measurement.
fn whole(figures: &Figures) -> f64 {
    figures.iter().find(|(metric, _)| *metric == WHOLE).map_or(f64::INFINITY, |(_, value)| *value)
}

fn length(args: &Args, subject: &Subject, load: &Load) -> Result<Figures> {
    let mut client = subject.connect(load)?;
    client.keep_busy(1);
    client.run_until(Until::Ios(WARM_UP_IOS), &[])?;
    let before = subject.times()?;
    let outcome = client.run_until(Until::Ios(args.ios), &[])?;
    let server = subject.times()?.since(&before).busy;
    let each = |time: std::time::Duration| (time.as_nanos() as f64 / outcome.ios as f64).round();
    Ok(vec![(WHOLE, each(outcome.elapsed)), (CLIENT, each(outcome.busy)), (SERVER, each(server))])
}

/// The kernel plane's instructions at each stage, by its trace events, with one request in flight.
fn per_stage(args: &Args, programs: &Programs) -> Result<Section> {
    let subject = Subject::start(Who::Kernel, programs, Storage::Device(Speed::Null), 1)?;
    let mut client = subject.connect(&Load::random_reads(1))?;
    client.run_until(Until::Ios(WARM_UP_IOS), &[])?;
    let plain = client.run_until(Until::Ios(args.ios), &[])?;
    let tracing = stages::Tracing::start()?;
    let traced = client.run_until(Until::Ios(args.ios.min(500)), &[])?;
    let text = tracing.finish()?;
    let each = |o: &crate::load::Outcome| o.elapsed.as_nanos() as f64 / o.ios as f64;
    stages::section(&text, each(&plain), each(&traced))
}
