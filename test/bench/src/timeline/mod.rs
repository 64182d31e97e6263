// SPDX-License-Identifier: Apache-2.0
//! `bench timeline`: the time of requests in each stage, by the kernel's trace events.
//!
//! Each server is traced for a second: the moments at which requests become available, are taken,
//! submitted, done, called for and seen. The client notes the first and the last one. No server is
//! changed for it, so that peers have the same stages.

mod flow;

pub(crate) use self::flow::STAGES;

use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result};
use clap::Args as ClapArgs;
use kit::fio;
use kit::metric::{Figures, IOPS, KICKS, Metric, Point, Set, point};
use kit::report::{Column, Report, Section};
use rustix::fs::{major, minor};
use tempfile::NamedTempFile;

use self::flow::{Flow, Traced};
use crate::bare::{self, Engine};
use crate::host::disk::Storage;
use crate::host::subject::{Servers, Subject, Who};
use crate::load::Load;
use crate::server::is_ours;
use crate::tracing::{Clock, Tracing};
use crate::worker::Until;
use crate::{cpu, disk, setup};

/// Heading of the stages.
pub const STAGES_TITLE: &str = "Stages of a request, in time";
/// Heading of the time line.
pub const WINDOW_TITLE: &str = "Time line";

/// Mean time in a stage.
pub(crate) const TIME: Metric = Metric::new("time", "us");
/// Rate without a trace.
const UNTRACED: Metric = Metric::new("untraced_iops", "1/s");
/// Calls of the server for each request.
const CALLS: Metric = Metric::new("calls", "1");
/// The time of each stage of a request, in the order of [`STAGES`].
pub(crate) const PASSED: [Metric; STAGES.len()] = [
    Metric::new("available", "us"),
    Metric::new("taken", "us"),
    Metric::new("submitted", "us"),
    Metric::new("done", "us"),
    Metric::new("called", "us"),
    Metric::new("seen", "us"),
];

/// The parts of a request's time, each from one stage to the next.
pub(crate) const PARTS: [&str; 5] = ["ring", "submit", "device", "completion", "wake-up"];
/// The part of a path of which only the time in the device is known.
pub(crate) const REST: &str = "all but the device";
/// Label of a part.
pub(crate) const PART: &str = "stage";

const STAGES_METHOD: &str = "Mean microseconds of a request in each stage, 4 KiB random reads, the \
    client asleep. `ring`: available until the turn that takes it; `submit`: until its I/O enters the \
    block layer; `device`: until the device has completed it; `completion`: until the call; `wake-up`: \
    until the client sees it. A turn begins with a return of the server's thread from the kernel; in \
    the kernel plane, with its event `chain`. A thread that polls takes a request at \
    once. A request that the client sees without a call has no \
    wake-up. fio has no ring: all that is not the device is one part, from its rate. Tracing costs \
    time: compare the rates.";
const WINDOW_METHOD: &str = "Requests from the middle of the run: microseconds, from the first one \
    on, at which the n-th request passed each stage.";

/// KiB of the buffer of each CPU.
const BUFFER_KIB: u32 = 128 << 10;
const BATCH: &str = "--batch-size=32";
/// The server with fixed batches, before the trials of sizes.
pub(crate) const FIXED: &str = "vhost-blk io_uring, batches of 32";

