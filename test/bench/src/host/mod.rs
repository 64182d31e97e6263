// SPDX-License-Identifier: Apache-2.0
//! `bench host`: the host side only, compared inside of a lab VM on devices made for it.
//!
//! There is no guest: the project's own driver drives every server, so that the measurement covers
//! the path itself.

mod goals;
pub mod report;
pub mod subject;

use std::fs;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result};
use clap::Args as ClapArgs;

use self::report::{Idle, Point, Report, Row, Sample};
use self::subject::{Programs, Servers, Subject, Who};
use crate::load::{Chains, Load, Mode, Op};
use crate::rig::Speed;
use crate::{cpu, fio, setup};

/// Options of `bench host`.
#[derive(Clone, Debug, ClapArgs)]
pub struct Args {
    /// Rounds; each measures every server once at every point
    #[arg(long, default_value_t = 5)]
    rounds: u32,
    /// Seconds of each measurement
    #[arg(long, default_value_t = 1.0)]
    seconds: f64,
    /// Reads or writes
    #[arg(long, value_enum, default_value = "randread")]
    op: Op,
    /// Requests in flight on each queue
    #[arg(long = "depth", value_delimiter = ',', default_value = "1,4,32,128")]
    depths: Vec<u16>,
    /// Wait of the client: asleep until a call, or polling
    #[arg(long = "mode", value_enum, value_delimiter = ',', default_value = "event,spin")]
    modes: Vec<Mode>,
    /// Numbers of queues; more than one is measured with as many CPUs
    #[arg(long, value_delimiter = ',', default_value = "1,2")]
    queues: Vec<u16>,
    /// Microseconds that each request takes on the slow device; 0: no slow device
    #[arg(long, default_value_t = 200)]
    slow_us: u32,
    #[command(flatten)]
    servers: Servers,
    /// Also write everything as JSON
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

impl Args {
    pub(crate) fn load(&self, point: &Point, cpus: &[usize]) -> Load {
        Load {
            op: self.op,
            block_bytes: 4096,
            depth: point.depth,
            mode: point.mode.unwrap_or(Mode::Event),
            queues: point.queues,
            queue_size: 256,
            packed: false,
            chains: Chains::Auto,
            cpus: cpus.to_vec(),
        }
    }

