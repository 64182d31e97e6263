// SPDX-License-Identifier: Apache-2.0
//! Measures vhost-user-blk servers natively, without a guest, and compares them.

use std::process::ExitCode;

use clap::{Parser, Subcommand};

/// Measure vhost-user-blk servers without a guest, alternating between them.
#[derive(Debug, Parser)]
#[command(version)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Measure one server that is already running
    Socket(bench::socket::Args),
}

fn main() -> ExitCode {
    let result = match Cli::parse().command {
        Command::Socket(args) => bench::socket::run(&args),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("bench: {error:#}");
            ExitCode::FAILURE
        }
    }
}
