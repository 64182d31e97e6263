// SPDX-License-Identifier: Apache-2.0
//! `vhost-blk serve` for an inner guest.

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::Result;
use clap::ValueEnum;
use serde::Serialize;
use tempfile::TempDir;

use kit::daemon::Daemon as Process;
use kit::process::run_to_end;
use kit::wait::wait_until_so;

/// Descriptors of each queue of the disks in the guest, whatever serves them.
pub(crate) const QUEUE_SIZE: u16 = 1024;
const STOP_LIMIT: Duration = Duration::from_secs(30);
const CONNECT_LIMIT: Duration = Duration::from_secs(60);

/// The data plane that runs the queues.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, ValueEnum)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Plane {
    /// The daemon's own io_uring threads.
    Uring,
    /// The module, through /dev/vhost-blk.
    Kernel,
}

impl Plane {
    /// Name in the program's options.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Uring => "uring",
            Self::Kernel => "kernel",
        }
    }
}

/// A daemon that serves one disk.
#[derive(Debug)]
pub(crate) struct Daemon {
    // Ends before its directory is removed.
    process: Process,
    program: PathBuf,
    directory: TempDir,
    serial: String,
    /// The daemon was ended in order; after any other end the log is printed.
    stopped: bool,
}

impl Daemon {
    /// Serves `disk` with the serial number `serial`; `more` are further arguments of `serve`.
    pub(crate) fn start(
        program: &Path,
        disk: &Path,
        serial: &str,
        plane: Plane,
        more: &[&str],
    ) -> Result<Self> {
        Self::start_with(program, disk, serial, plane.name(), more, false)
    }

    /// Like [`Self::start`], with a control socket for [`Self::control`].
    pub(crate) fn with_control(
        program: &Path,
        disk: &Path,
        serial: &str,
        plane: Plane,
        more: &[&str],
    ) -> Result<Self> {
        Self::start_with(program, disk, serial, plane.name(), more, true)
    }

    /// Like [`Self::with_control`], on the kernel plane whenever the storage allows it.
    pub(crate) fn automatic(
        program: &Path,
        disk: &Path,
        serial: &str,
        more: &[&str],
    ) -> Result<Self> {
        Self::start_with(program, disk, serial, "auto", more, true)
    }

    fn start_with(
        program: &Path,
        disk: &Path,
        serial: &str,
        plane: &str,
        more: &[&str],
        control: bool,
    ) -> Result<Self> {
        let directory = tempfile::Builder::new().prefix("nested-daemon-").tempdir()?;
        let socket = directory.path().join("socket");
        let mut args = vec![
            program.display().to_string(),
            "serve".to_owned(),
            format!("--socket-path={}", socket.display()),
            format!("--blk-file={}", disk.display()),
            format!("--serial={serial}"),
            format!("--data-plane={plane}"),
            format!("--queue-size={QUEUE_SIZE}"),
        ];
        args.extend(more.iter().map(|&arg| arg.to_owned()));
        if control {
            args.push(control_arg(directory.path()));
        }
        let process = Process::start(args, &socket, &directory.path().join("log"))?;
        let (program, serial) = (program.to_owned(), serial.to_owned());
        Ok(Self { process, program, directory, serial, stopped: false })
    }

    /// Kills the daemon with SIGKILL, starts a successor on the same socket, and waits until the
    /// front-end connects.
    pub(crate) fn replace(&mut self) -> Result<()> {
        self.process.replace_killed()?;
        wait_until_so(CONNECT_LIMIT, "the front-end at the new daemon", || {
            Ok(self.process.log().contains("front-end connected"))
        })
    }

    /// QEMU's arguments for the disk; QEMU reconnects when the daemon is gone.
    pub(crate) fn reconnecting_qemu_args(&self, queues: u16) -> Vec<String> {
        let mut args = self.qemu_args(queues);
        args[1].push_str(",reconnect-ms=200");
        args
    }

    /// QEMU's arguments for the disk.
    pub(crate) fn qemu_args(&self, queues: u16) -> Vec<String> {
        let (id, socket) = (&self.serial, self.process.socket());
        vec![
            "-chardev".to_owned(),
            format!("socket,id={id},path={}", socket.display()),
            "-device".to_owned(),
            format!("vhost-user-blk-pci,chardev={id},num-queues={queues},queue-size={QUEUE_SIZE}"),
        ]
    }

    /// Ends the daemon, which must exit in order.
    pub(crate) fn stop(mut self) -> Result<()> {
        self.process.stop(STOP_LIMIT)?;
        self.stopped = true;
        Ok(())
    }

    /// Moves the running queues to another data plane.
    pub(crate) fn switch(&self, plane: Plane) -> Result<()> {
        self.control(&["switch", plane.name()]).map(drop)
    }

    /// Sends a command to the control socket; returns the answer.
    pub(crate) fn control(&self, words: &[&str]) -> Result<String> {
        let (program, control) = (self.program.display().to_string(), self.directory.path());
        let control = control_arg(control);
        let start: [&str; 3] = [&program, "ctl", &control];
        run_to_end(&[&start[..], words].concat())
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        if !self.stopped {
            eprintln!("daemon {}| {}", self.serial, self.process.log());
        }
    }
}

fn control_arg(directory: &Path) -> String {
    format!("--control-path={}", directory.join("control").display())
}
