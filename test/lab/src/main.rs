// SPDX-License-Identifier: Apache-2.0
//! `lab`: boots real guests on a disk served by the daemon, and host VMs for the kernel module.

use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use clap::{Args, Parser, Subcommand};
use kit::interrupt;
use kit::set::Set;
use lab::accel::AccelChoice;
use lab::cache::Cache;
use lab::disk;
use lab::disks;
use lab::exec::{ExecOptions, exec};
use lab::guest::{Guest, GuestDisk, GuestSpec};
use lab::job::Job;
use lab::qemu;
use lab::run::{Lab, Outcome, RunOptions, run};
use lab::server::{Server, ServerCommand};
use lab::suite::case::{self, Case};
use lab::suite::report;
use lab::suite::runner::Runner;
use lab::vm::boot::{Vm, VmBase, VmShape};
use lab::vm::kernel::{KernelName, VmKernel};
use lab::vm::machine::Machine;
use lab::vm::payload::Payload;

/// Exit code of `lab exec` if the command could not be run to its end.
const EXEC_FAILED: u8 = 125;

/// Exit code of `lab demo` if the data was verified but the measurement failed.
const NOT_MEASURED: u8 = 3;

/// Boots real guests in stock QEMU on a disk served by the daemon, and host VMs with the module.
#[derive(Debug, Parser)]
#[command(name = "lab", version)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

const DEMO_EXIT_CODES: &str = "Exit code: 0 if the data was verified and the comparison measured, \
1 if the data was not verified (or the run could not start), 2 for a wrong option, 3 if the data was \
verified and only the measurement failed.";

#[derive(Debug, Subcommand)]
enum Command {
    /// Fetches a QEMU, if needed, and the guest kernel, and makes the root image, if they are not
    /// in the cache.
    Fetch,
    /// Prints a folder to append to $PATH so that all of QEMU's programs are found; nothing if they
    /// are installed.
    QemuPath,
    /// Says whether guests run under KVM on this machine, and why.
    KvmCheck,
    /// The main job: format, write, verify and measure in a guest, compare with QEMU's own device.
    #[command(after_help = DEMO_EXIT_CODES)]
    Demo(DemoArgs),
    /// Gives a prompt in a guest that has the served disk as /dev/vda.
    DemoShell(DiskArgs),
    /// Runs one command in a host VM; output and exit code are the command's.
    Exec(ExecArgs),
    /// Gives a prompt in a host VM.
    Shell(VmArgs),
    /// Lists the cases.
    List {
        /// Only those of these sets.
        #[arg(long = "set", value_enum, value_delimiter = ',')]
        sets: Vec<Set>,
    },
    /// Runs cases in host VMs; the last line counts them.
    Run(RunArgs),
    /// Serves disks to the cases of a guest machine, until killed.
    #[command(hide = true)]
    ServeDisks {
        /// The folder for sockets and images.
        #[arg(long)]
        folder: PathBuf,
    },
}

#[derive(Debug, Args)]
struct RunArgs {
    #[command(flatten)]
    vm: MachineArgs,
    /// The kernels, one after the other.
    #[arg(long = "kernel", value_enum, value_delimiter = ',', default_value = "6.12")]
    kernels: Vec<KernelName>,
    /// All cases of these sets.
    #[arg(long = "set", value_enum, value_delimiter = ',')]
    sets: Vec<Set>,
    /// Runs of the cases on each kernel.
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..))]
    repeat: u32,
    /// The most seconds a case may take; by default 300 in the sets gating and guest, 3600 in
    /// the others.
    #[arg(long)]
    timeout: Option<u64>,
    /// The folder for logs and for junit.xml.
    #[arg(long, default_value = "target/lab")]
    report: PathBuf,
    /// Names of cases; a `*` at the end stands for anything.
    #[arg(required_unless_present = "sets")]
    cases: Vec<String>,
}

