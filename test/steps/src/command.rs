// SPDX-License-Identifier: Apache-2.0
//! One command with a time limit: its output is shown line by line, written to the log of the run,
//! and returned.

use std::fs::File;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use rustix::io::Errno;
use rustix::process::{Pid, Signal, kill_process_group};

/// Interval between two looks at the limit and at Ctrl-C.
const TICK: Duration = Duration::from_millis(100);
/// Time that a command has to end after SIGTERM.
const GRACE: Duration = Duration::from_secs(60);
/// Time for the rest of the output, after everything that writes it was killed.
const REST_OF_OUTPUT: Duration = Duration::from_secs(5);

/// The end of a command.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum End {
    /// It ended by itself, with this exit code; `None`: by a signal.
    Exit(Option<i32>),
    /// It exceeded its limit and was killed.
    TimedOut,
}

/// A place for lines: the output and the log of the run.
pub struct Console {
    output: Box<dyn Write>,
    log: File,
}

impl Console {
    /// A console that writes to `output` and to `log`.
    pub fn new(output: impl Write + 'static, log: File) -> Self {
        Console { output: Box::new(output), log }
    }

    /// Writes one line.
    ///
    /// # Errors
    /// The log or the output cannot be written.
    pub fn say(&mut self, line: &str) -> Result<()> {
        let output = &mut self.output;
        writeln!(output, "{line}").and_then(|()| output.flush()).context("cannot write output")?;
        writeln!(self.log, "{line}").context("cannot write the log of the run")
    }
}

/// Runs `command` for at most `limit`, without input. Returns its end and the lines of its output.
/// Kills its whole process group at the end, so that nothing of it remains.
///
/// # Errors
/// The command cannot be started, the run was interrupted, or the output cannot be written.
pub fn run(
    command: &mut Command,
    limit: Duration,
    console: &mut Console,
) -> Result<(End, Vec<String>)> {
    let (output, writer) = std::io::pipe().context("no pipe is left")?;
    command.process_group(0).stdin(Stdio::null()).stdout(writer.try_clone()?).stderr(writer);
    let spawned = command.spawn().with_context(|| format!("cannot start {command:?}"));
    command.stdout(Stdio::null()).stderr(Stdio::null()); // closes our ends of the pipe
    let mut group = Group { leader: spawned?, is_gone: false };
    let (lines, arrived) = channel();
    std::thread::spawn(move || {
        // The receiver is gone only if the run ends.
        let decoded = BufReader::new(output).split(b'\n').map_while(Result::ok);
        decoded
            .map(|line| String::from_utf8_lossy(&line).into_owned())
            .try_for_each(|line| lines.send(line))
    });
    let mut said = Vec::new();
    let end = group.wait(limit, || receive(&arrived, TICK, console, &mut said))?;
    receive(&arrived, REST_OF_OUTPUT, console, &mut said)?;
    Ok((end, said))
}

/// Starts `command` without input, with its output in `log`.
///
/// # Errors
/// The command cannot be started.
pub fn start(command: &mut Command, log: File) -> Result<Group> {
    command.process_group(0).stdin(Stdio::null()).stdout(log.try_clone()?).stderr(log);
    let leader = command.spawn().with_context(|| format!("cannot start {command:?}"))?;
    Ok(Group { leader, is_gone: false })
}

/// Shows lines for `time`, or until the last one.
fn receive(
    arrived: &Receiver<String>,
    time: Duration,
    console: &mut Console,
    said: &mut Vec<String>,
) -> Result<()> {
    let until = Instant::now() + time;
    loop {
        match arrived.recv_timeout(until.saturating_duration_since(Instant::now())) {
            Ok(line) => {
                console.say(&line)?;
                said.push(line);
            }
            Err(RecvTimeoutError::Timeout) => return Ok(()),
            Err(RecvTimeoutError::Disconnected) => {
                std::thread::sleep(until.saturating_duration_since(Instant::now()).min(TICK));
                return Ok(());
            }
        }
        if Instant::now() >= until {
            return Ok(());
        }
    }
}

