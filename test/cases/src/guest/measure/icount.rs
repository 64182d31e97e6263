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
use clap::Args as ClapArgs;
use kit::metric::{Figures, P50};
use kit::report::Report;

use super::load::{Length, Load};
use super::report::{INSTRUCTIONS, section};
use super::{DISK_BYTES, RAM, Work, compare, goals, setup};
use crate::guest::machine::Machine;
use crate::guest::machine::backing::Backing;
use crate::guest::machine::disk::{Disk, Plug};
use crate::guest::mode::{Mode, unload};
use crate::guest::system::{read, write};

/// Options of `cases guest-icount`.
#[derive(Clone, Debug, ClapArgs)]
pub(crate) struct Args {
    /// Rounds; each measures every driver once at every point
    #[arg(long, default_value_t = 3)]
    rounds: u32,
    /// Requests per measurement; fio's clock advances in steps of a million instructions
    #[arg(long, default_value_t = 10_000)]
    requests: u64,
    /// Also write all results as JSON
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    #[command(flatten)]
    baseline: Baseline,
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
    let length = Length::Requests(args.requests);
    let direct = |rw: &str, depth| Load::direct(rw, 4096, depth, length);
    let loads = [
        direct("randread", 1),
        direct("randread", 32),
        direct("randread", 32).in_batches(16),
        direct("read", 32).in_batches(16),
        direct("randwrite", 32),
    ];
    let work: Vec<Work<'_>> = loads.into_iter().map(|load| (RAM, &disk, load)).collect();
    let set = compare(&work, Mode::ALL, args.rounds, instructions)?;
    let method = "Everything from one request of 4 KiB to the next, fio included; QEMU's own work \
                  is not counted. Waiting counts too where the guest polls, and differs from run \
                  to run.";
    let mut report = Report::new("The guest's driver: set-up", setup(&machine)?);
    report.goals = goals::instructions(&set);
    report.sections.push(section("Instructions", method, INSTRUCTIONS, &set));
    report.publish(args.json.as_deref())?;
    earlier.judge(&report)
}

/// Instructions and latency of a load.
fn instructions(disk: &Disk<'_>, load: &Load, mode: Mode) -> Result<Figures> {
    let outcome = load.measure(&disk.path()?, mode.polls())?;
    // The clock's nanosecond is an instruction.
    Ok(vec![(INSTRUCTIONS, 1e9 / outcome.iops), (P50, outcome.p50_us)])
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
