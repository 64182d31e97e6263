// SPDX-License-Identifier: Apache-2.0
//! A vhost-user-blk server on a socket: the daemon, or any other program for comparison.

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use rustix::process::{Pid, Signal, kill_process};

use crate::process::{OwnedChild, StopWith};
use crate::sched::stands_still;
use crate::wait::wait_until_so;

/// Longest time for the threads of a killed server to end.
const STAND_LIMIT: Duration = Duration::from_secs(60);

/// A running server, ended on drop.
#[derive(Debug)]
pub struct Daemon {
    child: OwnedChild,
    args: Vec<String>,
    socket: PathBuf,
    log: PathBuf,
    echoed: bool,
}

impl Daemon {
    /// Starts `args[0]` with the other `args`, writes its output to `log`, and waits until it
    /// listens on `socket`.
    pub fn start(args: Vec<String>, socket: &Path, log: &Path) -> Result<Self> {
        Self::start_as(args, socket, log, false)
    }

    /// As [`Self::start`]; also copies its stderr to ours.
    pub fn start_echoed(args: Vec<String>, socket: &Path, log: &Path) -> Result<Self> {
        Self::start_as(args, socket, log, true)
    }

    fn start_as(args: Vec<String>, socket: &Path, log: &Path, echoed: bool) -> Result<Self> {
        let child = listening(&args, socket, log, echoed)?;
        Ok(Self { child, args, socket: socket.to_owned(), log: log.to_owned(), echoed })
    }

    /// Kills it (SIGKILL); an error if it has already ended.
    pub fn kill(&mut self) -> Result<()> {
        if let Some(status) = self.child.try_wait()? {
            bail!("`{}` had ended before ({status}):\n{}", self.command_line(), self.log());
        }
        self.child.kill_hard()
    }

    /// Kills it (SIGKILL) unless it has already ended.
    pub fn end(mut self) -> Result<()> {
        self.child.kill_hard()
    }

    /// Kills it (SIGKILL) and starts another one on the same socket, with a new log.
    pub fn replace_killed(&mut self) -> Result<()> {
        self.kill()?;
        self.start_next()
    }

    /// Kills it (SIGKILL) while its storage hangs, so that it cannot end. None of its code runs any more on return.
    pub fn kill_held(&self) -> Result<()> {
        self.signal(Signal::KILL)?;
        let what = "the threads of a killed server to end";
        wait_until_so(STAND_LIMIT, what, || stands_still(self.id()))
    }

    /// As [`Self::replace_killed`] after [`Self::kill_held`], and after its storage has answered.
    pub fn replace_held(&mut self) -> Result<()> {
        self.child.kill_hard()?;
        self.start_next()
    }

    fn start_next(&mut self) -> Result<()> {
        self.child = listening(&self.args, &self.socket, &self.log, self.echoed)?;
        Ok(())
    }

    /// Stops it by SIGTERM and starts another one on the same socket, with a new log.
    pub fn replace_stopped(&mut self, limit: Duration) -> Result<()> {
        self.stop(limit)?;
        self.start_next()
    }

    /// Sends it a signal.
    pub fn signal(&self, signal: Signal) -> Result<()> {
        let id = i32::try_from(self.id()).ok().and_then(Pid::from_raw);
        Ok(kill_process(id.context("a process has an id")?, signal)?)
    }

    /// Stops it by SIGTERM; an unclean exit is an error with its log.
    pub fn stop(&mut self, limit: Duration) -> Result<()> {
        let stopped = self.child.stop(limit);
        let status = stopped.with_context(|| format!("its log:\n{}", self.log()))?;
        if !status.success() {
            bail!("`{}` ended badly ({status}):\n{}", self.command_line(), self.log());
        }
        Ok(())
    }

    /// Waits until it listens on one more socket.
    pub fn wait_until_it_listens(&mut self, socket: &Path) -> Result<()> {
        self.child.wait_until_it_listens(socket)
    }

    /// The socket it listens on.
    pub fn socket(&self) -> &Path {
        &self.socket
    }

    /// The command line that started it.
    pub fn command_line(&self) -> String {
        self.child.command_line()
    }

    /// Its output so far.
    pub fn log(&self) -> String {
        self.child.log()
    }

    /// The process id.
    pub fn id(&self) -> u32 {
        self.child.id()
    }

    /// True while it runs.
    pub fn is_running(&mut self) -> Result<bool> {
        Ok(self.child.try_wait()?.is_none())
    }
}

fn listening(args: &[String], socket: &Path, log: &Path, echoed: bool) -> Result<OwnedChild> {
    let spawn = if echoed { OwnedChild::spawn_echoed } else { OwnedChild::spawn };
    let mut child = spawn(args, log, StopWith::Terminate)?;
    child.wait_until_it_listens(socket)?;
    Ok(child)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wait::wait_until;
    use std::os::unix::net::UnixListener;

    #[test]
    fn a_server_that_ends_at_once_is_reported_with_its_words() {
        let dir = tempfile::tempdir().unwrap();
        for start in [Daemon::start, Daemon::start_echoed] {
            let args = ["ls", "/no-such-file"].map(str::to_owned).to_vec();
            let error = start(args, &dir.path().join("s"), &dir.path().join("log")).unwrap_err();
            assert!(format!("{error:#}").contains("no-such-file"), "{error:#}");
        }
    }

    #[test]
    fn a_server_that_does_not_end_well_is_an_error_with_its_log() {
        let dir = tempfile::tempdir().unwrap();
        let socket = dir.path().join("s");
        // The test listens in its place.
        let _listener = UnixListener::bind(&socket).unwrap();
        // The words are those of the log, and not of the command.
        let script =
            "trap 'echo it is bro\"\"ken; exit 1' TERM; echo ready; while :; do sleep 0.05; done";
        let args = ["sh", "-c", script].map(str::to_owned).to_vec();
        let log = dir.path().join("log");
        let mut daemon = Daemon::start(args, &socket, &log).unwrap();
        wait_until(Duration::from_secs(60), "the trap", || {
            Ok(std::fs::read_to_string(&log)?.contains("ready").then_some(()))
        })
        .unwrap();
        let error = daemon.stop(Duration::from_secs(60)).unwrap_err();
        assert!(format!("{error:#}").contains("it is broken"), "{error:#}");
    }
}
