// SPDX-License-Identifier: Apache-2.0
//! `bench host`: the host side only, compared inside of a lab VM on devices made for it.
//!
//! There is no guest: the project's own driver drives every server, so that the measurement covers
//! the path itself.

pub mod disk;
mod goals;
pub mod subject;

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use clap::Args as ClapArgs;
use kit::fio;
use kit::metric::{CPU, Figures, IDLE_CPU, IOPS, Metric, P50, P99, Point, Set, in_turn, point};
use kit::report::{Column, Report, Section};

use self::disk::Storage;
use self::subject::{Programs, Servers, Subject, Who, is_qsd};
use crate::bare::{self, Engine};
use crate::changes::Baseline;
use crate::load::{Chains, Load, Mode, Op};
use crate::plan::{self, Shape};
use crate::rig::Speed;
use crate::{cpu, setup};

/// CPU time of the whole VM without the client, for each request.
const MACHINE: Metric = Metric::new("machine", "us");

const METHOD: &str = "Medians over the rounds. `/qsd`, `/scsi`: rate over the best variant of \
    qemu-storage-daemon, over vhost-scsi. CPU: threads of the server, vhost workers among them; \
    VM: everything but the client. CPUs `apart`: the client on one, the server on another; \
    `shared`: both on as many CPUs as there are queues.";

/// Options of `bench host`.
#[derive(Clone, Debug, ClapArgs)]
pub struct Args {
    /// Rounds; each measures every server once at every point
    #[arg(long, default_value_t = 5)]
    rounds: u32,
    /// Seconds of each measurement
    #[arg(long, default_value_t = 1.0)]
    seconds: f64,
    #[command(flatten)]
    loads: plan::Choice,
    /// Requests in flight on each queue
    #[arg(long = "depth", value_delimiter = ',', default_value = "1,4,16,32,64,128")]
    depths: Vec<u16>,
    /// Numbers of queues; more than one is measured with as many CPUs
    #[arg(long, value_delimiter = ',', default_value = "1,2")]
    queues: Vec<u16>,
    /// Microseconds that each request takes on the slow devices; 0: no slow device
    #[arg(long, value_delimiter = ',', default_value = "10,80,200")]
    slow_us: Vec<u32>,
    /// Only these devices, by their names in the tables [default: all]
    #[arg(long = "device", value_name = "NAME")]
    devices: Vec<String>,
    #[command(flatten)]
    servers: Servers,
    /// Also write everything as JSON
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    #[command(flatten)]
    baseline: Baseline,
}

/// The load and the place of a measurement.
#[derive(Clone, Copy, Debug)]
struct Spot {
    storage: Storage,
    op: Op,
    block_bytes: u32,
    mode: Mode,
    queues: u16,
    depth: u16,
    /// Client and server have the same CPUs, one for each queue.
    shared_cpus: bool,
}

impl Spot {
    fn point(&self) -> Point {
        let Self { op, block_bytes, mode, queues, depth, .. } = self;
        let cpus = if self.shared_cpus { "shared" } else { "apart" };
        point(&[
            ("device", &self.storage.name()),
            ("load", op),
            ("block", block_bytes),
            ("client", mode),
            ("queues", queues),
            ("CPUs", &cpus),
            ("depth", depth),
        ])
    }

    /// The point of bare fio, which has no client to wait.
    fn bare(&self) -> Point {
        let mut point = self.point();
        point.remove("client");
        point
    }
}

/// Everything that was measured.
#[derive(Default)]
struct Results {
    setup: Vec<(String, String)>,
    points: Set,
    idle: Set,
    left_out: Vec<String>,
}

impl Spot {
    fn load(&self, cpus: &[usize]) -> Load {
        let Self { op, block_bytes, mode, queues, depth, .. } = *self;
        Load {
            op,
            block_bytes,
            depth,
            mode,
            queues,
            queue_size: 256,
            packed: false,
            chains: Chains::Auto,
            cpus: cpus.to_vec(),
        }
    }
}

impl Args {
    /// The wanted devices.
    ///
    /// # Errors
    /// A name of `--device` that none of them has.
    fn devices(&self) -> Result<Vec<Storage>> {
        let slow = self.slow_us.iter().filter(|&&us| us > 0).map(|&us| Speed::Slow(us));
        let speeds = [Speed::Null, Speed::Polled].into_iter().chain(slow).map(Storage::Device);
        let mut devices: Vec<Storage> = speeds.chain([Storage::Ram, Storage::Nvme]).collect();
        let names: Vec<String> = devices.iter().map(|device| device.name()).collect();
        if let Some(wrong) = self.devices.iter().find(|name| !names.contains(name)) {
            bail!(
                "--device {wrong}: there is none of this name; give one of: {}",
                names.join("; ")
            );
        }
        devices.retain(|device| self.devices.is_empty() || self.devices.contains(&device.name()));
        Ok(devices)
    }

