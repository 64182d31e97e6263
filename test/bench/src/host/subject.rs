// SPDX-License-Identifier: Apache-2.0
//! The compared servers inside of a VM: both planes of the daemon, qemu-storage-daemon, vhost-scsi.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use clap::{Args, ValueEnum};
use kit::daemon::Daemon;
use tempfile::TempDir;

use crate::client::Client;
use crate::cpu::{self, Reading};
use crate::host::disk::{Disk, Storage};
use crate::load::Load;
use crate::rig::{ScsiTarget, Speed};

/// A measured server.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, ValueEnum)]
pub enum Who {
    /// `vhost-blk serve --data-plane kernel`.
    Kernel,
    /// `vhost-blk serve --data-plane uring`.
    Uring,
    /// qemu-storage-daemon with an iothread, aio=native.
    QsdNative,
    /// qemu-storage-daemon with an iothread, aio=io_uring.
    QsdUring,
    /// The kernel's vhost-scsi over LIO's iblock.
    VhostScsi,
    /// The kernel plane in the shape of the driver of 2022: one worker, each request by itself, no
    /// polling, a call for each.
    #[value(skip)]
    KernelPlain,
    /// The kernel plane without polling of the device, beside the one that polls it.
    #[value(skip)]
    KernelInterrupts,
    /// The same with the io_uring plane.
    #[value(skip)]
    UringInterrupts,
}

impl Who {
    /// Name in tables.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Kernel => "vhost-blk kernel",
            Self::Uring => "vhost-blk io_uring",
            Self::QsdNative => "qsd native",
            Self::QsdUring => "qsd io_uring",
            Self::VhostScsi => "vhost-scsi",
            Self::KernelPlain => "vhost-blk kernel, plain",
            Self::KernelInterrupts => "vhost-blk kernel, interrupts",
            Self::UringInterrupts => "vhost-blk io_uring, interrupts",
        }
    }

    /// The same server without polling of the device.
    pub(super) const fn by_interrupts(self) -> Option<Self> {
        match self {
            Self::Kernel => Some(Self::KernelInterrupts),
            Self::Uring => Some(Self::UringInterrupts),
            _ => None,
        }
    }
}

/// True for the name of a variant of qemu-storage-daemon.
pub(super) fn is_qsd(name: &str) -> bool {
    [Who::QsdNative, Who::QsdUring].iter().any(|who| who.name() == name)
}

/// The options that choose the measured servers.
#[derive(Clone, Debug, Args)]
pub struct Servers {
    /// The measured servers
    #[arg(
        long,
        value_enum,
        value_delimiter = ',',
        default_value = "kernel,uring,qsd-native,qsd-uring,vhost-scsi"
    )]
    pub who: Vec<Who>,
    /// A further argument of `vhost-blk serve`; may be repeated
    #[arg(long, value_name = "ARG", allow_hyphen_values = true)]
    ours_arg: Vec<String>,
}

impl Servers {
    /// The servers that are measured on a device.
    pub(super) fn on(&self, storage: Storage) -> Vec<Who> {
        let mut who = self.who.clone();
        let interrupts = || self.who.iter().filter_map(|who| who.by_interrupts());
        match storage {
            // null_blk takes no time, and so has no interrupt that peers would wait for.
            Storage::Device(Speed::Polled) => {
                who.retain(|who| who.by_interrupts().is_some());
                who.extend(interrupts());
            }
            Storage::Nvme => who.extend(interrupts()),
            Storage::Device(Speed::Null) if who.contains(&Who::Kernel) => {
                who.push(Who::KernelPlain);
            }
            _ => {}
        }
        who
    }

