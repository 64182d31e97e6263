// SPDX-License-Identifier: Apache-2.0
//! Servers of many null disks: one daemon for all of them, or a process each.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use kit::daemon::Daemon;
use tempfile::TempDir;

use crate::cpu;
use crate::one_daemon::{self, OneDaemon};
use crate::server::{OURS, Server, Settings, Storage};

/// Size of each disk.
const SIZE_BYTES: u64 = 1 << 30;

/// The options of a null disk, without its socket.
pub(super) fn null_disk() -> String {
    format!("backend = \"null\"\nsize = {SIZE_BYTES}\nnum-queues = 1\n")
}

/// A way to serve the disks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// `vhost-blk daemon`.
    Daemon,
    /// `vhost-blk serve` for each disk.
    Serve,
    /// qemu-storage-daemon with an iothread for each disk.
    Qsd,
}

impl Kind {
    /// Name in tables.
    pub(super) const fn name(self) -> &'static str {
        match self {
            Kind::Daemon => "one daemon",
            Kind::Serve => "a serve for each",
            Kind::Qsd => "a qsd for each",
        }
    }

    /// The server of one disk among those of `bench`; `None`: one server has all disks.
    const fn server(self) -> Option<&'static str> {
        match self {
            Kind::Daemon => None,
            Kind::Serve => Some(OURS),
            Kind::Qsd => Some("qsd null-co +iothread"),
        }
    }
}

/// The programs that serve.
#[derive(Clone, Debug)]
pub(super) struct Programs {
    pub(super) ours: PathBuf,
    qsd: Option<String>,
}

impl Programs {
    /// Looks for the programs; also returns a line about a missing peer.
    pub(super) fn find(ours: Option<&Path>, qsd: &str) -> Result<(Self, Vec<String>)> {
        let ours = one_daemon::program(ours)?;
        let version = crate::setup::version(qsd);
        let missing = version.starts_with("not usable");
        let left_out = (missing && qsd != "none")
            .then(|| format!("{qsd} is {version}: only this project's servers are measured"));
        left_out.iter().for_each(|line| eprintln!("bench: {line}"));
        let qsd = (!missing && qsd != "none").then(|| qsd.to_owned());
        Ok((Self { ours, qsd }, left_out.into_iter().collect()))
    }

    /// The ways that can be measured.
    pub(super) fn kinds(&self) -> Vec<Kind> {
        let mut kinds = vec![Kind::Daemon, Kind::Serve];
        kinds.extend(self.qsd.is_some().then_some(Kind::Qsd));
        kinds
    }

    /// Starts a server of one disk, with its files in `directory`.
    fn server(&self, name: &str, directory: &Path) -> Result<Server> {
        fs::create_dir(directory)?;
        let settings = Settings {
            ours: Some(self.ours.clone()),
            ours_args: Vec::new(),
            qsd: self.qsd.clone(),
            size_bytes: SIZE_BYTES,
            file: PathBuf::new(),
            disk: PathBuf::new(),
            qcow2: false,
            directory: directory.to_owned(),
            queues: 1,
        };
        let mut specs = settings.specs(Storage::Null).into_iter();
        let spec = specs.find(|spec| spec.name == name);
        spec.with_context(|| format!("no server {name}"))?.start(&[])
    }
}

/// Running servers, ended on drop.
#[derive(Debug)]
pub(super) struct Fleet {
    /// Process ids of the servers.
    pids: Vec<u32>,
    sockets: Vec<PathBuf>,
    _servers: Vec<Server>,
    _daemon: Option<Daemon>,
    /// Sockets, logs and configuration; removed after the servers have ended.
    _directory: TempDir,
}

impl Fleet {
    /// Starts the servers of so many disks.
    pub(super) fn start(programs: &Programs, kind: Kind, disks: u16) -> Result<Self> {
        let directory = tempfile::Builder::new().prefix("bench-density-").tempdir()?;
        let Some(name) = kind.server() else {
            let disks: Vec<_> = (0..disks).map(|_| null_disk()).collect();
            let OneDaemon { daemon, sockets, .. } =
                OneDaemon::start(&programs.ours, directory.path(), &disks, &[])?;
            let pids = vec![daemon.id()];
            let (servers, daemon) = (Vec::new(), Some(daemon));
            return Ok(Self {
                pids,
                sockets,
                _servers: servers,
                _daemon: daemon,
                _directory: directory,
            });
        };
        let start = |disk: u16| programs.server(name, &directory.path().join(disk.to_string()));
        let servers = (0..disks).map(start).collect::<Result<Vec<_>>>()?;
        let pids = servers.iter().map(|server| server.pid).collect();
        let sockets = servers.iter().map(|server| PathBuf::from(&server.socket)).collect();
        Ok(Self { pids, sockets, _servers: servers, _daemon: None, _directory: directory })
    }

    /// The sockets of the disks.
    pub(super) fn sockets(&self) -> impl Iterator<Item = &Path> {
        self.sockets.iter().map(PathBuf::as_path)
    }

    /// CPU time of the threads of all servers so far.
    pub(super) fn times(&self) -> Result<cpu::Reading> {
        cpu::times_of_all(&self.pids)
    }

    /// Threads of all servers.
    pub(super) fn threads(&self) -> Result<usize> {
        self.pids.iter().map(|&pid| Ok(kit::sched::tasks(pid)?.len())).sum()
    }

    /// Proportional memory of all servers without shared memory, which is the guests'.
    pub(super) fn memory_kib(&self) -> Result<u64> {
        let of = |pid| {
            let path = format!("/proc/{pid}/smaps_rollup");
            let text = fs::read_to_string(&path).with_context(|| path.clone())?;
            own_kib(&text).with_context(|| format!("{path} has an unknown form"))
        };
        self.pids.iter().map(of).sum()
    }
}

/// The proportional memory in a text of `smaps_rollup`, without shared memory.
fn own_kib(text: &str) -> Option<u64> {
    let kib = |name: &str| {
        let line = text.lines().find_map(|line| line.strip_prefix(name))?;
        line.trim().strip_suffix(" kB")?.trim().parse::<u64>().ok()
    };
    Some(kib("Pss_Anon:")? + kib("Pss_File:")?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shared_memory_does_not_count() {
        let text = "55d0-7ffd ---p 00000000 00:00 0 [rollup]\nRss: 9000 kB\nPss: 700 kB\n\
                    Pss_Anon:            300 kB\nPss_File:            150 kB\nPss_Shmem: 250 kB\n";
        assert_eq!(own_kib(text), Some(450));
        assert_eq!(own_kib("Rss: 1 kB\n"), None);
    }
}