    /// The wanted devices that this machine has; tells the others.
    fn present(&self, left_out: &mut Vec<String>) -> Result<Vec<Storage>> {
        let mut devices = self.devices()?;
        devices.retain(|storage| {
            let possible = storage.is_possible();
            if let Err(why) = &possible {
                let line = format!("{}: {why:#}", storage.name());
                eprintln!("bench: {line}");
                left_out.push(line);
            }
            possible.is_ok()
        });
        Ok(devices)
    }

    fn duration(&self) -> Duration {
        Duration::from_secs_f64(self.seconds)
    }
}

/// Runs the comparison and prints the report.
pub fn run(args: &Args) -> Result<()> {
    let mut args = args.clone();
    let earlier = args.baseline.read()?;
    let (programs, _directory) = args.servers.programs()?;
    let mut results = Results { setup: setup::describe(), ..Results::default() };
    let ours = programs.ours.display().to_string();
    for program in [ours.as_str(), "qemu-storage-daemon"] {
        results.setup.push((program.to_owned(), setup::version(program)));
    }
    for storage in args.present(&mut results.left_out)? {
        for &queues in &args.queues {
            compare(&args, &programs, storage, queues, &mut results)?;
        }
    }
    let report = report(results);
    report.publish(args.json.as_deref())?;
    earlier.judge(&report)
}

fn report(results: Results) -> Report {
    let Results { setup, points, idle, left_out } = results;
    let mut report = Report::new("Host side alone: set-up", setup);
    report.left_out = left_out;
    report.sections.push(Section::new("Measurements", METHOD, &points, &columns(&points)));
    let columns = [Column::subject("server"), Column::median("CPU %", IDLE_CPU, 1.0, 3)];
    report.sections.push(Section::new("Idle, a client connected", "", &idle, &columns));
    goals::judge(&points, &idle, &mut report);
    report
}

fn columns(set: &Set) -> Vec<Column<'_>> {
    let scsi = Who::VhostScsi.name();
    vec![
        Column::label("device"),
        Column::label("load"),
        Column::count("block"),
        Column::label("client"),
        Column::count("queues"),
        Column::label("CPUs"),
        Column::count("depth"),
        Column::subject("server"),
        Column::median("kIOPS", IOPS, 1e3, 1),
        Column::over("/qsd", IOPS, 2, |row| set.most(&row.point, IOPS, is_qsd)),
        Column::over("/scsi", IOPS, 2, move |row| set.at(scsi, &row.point)),
        Column::median("CPU us/IO", CPU, 1.0, 1),
        Column::median("VM us/IO", MACHINE, 1.0, 1),
        Column::median("p50 us", P50, 1.0, 0),
        Column::median("p99 us", P99, 1.0, 0),
    ]
}

/// Measures all servers on one kind of device with one number of queues, in turn, round by round.
fn compare(
    args: &Args,
    programs: &Programs,
    storage: Storage,
    queues: u16,
    results: &mut Results,
) -> Result<()> {
    let start = |&who: &Who| {
        Subject::start(who, programs, storage, queues)
            .with_context(|| format!("starting {}", who.name()))
    };
    let subjects = args.servers.on(storage).iter().map(start).collect::<Result<Vec<_>>>()?;
    if subjects.is_empty() {
        return Ok(());
    }
    let device = storage.name();
    for subject in subjects.iter().filter(|_| queues == 1) {
        let name = format!("{}, {device}", subject.who.name());
        results.setup.push((name, subject.command_line.clone()));
    }
    let spots = spots(args, storage, queues)?;
    let with_fio = queues == 1 && fio::installed();
    for round in 0..args.rounds {
        for spot in &spots {
            for subject in in_turn(&subjects, round) {
                let what = || format!("measuring {}, {:?}", subject.who.name(), spot.point());
                let figures = sample(args, subject, spot).with_context(what)?;
                results.points.add(subject.who.name(), &spot.point(), figures);
            }
        }
        for spot in bare_spots(&spots).filter(|_| with_fio) {
            for engine in engines(storage, spot.op) {
                let figures = bare(args, &subjects[0], spot, engine)?;
                results.points.add(engine.name(), &spot.bare(), figures);
            }
        }
        eprintln!("bench: {device}, {queues} queues, round {} of {}", round + 1, args.rounds);
    }
    if storage == Storage::Device(Speed::Null) && queues == 1 {
        for subject in &subjects {
            results.idle.add(subject.who.name(), &Point::new(), idle(args, subject)?);
        }
    }
    Ok(())
}

/// The points to measure. One queue: client and server on separate CPUs, and once on a shared one.
/// More queues: shared CPUs only.
fn spots(args: &Args, storage: Storage, queues: u16) -> Result<Vec<Spot>> {
    let cpus = cpu::usable()?.len();
    let mut spots = Vec::new();
    for Shape { op, block_bytes, depths, modes } in args.loads.shapes(&args.depths, true) {
        for (&depth, &mode) in depths.iter().flat_map(|depth| modes.iter().map(move |m| (depth, m)))
        {
            let spot =
                |shared_cpus| Spot { storage, op, block_bytes, mode, queues, depth, shared_cpus };
            if queues == 1 {
                spots.push(spot(false));
            }
            // A spinning client would leave a shared CPU to no other thread.
            let scales = mode == Mode::Event && depth >= 32 && usize::from(queues) <= cpus;
            if scales && args.queues.len() > 1 {
                spots.push(spot(true));
            }
        }
    }
    Ok(spots)
}

