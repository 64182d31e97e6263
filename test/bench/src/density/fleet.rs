// SPDX-License-Identifier: Apache-2.0
//! Servers of many null disks: one daemon for all of them, or a process each.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use kit::daemon::Daemon;
use tempfile::TempDir;

use crate::cpu;

/// Size of each disk.
const SIZE: &str = "1G";
const SIZE_BYTES: u64 = 1 << 30;

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
}

/// The programs that serve.
#[derive(Clone, Debug)]
pub(super) struct Programs {
    ours: PathBuf,
    qsd: Option<String>,
}

impl Programs {
    /// Looks for the programs; also returns a line about a missing peer.
    pub(super) fn find(ours: Option<&Path>, qsd: &str) -> Result<(Self, Vec<String>)> {
        let beside = std::env::current_exe()?.with_file_name("vhost-blk");
        let ours = ours.map_or(beside, Path::to_owned);
        if !ours.exists() {
            bail!("{} is not there: build vhost-blk, or give --vhost-blk", ours.display());
        }
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
}

/// Running servers, ended on drop.
#[derive(Debug)]
pub(super) struct Fleet {
    servers: Vec<Daemon>,
    sockets: Vec<PathBuf>,
    /// Sockets, logs and configuration; removed after the servers have ended.
    _folder: TempDir,
}

impl Fleet {
    /// Starts the servers of so many disks.
    pub(super) fn start(programs: &Programs, kind: Kind, disks: u16) -> Result<Self> {
        let folder = tempfile::Builder::new().prefix("bench-density-").tempdir()?;
        let socket = |disk| folder.path().join(format!("{disk}.sock"));
        let sockets: Vec<PathBuf> = (0..disks).map(socket).collect();
        let servers = match kind {
            Kind::Daemon => vec![one_daemon(programs, folder.path(), &sockets)?],
            Kind::Serve | Kind::Qsd => {
                let start = |socket: &PathBuf| {
                    let args = match (kind, &programs.qsd) {
                        (Kind::Qsd, Some(qsd)) => qsd_arguments(qsd, socket),
                        _ => serve_arguments(&programs.ours, socket),
                    };
                    Daemon::start(args, socket, &socket.with_extension("log"))
                };
                sockets.iter().map(start).collect::<Result<_>>()?
            }
        };
        Ok(Self { servers, sockets, _folder: folder })
    }

    /// The sockets of the disks.
    pub(super) fn sockets(&self) -> impl Iterator<Item = &Path> {
        self.sockets.iter().map(PathBuf::as_path)
    }

    /// CPU time of all servers so far.
    pub(super) fn busy(&self) -> Result<Duration> {
        self.servers.iter().map(|server| Ok(cpu::times(server.id())?.busy)).sum()
    }

    /// Threads of all servers.
    pub(super) fn threads(&self) -> Result<usize> {
        let of = |server: &Daemon| Ok(kit::sched::tasks(server.id())?.len());
        self.servers.iter().map(of).sum()
    }

    /// Proportional memory of all servers without shared memory, which is the guests'.
    pub(super) fn memory_kib(&self) -> Result<u64> {
        let of = |server: &Daemon| {
            let path = format!("/proc/{}/smaps_rollup", server.id());
            let text = fs::read_to_string(&path).with_context(|| path.clone())?;
            own_kib(&text).with_context(|| format!("{path} has an unknown form"))
        };
        self.servers.iter().map(of).sum()
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

fn one_daemon(programs: &Programs, folder: &Path, sockets: &[PathBuf]) -> Result<Daemon> {
    let configuration = folder.join("disks");
    fs::create_dir(&configuration)?;
    for (disk, socket) in sockets.iter().enumerate() {
        let text = format!(
            "backend = \"null\"\nsize = \"{SIZE}\"\nnum-queues = 1\nsocket-path = \"{}\"\n",
            socket.display()
        );
        fs::write(configuration.join(format!("disk{disk}.toml")), text)?;
    }
    let control = folder.join("control");
    let args = [
        programs.ours.display().to_string(),
        "daemon".to_owned(),
        format!("--control-path={}", control.display()),
        format!("--config-dir={}", configuration.display()),
    ];
    Daemon::start(args.to_vec(), &control, &folder.join("daemon.log"))
}

fn serve_arguments(program: &Path, socket: &Path) -> Vec<String> {
    vec![
        program.display().to_string(),
        "serve".to_owned(),
        format!("--socket-path={}", socket.display()),
        "--backend=null".to_owned(),
        format!("--size={SIZE}"),
        "--num-queues=1".to_owned(),
    ]
}

fn qsd_arguments(program: &str, socket: &Path) -> Vec<String> {
    let export = format!(
        "type=vhost-user-blk,id=export,node-name=disk,addr.type=unix,addr.path={},writable=on,\
         num-queues=1,iothread=thread",
        socket.display()
    );
    let blockdev = format!("driver=null-co,node-name=disk,size={SIZE_BYTES},read-zeroes=off");
    let args = ["--blockdev", &blockdev, "--object", "iothread,id=thread", "--export", &export];
    [program].into_iter().chain(args).map(str::to_owned).collect()
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
