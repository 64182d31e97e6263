// SPDX-License-Identifier: Apache-2.0
//! The command line.

#![expect(missing_docs, reason = "clap shows each comment on a type or a field as help")]

use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use anyhow::{Result, bail};
use clap::{Args, Parser, Subcommand};
use kit::set::Set;
use kit::soak::{Length, Options};

use crate::run::Lab;
use crate::server::ServerCommand;
use crate::vm::boot::{VmBase, VmShape};
use crate::vm::kernel::{KernelName, VmKernel};
use crate::vm::machine::Machine;
use crate::vm::payload::Payload;

/// Boots real guests in stock QEMU on a disk served by the daemon, and host VMs with the module.
#[derive(Debug, Parser)]
#[command(name = "lab", version)]
pub struct Cli {
    #[command(subcommand)]
    pub command: Command,
}

const DEMO_EXIT_CODES: &str = "Exit code: 0 if the data was verified and the comparison measured, \
1 if the data was not verified (or the run could not start), 2 for a wrong option, 3 if the data was \
verified and only the measurement failed.";

#[derive(Debug, Subcommand)]
pub enum Command {
    /// Fetches a QEMU, if needed, and the guest kernel, and makes the root image, if they are not
    /// in the cache.
    Fetch,
    /// Prints a directory to append to $PATH so that all of QEMU's programs are found; nothing if they
    /// are installed.
    QemuPath,
    /// Says whether guests run under KVM on this machine, and why.
    KvmCheck,
    /// The main job: format, write, verify and measure in a guest, compare with QEMU's own device.
    #[command(after_help = DEMO_EXIT_CODES)]
    Demo(DemoArgs),
    /// Compares all ways to attach a disk to a guest, on this machine itself, which needs KVM.
    BenchGuest {
        /// Options of `cases nested-bench`.
        #[arg(last = true)]
        options: Vec<String>,
    },
    /// A guest writes and verifies while its disk is operated, killed and broken in random order.
    Soak(SoakArgs),
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
        /// The directory for sockets and images.
        #[arg(long)]
        directory: PathBuf,
    },
}

#[derive(Debug, Args)]
pub struct RunArgs {
    #[command(flatten)]
    pub vm: MachineArgs,
    /// The kernels, one after the other.
    #[arg(long = "kernel", value_enum, value_delimiter = ',', default_value = "6.12")]
    pub kernels: Vec<KernelName>,
    /// All cases of these sets.
    #[arg(long = "set", value_enum, value_delimiter = ',')]
    pub sets: Vec<Set>,
    /// Machines at once, to which the cases are dealt in turn. The cases of a machine run one after the
    /// other.
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u8).range(1..=16))]
    pub vms: u8,
    /// Runs of the cases on each kernel.
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..))]
    pub repeat: u32,
    /// The most seconds a case may take; by default 300 in the sets gating, plain,
    /// uring and guest, 3600 in the others.
    #[arg(long)]
    pub timeout: Option<u64>,
    /// The directory for logs and for junit.xml.
    #[arg(long, default_value = "target/lab")]
    pub report: PathBuf,
    /// Shows the output of the cases while they run.
    #[arg(long)]
    pub show: bool,
    /// Names of cases; a `*` at the end stands for anything.
    #[arg(required_unless_present = "sets")]
    pub cases: Vec<String>,
}

#[derive(Debug, Args)]
pub struct VmArgs {
    /// The kernel of the host VM.
    #[arg(long, value_enum, default_value = "6.12")]
    pub kernel: KernelName,
    /// The machine: one that guests run on, the same with guests inside, one that is a guest and
    /// plugs its own disks, or a Debian with systemd and the packages, with libvirt or without it.
    #[arg(long = "machine", value_enum, default_value = "host")]
    pub which: Machine,
    #[command(flatten)]
    pub machine: MachineArgs,
}

#[derive(Debug, Args)]
pub struct MachineArgs {
    /// Virtual CPUs [default: 2, in the guest machine 4].
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..=64))]
    pub vcpus: Option<u32>,
    /// Memory in MiB.
    #[arg(long, default_value_t = 3072, value_parser = clap::value_parser!(u32).range(512..))]
    pub memory: u32,
    /// One CPU for which an instruction takes a nanosecond: times become path lengths.
    #[arg(long)]
    pub icount: bool,
    /// Further NVMe disks, of zeros, and poll queues for all of them.
    #[arg(long)]
    pub nvme: bool,
    /// A directory with the modules to load; by default this checkout's are built.
    #[arg(long)]
    pub modules: Option<PathBuf>,
    /// One more program for /lab/bin.
    #[arg(long = "add", value_name = "FILE")]
    pub add: Vec<PathBuf>,
}

#[derive(Debug, Args)]
pub struct ExecArgs {
    #[command(flatten)]
    pub vm: VmArgs,
    /// The most seconds the command may take, booting included.
    #[arg(long, default_value_t = 600)]
    pub timeout: u64,
    /// The file for the kernel's log.
    #[arg(long)]
    pub console: Option<PathBuf>,
    /// The command and its arguments.
    #[arg(last = true, required = true)]
    pub command: Vec<String>,
}