/// The spots of bare fio: each load and depth once, with a CPU of its own.
fn bare_spots(spots: &[Spot]) -> impl Iterator<Item = &Spot> {
    let is_first = |at: usize, spot: &Spot| {
        let same = |other: &Spot| !other.shared_cpus && other.bare() == spot.bare();
        !spot.shared_cpus && !spots[..at].iter().any(same)
    };
    spots.iter().enumerate().filter(move |(at, spot)| is_first(*at, spot)).map(|(_, spot)| spot)
}

/// CPUs of client and server.
fn cpus(spot: &Spot) -> Result<[Vec<usize>; 2]> {
    let usable = cpu::usable()?;
    if spot.shared_cpus {
        let shared = usable[..usize::from(spot.queues).min(usable.len())].to_vec();
        return Ok([shared.clone(), shared]);
    }
    Ok(match usable.as_slice() {
        [first, second, ..] => [vec![*first], vec![*second]],
        _ => [Vec::new(), Vec::new()],
    })
}

/// Connects, warms up, measures, hangs up.
fn sample(args: &Args, subject: &Subject, spot: &Spot) -> Result<Figures> {
    let [client_cpus, server_cpus] = cpus(spot)?;
    let mut client = subject.connect(&spot.load(&client_cpus))?;
    subject.pin(&server_cpus)?;
    client.run(args.duration() / 5, &client_cpus)?;
    let (before, machine) = (subject.times()?, cpu::machine_busy()?);
    let outcome = client.run(args.duration(), &client_cpus)?;
    let spent = subject.times()?.since(&before).busy;
    let all = cpu::machine_busy()?.saturating_sub(machine).saturating_sub(outcome.busy);
    let mut figures = outcome.figures();
    figures.extend([(CPU, outcome.us_per_io(spent)), (MACHINE, outcome.us_per_io(all))]);
    Ok(figures)
}

/// The engines of bare fio for an operation. fio sleeps until a completion, or does not.
fn engines(storage: Storage, op: Op) -> Vec<Engine> {
    let mut engines = match storage {
        Storage::Device(Speed::Polled) => vec![Engine::UringPolled],
        _ if storage.is_polled() => {
            Engine::SLEEPING.into_iter().chain([Engine::UringPolled]).collect()
        }
        _ => Engine::SLEEPING.into_iter().chain([Engine::UringSpin]).collect(),
    };
    if op == Op::Writeflush {
        engines.retain(|engine| *engine != Engine::UringPolled); // such a ring takes no sync
    }
    engines
}

fn bare(args: &Args, subject: &Subject, spot: &Spot, engine: Engine) -> Result<Figures> {
    let second = cpu::usable()?.get(1).copied();
    let cpus: Vec<_> = second.into_iter().collect();
    let load = spot.load(&[]);
    let outcome = bare::measure(subject.path(), &load, engine, &cpus, args.seconds)?;
    let mut figures = bare::figures(&outcome, &load);
    figures.push((MACHINE, outcome.cpu_us()));
    Ok(figures)
}

/// CPU time with a client that has worked for a moment and then does nothing.
fn idle(args: &Args, subject: &Subject) -> Result<Figures> {
    let mut client = subject.connect(&Load::random_reads(1))?;
    client.run(args.duration() / 5, &[])?;
    std::thread::sleep(Duration::from_millis(500));
    let time = Duration::from_secs(3);
    let before = subject.times()?;
    std::thread::sleep(time);
    let busy = subject.times()?.since(&before).busy;
    Ok(vec![(IDLE_CPU, 100.0 * busy.as_secs_f64() / time.as_secs_f64())])
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Parser)]
    struct Cli {
        #[command(flatten)]
        args: Args,
    }

    #[test]
    fn fio_polls_for_no_flush() {
        let polled = Storage::Device(Speed::Polled);
        assert_eq!(engines(polled, Op::Randread), [Engine::UringPolled]);
        assert_eq!(engines(polled, Op::Writeflush), []);
        assert_eq!(engines(Storage::Device(Speed::Null), Op::Writeflush).len(), 5);
    }

    fn devices(words: &[&str]) -> Result<Vec<String>> {
        let cli = Cli::parse_from([&["host"], words].concat());
        Ok(cli.args.devices()?.iter().map(|device| device.name()).collect())
    }

    #[test]
    fn a_device_that_does_not_exist_is_refused() {
        let wanted = ["--slow-us", "80", "--device", "null_blk 80 us", "--device", "brd"];
        assert_eq!(devices(&wanted).unwrap(), ["null_blk 80 us", "brd"]);
        assert!(devices(&["--slow-us", "80"]).unwrap().len() > 3);
        let told = devices(&["--device", "null_blk 7 us"]).unwrap_err().to_string();
        assert!(told.contains("null_blk 7 us: there is none") && told.contains("; brd;"), "{told}");
    }
}
