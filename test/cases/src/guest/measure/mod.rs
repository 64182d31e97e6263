// SPDX-License-Identifier: Apache-2.0
//! Measurements of the guest driver, in the lab's guest machine: this project's paths and the
//! kernel's own driver on the same disks in one boot, in turn.
//!
//! * [`load`]: measured loads; [`generator`]: those without fio.
//! * [`report`], [`goals`]: tables and their judgement.
//! * [`icount`]: instructions instead of time.
//! * [`signals`]: kicks and interrupts per request.

mod generator;
mod goals;
pub(crate) mod icount;
mod load;
mod report;
mod signals;

use std::path::PathBuf;

use anyhow::{Context, Result};
use bench::changes::Baseline;
use clap::{Args as ClapArgs, ValueEnum};
use kit::metric::{Figures, IOPS, P50, Point, Set, in_turn, point};
use kit::report::{Report, Section};
use serde_json::{Value, json};

use self::load::{Length, Load};
use self::report::{name, section};
use self::signals::Counter;
use crate::guest::machine::Machine;
use crate::guest::machine::backing::Backing;
use crate::guest::machine::disk::{Disk, Plug};
use crate::guest::mode::{Driver, Mode, unload};

/// Names of the disks, by time per request: none, tens of microseconds, milliseconds.
const RAM: &str = "ram";
const FAST: &str = "fast";
const SLOW: &str = "slow";

const DISK_BYTES: u64 = 1 << 30;
const FAST_NS: u64 = 50_000;
/// Limits of a seeking disk: requests per second of any size, and bytes per second.
const SLOW_REQUESTS: u64 = 300;
const SLOW_BYTES: u64 = 32 << 20;

/// Options of `cases guest-bench`.
#[derive(Clone, Debug, ClapArgs)]
pub(crate) struct Args {
    /// Rounds; each measures every driver once at every point
    #[arg(long, default_value_t = 5)]
    rounds: u32,
    /// Seconds per measurement; twice as many on the slow disk
    #[arg(long, default_value_t = 1.0)]
    seconds: f64,
    /// Tables to measure
    #[arg(long = "part", value_enum, value_delimiter = ',', default_value = "polled,paths")]
    parts: Vec<Part>,
    /// Disks on which the paths are compared
    #[arg(long = "disk", value_delimiter = ',', default_value = "ram,fast,slow",
          value_parser = [RAM, FAST, SLOW])]
    disks: Vec<String>,
    /// Also write all results as JSON
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    #[command(flatten)]
    baseline: Baseline,
}

/// A table of the report.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Part {
    /// Polling compared with interrupts
    Polled,
    /// The bio path compared with the request path
    Paths,
}

/// A load, with its disk.
type Work<'a> = (&'static str, &'a Disk<'a>, Load);

/// Measures and prints the tables.
pub(crate) fn run(args: &Args) -> Result<()> {
    let earlier = args.baseline.read()?;
    // A loaded driver would bind the disks when they are plugged.
    unload()?;
    let machine = Machine::open()?;
    let mut report = Report::new("The guest's driver: set-up", setup(&machine)?);
    if args.parts.contains(&Part::Polled) {
        let table = polled(args, &machine)?;
        report.goals.extend(goals::polled(&table.rows));
        report.sections.push(table);
    }
    if args.parts.contains(&Part::Paths) {
        let table = paths(args, &machine)?;
        report.goals.extend(goals::paths(&table.rows));
        report.sections.push(table);
    }
    report.publish(args.json.as_deref())?;
    earlier.judge(&report)
}

fn setup(machine: &Machine) -> Result<Vec<(String, String)>> {
    let mut setup = bench::setup::describe();
    let version = machine.qemu("query-version", json!({}))?;
    setup.push(("QEMU".to_owned(), version["qemu"].to_string()));
    let kvm = machine.qemu("query-kvm", json!({}))?;
    setup.push(("KVM".to_owned(), kvm["enabled"].to_string()));
    Ok(setup)
}

/// Plugs a disk of zeros, without a driver so far.
fn plug<'a>(machine: &'a Machine, latency_ns: u64, limits: Option<Value>) -> Result<Disk<'a>> {
    let slow = limits.is_some();
    let mut plug = Plug::of(Backing::Null { bytes: DISK_BYTES, latency_ns, limits });
    if slow {
        // QEMU would otherwise merge requests that the driver leaves separate.
        plug = plug.with("request-merging", false);
    }
    Disk::plug_device(machine, &plug)
}

fn point_of((disk, _, load): &Work<'_>) -> Point {
    point(&[("disk", disk), ("load", &load.name)])
}

/// Rate and latency of a load.
fn rate(disk: &Disk<'_>, load: &Load, mode: Mode) -> Result<Figures> {
    let outcome = load.measure(&disk.path()?, mode.polls())?;
    Ok(vec![(IOPS, outcome.iops), (P50, outcome.p50_us)])
}

