// SPDX-License-Identifier: Apache-2.0
//! The options of a comparison.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::{Result, bail};
use clap::Args as ClapArgs;
use kit::fio;

use crate::changes::Baseline;
use crate::cpu::{self, CpuList};
use crate::load::{Chains, Load, Mode, Op};
use crate::plan::{self, Shape};
use crate::server::{FRAGMENTED_MIN, Settings, Spec, Storage, is_bare, is_ours};
use crate::syscalls::Syscalls;
use crate::{disk, setup};

/// Options of a comparison.
#[derive(Clone, Debug, ClapArgs)]
pub struct Args {
    /// Fewer and shorter rounds: a first look, not a result
    #[arg(long)]
    pub(super) quick: bool,
    /// Rounds; each measures every server once at every point [default: 5, quick: 3, of all loads 2]
    #[arg(long)]
    rounds: Option<u32>,
    /// Seconds of each measurement [default: 1, quick: 0.3, of all loads 0.15]
    #[arg(long)]
    seconds: Option<f64>,
    #[command(flatten)]
    loads: plan::Choice,
    /// Requests in flight
    #[arg(long = "depth", value_delimiter = ',', default_value = "1,4,32")]
    pub(super) depths: Vec<u16>,
    /// Backing storage of the servers: a file on a tmpfs, a file on a real disk, nothing
    #[arg(long = "storage", value_parser = parse_storage, value_delimiter = ',', default_value = "file,null")]
    pub(super) storages: Vec<Storage>,
    /// Also measure qcow2: an image with the same content beside each file, all clusters allocated; from
    /// 1 GiB on also one with its clusters in random order; and writes that allocate, on an empty image
    #[arg(long)]
    pub(super) qcow2: bool,
    /// The vhost-blk program [default: next to this program]
    #[arg(long, value_name = "PATH")]
    vhost_blk: Option<PathBuf>,
    /// A further argument of `vhost-blk serve`; may be repeated
    #[arg(long, value_name = "ARG", allow_hyphen_values = true)]
    ours_arg: Vec<String>,
    /// The qemu-storage-daemon program, or `none`
    #[arg(long, value_name = "PATH", default_value = "qemu-storage-daemon")]
    qsd: String,
    /// A server that runs already, compared on the file; may be repeated
    #[arg(long = "peer", value_name = "NAME=SOCKET", value_parser = parse_peer)]
    peers: Vec<(String, String)>,
    /// A server of a null device that runs already; may be repeated
    #[arg(long = "null-peer", value_name = "NAME=SOCKET", value_parser = parse_peer)]
    null_peers: Vec<(String, String)>,
    /// Also count the servers' system calls, in a further run of each sample (root)
    #[arg(long)]
    pub(super) syscalls: bool,
    /// Do not run bare fio
    #[arg(long)]
    pub(super) no_fio: bool,
    /// Do not measure two queues
    #[arg(long)]
    pub(super) no_scaling: bool,
    /// Use packed rings (servers that lack them are left out)
    #[arg(long)]
    pub(super) packed: bool,
    /// Directory of the disk file of `file`: a tmpfs
    #[arg(long, value_name = "DIR", default_value = "/dev/shm")]
    pub(super) directory: PathBuf,
    /// Directory of the disk file of `disk`: on a real disk [default: the cache directory]
    #[arg(long, value_name = "DIR")]
    dir: Option<PathBuf>,
    /// MiB of the disks
    #[arg(long, default_value_t = 1024)]
    pub(super) size_mib: u64,
    /// CPUs of the client's threads (`0-2,5` or `none`) [default: the first]
    #[arg(long, value_parser = cpu::parse_list)]
    client_cpus: Option<CpuList>,
    /// CPUs of the servers and of fio (`0-2,5` or `none`) [default: the second]
    #[arg(long, value_parser = cpu::parse_list)]
    server_cpus: Option<CpuList>,
    /// Repetitions of a sample while something else takes the CPUs
    #[arg(long, default_value_t = 1)]
    pub(super) retries: u32,
    /// Also write everything as JSON
    #[arg(long, value_name = "FILE")]
    pub(super) json: Option<PathBuf>,
    #[command(flatten)]
    pub(super) baseline: Baseline,
    /// Set by SIGINT and SIGTERM, so that everything is cleaned up.
    #[arg(skip)]
    pub(super) interrupted: Arc<AtomicBool>,
}

/// Tells a missing part at once and in the report.
pub(super) fn tell(left_out: &mut Vec<String>, line: String) {
    eprintln!("bench: {line}");
    left_out.push(line);
}

fn parse_storage(text: &str) -> Result<Storage, String> {
    match text {
        "file" => Ok(Storage::File),
        "disk" => Ok(Storage::Disk),
        "null" => Ok(Storage::Null),
        _ => Err("use file, disk or null".to_owned()),
    }
}

/// True for a name that the report gives to a server of its own.
fn is_taken(name: &str) -> bool {
    is_ours(name) || is_bare(name) || name.starts_with("qsd ")
}

fn parse_peer(text: &str) -> Result<(String, String), String> {
    match text.split_once('=') {
        Some((name, _)) if is_taken(name) => {
            Err(format!("`{name}` is the name of another server in the tables"))
        }
        Some((name, socket)) if !name.is_empty() && !socket.is_empty() => {
            Ok((name.to_owned(), socket.to_owned()))
        }
        _ => Err("use NAME=SOCKET".to_owned()),
    }
}

impl Args {
    /// Number of rounds.
    pub(super) fn rounds(&self) -> u32 {
        self.rounds.unwrap_or(match (self.quick, self.loads.all_loads) {
            (true, true) => 2,
            (true, false) => 3,
            (false, _) => 5,
        })
    }

