// SPDX-License-Identifier: Apache-2.0
//! `vhost-blk serve` for an inner guest.

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Result, bail};
use bench::process::Running;
use clap::ValueEnum;
use serde::Serialize;
use tempfile::TempDir;

use crate::exec::run;

const STOP_LIMIT: Duration = Duration::from_secs(30);

/// Who runs the queues.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum Plane {
    /// The daemon's own io_uring threads.
    Uring,
    /// The module, through /dev/vhost-blk.
    Kernel,
}

impl Plane {
    /// As in the program's options.
    pub fn name(self) -> &'static str {
        match self {
            Self::Uring => "uring",
            Self::Kernel => "kernel",
        }
    }
}

/// A daemon that serves one disk.
#[derive(Debug)]
pub struct Daemon {
    running: Running,
    program: PathBuf,
    folder: TempDir,
    serial: String,
    /// Ended as a daemon should; any other end shows its log.
    stopped: bool,
}

impl Daemon {
    /// Serves `disk` with the name `serial`; `more` are further arguments of `serve`.
    pub fn start(
        program: &Path,
        disk: &Path,
        serial: &str,
        plane: Plane,
        more: &[&str],
    ) -> Result<Self> {
        Self::start_with(program, disk, serial, plane, more, false)
    }

    /// As [`Self::start`], with a control socket for [`Self::switch`].
    pub fn with_control(program: &Path, disk: &Path, serial: &str, plane: Plane) -> Result<Self> {
        Self::start_with(program, disk, serial, plane, &[], true)
    }

    fn start_with(
        program: &Path,
        disk: &Path,
        serial: &str,
        plane: Plane,
        more: &[&str],
        control: bool,
    ) -> Result<Self> {
        let folder = tempfile::Builder::new().prefix("nested-daemon-").tempdir()?;
        let socket = folder.path().join("socket");
        let mut args = vec![
            "serve".to_owned(),
            format!("--socket-path={}", socket.display()),
            format!("--blk-file={}", disk.display()),
            format!("--serial={serial}"),
            format!("--data-plane={}", plane.name()),
            // As large as the device's, see `qemu_args`.
            "--queue-size=1024".to_owned(),
        ];
        args.extend(more.iter().map(|&arg| arg.to_owned()));
        if control {
            args.push(control_arg(folder.path()));
        }
        let program_name = program.display().to_string();
        let mut running = Running::start(&program_name, &args, &folder.path().join("log"))?;
        running.wait_for_socket(&socket)?;
        Ok(Self {
            running,
            program: program.to_owned(),
            folder,
            serial: serial.to_owned(),
            stopped: false,
        })
    }

    /// QEMU's arguments for the disk.
    pub fn qemu_args(&self, queues: u16) -> Vec<String> {
        let (id, socket) = (&self.serial, self.folder.path().join("socket"));
        vec![
            "-chardev".to_owned(),
            format!("socket,id={id},path={}", socket.display()),
            "-device".to_owned(),
            format!("vhost-user-blk-pci,chardev={id},num-queues={queues},queue-size=1024"),
        ]
    }

    /// Ends the daemon, which has to go in order.
    pub fn stop(mut self) -> Result<()> {
        let status = self.running.terminate(STOP_LIMIT)?;
        if !status.success() {
            bail!("the daemon ended with {status}");
        }
        self.stopped = true;
        Ok(())
    }

    /// Moves the queues to another data plane while they run.
    pub fn switch(&self, plane: Plane) -> Result<()> {
        let (program, control) = (self.program.display().to_string(), self.folder.path());
        run(&[&program, "ctl", &control_arg(control), "switch", plane.name()]).map(drop)
    }

    /// The process id.
    pub fn pid(&self) -> u32 {
        self.running.pid()
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        if !self.stopped {
            eprintln!("daemon {}| {}", self.serial, self.running.log());
        }
    }
}

fn control_arg(folder: &Path) -> String {
    format!("--control-path={}", folder.join("control").display())
}