#[derive(Debug, Args)]
struct VmArgs {
    /// The kernel of the host VM.
    #[arg(long, value_enum, default_value = "6.12")]
    kernel: KernelName,
    /// The machine: one that guests run on, the same with guests inside, or one that is a guest and
    /// plugs its own disks.
    #[arg(long = "machine", value_enum, default_value = "host")]
    which: Machine,
    #[command(flatten)]
    machine: MachineArgs,
}

#[derive(Debug, Args)]
struct MachineArgs {
    /// Virtual CPUs [default: 2, in the guest machine 4].
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..=64))]
    vcpus: Option<u32>,
    /// Memory in MiB.
    #[arg(long, default_value_t = 3072, value_parser = clap::value_parser!(u32).range(512..))]
    memory: u32,
    /// One CPU for which an instruction takes a nanosecond: times become path lengths.
    #[arg(long)]
    icount: bool,
    /// A folder with the modules to load; by default this checkout's are built.
    #[arg(long)]
    modules: Option<PathBuf>,
    /// One more program for /lab/bin.
    #[arg(long = "add", value_name = "FILE")]
    add: Vec<PathBuf>,
}

#[derive(Debug, Args)]
struct ExecArgs {
    #[command(flatten)]
    vm: VmArgs,
    /// The most seconds the command may take, booting included.
    #[arg(long, default_value_t = 600)]
    timeout: u64,
    /// The file for the kernel's log.
    #[arg(long)]
    console: Option<PathBuf>,
    /// The command and its arguments.
    #[arg(last = true, required = true)]
    command: Vec<String>,
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
struct DemoArgs {
    #[command(flatten)]
    disk: DiskArgs,
    /// Formats the disk even if it has content.
    #[arg(long)]
    format: bool,
    /// Repetitions of the comparison, in alternating order.
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..=100))]
    rounds: u32,
    /// Seconds for each of the four loads of a measurement.
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=600))]
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

impl MachineArgs {
    fn shape(&self, machine: Machine) -> VmShape {
        let vcpus = self.vcpus.unwrap_or(machine.vcpus());
        VmShape { machine, vcpus, memory_mib: self.memory, icount: self.icount }
    }

    fn prepare(&self, kernel: KernelName, machine: Machine) -> Result<(VmBase, Payload)> {
        let lab = Lab::open()?;
        let kernel = VmKernel::cached(&lab.cache, kernel)?;
        let modules = match &self.modules {
            Some(folder) => folder.clone(),
            None => kernel.build_modules()?,
        };
        let mut payload = Payload::new(&modules)?;
        for program in &self.add {
            payload.add_program(program)?;
        }
        Ok((VmBase::open(&lab, kernel, machine)?, payload))
    }
}

fn main() -> ExitCode {
    let cli = Cli::parse();
    let failed = match cli.command {
        Command::Exec(_) => ExitCode::from(EXEC_FAILED),
        _ => ExitCode::FAILURE,
    };
    start(cli).unwrap_or_else(|error| {
        eprintln!("lab: {error:#}");
        failed
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
            if let Some(folder) = qemu::missing_programs_folder(&Cache::open()?)? {
                println!("{}", folder.display());
            }
        }
        Command::Demo(args) => return demo(args),
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
        Command::ServeDisks { folder } => disks::run(&folder)?,
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
    case::all(lab.parent().context("the lab's own program is in no folder")?)
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
        for machine in [Machine::Host, Machine::Nested, Machine::Guest] {
            let here: Vec<&Case> =
                chosen.iter().copied().filter(|case| Machine::of(case.set) == machine).collect();
            if here.is_empty() {
                continue;
            }
            let (base, payload) = args.vm.prepare(*kernel, machine)?;
            let (shape, logs) = (args.vm.shape(machine), args.report.clone());
            let timeout = args.timeout.map(Duration::from_secs);
            let runner = Runner { base: &base, shape, payload: &payload, logs, timeout };
            for _ in 0..args.repeat {
                outcomes.extend(runner.run(&here)?);
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
    let disk = Some(GuestDisk::VhostUser { socket: server.socket() });
    let spec = GuestSpec { accel: lab.choice.accel, vcpus, disk, job: Job::shell() };
    Guest::boot_on_terminal(&lab.base, &spec)?;
    server.stop()
}
