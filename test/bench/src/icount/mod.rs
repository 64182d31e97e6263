// SPDX-License-Identifier: Apache-2.0
//! `bench icount`: path lengths in instructions.
//!
//! In a VM with one CPU whose clock counts instructions (QEMU's `-icount shift=0,sleep=off`) a
//! nanosecond is an instruction, and two runs agree. No thread polls for requests: every one takes
//! the whole path, with kick, wake-up and call.

mod path;
mod spans;
mod stages;
mod table;

use std::collections::HashSet;
use std::path::PathBuf;

use anyhow::{Context, Result, bail};
use clap::Args as ClapArgs;
use kit::fio;
use kit::metric::{Figures, Set, median};
use kit::report::{Report, Section};

use self::path::Path;
pub(crate) use self::path::{USUAL, is_usual};
pub use self::spans::TITLE as SPANS_TITLE;
pub(crate) use self::spans::{SPAN, STAGES as SPANS};
use self::spans::{Spans, Tasks};
pub(crate) use self::stages::LENGTH;
pub use self::stages::TITLE as STAGES_TITLE;
pub use self::table::TITLE as PATHS_TITLE;
pub(crate) use self::table::{CLIENT, SERVER, WHOLE};

use crate::bare::{self, Engine};
use crate::host::disk::Storage;
use crate::host::subject::{Programs, Servers, Subject, Who};
use crate::kept::Kept;
use crate::load::{Load, Outcome};
use crate::rig::{Speed, null_blk};
use crate::tracing::{Clock, Tracing};
use crate::worker::Until;
use crate::{cpu, setup};

/// The reference for `--check`: the output of `--json` on the lab's 6.12 kernel.
pub const KEPT: Kept = Kept {
    file: "test/bench/path-lengths.json",
    text: include_str!("../../path-lengths.json"),
    title: PATHS_TITLE,
    metric: WHOLE,
};
/// Requests of a traced run.
const TRACED_IOS: u64 = 500;
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
    let (mut programs, _directory) = args.servers.programs()?;
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
    let spans = all_spans(&args, &programs, &mut report.left_out);
    report.sections.push(spans::section(&spans));
    report.publish(args.json.as_deref())?;
    stages?;
    if !args.check {
        return Ok(());
    }
    KEPT.check(table::ours(&paths), &setup::kernel(), args.tolerance)
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
    let tracing = stages::tracing()?;
    tracing.begin()?;
    let traced = client.run_until(Until::Ios(args.ios.min(TRACED_IOS)), &[])?;
    let trace = tracing.finish()?;
    stages::section(&trace, each(&plain), each(&traced))
}

/// Instructions of a request, client included.
fn each(outcome: &Outcome) -> f64 {
    outcome.elapsed.as_nanos() as f64 / outcome.ios as f64
}

/// The instructions of each stage of all servers, and of fio on the device alone, at the first and
/// the last depth. A path whose trace cannot be read is left out.
fn all_spans(args: &Args, programs: &Programs, left_out: &mut Vec<String>) -> Set {
    let mut set = Set::default();
    let mut costs = Vec::new();
    let (first, last) = (args.depths.first(), args.depths.last());
    let depths: Vec<u16> =
        first.into_iter().chain(last.filter(|_| first != last)).copied().collect();
    let mut tell = |name: &str, result: Result<()>| {
        let line = |why| format!("stages of {name}: {why:#}");
        left_out.extend(result.err().map(line));
    };
    for &who in &args.servers.who {
        tell(who.name(), server_spans(args, programs, who, &depths, &mut set, &mut costs));
    }
    if fio::installed() && !costs.is_empty() {
        let cost = median(costs);
        tell(Engine::UringFixed.name(), bare_spans(&depths, cost, &mut set));
    }
    set
}

/// Adds the stages of a server, and the costs of events.
fn server_spans(
    args: &Args,
    programs: &Programs,
    who: Who,
    depths: &[u16],
    set: &mut Set,
    costs: &mut Vec<f64>,
) -> Result<()> {
    let subject = Subject::start(who, programs, Storage::Device(Speed::Null), 1)?;
    for &depth in depths {
        let (spans, plain) = spans_of(args, &subject, depth)?;
        let cost = spans.each_event(plain);
        costs.push(cost);
        spans.add_to(set, who.name(), depth, cost);
    }
    Ok(())
}

/// Adds the stages of fio; an event costs as much as those of servers.
fn bare_spans(depths: &[u16], cost: f64, set: &mut Set) -> Result<()> {
    let device = null_blk("bench-bare", 1024, 1, Speed::Null)?;
    let engine = Engine::UringFixed;
    for &depth in depths {
        let tracing = tracing_of_all()?;
        tracing.begin()?;
        bare::count(device.device(), &Load::random_reads(depth), engine, TRACED_IOS)?;
        let trace = tracing.finish()?;
        let fio: HashSet<u32> = trace.tasks_of("fio").into_iter().collect();
        let tasks = Tasks { server: fio.clone(), client: fio };
        Spans::of(&trace, &tasks)?.add_to(set, engine.name(), depth, cost);
    }
    Ok(())
}

/// The stages of a server, and the instructions of a request without a trace.
fn spans_of(args: &Args, subject: &Subject, depth: u16) -> Result<(Spans, f64)> {
    let mut client = subject.connect(&Load::random_reads(depth))?;
    client.run_until(Until::Ios(WARM_UP_IOS), &[])?;
    let plain = client.run_until(Until::Ios(args.ios), &[])?;
    let tracing = tracing_of_all()?;
    tracing.begin()?;
    let (_, notes) = client.run_noted(Until::Ios(args.ios.min(TRACED_IOS)), &[])?;
    let trace = tracing.finish()?;
    let server = subject.tasks()?.into_iter().collect();
    let client = notes.iter().map(|notes| notes.task).collect();
    let mut tasks = Tasks { server, client };
    if subject.who == Who::VhostScsi {
        // Threads of the kernel that belong to no process submit its I/O.
        tasks.server.extend(trace.tasks_that_queue());
    }
    Ok((Spans::of(&trace, &tasks)?, each(&plain)))
}

/// A buffer with all events that [`Spans`] knows.
fn tracing_of_all() -> Result<Tracing> {
    let tracing = Tracing::new(Clock::Counter, stages::BUFFER_KIB)?;
    for event in ["raw_syscalls", "sched/sched_switch", "block/block_bio_queue", "vhost_blk"] {
        tracing.add(event)?;
    }
    for event in ["block/block_rq_complete", "block/block_bio_complete"] {
        tracing.add(event)?;
    }
    for event in ["io_uring/io_uring_submit_req", "io_uring/io_uring_submit_sqe"] {
        tracing.add(event)?;
    }
    Ok(tracing)
}
