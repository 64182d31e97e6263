// SPDX-License-Identifier: Apache-2.0
//! `cases guest-icount`: instructions per request in the guest, for all paths.
//!
//! In a machine with one online CPU, whose clock counts instructions (the lab's `--icount`), a
//! nanosecond is an instruction. The count includes everything: fio, system call, block layer,
//! driver, interrupt, wake-up. QEMU completes requests in its main loop while the guest runs, so
//! the number of sleeps and the time of polling differ from run to run; batches differ least.

use std::path::PathBuf;

use anyhow::{Result, bail};
use bench::changes::Baseline;
use bench::kept::Kept;
use clap::Args as ClapArgs;
use kit::metric::{Figures, P50, Set};
use kit::report::Report;

use super::generator::{Generator, Operation};
use super::load::{Length, Load};
use super::report::{CALLS, INSTRUCTIONS, NO_IO, section};
use super::{DISK_BYTES, RAM, Work, compare, goals, point_of, setup};
use crate::guest::machine::Machine;
use crate::guest::machine::backing::Backing;
use crate::guest::machine::disk::{Disk, Plug};
use crate::guest::mode::{Driver, Mode, unload};
use crate::guest::system::{read, write};

/// The reference for `--check`: its own output of `--json`.
const KEPT: Kept = Kept {
    file: "test/cases/src/guest/measure/path-lengths.json",
    text: include_str!("path-lengths.json"),
    title: "Path lengths",
    metric: INSTRUCTIONS,
};
/// Requests per measurement, and those for `--check`: 32 requests in lockstep have two lengths, in phases of some
/// thousand requests.
const REQUESTS: u64 = 10_000;
const REQUESTS_TO_CHECK: u64 = 40_000;
/// Percent by which a path may grow.
const TOLERANCE: f64 = 3.0;

/// Options of `cases guest-icount`.
#[derive(Clone, Debug, ClapArgs)]
pub(crate) struct Args {
    /// Rounds; each measures every driver once at every point
    #[arg(long, default_value_t = 3)]
    rounds: u32,
    /// Requests per measurement (10000; with --check 40000); fio's clock advances in steps of a million instructions
    #[arg(long)]
    requests: Option<u64>,
    /// Also write all results as JSON
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    #[command(flatten)]
    baseline: Baseline,
    /// Only compare with the path lengths kept in `test/cases/src/guest/measure/path-lengths.json`: batches of the
    /// generator, by interrupts. A path that is longer by more than 3 % is a failure
    #[arg(long, conflicts_with_all = ["any_clock", "baseline", "keep_goals"])]
    check: bool,
    /// Measure even though the clock does not count instructions
    #[arg(long)]
    any_clock: bool,
}

/// Measures and prints the table.
pub(crate) fn run(args: &Args) -> Result<()> {
    let earlier = args.baseline.read()?;
    unload()?;
    if !args.any_clock {
        leave_one_cpu()?;
    }
    let machine = Machine::open()?;
    let disk = plug(&machine)?;
    let requests = args.requests.unwrap_or(match args.check {
        true => REQUESTS_TO_CHECK,
        false => REQUESTS,
    });
    let length = Length::Requests(requests);
    let direct = |rw: &str, depth| Load::direct(rw, 4096, depth, length);
    let fixed = |operation, depth, batch| Load::fixed(operation, depth, batch, requests);
    let batches = [
        fixed(Operation::Read, 32, 16),
        fixed(Operation::Read, 32, 32),
        fixed(Operation::Write, 32, 16),
    ];
    let work_of = |load| (RAM, &disk, load);
    if args.check {
        return check(args, &batches.map(work_of), &machine);
    }
    let loads = [
        direct("randread", 1),
        direct("randread", 32),
        direct("randread", 32).in_batches(16),
        direct("read", 32).in_batches(16),
        direct("randwrite", 32),
        fixed(Operation::Read, 1, 1),
        fixed(Operation::Read, 32, 1),
    ];
    let work: Vec<Work<'_>> = loads.into_iter().chain(batches).map(work_of).collect();
    let mut set = compare(&work, Mode::ALL, args.rounds, instructions)?;
    floors(&work, (args.rounds, requests), &mut set)?;
    let method = "Everything from one request of 4 KiB to the next, fio included; QEMU's own work \
                  is not counted. Waiting counts too where the guest polls, and differs from run \
                  to run. `fixed`: a generator with registered file and buffers instead of fio; `no \
                  I/O`: the same generator without I/O, so that the rest of a row is the share of \
                  block layer, driver, interrupts and wake-ups.";
    let mut report = Report::new("The guest's driver: set-up", setup(&machine)?);
    report.goals = goals::instructions(&set);
    report.goals.extend(goals::shares(&set));
    report.sections.push(section("Instructions", method, INSTRUCTIONS, &set));
    report.publish(args.json.as_deref())?;
    earlier.judge(&report)
}

/// Compares both paths with the kept ones, where two runs agree: by interrupts, in batches.
fn check(args: &Args, work: &[Work<'_>], machine: &Machine) -> Result<()> {
    let set = compare(work, &[Mode::Request, Mode::Bio], args.rounds, instructions)?;
    let mut report = Report::new("The guest's driver: set-up", setup(machine)?);
    report.sections.push(section(KEPT.title, "", INSTRUCTIONS, &set));
    report.publish(args.json.as_deref())?;
    KEPT.check(set.rows(), &bench::setup::kernel(), TOLERANCE)
}

/// Instructions and latency of a load.
fn instructions(disk: &Disk<'_>, load: &Load, mode: Mode) -> Result<Figures> {
    let outcome = load.measure(&disk.path()?, mode.polls())?;
    // The clock's nanosecond is an instruction.
    let mut figures = vec![(INSTRUCTIONS, 1e9 / outcome.iops)];
    if load.generator().is_none() {
        figures.push((P50, outcome.p50_us));
    }
    Ok(figures)
}

/// The instructions of the generator and of io_uring alone, for each load without fio.
fn floors(work: &[Work<'_>], (rounds, requests): (u32, u64), set: &mut Set) -> Result<()> {
    let _driver = Driver::load(Mode::InTree, &[])?;
    for _ in 0..rounds {
        for work in work {
            let (_, disk, load) = work;
            let Some(generator) = load.generator() else { continue };
            disk.wait_for_block()?;
            let nothing = Generator { operation: Operation::Nop, ..generator };
            let run = nothing.run(&disk.path()?, requests)?;
            let each = |count: f64| count / run.requests as f64;
            let instructions = each(run.elapsed.as_nanos() as f64);
            let figures = vec![(INSTRUCTIONS, instructions), (CALLS, each(run.calls as f64))];
            set.add(NO_IO, &point_of(work), figures);
        }
    }
    Ok(())
}

/// Switches the second CPU off; it exists only to give the driver a second queue.
fn leave_one_cpu() -> Result<()> {
    let online = read("/sys/devices/system/cpu/online")?;
    match online.as_str() {
        "0" => Ok(()),
        "0-1" => write("/sys/devices/system/cpu/cpu1/online", "0"),
        _ => bail!("this machine has the CPUs {online}, not two: use the lab's --icount"),
    }
}

/// Plugs a disk without an I/O thread, so QEMU handles a kick before the guest continues.
fn plug(machine: &Machine) -> Result<Disk<'_>> {
    let backing = Backing::Null { bytes: DISK_BYTES, latency_ns: 0, limits: None };
    let plug = Plug::of(backing).with("iothread", "").with("ioeventfd", false);
    Disk::plug_device(machine, &plug)
}