    fn duration(&self) -> Duration {
        Duration::from_secs_f64(self.seconds)
    }
}

/// Runs the comparison and prints the report.
pub fn run(args: &Args) -> Result<()> {
    let mut args = args.clone();
    let (programs, _folder) = args.servers.programs()?;
    let mut report = Report { setup: setup::describe(), ..Report::default() };
    let ours = programs.ours.display().to_string();
    for program in [ours.as_str(), "qemu-storage-daemon"] {
        report.setup.push((program.to_owned(), setup::version(program)));
    }
    let slow = (args.slow_us > 0).then_some(Speed::Slow(args.slow_us));
    for speed in [Some(Speed::Null), slow].into_iter().flatten() {
        for &queues in &args.queues {
            compare(&args, &programs, speed, queues, &mut report)?;
        }
    }
    goals::judge(&mut report, &Speed::Null.name());
    println!("{}", report.markdown());
    if let Some(path) = &args.json {
        let json = serde_json::to_string_pretty(&report)?;
        fs::write(path, json).with_context(|| format!("cannot write {}", path.display()))?;
    }
    Ok(())
}

/// Measures all servers on one kind of device with one number of queues, in turn, round by round.
fn compare(
    args: &Args,
    programs: &Programs,
    speed: Speed,
    queues: u16,
    report: &mut Report,
) -> Result<()> {
    let start = |&who: &Who| {
        Subject::start(who, programs, speed, queues)
            .with_context(|| format!("starting {}", who.name()))
    };
    let subjects = args.servers.who.iter().map(start).collect::<Result<Vec<_>>>()?;
    for subject in subjects.iter().filter(|_| queues == 1) {
        let name = format!("{}, {}", subject.who.name(), speed.name());
        report.setup.push((name, subject.command_line.clone()));
    }
    let points = points(args, speed, queues)?;
    let row = |point: &Point, who| Row { point: point.clone(), who, samples: Vec::new() };
    let mut rows: Vec<_> = points
        .iter()
        .flat_map(|point| subjects.iter().map(|subject| row(point, Some(subject.who))))
        .collect();
    let mut bare: Vec<_> =
        args.depths.iter().map(|&depth| row(&bare_point(speed, depth), None)).collect();
    for round in 0..args.rounds {
        let mut next = rows.iter_mut();
        for point in &points {
            for subject in &subjects {
                let row = next.next().expect("one row for each point and subject");
                row.samples.push(sample(args, subject, point)?);
            }
        }
        for row in bare.iter_mut().filter(|_| queues == 1 && fio::installed()) {
            row.samples.push(bare_sample(args, &subjects[0], row.point.depth)?);
        }
        eprintln!(
            "bench: {}, {queues} queues, round {} of {}",
            speed.name(),
            round + 1,
            args.rounds
        );
    }
    if speed == Speed::Null && queues == 1 {
        report.idle = subjects.iter().map(|subject| idle(args, subject)).collect::<Result<_>>()?;
    }
    rows.extend(bare.into_iter().filter(|row| !row.samples.is_empty()));
    report.rows.extend(rows);
    Ok(())
}

/// The points to measure. One queue: client and server on separate CPUs, and once on a shared one.
/// More queues: shared CPUs only.
fn points(args: &Args, speed: Speed, queues: u16) -> Result<Vec<Point>> {
    let cpus = cpu::usable()?.len();
    let mut points = Vec::new();
    for &depth in &args.depths {
        for &mode in &args.modes {
            let point = |shared_cpus| Point {
                device: speed.name(),
                mode: Some(mode),
                queues,
                depth,
                shared_cpus,
            };
            if queues == 1 {
                points.push(point(false));
            }
            // A spinning client would leave a shared CPU to no other thread.
            let scales = mode == Mode::Event && depth >= 32 && usize::from(queues) <= cpus;
            if scales && args.queues.len() > 1 {
                points.push(point(true));
            }
        }
    }
    Ok(points)
}

fn bare_point(speed: Speed, depth: u16) -> Point {
    Point { device: speed.name(), mode: None, queues: 1, depth, shared_cpus: false }
}

/// CPUs of client and server.
fn cpus(point: &Point) -> Result<[Vec<usize>; 2]> {
    let usable = cpu::usable()?;
    if point.shared_cpus {
        let shared = usable[..usize::from(point.queues).min(usable.len())].to_vec();
        return Ok([shared.clone(), shared]);
    }
    Ok(match usable.as_slice() {
        [first, second, ..] => [vec![*first], vec![*second]],
        _ => [Vec::new(), Vec::new()],
    })
}

fn sample(args: &Args, subject: &Subject, point: &Point) -> Result<Sample> {
    let what = || format!("measuring {} at depth {}", subject.who.name(), point.depth);
    sample_once(args, subject, point).with_context(what)
}

/// Connects, warms up, measures, hangs up.
fn sample_once(args: &Args, subject: &Subject, point: &Point) -> Result<Sample> {
    let [client_cpus, server_cpus] = cpus(point)?;
    let mut client = subject.connect(&args.load(point, &client_cpus))?;
    subject.pin(&server_cpus)?;
    client.run(args.duration() / 5, &client_cpus)?;
    let (before, machine) = (subject.times()?, cpu::machine_busy()?);
    let outcome = client.run(args.duration(), &client_cpus)?;
    let spent = subject.times()?.since(&before).busy;
    let all = cpu::machine_busy()?.saturating_sub(machine).saturating_sub(outcome.busy);
    let each = |time: Duration| time.as_secs_f64() * 1e6 / outcome.ios as f64;
    let quantile_us = |q| outcome.latency_ns.value_at_quantile(q) as f64 / 1e3;
    Ok(Sample {
        iops: outcome.iops(),
        cpu_us: each(spent),
        machine_us: each(all),
        p50_us: quantile_us(0.5),
        p99_us: quantile_us(0.99),
    })
}

fn bare_sample(args: &Args, subject: &Subject, depth: u16) -> Result<Sample> {
    let cpus = cpu::usable()?;
    let server = cpus.get(1).copied().into_iter().collect::<Vec<_>>();
    let device = subject.device();
    let got = fio::measure(&fio::arguments(device, args.op, 4096, depth, &server, args.seconds))?;
    Ok(Sample {
        iops: got.iops,
        cpu_us: got.cpu_us_per_io,
        machine_us: got.cpu_us_per_io,
        p50_us: got.p50_us,
        p99_us: got.p99_us,
    })
}

/// CPU time with a client that has worked for a moment and then does nothing.
fn idle(args: &Args, subject: &Subject) -> Result<Idle> {
    let point = Point { mode: Some(Mode::Event), ..bare_point(Speed::Null, 1) };
    let mut client = subject.connect(&args.load(&point, &[]))?;
    client.run(args.duration() / 5, &[])?;
    std::thread::sleep(Duration::from_millis(500));
    let time = Duration::from_secs(3);
    let before = subject.times()?;
    std::thread::sleep(time);
    let busy = subject.times()?.since(&before).busy;
    Ok(Idle { who: subject.who, cpu_percent: 100.0 * busy.as_secs_f64() / time.as_secs_f64() })
}
