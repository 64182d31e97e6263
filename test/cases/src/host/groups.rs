// SPDX-License-Identifier: Apache-2.0
//! `vhost-blk daemon` with several disks, as a process of the case.

use crate::host::daemon;
use crate::host::env::Env;
use crate::host::fixture::Disk;
use crate::host::target::{LIMIT, need_module};
use anyhow::{Context, Result, ensure};
use kit::daemon::Daemon as Process;
use serde_json::Value;
use std::os::unix::net::UnixStream;
use tempfile::TempDir;

/// A running daemon. Drop kills it.
pub(crate) struct Daemon {
    // Ends before its directory is removed.
    process: Process,
    program: String,
    directory: TempDir,
}

impl Daemon {
    /// Starts the daemon without a disk, with further options.
    pub(crate) fn start(env: &Env, more: &[&str]) -> Result<Self> {
        need_module()?;
        let directory = tempfile::tempdir().context("cannot make a directory for the sockets")?;
        let program = env.bin.join("vhost-blk").to_string_lossy().into_owned();
        let (socket, log) = (directory.path().join("control"), directory.path().join("log"));
        let path = socket.to_string_lossy().into_owned();
        let metrics = format!("unix:{}", directory.path().join("metrics").display());
        let words = [&program, "daemon", "--control-path", &path, "--metrics", &metrics];
        let words = [&words[..], &["--log-level", "warn"], more].concat();
        let arguments = words.into_iter().map(str::to_owned).collect();
        let process = Process::start_echoed(arguments, &socket, &log)?;
        Ok(Self { process, program, directory })
    }

    fn path(&self, name: &str) -> String {
        self.directory.path().join(name).to_string_lossy().into_owned()
    }

    /// Sends a command through the control socket.
    pub(crate) fn control(&self, words: &[&str]) -> Result<String> {
        let path = self.path("control");
        kit::system::run(&self.program, &[&["ctl", "--control-path", &path], words].concat())
    }

    /// Adds a disk of the group `g` on the kernel plane. `iops`: the limit of the group.
    pub(crate) fn add(
        &self,
        name: &str,
        disk: &Disk,
        queues: u16,
        iops: Option<u64>,
    ) -> Result<()> {
        let iops = iops.map(|iops| iops.to_string());
        let mut words = vec!["--limit-group", "g"];
        if let Some(iops) = &iops {
            words.extend(["--limit-iops", iops, "--limit-burst", "0.01"]);
        }
        self.add_on("kernel", name, disk, queues, &words)
    }

    /// Adds a disk on a plane, with further options.
    pub(crate) fn add_on(
        &self,
        plane: &str,
        name: &str,
        disk: &Disk,
        queues: u16,
        more: &[&str],
    ) -> Result<()> {
        let (socket, file, queues) =
            (self.path(name), disk.path.to_string_lossy(), queues.to_string());
        let mut words = vec!["add", name, "--socket-path", &socket, "--blk-file", &file];
        words.extend(["--num-queues", &queues, "--queue-size", "1024", "--packed", "off"]);
        words.extend(["--data-plane", plane]);
        words.extend(more);
        self.control(&words).map(drop)
    }

    /// Sum of a metric over all queues of a disk.
    pub(crate) fn total(&self, metric: &str, disk: &str) -> Result<u64> {
        let metrics = self.directory.path().join("metrics");
        daemon::total(&metrics, &format!("{metric}{{disk=\"{disk}\""))
    }

    /// A connection to a disk.
    pub(crate) fn connect(&self, name: &str) -> Result<UnixStream> {
        UnixStream::connect(self.path(name)).context("cannot connect to the disk")
    }

    /// The data planes of disks.
    pub(crate) fn planes(&self, names: &[&str]) -> Result<Vec<String>> {
        let plane = |name: &&str| {
            let status: Value = serde_json::from_str(&self.control(&["--json", "status", name])?)?;
            ensure!(status["limits"]["group"] == "g", "{name} is in no group: {status}");
            Ok(status["data_plane"].as_str().context("no data plane")?.to_owned())
        };
        names.iter().map(plane).collect()
    }

    /// Tells the daemon to exit, which it must do in order.
    pub(crate) fn end(&mut self) -> Result<()> {
        self.process.stop(LIMIT)
    }
}
