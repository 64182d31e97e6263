// SPDX-License-Identifier: Apache-2.0
//! Child processes that cannot outlive the lab.
//!
//! Three nets: dropping an [`OwnedChild`] ends it; each child is in its own process group, so that
//! Ctrl-C reaches the lab first and the lab ends its children in order; and the kernel kills the
//! child if the lab itself is killed (`setpriv --pdeathsig`, which needs no unsafe code here).

use std::io;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use rustix::process::{Pid, Signal, kill_process};

use crate::interrupt;

/// How often a wait looks again.
pub(crate) const TICK: Duration = Duration::from_millis(20);

/// A running child that is ended when it goes out of scope.
#[derive(Debug)]
pub struct OwnedChild {
    name: String,
    child: Child,
    stop: StopWith,
}

/// The first signal that ends a child; whoever ignores it is killed after two seconds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StopWith {
    /// Asks politely: the daemon must get the chance to close its disk.
    Terminate,
    /// For guests whose state nobody will look at again.
    Kill,
}

impl OwnedChild {
    /// Starts `args[0]` with the other `args`, both output streams going to `log`.
    pub fn spawn(args: &[String], log: &Path, stop: StopWith) -> Result<Self> {
        let output = std::fs::File::create(log)
            .with_context(|| format!("cannot create the log {}", log.display()))?;
        let error_output = output.try_clone()?;
        let mut command = tied_to_us(args);
        command.process_group(0).stdin(Stdio::null()).stdout(output).stderr(error_output);
        Self::start(&mut command, args, stop)
    }

    /// Starts `args[0]` on the lab's own terminal, for interactive use.
    pub fn spawn_on_terminal(args: &[String], stop: StopWith) -> Result<Self> {
        Self::start(&mut tied_to_us(args), args, stop)
    }

    fn start(command: &mut Command, args: &[String], stop: StopWith) -> Result<Self> {
        let name = args[0].clone();
        let child = command.spawn().with_context(|| format!("cannot start {name}"))?;
        Ok(Self { name, child, stop })
    }

    /// The process id.
    pub fn id(&self) -> u32 {
        self.child.id()
    }

    /// The exit status if the child has ended.
    pub fn try_wait(&mut self) -> io::Result<Option<ExitStatus>> {
        self.child.try_wait()
    }

    /// Waits for the child to end by itself.
    pub fn wait(&mut self, timeout: Duration) -> Result<ExitStatus> {
        let deadline = Instant::now() + timeout;
        loop {
            if let Some(status) = self.try_wait()? {
                return Ok(status);
            }
            interrupt::check()?;
            if Instant::now() >= deadline {
                bail!("{} did not end within {} s", self.name, timeout.as_secs());
            }
            std::thread::sleep(TICK);
        }
    }

    /// Ends the child at once, as a power cut would.
    pub fn kill_hard(&mut self) -> Result<()> {
        self.child.kill().with_context(|| format!("cannot kill {}", self.name))?;
        self.child.wait()?;
        Ok(())
    }

    /// Ends the child with its first signal and gives its exit status.
    pub fn stop(&mut self, timeout: Duration) -> Result<ExitStatus> {
        if self.stop == StopWith::Terminate && self.try_wait()?.is_none() {
            kill_process(Pid::from_child(&self.child), Signal::TERM)?;
            let deadline = Instant::now() + timeout;
            while Instant::now() < deadline {
                if let Some(status) = self.try_wait()? {
                    return Ok(status);
                }
                std::thread::sleep(TICK);
            }
            self.kill_hard()?;
            bail!("{} ignored SIGTERM for {} s and was killed", self.name, timeout.as_secs());
        }
        self.child.kill()?;
        Ok(self.child.wait()?)
    }
}

impl Drop for OwnedChild {
    fn drop(&mut self) {
        // Already ended children and repeated stops are fine here; there is nobody to tell.
        let _ = self.stop(Duration::from_secs(2));
    }
}

/// A command that the kernel kills when the thread that started it is gone.
fn tied_to_us(args: &[String]) -> Command {
    let mut command = Command::new("setpriv");
    command.args(["--pdeathsig", "KILL", "--"]).args(args);
    command
}

/// Runs a short command to its end; its output goes into the error if it fails.
pub fn run_to_end(args: &[&str]) -> Result<String> {
    let output = Command::new(args[0])
        .args(&args[1..])
        .stdin(Stdio::null())
        .output()
        .with_context(|| format!("cannot start {}: run scripts/setup.sh", args[0]))?;
    if !output.status.success() {
        let text = String::from_utf8_lossy(&output.stderr);
        bail!("`{}` failed ({}): {}", args.join(" "), output.status, text.trim());
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sleeper(stop: StopWith) -> OwnedChild {
        let log = tempfile::NamedTempFile::new().unwrap();
        OwnedChild::spawn(&["sleep".into(), "600".into()], log.path(), stop).unwrap()
    }

    fn is_alive(pid: u32) -> bool {
        Path::new(&format!("/proc/{pid}")).exists()
    }

    #[test]
    fn a_dropped_child_is_gone() {
        for stop in [StopWith::Terminate, StopWith::Kill] {
            let child = sleeper(stop);
            let pid = child.id();
            assert!(is_alive(pid));
            drop(child);
            assert!(!is_alive(pid));
        }
    }

    #[test]
    fn a_child_that_does_not_end_is_reported_and_not_waited_for() {
        let mut child = sleeper(StopWith::Kill);
        let error = child.wait(Duration::from_millis(50)).unwrap_err();
        assert!(error.to_string().contains("did not end"), "{error}");
    }

    #[test]
    fn a_failing_command_gives_its_own_message() {
        let error = run_to_end(&["ls", "--no-such-option"]).unwrap_err();
        assert!(error.to_string().contains("no-such-option"), "{error}");
    }
}
