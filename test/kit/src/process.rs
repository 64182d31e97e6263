// SPDX-License-Identifier: Apache-2.0
//! Child processes that cannot outlive the program that started them.
//!
//! Three safeguards: dropping an [`OwnedChild`] ends it; each child is in its own process group, so
//! that Ctrl-C reaches the program first, which ends its children in order; and the kernel kills
//! the child if the program itself is killed (`setpriv --pdeathsig`, which needs no unsafe code
//! here).

use std::fs::File;
use std::io::{self, BufRead, BufReader, ErrorKind, Write};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use rustix::process::{Pid, Signal, kill_process, kill_process_group};

use crate::interrupt;
use crate::outcome::skip;

/// Interval between two looks of a wait.
pub const TICK: Duration = Duration::from_millis(20);

/// Time that a server may take to listen if it does not end at once: nested emulation is slow.
const START_LIMIT: Duration = Duration::from_secs(90);

/// The flag of a listening socket in `/proc/net/unix` (`__SO_ACCEPTCON`).
const LISTENING: &str = "00010000";

/// A running child, ended on drop.
#[derive(Debug)]
pub struct OwnedChild {
    args: Vec<String>,
    log: Option<PathBuf>,
    child: Child,
    stop: StopWith,
    /// The thread that copies its output to ours.
    echo: Option<JoinHandle<()>>,
}

/// The first signal that ends a child; one that ignores it is killed after two seconds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StopWith {
    /// SIGTERM: the daemon must get the chance to close its disk.
    Terminate,
    /// SIGKILL: for guests whose state is not read again.
    Kill,
    /// As [`StopWith::Kill`], for the whole process group: the processes of User Mode Linux outlive
    /// it.
    KillGroup,
}

impl OwnedChild {
    /// Starts `args[0]` with the other `args`, and writes both output streams to `log`.
    pub fn spawn(args: &[String], log: &Path, stop: StopWith) -> Result<Self> {
        let output = create_log(log)?;
        let error_output = output.try_clone()?;
        let mut command = tied_to_us(args);
        command.process_group(0).stdin(Stdio::null()).stdout(output).stderr(error_output);
        Self::start(&mut command, args, Some(log), stop)
    }

    /// As [`Self::spawn`]; also copies its stderr to ours.
    pub fn spawn_echoed(args: &[String], log: &Path, stop: StopWith) -> Result<Self> {
        let mut output = create_log(log)?;
        let mut command = tied_to_us(args);
        command.process_group(0).stdin(Stdio::null()).stdout(output.try_clone()?);
        let mut this = Self::start(command.stderr(Stdio::piped()), args, Some(log), stop)?;
        let said = BufReader::new(this.child.stderr.take().context("the stderr of a child")?);
        // The thread ends with the child.
        this.echo = Some(std::thread::spawn(move || {
            for line in said.lines().map_while(Result::ok) {
                eprintln!("{line}");
                // A full disk shows in later errors; this thread cannot report it.
                let _ = writeln!(output, "{line}");
            }
        }));
        Ok(this)
    }

    /// Starts `args[0]` on our own terminal, for interactive use.
    pub fn spawn_on_terminal(args: &[String], stop: StopWith) -> Result<Self> {
        Self::start(&mut tied_to_us(args), args, None, stop)
    }

    fn start(
        command: &mut Command,
        args: &[String],
        log: Option<&Path>,
        stop: StopWith,
    ) -> Result<Self> {
        let child = command.spawn().with_context(|| format!("cannot start {}", args[0]))?;
        let (args, log) = (args.to_vec(), log.map(Path::to_owned));
        Ok(Self { args, log, child, stop, echo: None })
    }

    /// The command line that started it.
    pub fn command_line(&self) -> String {
        self.args.join(" ")
    }

    /// Its output so far.
    pub fn log(&self) -> String {
        let bytes = self.log.as_ref().and_then(|log| std::fs::read(log).ok()).unwrap_or_default();
        String::from_utf8_lossy(&bytes).into_owned()
    }