/// Measures all drivers with all of the work, in turn, round by round. Each round begins with
/// another driver.
fn compare(
    work: &[Work<'_>],
    modes: &[Mode],
    rounds: u32,
    measure: impl Fn(&Disk<'_>, &Load, Mode) -> Result<Figures>,
) -> Result<Set> {
    let mut set = Set::default();
    for work in work {
        // Rows in the order of points, then of drivers.
        modes.iter().for_each(|&mode| set.add(name(mode), &point_of(work), Figures::new()));
    }
    for round in 0..rounds {
        for &mode in in_turn(modes, round) {
            let _driver = Driver::load(mode, &[])?;
            for work in work {
                let (_, disk, load) = work;
                disk.wait_for_block()?;
                let figures = measure(disk, load, mode).with_context(|| name(mode))?;
                set.add(name(mode), &point_of(work), figures);
            }
        }
        eprintln!("guest-bench: round {} of {rounds}", round + 1);
    }
    match Counter::start() {
        Ok(counter) => count(&counter, work, modes, &mut set)?,
        Err(why) => eprintln!("guest-bench: kicks and interrupts are not counted: {why:#}"),
    }
    Ok(set)
}

/// Counts signals in one more round, whose rates are ignored.
fn count(counter: &Counter, work: &[Work<'_>], modes: &[Mode], set: &mut Set) -> Result<()> {
    for &mode in modes {
        let _driver = Driver::load(mode, &[])?;
        for work in work {
            let (_, disk, load) = work;
            disk.wait_for_block()?;
            let path = disk.path()?;
            let signals = counter.of(disk, || load.measure(&path, mode.polls()));
            set.add(name(mode), &point_of(work), signals.with_context(|| name(mode))?);
        }
    }
    eprintln!("guest-bench: kicks and interrupts are counted");
    Ok(())
}

/// The table of the kernel commit that added queues for polling.
fn polled(args: &Args, machine: &Machine) -> Result<Section> {
    let disk = plug(machine, 0, None)?;
    let length = Length::Seconds(args.seconds);
    let loads = [1, 2, 4].map(|jobs| Load::direct("randread", 512, 64, length).jobs(jobs));
    let work: Vec<Work<'_>> = loads.into_iter().map(|load| (RAM, &disk, load)).collect();
    let set = compare(&work, Mode::ALL, args.rounds, rate)?;
    let method = "Direct random reads of 512 bytes through io_uring, 64 in flight for each job; a \
                  disk of zeros with four queues. Polled: two of them poll, and fio does (`hipri`, \
                  which the kernel refuses without such queues).";
    Ok(section("Polled against interrupts", method, IOPS, &set))
}

/// The table of the patch of 2012 that added the bio path.
fn paths(args: &Args, machine: &Machine) -> Result<Section> {
    let limits = json!({ "iops-total": SLOW_REQUESTS, "bps-total": SLOW_BYTES });
    let mut disks = Vec::new();
    for (name, latency_ns, limits) in
        [(RAM, 0, None), (FAST, FAST_NS, None), (SLOW, 0, Some(limits))]
    {
        if args.disks.iter().any(|wanted| wanted == name) {
            disks.push((name, plug(machine, latency_ns, limits)?));
        }
    }
    let mut work: Vec<Work<'_>> = Vec::new();
    for (name, disk) in &disks {
        let loads = if *name == SLOW { slow_loads(args) } else { loads(args.seconds) };
        work.extend(loads.into_iter().map(|load| (*name, disk, load)));
    }
    let set = compare(&work, Mode::INTERRUPTS, args.rounds, rate)?;
    let method = format!(
        "Requests of 4 KiB, direct through io_uring by one job or through the page cache; four \
         queues, interrupts. `{RAM}`: takes no time; `{FAST}`: {} us each; `{SLOW}`: \
         {SLOW_REQUESTS} requests and {} MiB a second, so that it pays to merge.",
        FAST_NS / 1000,
        SLOW_BYTES >> 20
    );
    Ok(section("Bio against request", &method, IOPS, &set))
}

/// Single requests, and sequential requests in batches, which can be merged.
fn loads(seconds: f64) -> Vec<Load> {
    let direct = |rw: &str| Load::direct(rw, 4096, 32, Length::Seconds(seconds));
    let mut loads: Vec<Load> = ["read", "write", "randread", "randwrite"].map(direct).into();
    loads.extend(["read", "write"].map(|rw| direct(rw).in_batches(16)));
    loads
}

fn slow_loads(args: &Args) -> Vec<Load> {
    let mut loads = loads(2.0 * args.seconds);
    let kib = (args.seconds * (SLOW_BYTES >> 10) as f64) as u64 / 4 * 4;
    loads.extend(["read", "write"].map(|rw| Load::buffered(rw, kib.max(1024))));
    loads
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_slow_disk_is_measured_through_the_page_cache_as_well() {
        let args = Args {
            rounds: 1,
            seconds: 0.5,
            parts: Vec::new(),
            disks: Vec::new(),
            json: None,
            baseline: Baseline::default(),
        };
        let names: Vec<_> = slow_loads(&args).into_iter().map(|load| load.name).collect();
        assert_eq!(names.len(), loads(1.0).len() + 2);
        assert!(names.contains(&"write, buffered".to_owned()), "{names:?}");
        assert!(names.contains(&"read, depth 32, batches of 16".to_owned()), "{names:?}");
    }
}
