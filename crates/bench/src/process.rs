// SPDX-License-Identifier: Apache-2.0
//! Child processes that never outlive the benchmark.

use std::fs::{self, File};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use rustix::process::{Pid, Signal, kill_process};

/// How long a server may take until its socket accepts connections.
/// (In emulation inside of emulation: long.)
const START_LIMIT: Duration = Duration::from_secs(90);

/// A running child: killed and waited for on drop, and by the kernel if this process dies first.
#[derive(Debug)]
pub struct Running {
    child: Child,
    /// The command line, as a shell would take it.
    pub command_line: String,
    log: std::path::PathBuf,
}

impl Running {
    /// Starts a program with its output in a log file.
    pub fn start(program: &str, args: &[String], log: &Path) -> Result<Self> {
        let output =
            File::create(log).with_context(|| format!("cannot write {}", log.display()))?;
        // setpriv becomes the program (same pid) after it asked for the parent-death signal.
        let child = Command::new("setpriv")
            .args(["--pdeathsig", "KILL", "--", program])
            .args(args)
            // Ctrl-C reaches the benchmark only, which then ends its servers in order.
            .process_group(0)
            .stdin(Stdio::null())
            .stdout(output.try_clone()?)
            .stderr(output)
            .spawn()
            .context("cannot run setpriv (install util-linux)")?;
        let command_line = format!("{program} {}", args.join(" "));
        Ok(Self { child, command_line, log: log.to_owned() })
    }

    /// The process id.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// What it has printed so far.
    pub fn log(&self) -> String {
        fs::read_to_string(&self.log).unwrap_or_default().trim().to_owned()
    }

    /// Asks it to end and waits until it has.
    pub fn terminate(&mut self, limit: Duration) -> Result<ExitStatus> {
        // Fails only where it has ended already.
        let _ = kill_process(Pid::from_child(&self.child), Signal::TERM);
        let end = Instant::now() + limit;
        loop {
            if let Some(status) = self.child.try_wait()? {
                return Ok(status);
            }
            if Instant::now() > end {
                bail!("`{}` ignores SIGTERM: {}", self.command_line, self.log());
            }
            sleep(Duration::from_millis(10));
        }
    }

    /// Waits until the socket file is there. It is not connected to: some servers serve only one
    /// connection at a time.
    pub fn wait_for_socket(&mut self, socket: &Path) -> Result<()> {
        let end = Instant::now() + START_LIMIT;
        while !socket.exists() {
            if let Some(status) = self.child.try_wait()? {
                bail!("`{}` ended with {status}: {}", self.command_line, self.log());
            }
            if Instant::now() > end {
                bail!("`{}` made no socket in {START_LIMIT:?}", self.command_line);
            }
            sleep(Duration::from_millis(20));
        }
        // Between bind and listen there is a moment; the socket exists before it accepts.
        sleep(Duration::from_millis(100));
        Ok(())
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        // Both fail only where the process has ended already, which is what is wanted.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The process that listens on a socket, as the kernel recorded it.
pub fn listener_pid(socket: &str) -> Result<u32> {
    let stream =
        UnixStream::connect(socket).with_context(|| format!("cannot connect to {socket}"))?;
    let peer = rustix::net::sockopt::socket_peercred(&stream)?;
    Ok(peer.pid.as_raw_nonzero().get() as u32)
}
