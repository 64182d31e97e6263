// SPDX-License-Identifier: Apache-2.0
//! `vhost-blk serve` as a process of the case.

use crate::env::{Env, Plane};
use crate::fixture::{Disk, wait_for};
use crate::target::{LIMIT, SERIAL, need_module};
use anyhow::{Context, Result, ensure};
use driver::kernel::abi;
use std::io::ErrorKind;
use std::os::unix::net::UnixStream;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::time::{Duration, Instant};
use tempfile::TempDir;

/// A running daemon; killed when dropped.
pub(crate) struct Daemon {
    child: Child,
    program: PathBuf,
    arguments: Vec<String>,
    folder: TempDir,
}

impl Daemon {
    /// Starts the daemon over `disk`; `flags` are options of the kernel's device that it has too.
    pub(crate) fn start(env: &Env, disk: &Disk, queues: u16, flags: u32) -> Result<Self> {
        let folder = tempfile::tempdir().context("cannot make a folder for the socket")?;
        let on = |yes: bool| if yes { "on" } else { "off" };
        let path = |name: &str| folder.path().join(name).to_string_lossy().into_owned();
        let mut arguments: Vec<String> = [
            ("--socket-path", path("socket")),
            ("--blk-file", disk.path.to_string_lossy().into_owned()),
            ("--direct", on(disk.direct || disk.path.starts_with("/dev")).into()),
            ("--data-plane", if env.plane == Plane::Uring { "uring" } else { "kernel" }.into()),
            ("--num-queues", queues.to_string()),
            ("--queue-size", "1024".into()),
            ("--serial", SERIAL.into()),
            ("--lock", "off".into()),
            ("--packed", "off".into()),
        ]
        .into_iter()
        .flat_map(|(name, value)| [name.to_string(), value])
        .collect();
        arguments.push(format!("--read-only={}", on(flags & abi::OPT_READ_ONLY != 0)));
        let through = flags & abi::OPT_WRITE_THROUGH != 0;
        arguments.push(format!("--cache={}", if through { "writethrough" } else { "writeback" }));
        if let Some(wrap) = &env.wrap {
            arguments.extend(["--wrap".into(), wrap.clone()]);
        }
        if env.plane == Plane::Kernel {
            need_module()?;
            arguments.extend(["--control-path".into(), path("control")]);
        }
        let program = env.bin.join("vhost-blk");
        let child = spawn(&program, &arguments)?;
        let daemon = Self { child, program, arguments, folder };
        wait_for(daemon.socket())?;
        Ok(daemon)
    }

    fn socket(&self) -> PathBuf {
        self.folder.path().join("socket")
    }

    /// A connection to it. The socket file is there a moment before it listens.
    pub(crate) fn connect(&self) -> Result<UnixStream> {
        let end = Instant::now() + LIMIT;
        loop {
            match UnixStream::connect(self.socket()) {
                Err(why) if why.kind() == ErrorKind::ConnectionRefused && Instant::now() < end => {
                    std::thread::sleep(Duration::from_millis(5));
                }
                stream => return stream.context("cannot connect to the daemon"),
            }
        }
    }

    /// Tells the running daemon through its control socket.
    pub(crate) fn control(&self, words: &[&str]) -> Result<String> {
        let path = self.folder.path().join("control").to_string_lossy().into_owned();
        let program = self.program.to_string_lossy().into_owned();
        lab_case::system::run(&program, &[&["ctl", "--control-path", &path], words].concat())
    }

    /// Kills it with SIGKILL and starts a successor on the same socket.
    pub(crate) fn replace(&mut self) -> Result<()> {
        self.kill()?;
        // The stale socket file would look like a daemon that is there.
        std::fs::remove_file(self.socket())?;
        self.child = spawn(&self.program, &self.arguments)?;
        wait_for(self.socket())
    }

    fn kill(&mut self) -> Result<()> {
        self.child.kill()?;
        let status = self.child.wait()?;
        ensure!(status.signal() == Some(libc::SIGKILL), "the daemon had ended before: {status}");
        Ok(())
    }

    /// Whether it still runs.
    pub(crate) fn is_alive(&mut self) -> bool {
        matches!(self.child.try_wait(), Ok(None))
    }
}

fn spawn(program: &Path, arguments: &[String]) -> Result<Child> {
    let mut command = Command::new(program);
    command.arg("serve").args(arguments).args(["--log-level", "warn"]);
    command.spawn().with_context(|| format!("cannot run {}", program.display()))
}

impl Drop for Daemon {
    fn drop(&mut self) {
        // Fails only where it has ended already.
        let _ended = self.child.kill();
        let _reaped = self.child.wait();
    }
}