#[derive(Debug, Args)]
pub struct DiskArgs {
    /// The disk to serve: a raw image or block device; made in the cache if not given.
    #[arg(long)]
    pub disk: Option<PathBuf>,
    /// The daemon; by default the one built beside this program.
    #[arg(long)]
    pub daemon: Option<PathBuf>,
    /// Another server in the daemon's place: a command line with {socket}, {disk} and {queues}.
    #[arg(long, conflicts_with = "daemon")]
    pub server_cmd: Option<String>,
}

#[derive(Debug, Args)]
pub struct SoakArgs {
    /// The daemon; by default the one built beside this program.
    #[arg(long)]
    pub daemon: Option<PathBuf>,
    /// Number of events.
    #[arg(long, default_value_t = 200, value_parser = clap::value_parser!(u32).range(1..))]
    pub events: u32,
    /// Minutes in which events begin, in place of a number of events.
    #[arg(long, conflicts_with = "events", value_parser = clap::value_parser!(u32).range(1..))]
    pub minutes: Option<u32>,
    /// Seed of the events; by default another one in each run.
    #[arg(long)]
    pub seed: Option<u64>,
}

#[derive(Debug, Args)]
pub struct DemoArgs {
    #[command(flatten)]
    pub disk: DiskArgs,
    /// Formats the disk even if it has content.
    #[arg(long)]
    pub format: bool,
    /// Repetitions of the comparison, in alternating order.
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..=100))]
    pub rounds: u32,
    /// Seconds for each of the four loads of a measurement.
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=600))]
    pub seconds: u32,
}

impl DiskArgs {
    pub fn server(&self) -> Result<ServerCommand> {
        if let Some(text) = &self.server_cmd {
            return ServerCommand::template(text);
        }
        Ok(ServerCommand::daemon(&daemon(self.daemon.as_deref())?))
    }
}

/// The given daemon, or the one beside this program.
fn daemon(given: Option<&Path>) -> Result<PathBuf> {
    let binary = match given {
        Some(binary) => binary.to_owned(),
        None => std::env::current_exe()?.with_file_name("vhost-blk"),
    };
    if !binary.exists() {
        bail!("no daemon at {}: build it, or name it with --daemon", binary.display());
    }
    Ok(binary)
}

impl SoakArgs {
    pub fn daemon(&self) -> Result<PathBuf> {
        daemon(self.daemon.as_deref())
    }

    pub fn options(&self) -> Options {
        let now = || SystemTime::UNIX_EPOCH.elapsed().map_or(1, |time| time.as_secs());
        let seed = self.seed.unwrap_or_else(now);
        let (length, words) = match self.minutes {
            Some(minutes) => {
                let length = Length::Time(Duration::from_secs(60 * u64::from(minutes)));
                (length, format!("MINUTES={minutes}"))
            }
            None => (Length::Events(self.events as usize), format!("EVENTS={}", self.events)),
        };
        let repeat = format!("make soak SEED={seed} {words}");
        Options { seed, length, nodes: vec!["/dev/vda".to_owned()], repeat }
    }
}

impl MachineArgs {
    pub fn shape(&self, machine: Machine) -> VmShape {
        let vcpus = self.vcpus.unwrap_or(machine.vcpus());
        VmShape { machine, vcpus, memory_mib: self.memory, icount: self.icount, nvme: self.nvme }
    }

    pub fn prepare(&self, kernel: KernelName, machine: Machine) -> Result<(VmBase, Payload)> {
        let lab = Lab::open()?;
        let kernel = VmKernel::cached(&lab.cache, kernel)?;
        let modules = match &self.modules {
            Some(directory) => directory.clone(),
            None => kernel.build_modules()?,
        };
        let mut payload = Payload::new(&modules)?;
        for program in &self.add {
            payload.add_program(program)?;
        }
        if machine.systemd_root().is_some() {
            payload.add_packages()?;
        }
        Ok((VmBase::open(&lab, kernel, machine)?, payload))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn options(words: &[&str]) -> Options {
        let words = ["lab", "soak"].iter().chain(words);
        match Cli::try_parse_from(words).unwrap().command {
            Command::Soak(args) => args.options(),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn a_soak_names_the_command_that_repeats_it() {
        assert_eq!(options(&["--seed", "7"]).repeat, "make soak SEED=7 EVENTS=200");
        let long = options(&["--seed", "7", "--minutes", "60"]);
        assert_eq!(long.repeat, "make soak SEED=7 MINUTES=60");
        assert!(matches!(long.length, Length::Time(time) if time.as_secs() == 3600));
    }

    #[test]
    fn a_soak_of_nothing_is_refused() {
        for wrong in [["--events", "0"], ["--minutes", "0"], ["--seed", "x"]] {
            let error = Cli::try_parse_from(["lab", "soak"].iter().chain(&wrong)).unwrap_err();
            assert!(error.to_string().contains(wrong[0]), "{error}");
        }
        let both = ["lab", "soak", "--events", "5", "--minutes", "5"];
        assert!(Cli::try_parse_from(both).unwrap_err().to_string().contains("cannot be used with"));
    }
}
