// SPDX-License-Identifier: Apache-2.0
//! `lab`: boots real guests on a disk served by the daemon, and host VMs for the kernel module.

use std::io::Write;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, Result};
use clap::{Parser, ValueEnum};
use kit::interrupt;
use lab::accel::AccelChoice;
use lab::bench_guest;
use lab::cache::Cache;
use lab::cli::{Cli, Command, DemoArgs, DiskArgs, ExecArgs, RunArgs};
use lab::disk;
use lab::disks;
use lab::emulator::EmulatorFault;
use lab::exec::{ExecOptions, exec};
use lab::guest::{Guest, GuestDisk, GuestSpec};
use lab::job::Job;
use lab::qemu;
use lab::run::{Lab, Outcome, RunOptions, run};
use lab::server::Server;
use lab::soak;
use lab::suite::case::{self, Case};
use lab::suite::report;
use lab::suite::runner::Runner;
use lab::vm::boot::Vm;
use lab::vm::machine::Machine;

/// Exit code of `lab exec` if the command could not be run to its end.
const EXEC_FAILED: u8 = 125;

/// The same, if the emulator has failed: another run may succeed (`scripts/bench-lab.sh`).
const EMULATOR_FAILED: u8 = 123;

/// Exit code of `lab demo` if the data was verified but the measurement failed.
const NOT_MEASURED: u8 = 3;

fn main() -> ExitCode {
    let cli = Cli::parse();
    let is_exec = matches!(cli.command, Command::Exec(_));
    start(cli).unwrap_or_else(|error| {
        eprintln!("lab: {error:#}");
        match is_exec {
            true if error.is::<EmulatorFault>() => ExitCode::from(EMULATOR_FAILED),
            true => ExitCode::from(EXEC_FAILED),
            false => ExitCode::FAILURE,
        }
    })
}

fn start(cli: Cli) -> Result<ExitCode> {
    // The helper has no waits that check the flag: signals end it.
    if !matches!(cli.command, Command::ServeDisks { .. }) {
        interrupt::install()?;
    }
    match cli.command {
        Command::Fetch | Command::KvmCheck => {
            let lab = Lab::open()?;
            let AccelChoice { accel, reason } = lab.choice;
            println!("{}", lab.base.qemu);
            println!("{accel}: {reason}");
        }
        Command::QemuPath => {
            if let Some(directory) = qemu::missing_programs_directory(&Cache::open()?)? {
                println!("{}", directory.display());
            }
        }
        Command::Demo(args) => return demo(args),
        Command::BenchGuest { options } => {
            return Ok(ExitCode::from(bench_guest::run(&Lab::open()?, &options)?));
        }
        Command::Soak(args) => {
            print!("{}", soak::run(&Lab::open()?, &args.daemon()?, &args.options())?);
        }
        Command::DemoShell(args) => demo_shell(&args)?,
        Command::Exec(args) => return exec_command(args),
        Command::Shell(args) => {
            let (base, payload) = args.machine.prepare(args.kernel, args.which)?;
            let shape = args.machine.shape(args.which);
            Vm::boot_on_terminal(&base, &shape, &payload, Job::vm_shell().script())?;
        }
        Command::List { sets } => {
            let mut cases = all_cases()?;
            cases.retain(|case| sets.is_empty() || sets.contains(&case.set));
            let row = |case: &Case| {
                format!("{}\t{}\t{}\n", case.name, case.set.as_str(), case.description)
            };
            let table: String = cases.iter().map(row).collect();
            std::io::stdout().write_all(table.as_bytes()).context("cannot write the list")?;
        }
        Command::Run(args) => return run_cases(&args),
        Command::ServeDisks { directory } => disks::run(&directory)?,
    }
    Ok(ExitCode::SUCCESS)
}

fn demo(args: DemoArgs) -> Result<ExitCode> {
    let outcome = run(&RunOptions {
        server: args.disk.server()?,
        disk: args.disk.disk,
        format: args.format,
        rounds: args.rounds,
        seconds: args.seconds,
    })?;
    Ok(match outcome {
        Outcome::Measured => ExitCode::SUCCESS,
        Outcome::NotMeasured(error) => {
            eprintln!("lab: the data was verified, but the measurement failed: {error:#}");
            ExitCode::from(NOT_MEASURED)
        }
    })
}

fn exec_command(args: ExecArgs) -> Result<ExitCode> {
    let (base, payload) = args.vm.machine.prepare(args.vm.kernel, args.vm.which)?;
    let options = ExecOptions {
        shape: args.vm.machine.shape(args.vm.which),
        command: args.command,
        timeout: Duration::from_secs(args.timeout),
        console: args.console,
    };
    Ok(ExitCode::from(exec(&base, &payload, &options)?))
}

fn all_cases() -> Result<Vec<Case>> {
    let lab = std::env::current_exe()?;
    case::all(lab.parent().context("the lab's own program is in no directory")?)
}

fn run_cases(args: &RunArgs) -> Result<ExitCode> {
    let cases = all_cases()?;
    let mut chosen: Vec<&Case> = cases.iter().filter(|c| args.sets.contains(&c.set)).collect();
    for pattern in &args.cases {
        for case in case::matching(&cases, pattern)? {
            if !chosen.contains(&case) {
                chosen.push(case);
            }
        }
    }
    let mut outcomes = Vec::new();
    for kernel in &args.kernels {
        for machine in Machine::value_variants() {
            let here: Vec<&Case> =
                chosen.iter().copied().filter(|case| Machine::of(case.set) == *machine).collect();
            if here.is_empty() {
                continue;
            }
            let (base, payload) = args.vm.prepare(*kernel, *machine)?;
            let (shape, logs) = (args.vm.shape(*machine), args.report.clone());
            let timeout = args.timeout.map(Duration::from_secs);
            let (payload, show) = (&payload, args.show);
            let runner = Runner { base: &base, shape, payload, logs, timeout, show };
            for _ in 0..args.repeat {
                outcomes.extend(runner.run(args.vms.into(), &here)?);
            }
        }
    }
    report::write_junit(&outcomes, &args.report.join("junit.xml"))?;
    println!("{}", report::closing_line(&outcomes));
    Ok(if report::is_good(&outcomes) { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn demo_shell(args: &DiskArgs) -> Result<()> {
    let command = args.server()?;
    let lab = Lab::open()?;
    let path = args.disk.clone().unwrap_or_else(|| lab.cache.dir().join("shell.img"));
    if !path.exists() {
        disk::create(&path, disk::DISK_BYTES)?;
    }
    let path = path.canonicalize().with_context(|| path.display().to_string())?;
    println!("emulator:    {}", lab.base.qemu);
    println!("accelerator: {}: {}", lab.choice.accel, lab.choice.reason);
    println!("disk:        {}", path.display());
    let vcpus = 2;
    let server = Server::start(&command, &path, vcpus)?;
    let disks = vec![GuestDisk::VhostUser { socket: server.socket() }];
    let spec = GuestSpec { accel: lab.choice.accel, vcpus, disks, job: Job::shell() };
    Guest::boot_on_terminal(&lab.base, &spec)?;
    server.stop()
}
