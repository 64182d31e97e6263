// SPDX-License-Identifier: Apache-2.0
//! Cases for `/dev/vhost-blk` and the daemon that drives it, run as root inside a VM of the lab.
//!
//! `torture list` names them, `torture run NAME` runs one: exit status 0 passed, 4 skipped (the last
//! line says why), anything else failed. Each case makes what it needs and removes it again.

mod abi;
mod case;
mod charge;
mod control;
mod daemon;
mod durability;
mod env;
mod faults;
mod fixture;
mod fuzz;
mod hostile;
mod integrity;
mod load;
mod module;
mod notify;
mod over_daemon;
mod owner;
mod ranges;
mod registry;
mod removal;
mod requests;
mod suite;
mod target;
mod visibility;

use clap::{Parser, Subcommand};
use env::Env;
use integrity::Setup;
use lab_case::outcome::exit_code;
use std::process::ExitCode;
use std::time::SystemTime;

/// Cases for the kernel data plane.
#[derive(Debug, Parser)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Print name, tier and description of each case, separated by tabs
    List,
    /// Run one case
    Run {
        /// Its name
        name: String,
        #[command(flatten)]
        env: Env,
    },
    /// Own a device and load it until killed: a part of other cases
    #[command(hide = true)]
    Own {
        #[command(flatten)]
        env: Env,
    },
}

fn main() -> ExitCode {
    match Cli::parse().command {
        Command::List => {
            for case in registry::CASES.iter().copied().flatten() {
                println!("{}\t{}\t{}", case.name, case.tier, case.about);
            }
            ExitCode::SUCCESS
        }
        Command::Run { name, env } => run(&name, env),
        Command::Own { env } => match owner::own(&env, Setup::usual(0)) {
            Ok(()) => ExitCode::SUCCESS,
            Err(why) => {
                eprintln!("torture own: {why:#}");
                ExitCode::FAILURE
            }
        },
    }
}

fn run(name: &str, mut env: Env) -> ExitCode {
    let Some(case) = registry::CASES.iter().copied().flatten().find(|case| case.name == name)
    else {
        eprintln!("torture: no case {name}: see torture list");
        return ExitCode::FAILURE;
    };
    let now = || SystemTime::UNIX_EPOCH.elapsed().map_or(1, |time| time.as_nanos() as u64);
    println!("{name}: seed {}", *env.seed.get_or_insert_with(now));
    let outcome = (case.run)(&env);
    if outcome.is_ok() {
        println!("{name}: passed");
    }
    exit_code(name, outcome)
}
