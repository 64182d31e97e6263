// SPDX-License-Identifier: Apache-2.0
//! Commands for the agent in a guest ([`SCRIPT`]), over a virtio-serial port.

use std::io::{ErrorKind, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};

/// The agent: a shell script, run by the first process of a guest. It needs the virtio-serial port
/// `agent.commands`.
pub const SCRIPT: &str = include_str!("agent.sh");

/// Number of the next command. No number is used twice, so a late answer is recognized by its
/// number.
static NEXT: AtomicU64 = AtomicU64::new(1);

/// A connection to the agent.
#[derive(Debug)]
pub struct Agent {
    stream: UnixStream,
    /// Received bytes that are not yet a whole line.
    partial: Vec<u8>,
}

/// Output of a command, and its exit code.
#[derive(Clone, Debug)]
pub struct Output {
    /// Standard output and error.
    pub text: String,
    /// Exit code.
    pub code: i32,
}

/// A guest that runs shell commands.
pub trait Shell {
    /// Runs a command of one line.
    fn run(&mut self, command: &str) -> Result<Output>;

    /// Runs a command that must succeed; returns its output.
    fn ok(&mut self, command: &str) -> Result<String> {
        let output = self.run(command)?;
        if output.code != 0 {
            let text = output.text.trim();
            bail!("in the guest: `{command}` ended with {}: {text}", output.code);
        }
        Ok(output.text)
    }
}

impl Agent {
    /// Connects to QEMU's end of the port.
    pub fn connect(socket: &Path) -> Result<Self> {
        let stream = UnixStream::connect(socket).context("cannot connect to the guest's port")?;
        stream.set_read_timeout(Some(Duration::from_millis(100)))?;
        Ok(Self { stream, partial: Vec::new() })
    }

    /// Waits until a booted guest reports that its agent listens.
    pub fn wait_ready(&mut self, limit: Duration) -> Result<()> {
        let end = Instant::now() + limit;
        while self.line(end)? != "@@ ready" {}
        Ok(())
    }

    /// Runs a shell command (one line) and waits for its end.
    pub fn run(&mut self, command: &str, limit: Duration) -> Result<Output> {
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let end = Instant::now() + limit;
        assert!(!command.contains('\n'), "a command is one line");
        writeln!(self.stream, "{number} {command}")?;
        let mut text = String::new();
        loop {
            let line = self.line(end).with_context(|| format!("running `{command}`: {text}"))?;
            match line.strip_prefix("@@ ") {
                None => text = text + &line + "\n",
                Some(mark) => match mark.split_once(' ') {
                    Some((n, code)) if n == number.to_string() => {
                        let code = code.trim().parse().context("the agent's exit code")?;
                        return Ok(Output { text, code });
                    }
                    _ => text.clear(),
                },
            }
        }
    }

    fn line(&mut self, end: Instant) -> Result<String> {
        loop {
            if let Some(at) = self.partial.iter().position(|&byte| byte == b'\n') {
                let line: Vec<_> = self.partial.drain(..=at).collect();
                return Ok(String::from_utf8_lossy(&line).trim_end().to_owned());
            }
            let mut bytes = [0; 4096];
            match self.stream.read(&mut bytes) {
                Ok(0) => bail!("QEMU closed the guest's port"),
                Ok(n) => self.partial.extend(&bytes[..n]),
                Err(e) if matches!(e.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => {}
                Err(e) => return Err(e.into()),
            }
            if Instant::now() > end {
                bail!("the guest does not answer in time");
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{BufRead, BufReader};
    use std::os::unix::net::UnixListener;

    #[test]
    fn an_answer_left_over_from_another_command_is_passed_over() {
        let directory = tempfile::tempdir().unwrap();
        let socket = directory.path().join("port");
        let listener = UnixListener::bind(&socket).unwrap();
        let guest = std::thread::spawn(move || {
            let mut stream = listener.accept().unwrap().0;
            write!(stream, "@@ ready\nold output\n@@ 0 1\n").unwrap();
            let mut line = String::new();
            BufReader::new(stream.try_clone().unwrap()).read_line(&mut line).unwrap();
            let number = line.split(' ').next().unwrap();
            write!(stream, "hello\n@@ {number} 3\n").unwrap();
            line
        });
        let mut agent = Agent::connect(&socket).unwrap();
        agent.wait_ready(Duration::from_secs(5)).unwrap();
        let output = agent.run("echo hello; exit 3", Duration::from_secs(5)).unwrap();
        assert_eq!((output.text.as_str(), output.code), ("hello\n", 3));
        assert!(guest.join().unwrap().ends_with("echo hello; exit 3\n"));
    }
}
