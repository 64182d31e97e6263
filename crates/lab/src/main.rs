// SPDX-License-Identifier: Apache-2.0
//! `lab`: boots real guests on a disk served by the daemon.

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Context, Result, bail};
use clap::{Args, Parser, Subcommand};
use lab::accel::AccelChoice;
use lab::disk;
use lab::guest::{Guest, GuestDisk, GuestSpec};
use lab::interrupt;
use lab::job::Job;
use lab::run::{Lab, RunOptions, run};
use lab::server::{Server, ServerCommand};

/// Boots real guests in stock QEMU on a disk served by the daemon.
#[derive(Debug, Parser)]
#[command(name = "lab", version)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Fetches the guest kernel and makes the root image, if they are not in the cache.
    Fetch,
    /// Says whether guests run under KVM on this machine, and why.
    KvmCheck,
    /// The main job: format, write, verify and measure in a guest, compare with QEMU's own device.
    Run(RunArgs),
    /// Gives a prompt in a guest that has the served disk as /dev/vda.
    Shell(DiskArgs),
}

#[derive(Debug, Args)]
struct DiskArgs {
    /// The disk to serve: a raw image or block device; made in the cache if not given.
    #[arg(long)]
    disk: Option<PathBuf>,
    /// The daemon; by default the one built beside this program.
    #[arg(long)]
    daemon: Option<PathBuf>,
    /// Another server in the daemon's place: a command line with {socket}, {disk} and {queues}.
    #[arg(long, conflicts_with = "daemon")]
    server_cmd: Option<String>,
}

#[derive(Debug, Args)]
struct RunArgs {
    #[command(flatten)]
    disk: DiskArgs,
    /// Formats the disk even if it has content.
    #[arg(long)]
    format: bool,
    /// How often the comparison is repeated, in alternating order.
    #[arg(long, default_value_t = 2, value_parser = clap::value_parser!(u32).range(1..=100))]
    rounds: u32,
    /// Seconds for each of the four loads of a measurement.
    #[arg(long, default_value_t = 2, value_parser = clap::value_parser!(u32).range(1..=600))]
    seconds: u32,
}

impl DiskArgs {
    fn server(&self) -> Result<ServerCommand> {
        if let Some(text) = &self.server_cmd {
            return ServerCommand::template(text);
        }
        let binary = match &self.daemon {
            Some(binary) => binary.clone(),
            None => std::env::current_exe()?.with_file_name("vhost-blk"),
        };
        if !binary.exists() {
            bail!("no daemon at {}: build it, or name it with --daemon", binary.display());
        }
        Ok(ServerCommand::daemon(&binary))
    }
}

fn main() -> ExitCode {
    match start() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("lab: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn start() -> Result<()> {
    let cli = Cli::parse();
    interrupt::install()?;
    match cli.command {
        Command::Fetch | Command::KvmCheck => {
            let AccelChoice { accel, reason } = Lab::open()?.choice;
            println!("{accel}: {reason}");
            Ok(())
        }
        Command::Run(args) => run(&RunOptions {
            server: args.disk.server()?,
            disk: args.disk.disk,
            format: args.format,
            rounds: args.rounds,
            seconds: args.seconds,
        }),
        Command::Shell(args) => shell(&args),
    }
}

fn shell(args: &DiskArgs) -> Result<()> {
    let command = args.server()?;
    let lab = Lab::open()?;
    let path = args.disk.clone().unwrap_or_else(|| lab.cache.dir().join("shell.img"));
    if !path.exists() {
        disk::create(&path, disk::DISK_BYTES)?;
    }
    let path = path.canonicalize().with_context(|| path.display().to_string())?;
    println!("accelerator: {}: {}", lab.choice.accel, lab.choice.reason);
    println!("disk:        {}", path.display());
    let vcpus = 2;
    let server = Server::start(&command, &path, vcpus)?;
    let disk = Some(GuestDisk::VhostUser { socket: server.socket() });
    let spec = GuestSpec { accel: lab.choice.accel, vcpus, disk, job: Job::shell() };
    Guest::boot_on_terminal(&lab.base, &spec)?;
    server.stop()
}