    /// Removes the servers that cannot be measured here; returns the programs of the others.
    pub fn programs(&mut self) -> Result<(Programs, TempDir)> {
        let directory = tempfile::Builder::new().prefix("bench-").tempdir()?;
        let ours = std::env::current_exe()?.with_file_name("vhost-blk");
        if !ours.exists() {
            bail!("{} is not there: build vhost-blk", ours.display());
        }
        if self.who.contains(&Who::Kernel) && !Path::new("/dev/vhost-blk").exists() {
            eprintln!("bench: /dev/vhost-blk is missing: the kernel plane is left out");
            self.who.retain(|&who| who != Who::Kernel);
        }
        let ours_args = self.ours_arg.clone();
        let path = directory.path().to_owned();
        let disk = PathBuf::new();
        Ok((Programs { ours, ours_args, directory: path, disk, polling: true }, directory))
    }
}

/// The programs and their settings.
#[derive(Clone, Debug)]
pub struct Programs {
    /// The `vhost-blk` program.
    pub ours: PathBuf,
    /// Further arguments of `vhost-blk serve`.
    pub ours_args: Vec<String>,
    /// Directory for sockets and logs.
    pub directory: PathBuf,
    /// The file on a real disk, which servers share in turn; empty: none.
    pub disk: PathBuf,
    /// True if servers may poll before they sleep, which is their default.
    pub polling: bool,
}

/// A running subject with its own storage.
#[derive(Debug)]
pub struct Subject {
    /// The server's kind.
    pub who: Who,
    /// Command line, for the report.
    pub command_line: String,
    // Dropped in this order: server, target, storage.
    server: Server,
    disk: Disk,
}

#[derive(Debug)]
enum Server {
    Daemon(Daemon),
    Scsi { target: ScsiTarget, disk_bytes: u64 },
}

impl Subject {
    /// Makes the storage and starts the server.
    pub fn start(who: Who, programs: &Programs, storage: Storage, queues: u16) -> Result<Self> {
        let disk = Disk::new(storage, who as usize, queues, programs)?;
        let (server, command_line) = match who {
            Who::VhostScsi => scsi(disk.path())?,
            _ => daemon(who, programs, &disk, queues)?,
        };
        Ok(Self { who, command_line, server, disk })
    }

    /// Connects a client to the subject.
    pub fn connect(&self, load: &Load) -> Result<Client> {
        match &self.server {
            Server::Daemon(daemon) => Client::connect(&daemon.socket().display().to_string(), load),
            Server::Scsi { target, disk_bytes } => {
                Client::connect_scsi(target.wwpn(), *disk_bytes, load)
            }
        }
    }

    /// Moves the subject's threads to these CPUs; a client must be connected.
    pub fn pin(&self, cpus: &[usize]) -> Result<()> {
        match &self.server {
            Server::Daemon(daemon) => cpu::pin_process(daemon.id(), cpus),
            Server::Scsi { .. } => cpu::pin_vhost(std::process::id(), cpus),
        }
    }

    /// CPU time of the subject's threads, the kernel's vhost workers among them.
    pub fn times(&self) -> Result<Reading> {
        match &self.server {
            // Since Linux 6.4 the workers of its vhost device are threads of the process.
            Server::Daemon(daemon) => cpu::times(daemon.id()),
            Server::Scsi { .. } => cpu::vhost_times(std::process::id()),
        }
    }

    /// Numbers of the subject's threads; a client must be connected.
    pub(crate) fn tasks(&self) -> Result<Vec<u32>> {
        match &self.server {
            Server::Daemon(daemon) => kit::sched::tasks(daemon.id()),
            Server::Scsi { .. } => cpu::vhost_tasks(std::process::id()),
        }
    }

    /// Its device node or file.
    pub fn path(&self) -> &Path {
        self.disk.path()
    }
}

const NO_POLL: &str = "--iopoll=off";

fn scsi(device: &Path) -> Result<(Server, String)> {
    let target = ScsiTarget::create(1, device)?;
    let name = device.file_name().context("a device has a name")?.to_string_lossy();
    let sectors = fs::read_to_string(format!("/sys/block/{name}/size"))?;
    let disk_bytes = sectors.trim().parse::<u64>()? * 512;
    let text = format!("iblock on {}, target {}", device.display(), target.wwpn());
    Ok((Server::Scsi { target, disk_bytes }, text))
}