/// The process group of a command, ended on drop.
pub struct Group {
    leader: Child,
    /// Its number may belong to another group.
    is_gone: bool,
}

impl Group {
    /// Waits for the end of the leader, for at most `limit`, and ends all others. `look` is called in between.
    ///
    /// # Errors
    /// The run was interrupted, or the errors of `look`.
    pub fn wait(&mut self, limit: Duration, mut look: impl FnMut() -> Result<()>) -> Result<End> {
        let deadline = Instant::now() + limit;
        let status = loop {
            look()?;
            kit::interrupt::check()?;
            if let Some(status) = self.leader.try_wait()? {
                break Some(status);
            }
            if Instant::now() >= deadline {
                break None;
            }
        };
        self.end()?;
        Ok(status.map_or(End::TimedOut, |status| End::Exit(status.code())))
    }

    /// As [`Group::wait`], without a look.
    ///
    /// # Errors
    /// The run was interrupted.
    pub fn wait_idly(&mut self, limit: Duration) -> Result<End> {
        self.wait(limit, || {
            std::thread::sleep(TICK);
            Ok(())
        })
    }

    /// Sends SIGTERM, and SIGKILL after [`GRACE`] or when the leader has ended.
    fn end(&mut self) -> Result<()> {
        if self.is_gone {
            return Ok(());
        }
        if self.leader.try_wait()?.is_none() {
            self.signal(Signal::TERM)?;
        }
        let until = Instant::now() + GRACE;
        while self.leader.try_wait()?.is_none() && Instant::now() < until {
            std::thread::sleep(TICK);
        }
        self.is_gone = true;
        self.signal(Signal::KILL)?;
        self.leader.wait()?;
        Ok(())
    }

    fn signal(&self, signal: Signal) -> Result<()> {
        match kill_process_group(Pid::from_child(&self.leader), signal) {
            Ok(()) | Err(Errno::SRCH) => Ok(()),
            Err(error) => Err(error).context("cannot end a command"),
        }
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        // SIGTERM lets the lab end its VMs. An error has no receiver here.
        let _ = self.end();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run_shell(script: &str, limit: Duration) -> (End, Vec<String>) {
        let mut console = Console::new(std::io::sink(), tempfile::tempfile().unwrap());
        run(Command::new("sh").args(["-c", script]), limit, &mut console).unwrap()
    }

    #[test]
    fn output_of_both_streams_and_the_exit_code_are_returned() {
        let (end, said) = run_shell("echo one; echo two >&2; exit 3", Duration::from_secs(60));
        assert_eq!((end, said), (End::Exit(Some(3)), vec!["one".to_owned(), "two".to_owned()]));
    }

    #[test]
    fn a_command_that_exceeds_its_limit_is_killed_with_its_children() {
        let (end, said) = run_shell("sleep 600 & echo $!; wait", Duration::from_secs(3));
        assert_eq!(end, End::TimedOut);
        let child = format!("/proc/{}/cmdline", said[0]);
        let left = std::fs::read(child).unwrap_or_default();
        assert!(left.is_empty(), "{}", String::from_utf8_lossy(&left));
    }

    #[test]
    fn a_process_that_keeps_the_output_open_does_not_keep_the_run() {
        // The shell ends when the other process has a session of its own.
        let script = "trap 'exit 0' USR1; \
                      setsid sh -c 'echo $$; kill -USR1 $PPID; exec sleep 600' & \
                      while :; do wait; done";
        let (end, said) = run_shell(script, Duration::from_secs(60));
        let killed = Command::new("kill").args(&said).status().unwrap();
        assert_eq!(end, End::Exit(Some(0)));
        assert!(killed.success(), "{said:?} had ended");
    }

    #[test]
    fn a_program_that_does_not_exist_is_an_error() {
        let mut console = Console::new(std::io::sink(), tempfile::tempfile().unwrap());
        let outcome = run(&mut Command::new("/no/such"), Duration::from_secs(1), &mut console);
        assert!(outcome.unwrap_err().to_string().contains("/no/such"));
    }
}
