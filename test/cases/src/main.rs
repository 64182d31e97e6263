// SPDX-License-Identifier: Apache-2.0
//! Cases that run inside the lab's VMs, as root.
//!
//! `cases list` lists the cases, `cases run NAME` runs one. Exit status 0 means passed, 4 skipped
//! (the last line gives the reason), any other value failed. Each case creates its resources and
//! removes them again.
//!
//! * [`case`]: the definition of a case, and the list of all cases.
//! * [`host`]: the host machine: `/dev/vhost-blk` and the daemon that drives it.
//! * [`nested`]: guests inside the VM: the whole stack.
//! * [`guest`]: the guest machine: the guest's driver.
//! * [`initramfs`]: the first files of guests inside the VM.

mod case;
mod guest;
mod host;
mod initramfs;
mod nested;

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::SystemTime;

use anyhow::{Context, Result};
use clap::{Parser, Subcommand};
use kit::outcome::exit_code;

use crate::case::Kind;
use crate::host::env::Env;

/// Cases and measurements that run inside the lab's VMs.
#[derive(Debug, Parser)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Print the name, the set and the description of each case, separated by tabs
    List,
    /// Run one case
    Run(RunArgs),
    /// Measure all ways to attach a disk in an inner guest, in turn
    NestedBench {
        #[command(flatten)]
        lab: nested::Lab,
        #[command(flatten)]
        args: nested::measure::Args,
    },
    /// Compare the guest driver's paths with the kernel's own driver, in turn, as tables
    GuestBench(guest::measure::Args),
    /// Count the instructions per request of the guest driver, in a machine whose clock counts them
    GuestIcount(guest::measure::icount::Args),
    /// Own a device and load it until killed (other cases use this)
    #[command(hide = true)]
    Own(Env),
    /// Own a device whose guest memory never comes until killed (other cases use this)
    #[command(hide = true)]
    OwnFaulting(Env),
    /// The same, while another ioctl waits for the requests in flight (other cases use this)
    #[command(hide = true)]
    OwnPausing(Env),
    /// Use memory and check its content (other cases use this)
    #[command(hide = true)]
    Eat {
        /// Amount of memory in MiB
        mib: usize,
    },
}

#[derive(Debug, clap::Args)]
struct RunArgs {
    /// Name of the case
    name: String,
    #[command(flatten)]
    env: Env,
    /// Directory with the inner guest's vmlinuz and root.img
    #[arg(long, value_name = "DIR", default_value = nested::GUEST_DIRECTORY)]
    guest: PathBuf,
    /// Number of events of a case that has random ones, in place of its own
    #[arg(long, value_name = "N")]
    events: Option<usize>,
    /// Run the case even if the kernel's own driver is known to fail it
    #[arg(long)]
    anyway: bool,
}

fn main() -> ExitCode {
    let (name, outcome) = match Cli::parse().command {
        Command::List => {
            for row in case::rows() {
                println!("{}\t{}\t{}", row.name, row.set.as_str(), row.case.about);
            }
            return ExitCode::SUCCESS;
        }
        Command::Run(args) => (args.name.clone(), run(args)),
        Command::NestedBench { lab, args } => {
            ("nested-bench".to_owned(), nested::measure::run(&args, &lab))
        }
        Command::GuestBench(args) => ("guest-bench".to_owned(), guest::measure::run(&args)),
        Command::GuestIcount(args) => {
            ("guest-icount".to_owned(), guest::measure::icount::run(&args))
        }
        Command::Own(env) => ("own".to_owned(), host::owner::own(&env)),
        Command::OwnFaulting(env) => ("own-faulting".to_owned(), host::owner::own_faulting(&env)),
        Command::OwnPausing(env) => ("own-pausing".to_owned(), host::owner::own_pausing(&env)),
        Command::Eat { mib } => ("eat".to_owned(), guest::swap::eat(mib)),
    };
    exit_code(&name, outcome)
}

fn run(RunArgs { name, mut env, guest, events, anyway }: RunArgs) -> Result<()> {
    let row = case::rows().into_iter().find(|row| row.name == name);
    let row = row.with_context(|| format!("no case {name}: see cases list"))?;
    let now = || SystemTime::UNIX_EPOCH.elapsed().map_or(1, |time| time.as_nanos() as u64);
    println!("{name}: seed {}", *env.seed.get_or_insert_with(now));
    match &row.case.kind {
        Kind::Host(_, body) => body(&env).and_then(|()| host::daemon::all_ended_well())?,
        Kind::Nested(needs, body) => {
            let seed = env.seed();
            nested::run(*needs, *body, &nested::Lab::in_vm(env.bin, guest), (seed, events))?
        }
        Kind::Guest(_, body) => guest::run(&row, *body, env.seed(), anyway)?,
    }
    println!("{name}: passed");
    Ok(())
}
