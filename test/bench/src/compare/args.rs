// SPDX-License-Identifier: Apache-2.0
//! The options of a comparison.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use anyhow::{Result, bail};
use clap::Args as ClapArgs;

use crate::cpu::{self, CpuList};
use crate::load::{Chains, Load, Mode, Op};
use crate::server::{BARE_FIO, OURS, Settings, Spec, Storage, is_qsd};
use crate::setup;

/// Options of a comparison.
#[derive(Clone, Debug, ClapArgs)]
pub struct Args {
    /// Fewer and shorter rounds: a first look, not a result
    #[arg(long)]
    pub(super) quick: bool,
    /// Rounds; each measures every server once at every point [default: 5, quick: 3]
    #[arg(long)]
    rounds: Option<u32>,
    /// Seconds of each measurement [default: 1, quick: 0.3]
    #[arg(long)]
    seconds: Option<f64>,
    /// Reads or writes
    #[arg(long, value_enum, default_value = "randread")]
    pub(super) op: Op,
    /// Bytes of each request
    #[arg(long, default_value_t = 4096)]
    pub(super) block_size: u32,
    /// Requests in flight
    #[arg(long = "depth", value_delimiter = ',', default_value = "1,4,32")]
    pub(super) depths: Vec<u16>,
    /// Wait of the client: asleep until a call, or polling
    #[arg(long = "mode", value_enum, value_delimiter = ',', default_value = "event,spin")]
    pub(super) modes: Vec<Mode>,
    /// Backing storage of the servers
    #[arg(long = "storage", value_parser = parse_storage, value_delimiter = ',', default_value = "file,null")]
    pub(super) storages: Vec<Storage>,
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
    /// Do not run bare fio
    #[arg(long)]
    pub(super) no_fio: bool,
    /// Do not measure two queues
    #[arg(long)]
    pub(super) no_scaling: bool,
    /// Use packed rings (servers that lack them are left out)
    #[arg(long)]
    pub(super) packed: bool,
    /// Folder of the disk file: a tmpfs
    #[arg(long, value_name = "FOLDER", default_value = "/dev/shm")]
    pub(super) folder: PathBuf,
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
    /// Set by SIGINT and SIGTERM, so that everything is cleaned up.
    #[arg(skip)]
    pub(super) interrupted: Arc<AtomicBool>,
}

fn parse_storage(text: &str) -> Result<Storage, String> {
    match text {
        "file" => Ok(Storage::File),
        "null" => Ok(Storage::Null),
        _ => Err("use file or null".to_owned()),
    }
}

fn parse_peer(text: &str) -> Result<(String, String), String> {
    match text.split_once('=') {
        Some((name, _)) if name == OURS || name == BARE_FIO || is_qsd(name) => {
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
        self.rounds.unwrap_or(if self.quick { 3 } else { 5 })
    }

    pub(super) fn duration(&self) -> Duration {
        Duration::from_secs_f64(self.seconds.unwrap_or(if self.quick { 0.3 } else { 1.0 }))
    }

    /// The load of one point on one queue.
    pub(super) fn load(&self, mode: Mode, depth: u16) -> Load {
        Load {
            op: self.op,
            block_bytes: self.block_size,
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

    pub(super) fn settings(&self, folder: PathBuf, file: PathBuf) -> Result<Settings> {
        let ours = match &self.vhost_blk {
            Some(path) if path.exists() => Some(path.clone()),
            Some(path) => bail!("{} does not exist: build vhost-blk first", path.display()),
            None => Some(std::env::current_exe()?.with_file_name("vhost-blk")),
        };
        if let Some(path) = ours.as_ref().filter(|path| !path.exists()) {
            eprintln!("bench: {} is not built: ours is left out", path.display());
        }
        let qsd_runs = self.qsd != "none" && !setup::version(&self.qsd).starts_with("not usable");
        if self.qsd != "none" && !qsd_runs {
            eprintln!("bench: {} cannot be run: qemu-storage-daemon is left out", self.qsd);
        }
        Ok(Settings {
            ours: ours.filter(|path| path.exists()),
            ours_args: self.ours_arg.clone(),
            qsd: qsd_runs.then(|| self.qsd.clone()),
            size_bytes: self.size_mib << 20,
            file,
            folder,
            queues: 2,
        })
    }

    pub(super) fn peers(&self, storage: Storage) -> impl Iterator<Item = Spec> {
        let peers = if storage == Storage::File { &self.peers } else { &self.null_peers };
        peers.iter().map(|(name, socket)| Spec::peer(name, socket))
    }
}