    pub(super) fn duration(&self) -> Duration {
        Duration::from_secs_f64(self.seconds.unwrap_or(match (self.quick, self.loads.all_loads) {
            (true, true) => 0.15,
            (true, false) => 0.3,
            (false, _) => 1.0,
        }))
    }

    fn is_quick_report(&self) -> bool {
        self.quick && self.loads.all_loads
    }

    /// The measured loads. Nothing as storage knows no difference between loads: a quick report of all has there that
    /// of the goals alone.
    pub(super) fn shapes(&self, storage: Storage) -> Vec<Shape> {
        let mut shapes = self.loads.shapes(&self.depths, self.quick);
        if self.is_quick_report() && storage == Storage::Null {
            shapes.retain(Shape::is_of_goals);
        }
        shapes
    }

    /// Returns whether bare fio runs in this round: its start takes longer than a quick sample of all loads.
    pub(super) fn has_bare(&self, round: u32) -> bool {
        !self.no_fio && fio::installed() && (round == 0 || !self.is_quick_report())
    }

    /// Requests in flight on each of two queues.
    pub(super) fn scaling_depths(&self) -> Vec<u16> {
        if self.loads.all_loads { plan::EVERY_DEPTH.to_vec() } else { self.depths.clone() }
    }

    /// The directory on a real disk.
    pub(super) fn dir(&self) -> Result<PathBuf> {
        disk::directory(self.dir.as_deref())
    }

    /// The load of one point of a shape on one queue.
    pub(super) fn load_of(&self, shape: &Shape, mode: Mode, depth: u16) -> Load {
        let Shape { op, block_bytes, .. } = *shape;
        Load { op, block_bytes, ..self.load(mode, depth) }
    }

    /// 4 KiB random reads on one queue.
    pub(super) fn load(&self, mode: Mode, depth: u16) -> Load {
        Load {
            op: Op::Randread,
            block_bytes: plan::GOAL_BYTES,
            depth,
            mode,
            queues: 1,
            queue_size: 128,
            packed: self.packed,
            chains: Chains::Auto,
            cpus: self.client_cpus.clone().map(|list| list.0).unwrap_or_default(),
        }
    }

    /// Fills in the CPUs that were not chosen.
    pub(super) fn place(&mut self) -> Result<()> {
        let usable = cpu::usable()?;
        let or_nth = |list: &mut Option<CpuList>, n: usize| {
            let nth = if usable.len() > 1 { vec![usable[n]] } else { Vec::new() };
            list.get_or_insert(CpuList(nth));
        };
        or_nth(&mut self.client_cpus, 0);
        or_nth(&mut self.server_cpus, 1);
        Ok(())
    }

    pub(super) fn server_cpus(&self) -> &[usize] {
        self.server_cpus.as_ref().map_or(&[], |list| &list.0)
    }

    pub(super) fn client_cpus(&self) -> &[usize] {
        self.client_cpus.as_ref().map_or(&[], |list| &list.0)
    }

    /// Leaves system calls out of the measurement where they cannot be counted, and tells it.
    pub(super) fn count_calls_if_possible(&mut self, left_out: &mut Vec<String>) {
        if let Some(Err(why)) = self.syscalls.then(|| Syscalls::of(std::process::id())) {
            tell(left_out, format!("system calls are left out: {why:#}"));
            self.syscalls = false;
        }
    }

    /// An error after SIGINT or SIGTERM.
    pub(super) fn go_on(&self) -> Result<()> {
        if self.interrupted.load(Ordering::Relaxed) {
            bail!("interrupted");
        }
        Ok(())
    }

    /// Paths and sizes for the servers; tells the missing programs.
    pub(super) fn settings(
        &self,
        directory: PathBuf,
        files: [PathBuf; 2],
        left_out: &mut Vec<String>,
    ) -> Result<Settings> {
        let [file, disk] = files;
        let ours = match &self.vhost_blk {
            Some(path) if path.exists() => Some(path.clone()),
            Some(path) => bail!("{} does not exist: build vhost-blk first", path.display()),
            None => Some(std::env::current_exe()?.with_file_name("vhost-blk")),
        };
        if let Some(path) = ours.as_ref().filter(|path| !path.exists()) {
            tell(left_out, format!("{} is not built: ours is left out", path.display()));
        }
        let qsd_runs = self.qsd != "none" && !setup::version(&self.qsd).starts_with("not usable");
        if self.qsd != "none" && !qsd_runs {
            let line = format!("{} cannot be run: qemu-storage-daemon is left out", self.qsd);
            tell(left_out, line);
        }
        if !self.no_fio && !fio::installed() {
            tell(left_out, "fio is not installed: bare fio is left out".to_owned());
        }
        let ours = ours.filter(|path| path.exists());
        if self.qcow2 && ours.is_none() {
            tell(left_out, "qcow2 is left out: ours makes the image".to_owned());
        }
        if self.qcow2 && self.size_mib << 20 < FRAGMENTED_MIN {
            let least = FRAGMENTED_MIN >> 20;
            tell(
                left_out,
                format!("fragmented qcow2 is left out: give --size-mib {least} or more"),
            );
        }
        Ok(Settings {
            qcow2: self.qcow2 && ours.is_some(),
            ours,
            ours_args: self.ours_arg.clone(),
            qsd: qsd_runs.then(|| self.qsd.clone()),
            size_bytes: self.size_mib << 20,
            file,
            disk,
            directory,
            queues: 2,
        })
    }

    pub(super) fn peers(&self, storage: Storage) -> impl Iterator<Item = Spec> {
        let peers = match storage {
            Storage::File => self.peers.as_slice(),
            Storage::Null => self.null_peers.as_slice(),
            Storage::Disk => &[],
        };
        peers.iter().map(|(name, socket)| Spec::peer(name, socket))
    }
}
