// SPDX-License-Identifier: Apache-2.0
//! The daemon of a run: `vhost-blk serve` with a control socket and a configuration file, which a
//! new start or an upgrade reads again.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result};
use serde_json::Value;

use crate::daemon::Daemon;
use crate::process::run_to_end;
use crate::wait::wait_until_so;

/// The serial number of the disk in the guest.
pub const SERIAL: &str = "soak";

const STOP_LIMIT: Duration = Duration::from_secs(60);
const CONNECT_LIMIT: Duration = Duration::from_secs(120);
const LOG_LINES: usize = 30;

/// A successor of the daemon.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Successor {
    /// The daemon is killed.
    AfterKill,
    /// The daemon stops in order.
    AfterStop,
    /// The daemon executes the new program.
    ByUpgrade,
}

/// The running daemon.
#[derive(Debug)]
pub struct Served {
    daemon: Daemon,
    program: PathBuf,
    folder: PathBuf,
}

impl Served {
    /// Serves `disk` by `program`, which is an absolute path; sockets, log and configuration are in
    /// `folder`.
    pub fn start(program: &Path, folder: &Path, disk: &Path) -> Result<Self> {
        let file = |name: &str| folder.join(name).display().to_string();
        write_configuration(folder, "")?;
        let args = [
            program.display().to_string(),
            "serve".to_owned(),
            format!("--blk-file={}", disk.display()),
            format!("--socket-path={}", file("socket")),
            format!("--control-path={}", file("control")),
            format!("--config={}", file("soak.toml")),
            format!("--serial={SERIAL}"),
            "--num-queues=2".to_owned(),
            "--queue-size=1024".to_owned(),
        ];
        let daemon = Daemon::start(args.to_vec(), &folder.join("socket"), &folder.join("log"))?;
        Ok(Self { daemon, program: program.to_owned(), folder: folder.to_owned() })
    }

    /// QEMU's arguments for the disk; `reconnect` is the option of the socket by which QEMU connects
    /// again, such as `reconnect=1`.
    pub fn qemu_args(&self, reconnect: &str) -> Vec<String> {
        let socket = self.daemon.socket().display();
        vec![
            "-chardev".to_owned(),
            format!("socket,id={SERIAL},path={socket},{reconnect}"),
            "-device".to_owned(),
            format!("vhost-user-blk-pci,chardev={SERIAL},num-queues=2,queue-size=1024"),
        ]
    }

    /// Stops it in order.
    pub fn stop(mut self) -> Result<()> {
        self.daemon.stop(STOP_LIMIT)
    }

    /// Writes the options that the next program reads.
    pub(super) fn configure(&self, options: &str) -> Result<()> {
        write_configuration(&self.folder, options)
    }

    /// Starts the next program, and waits until QEMU is connected to it.
    pub(super) fn replace(&mut self, successor: Successor) -> Result<()> {
        match successor {
            Successor::AfterKill => self.daemon.replace_killed()?,
            Successor::AfterStop => self.daemon.replace_stopped(STOP_LIMIT)?,
            Successor::ByUpgrade => return self.ctl(&["upgrade"]).map(drop),
        }
        wait_until_so(CONNECT_LIMIT, "QEMU at the next daemon", || {
            Ok(self.daemon.log().contains("front-end connected"))
        })
    }

    /// Sends a command to the control socket; returns the answer.
    pub(super) fn ctl(&self, words: &[&str]) -> Result<Value> {
        let program = self.program.display().to_string();
        let control = format!("--control-path={}", self.folder.join("control").display());
        let start: [&str; 4] = [&program, "ctl", &control, "--json"];
        let text = run_to_end(&[&start[..], words].concat())?;
        serde_json::from_str(&text).with_context(|| format!("the answer to {words:?}: {text}"))
    }

    /// A member of the status.
    pub(super) fn status(&self, member: &str) -> Result<Value> {
        Ok(self.ctl(&["status"])?[member].take())
    }

    /// The end of the log, for an error.
    pub(super) fn log_tail(&self) -> String {
        let log = self.daemon.log();
        let lines: Vec<&str> = log.lines().collect();
        let tail = &lines[lines.len().saturating_sub(LOG_LINES)..];
        tail.iter().map(|line| format!("  daemon| {line}\n")).collect()
    }
}

fn write_configuration(folder: &Path, options: &str) -> Result<()> {
    let path = folder.join("soak.toml");
    fs::write(&path, options).with_context(|| format!("cannot write {}", path.display()))
}