/// Options of `bench timeline`.
#[derive(Clone, Debug, ClapArgs)]
pub struct Args {
    /// Seconds of each traced run
    #[arg(long, default_value_t = 1.0)]
    seconds: f64,
    /// Seconds of load before it, in which the trials of batch sizes end
    #[arg(long, default_value_t = 2.0)]
    warm_up: f64,
    /// Requests in flight
    #[arg(long = "depth", value_delimiter = ',', default_value = "1,32")]
    depths: Vec<u16>,
    /// Storage: a file on a real disk (`disk`); in a lab VM `null_blk`, the same with so many
    /// microseconds for each request (`80us`), `brd` or `nvme`
    #[arg(long = "storage", value_parser = parse_storage, value_delimiter = ',', default_value = "disk")]
    storages: Vec<Storage>,
    /// Directory of the file on a real disk [default: the cache directory]
    #[arg(long, value_name = "DIR")]
    dir: Option<PathBuf>,
    /// MiB of that file
    #[arg(long, default_value_t = 1024)]
    size_mib: u64,
    /// Microseconds of the time line
    #[arg(long, default_value_t = 1500.0)]
    window_us: f64,
    #[command(flatten)]
    servers: Servers,
    /// Also write everything as JSON
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

fn parse_storage(text: &str) -> Result<Storage, String> {
    use crate::rig::Speed;
    let slow = |text: &str| text.strip_suffix("us")?.parse().ok();
    match text {
        "disk" => Ok(Storage::Disk),
        "null_blk" => Ok(Storage::Device(Speed::Null)),
        "brd" => Ok(Storage::Ram),
        "nvme" => Ok(Storage::Nvme),
        _ => match slow(text) {
            Some(us) => Ok(Storage::Device(Speed::Slow(us))),
            None => Err("use disk, null_blk, brd, nvme or a time such as 80us".to_owned()),
        },
    }
}

#[derive(Default)]
struct Results {
    setup: Vec<(String, String)>,
    stages: Set,
    rates: Set,
    window: Set,
    left_out: Vec<String>,
}

/// Measures and prints the tables.
pub fn run(args: &Args) -> Result<()> {
    let mut args = args.clone();
    let (mut programs, _directory) = args.servers.programs()?;
    let mut results = Results { setup: setup::describe(), ..Results::default() };
    if let Err(why) = tracing() {
        results.leave_out(format!("all: {why:#}"));
        args.storages.clear();
    }
    let file = args.file(&mut results)?;
    programs.disk = file.as_ref().map_or_else(PathBuf::new, |file| file.path().to_owned());
    for &storage in &args.storages {
        for (who, name, extra) in args.subjects(storage) {
            let mut programs = programs.clone();
            programs.ours_args.extend(extra.map(str::to_owned));
            let subject = Subject::start(who, &programs, storage, 1)
                .with_context(|| format!("starting {name}"))?;
            let line = format!("{name}, {}", storage.name());
            results.setup.push((line, subject.command_line.clone()));
            for &depth in &args.depths {
                let place = (storage, name, depth);
                let measured = measure(&args, &subject, place, &mut results);
                results.tell(place, measured);
            }
            let with_fio = who == Who::Uring && extra.is_none() && fio::installed();
            for &depth in args.depths.iter().filter(|_| with_fio) {
                let place = (storage, Engine::UringFixed.name(), depth);
                let measured = measure_bare(&args, subject.path(), place, &mut results);
                results.tell(place, measured);
            }
        }
    }
    report(results).publish(args.json.as_deref())
}

/// A storage, a subject, and the requests in flight.
type Place = (Storage, &'static str, u16);

fn point_of((storage, _, depth): Place) -> Point {
    point(&[("storage", &storage.name()), ("depth", &depth)])
}

impl Results {
    fn leave_out(&mut self, line: String) {
        eprintln!("bench: {line}");
        self.left_out.push(line);
    }

    /// A run that something else disturbed is left out.
    fn tell(&mut self, (storage, name, depth): Place, measured: Result<()>) {
        if let Err(why) = measured {
            self.leave_out(format!("{}, {name}, depth {depth}: {why:#}", storage.name()));
        }
    }

    fn add_stages(&mut self, place: Place, parts: impl IntoIterator<Item = (&'static str, f64)>) {
        for (part, time) in parts {
            let mut point = point_of(place);
            point.insert(PART.to_owned(), part.to_owned());
            self.stages.add(place.1, &point, vec![(TIME, time)]);
        }
    }
}

impl Args {
    /// The file on a real disk, if it is wanted. A directory that is no place for it takes this storage
    /// out of the measurement.
    fn file(&mut self, results: &mut Results) -> Result<Option<NamedTempFile>> {
        if !self.storages.contains(&Storage::Disk) {
            return Ok(None);
        }
        let directory = disk::directory(self.dir.as_deref())?;
        std::fs::create_dir_all(&directory).with_context(|| directory.display().to_string())?;
        if let Some(why) = disk::is_no_real_disk(&directory)? {
            results.leave_out(format!("disk: {} {why}; give --dir", directory.display()));
            self.storages.retain(|storage| *storage != Storage::Disk);
            return Ok(None);
        }
        disk::create(&directory, self.size_mib << 20).map(Some)
    }

    /// The measured servers with their names and a further option.
    fn subjects(&self, storage: Storage) -> Vec<(Who, &'static str, Option<&'static str>)> {
        let mut subjects = Vec::new();
        for &who in &self.servers.who {
            if who == Who::VhostScsi {
                // Its calls have no event.
                continue;
            }
            if who == Who::Uring && !matches!(storage, Storage::Device(crate::rig::Speed::Null)) {
                subjects.push((who, FIXED, Some(BATCH)));
            }
            subjects.push((who, who.name(), None));
        }
        subjects
    }
}

/// CPUs of client and server: one for each, if there are two.
fn cpus() -> Result<[Vec<usize>; 2]> {
    Ok(match cpu::usable()?.as_slice() {
        [first, second, ..] => [vec![*first], vec![*second]],
        _ => [Vec::new(), Vec::new()],
    })
}

/// A buffer with all events of [`Flow::of`].
fn tracing() -> Result<Tracing> {
    let tracing = Tracing::new(Clock::Monotonic, BUFFER_KIB)?;
    for event in ["raw_syscalls/sys_enter", "raw_syscalls/sys_exit", "block/block_bio_queue"] {
        tracing.add(event)?;
    }
    for event in ["block/block_rq_complete", "block/block_bio_complete", "vhost_blk"] {
        tracing.add(event)?;
    }
    Ok(tracing)
}

/// Traces one server at one depth.
fn measure(args: &Args, subject: &Subject, place: Place, results: &mut Results) -> Result<()> {
    let [client_cpus, server_cpus] = cpus()?;
    let load = Load { cpus: client_cpus.clone(), ..Load::random_reads(place.2) };
    let mut client = subject.connect(&load)?;
    subject.pin(&server_cpus)?;
    let seconds = Duration::from_secs_f64;
    client.run(seconds(args.warm_up), &client_cpus)?;
    let untraced = client.run(seconds(args.seconds), &client_cpus)?;
    let tracing = tracing()?;
    tracing.begin()?;
    let (outcome, notes) = client.run_noted(Until::Time(seconds(args.seconds)), &client_cpus)?;
    let events = tracing.finish()?.events;
    let (device, start_sector) = device_of(subject.path())?;
    let block_bytes = load.block_bytes;
    let traced = Traced { tasks: subject.tasks()?, device, start_sector, block_bytes };
    let flow = Flow::of(&events, &notes, &traced)?;
    results.add_stages(place, PARTS.iter().enumerate().map(|(n, part)| (*part, flow.mean(n))));
    let each = |count: u64| count as f64 / flow.requests() as f64;
    let figures = vec![
        (IOPS, outcome.iops()),
        (UNTRACED, untraced.iops()),
        (CALLS, each(flow.calls)),
        (KICKS, each(flow.kicks)),
    ];
    results.rates.add(place.1, &point_of(place), figures);
    // One request at a time makes no line.
    let window = if place.2 > 1 && is_ours(place.1) { args.window_us } else { 0.0 };
    for (n, times) in (1..).zip(flow.window(window)) {
        let mut point = point_of(place);
        point.insert("request".to_owned(), n.to_string());
        let figures: Figures = PASSED.into_iter().zip(times).collect();
        results.window.add(place.1, &point, figures);
    }
    Ok(())
}

/// Traces the device below fio.
fn measure_bare(args: &Args, path: &Path, place: Place, results: &mut Results) -> Result<()> {
    let [_, cpus] = cpus()?;
    let load = Load::random_reads(place.2);
    let once = || bare::measure(path, &load, Engine::UringFixed, &cpus, args.seconds);
    let untraced = once()?;
    let tracing = tracing()?;
    tracing.begin()?;
    let outcome = once()?;
    let trace = tracing.finish()?;
    let tasks = trace.tasks_of("fio");
    let device_us = flow::device_time(&trace.events, &tasks, device_of(path)?)?;
    let each_us = 1e6 * f64::from(place.2) / outcome.iops;
    results.add_stages(place, [(PARTS[2], device_us), (REST, each_us - device_us)]);
    let figures = vec![(IOPS, outcome.iops), (UNTRACED, untraced.iops)];
    results.rates.add(place.1, &point_of(place), figures);
    Ok(())
}

/// The device of a file or a device node, and its first sector on the whole disk.
fn device_of(path: &Path) -> Result<((u32, u32), u64)> {
    let metadata = path.metadata().with_context(|| path.display().to_string())?;
    let is_device = metadata.file_type().is_block_device();
    let number = if is_device { metadata.rdev() } else { metadata.dev() };
    let device = (major(number), minor(number));
    // A whole disk has no such file.
    let start = format!("/sys/dev/block/{}:{}/start", device.0, device.1);
    let start = std::fs::read_to_string(start).map_or(Ok(0), |text| text.trim().parse());
    Ok((device, start?))
}

fn report(results: Results) -> Report {
    let Results { setup, stages, rates, window, left_out } = results;
    let mut report = Report::new("Where requests spend their time: set-up", setup);
    report.left_out = left_out;
    let place = || [Column::label("storage"), Column::count("depth"), Column::subject("server")];
    let mut columns = Vec::from(place());
    columns.extend([Column::label(PART), Column::median("us", TIME, 1.0, 1)]);
    report.sections.push(Section::new(STAGES_TITLE, STAGES_METHOD, &stages, &columns));
    let mut columns = Vec::from(place());
    columns.extend([
        Column::median("kIOPS, traced", IOPS, 1e3, 1),
        Column::median("kIOPS", UNTRACED, 1e3, 1),
        Column::median("calls/IO", CALLS, 1.0, 2),
        Column::median("kicks/IO", KICKS, 1.0, 2),
    ]);
    report.sections.push(Section::new("Rates of the traced runs", "", &rates, &columns));
    let mut columns = Vec::from(place());
    columns.push(Column::count("request"));
    columns.extend(PASSED.map(|metric| Column::median(metric.name, metric, 1.0, 0)));
    report.sections.push(Section::new(WINDOW_TITLE, WINDOW_METHOD, &window, &columns));
    report
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn storage_is_named_as_in_the_help() {
        let name = |text| parse_storage(text).map(Storage::name);
        assert_eq!(name("disk").unwrap(), "disk");
        assert_eq!(name("80us").unwrap(), "null_blk 80 us");
        assert!(name("80").unwrap_err().contains("80us"));
    }

    #[test]
    fn the_metrics_of_a_request_are_the_stages() {
        assert_eq!(PASSED.map(|metric| metric.name), STAGES);
    }
}