fn daemon(who: Who, programs: &Programs, disk: &Disk, queues: u16) -> Result<(Server, String)> {
    let name = who.name().replace(' ', "-");
    let socket = programs.directory.join(format!("{name}.sock"));
    let _ = fs::remove_file(&socket);
    let (program, args) = match who {
        Who::Kernel => ours(programs, disk, &socket, queues, &["kernel"]),
        Who::Uring => ours(programs, disk, &socket, queues, &["uring"]),
        Who::KernelPlain => {
            let plain = ["--batch-size=1", "--poll-max-us=0", "--coalesce=off", "--threads=1"];
            ours(programs, disk, &socket, queues, &[&["kernel"][..], &plain].concat())
        }
        Who::KernelInterrupts => ours(programs, disk, &socket, queues, &["kernel", NO_POLL]),
        Who::UringInterrupts => ours(programs, disk, &socket, queues, &["uring", NO_POLL]),
        Who::QsdNative => qsd(programs, disk.path(), &socket, queues, "native"),
        Who::QsdUring => qsd(programs, disk.path(), &socket, queues, "io_uring"),
        Who::VhostScsi => bail!("vhost-scsi has no daemon"),
    };
    let args = [program].into_iter().chain(args).collect();
    let daemon = Daemon::start(args, &socket, &socket.with_extension("log"))?;
    let command_line = daemon.command_line();
    Ok((Server::Daemon(daemon), command_line))
}

fn ours(
    programs: &Programs,
    disk: &Disk,
    socket: &Path,
    queues: u16,
    plane: &[&str],
) -> (String, Vec<String>) {
    let mut args = vec![
        "serve".to_owned(),
        format!("--socket-path={}", socket.display()),
        format!("--num-queues={queues}"),
        "--data-plane".to_owned(),
    ];
    args.extend(plane.iter().map(|&arg| arg.to_owned()));
    args.extend(disk.options());
    if !programs.polling {
        args.push("--poll-max-us=0".to_owned());
    }
    args.extend(programs.ours_args.iter().cloned());
    (programs.ours.display().to_string(), args)
}

fn qsd(
    programs: &Programs,
    device: &Path,
    socket: &Path,
    queues: u16,
    aio: &str,
) -> (String, Vec<String>) {
    let thread = if programs.polling { "" } else { ",poll-max-ns=0" };
    let driver = if device.is_file() { "file" } else { "host_device" };
    let args = [
        "--object".to_owned(),
        format!("iothread,id=thread{thread}"),
        "--blockdev".to_owned(),
        format!(
            "driver={driver},node-name=disk,filename={},aio={aio},cache.direct=on",
            device.display()
        ),
        "--export".to_owned(),
        format!(
            "type=vhost-user-blk,id=export,node-name=disk,addr.type=unix,addr.path={},\
             writable=on,num-queues={queues},iothread=thread",
            socket.display()
        ),
    ];
    ("qemu-storage-daemon".to_owned(), args.to_vec())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_polled_device_has_both_ways_and_nvme_the_peers_too() {
        let servers =
            Servers { who: vec![Who::Kernel, Who::Uring, Who::QsdNative], ours_arg: Vec::new() };
        let both = [Who::Kernel, Who::Uring, Who::KernelInterrupts, Who::UringInterrupts];
        assert_eq!(servers.on(Storage::Device(Speed::Polled)), both);
        let nvme = servers.on(Storage::Nvme);
        assert!(nvme.contains(&Who::QsdNative) && both.iter().all(|who| nvme.contains(who)));
        assert_eq!(servers.on(Storage::Ram), servers.who);
        let null = servers.on(Storage::Device(Speed::Null));
        assert_eq!(null.last(), Some(&Who::KernelPlain));
    }
}
