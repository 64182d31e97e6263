// SPDX-License-Identifier: Apache-2.0
//! Measures vhost-user-blk servers natively, without a guest, and compares them.

use std::process::ExitCode;

use clap::{Parser, Subcommand};

/// Measure vhost-user-blk servers without a guest: vhost-blk, qemu-storage-daemon, any other that
/// runs already, and bare fio, in turn, round by round.
#[derive(Debug, Parser)]
#[command(version, args_conflicts_with_subcommands = true)]
struct Cli {
    #[command(subcommand)]
    command: Option<Command>,
    #[command(flatten)]
    compare: bench::compare::Args,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Compare the JSON of two runs; fails if a goal was met before and is missed now
    Compare(bench::changes::Args),
    /// Write the page of all measurements from their JSON
    Report(bench::page::Args),
    /// Measure many lightly loaded disks, in one daemon and in a process each
    Density(bench::density::Args),
    /// Measure how long a busy driver waits during upgrades, snapshots, commits and other operations
    Operations(bench::operations::Args),
    /// Trace where requests spend their time, of all servers and of bare fio (root)
    Timeline(bench::timeline::Args),
    /// Measure one server that is already running
    Socket(bench::socket::Args),
    /// Compare inside of a lab VM, as root: both data planes, qemu-storage-daemon, vhost-scsi
    Host(bench::host::Args),
    /// Count instructions of each request, in a lab VM whose clock counts them
    Icount(bench::icount::Args),
}

fn main() -> ExitCode {
    let cli = Cli::parse();
    let result = match cli.command {
        None => bench::compare::run(&cli.compare),
        Some(Command::Compare(args)) => bench::changes::run(&args),
        Some(Command::Report(args)) => bench::page::run(&args),
        Some(Command::Density(args)) => bench::density::run(&args),
        Some(Command::Operations(args)) => bench::operations::run(&args),
        Some(Command::Timeline(args)) => bench::timeline::run(&args),
        Some(Command::Socket(args)) => bench::socket::run(&args),
        Some(Command::Host(args)) => bench::host::run(&args),
        Some(Command::Icount(args)) => bench::icount::run(&args),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("bench: {error:#}");
            ExitCode::FAILURE
        }
    }
}
