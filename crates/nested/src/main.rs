// SPDX-License-Identifier: Apache-2.0
//! Inner guests in the lab's VM: cases and measurements of the whole stack.

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Context, Result};
use clap::{Parser, Subcommand};
use lab_case::outcome::exit_code;
use nested::cases::{CASES, Case, Lab};

/// Run inner guests with KVM inside of the lab's VM: cases and measurements of the whole stack.
#[derive(Debug, Parser)]
#[command(version)]
struct Cli {
    /// The vhost-blk program [default: next to this program]
    #[arg(long, global = true, value_name = "PATH")]
    vhost_blk: Option<PathBuf>,
    /// Folder with the inner guest's vmlinuz and root.img
    #[arg(long, global = true, value_name = "FOLDER", default_value = "/lab/guest")]
    guest: PathBuf,
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// List the cases: name, set and description, separated by tabs
    List,
    /// Run one case; exit code 0: passed, 4: skipped
    Run {
        /// Its name
        case: String,
    },
    /// Measure all ways to attach a disk in a guest, in turn
    Bench(nested::measure::Args),
}

fn main() -> ExitCode {
    exit_code("nested", run(&Cli::parse()))
}

fn run(cli: &Cli) -> Result<()> {
    let program = match &cli.vhost_blk {
        Some(path) => path.clone(),
        None => std::env::current_exe()?.with_file_name("vhost-blk"),
    };
    let lab = Lab { program, guest: cli.guest.clone() };
    match &cli.command {
        Command::List => {
            for case in CASES {
                println!("{}\tnested\t{}", case.name, case.about);
            }
            Ok(())
        }
        Command::Run { case } => {
            let found = Case::named(case);
            found.with_context(|| format!("no case {case}: see `nested list`"))?.run(&lab)
        }
        Command::Bench(args) => nested::measure::run(args, &lab),
    }
}
