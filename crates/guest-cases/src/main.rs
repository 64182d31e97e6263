// SPDX-License-Identifier: Apache-2.0
//! Cases for the guest's driver, run as root in the lab's guest machine, and their helper on the
//! real machine.
//!
//! `guest-cases list` names them, `guest-cases run NAME` runs one: exit status 0 passed, 4 skipped
//! (the last line says why), anything else failed. Each case loads the driver, plugs the disks it
//! needs, and removes both again. `guest-cases host` is the helper, which the lab starts.

mod case;
mod cases;
mod host;
mod load;
mod machine;
mod measure;
mod mode;
mod protocol;
mod registry;
mod symbols;
mod system;

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::SystemTime;

use anyhow::Result;
use case::{Context, Effort, Set};
use clap::{Parser, Subcommand};
use lab_case::outcome::{exit_code, skip};
use machine::Machine;
use mode::Driver;
use registry::Row;

/// Cases for the guest's driver.
#[derive(Debug, Parser)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Print name, set and description of each case, separated by tabs
    List,
    /// Run one case
    Run {
        /// Its name
        name: String,
        /// What its random numbers come from [default: the time]
        #[arg(long)]
        seed: Option<u64>,
        /// Also if the kernel's own driver is known to fail it
        #[arg(long)]
        anyway: bool,
    },
    /// Compare the driver's paths and the kernel's own driver, in turn, as tables
    Bench(measure::Args),
    /// Count instructions of each request, in a machine whose clock counts them
    Icount(measure::icount::Args),
    /// Serve disks to a machine's cases, until killed
    #[command(hide = true)]
    Host {
        /// Where sockets and images go
        #[arg(long)]
        folder: PathBuf,
    },
    /// Use memory and check what is in it: a part of other cases
    #[command(hide = true)]
    Eat {
        /// How much, in MiB
        mib: usize,
    },
}

fn main() -> ExitCode {
    let (name, outcome) = match Cli::parse().command {
        Command::List => {
            for row in registry::rows() {
                println!("{}\t{}\t{}", row.name(), row.set(), row.case.about);
            }
            return ExitCode::SUCCESS;
        }
        Command::Run { name, seed, anyway } => (name.clone(), run(&name, seed, anyway)),
        Command::Bench(args) => ("bench".to_owned(), measure::run(&args)),
        Command::Icount(args) => ("icount".to_owned(), measure::icount::run(&args)),
        Command::Host { folder } => ("host".to_owned(), host::run(&folder)),
        Command::Eat { mib } => ("eat".to_owned(), cases::swap::eat(mib)),
    };
    exit_code(&name, outcome)
}

fn run(name: &str, seed: Option<u64>, anyway: bool) -> Result<()> {
    let Some(row) = registry::rows().find(|row| row.name() == name) else {
        anyhow::bail!("no such case: see guest-cases list");
    };
    let now = || SystemTime::UNIX_EPOCH.elapsed().map_or(1, |time| time.as_nanos() as u64);
    let seed = seed.unwrap_or_else(now);
    println!("{name}: seed {seed}");
    if let Some(how) = cases::fails_in(row.case.name, row.mode).filter(|_| !anyway) {
        return Err(skip(format!("the kernel's own driver fails it ({how}); --anyway runs it")));
    }
    let machine = Machine::open()?;
    let driver = Driver::load(row.mode, &[])?;
    let effort = effort_of(&row);
    (row.case.run)(&Context { machine, mode: row.mode, effort, seed })?;
    drop(driver);
    println!("{name}: passed");
    Ok(())
}

fn effort_of(row: &Row) -> Effort {
    match row.set() {
        Set::Guest => Effort::SHORT,
        Set::GuestFull => Effort::LONG,
    }
}