    /// Waits until it listens on a socket.
    pub fn wait_until_it_listens(&mut self, socket: &Path) -> Result<()> {
        let deadline = Instant::now() + START_LIMIT;
        while !is_listening(socket)? {
            interrupt::check()?;
            if let Some(status) = self.try_wait()? {
                bail!("`{}` ended at once ({status}):\n{}", self.command_line(), self.log());
            }
            if Instant::now() >= deadline {
                bail!("`{}` did not listen in time:\n{}", self.command_line(), self.log());
            }
            std::thread::sleep(TICK);
        }
        Ok(())
    }

    /// The process id.
    pub fn id(&self) -> u32 {
        self.child.id()
    }

    /// The exit status if the child has ended; its log is complete then.
    pub fn try_wait(&mut self) -> io::Result<Option<ExitStatus>> {
        let status = self.child.try_wait()?;
        if status.is_some()
            && let Some(echo) = self.echo.take()
        {
            // The thread panics only if our own stderr is gone.
            let _ = echo.join();
        }
        Ok(status)
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
                bail!("{} did not end within {} s", self.args[0], timeout.as_secs());
            }
            std::thread::sleep(TICK);
        }
    }

    /// Kills the child at once, as a power cut would.
    pub fn kill_hard(&mut self) -> Result<()> {
        self.kill().with_context(|| format!("cannot kill {}", self.args[0]))?;
        self.child.wait()?;
        Ok(())
    }

    fn kill(&mut self) -> io::Result<()> {
        // A reaped child's number may belong to another process.
        if self.stop == StopWith::KillGroup && self.try_wait()?.is_none() {
            kill_process_group(Pid::from_child(&self.child), Signal::KILL)?;
        }
        self.child.kill()
    }

    /// Ends the child with its first signal and returns its exit status.
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
            bail!("{} ignored SIGTERM for {} s and was killed", self.args[0], timeout.as_secs());
        }
        self.kill()?;
        Ok(self.child.wait()?)
    }
}

impl Drop for OwnedChild {
    fn drop(&mut self) {
        // The child may have ended already. An error has no receiver here.
        let _ = self.stop(Duration::from_secs(2));
    }
}

/// Reads `/proc` and does not connect: a connection would take the daemon's only one.
fn is_listening(socket: &Path) -> Result<bool> {
    let table =
        std::fs::read_to_string("/proc/net/unix").context("cannot list listening sockets")?;
    let path = socket.display().to_string();
    Ok(table.lines().any(|line| {
        let mut fields = line.split_whitespace();
        fields.nth(3) == Some(LISTENING) && fields.nth(3) == Some(path.as_str())
    }))
}

fn create_log(log: &Path) -> Result<File> {
    File::create(log).with_context(|| format!("cannot create the log {}", log.display()))
}

/// A command that the kernel kills when the thread that started it ends.
fn tied_to_us(args: &[String]) -> Command {
    let mut command = Command::new("setpriv");
    command.args(["--pdeathsig", "KILL", "--"]).args(args);
    command
}

/// Runs a short command to its end and returns its output. If it fails, the error holds the output.
/// A command that is not installed is a reason to skip a case.
pub fn run_to_end(args: &[&str]) -> Result<String> {
    let output = match Command::new(args[0]).args(&args[1..]).stdin(Stdio::null()).output() {
        Err(why) if why.kind() == ErrorKind::NotFound => {
            return Err(skip(format!("{} is not installed", args[0]))
                .context(format!("cannot start {}: run scripts/setup.sh", args[0])));
        }
        output => output.with_context(|| format!("cannot start {}", args[0]))?,
    };
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    if !output.status.success() {
        let errors = String::from_utf8_lossy(&output.stderr);
        let (said, errors) = (said.trim(), errors.trim());
        bail!("`{}` failed ({}): {errors} {said}", args.join(" "), output.status);
    }
    Ok(said)
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
    fn a_listening_socket_is_seen_without_connecting() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("s");
        assert!(!is_listening(&path).unwrap());
        let listener = std::os::unix::net::UnixListener::bind(&path).unwrap();
        assert!(is_listening(&path).unwrap());
        listener.set_nonblocking(true).unwrap();
        assert!(listener.accept().is_err(), "the look left a connection");
    }

    #[test]
    fn a_failing_command_gives_its_own_message() {
        let error = run_to_end(&["ls", "--no-such-option"]).unwrap_err();
        assert!(error.to_string().contains("no-such-option"), "{error}");
    }
}
