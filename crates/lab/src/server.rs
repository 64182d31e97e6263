// SPDX-License-Identifier: Apache-2.0
//! A vhost-user-blk server on a socket: the daemon, or any other program for comparison.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::ExitStatus;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use tempfile::TempDir;

use crate::interrupt;
use crate::process::{OwnedChild, StopWith, TICK};

const START_TIMEOUT: Duration = Duration::from_secs(10);
const STOP_TIMEOUT: Duration = Duration::from_secs(5);

/// The flag of a listening socket in `/proc/net/unix` (`__SO_ACCEPTCON`).
const LISTENING: &str = "00010000";

/// How a server is started: words, in which `{socket}`, `{disk}` and `{queues}` stand for values.
#[derive(Debug, Clone)]
pub struct ServerCommand {
    words: Vec<String>,
}

impl ServerCommand {
    /// The daemon, with the options every user would give.
    pub fn daemon(binary: &Path) -> Self {
        let binary = binary.display().to_string();
        let options =
            "serve --socket-path {socket} --blk-file {disk} --num-queues {queues}".split(' ');
        Self { words: [binary].into_iter().chain(options.map(str::to_owned)).collect() }
    }

    /// Any other server, as a command line without quoting.
    pub fn template(text: &str) -> Result<Self> {
        let words: Vec<String> = text.split_whitespace().map(str::to_owned).collect();
        for needed in ["{socket}", "{disk}"] {
            if !text.contains(needed) {
                bail!("the server command `{text}` lacks {needed}");
            }
        }
        Ok(Self { words })
    }

    /// The program's name, for tables.
    pub fn name(&self) -> String {
        let program = self.words.first().map(String::as_str).unwrap_or_default();
        let name = Path::new(program).file_name();
        name.map(|name| name.to_string_lossy().into_owned()).unwrap_or_default()
    }

    fn with(&self, socket: &Path, disk: &Path, queues: u32) -> Vec<String> {
        let fill = |word: &String| {
            word.replace("{socket}", &socket.display().to_string())
                .replace("{disk}", &disk.display().to_string())
                .replace("{queues}", &queues.to_string())
        };
        self.words.iter().map(fill).collect()
    }
}

/// A running server; dropping it ends it.
#[derive(Debug)]
pub struct Server {
    child: OwnedChild,
    dir: TempDir,
}

impl Server {
    /// Starts a server on `disk` and waits until it listens.
    pub fn start(command: &ServerCommand, disk: &Path, queues: u32) -> Result<Self> {
        let dir = tempfile::Builder::new().prefix("lab-server-").tempdir()?;
        let args = command.with(&dir.path().join("socket"), disk, queues);
        let child = OwnedChild::spawn(&args, &dir.path().join("log"), StopWith::Terminate)?;
        let mut server = Self { child, dir };
        let deadline = Instant::now() + START_TIMEOUT;
        while !is_listening(&server.socket())? {
            interrupt::check()?;
            if let Some(status) = server.child.try_wait()? {
                bail!("`{}` ended at once ({status}):\n{}", args.join(" "), server.log());
            }
            if Instant::now() >= deadline {
                bail!("`{}` did not listen in time:\n{}", args.join(" "), server.log());
            }
            std::thread::sleep(TICK);
        }
        Ok(server)
    }

    /// The socket it listens on.
    pub fn socket(&self) -> PathBuf {
        self.dir.path().join("socket")
    }

    /// What it has written so far.
    pub fn log(&self) -> String {
        let bytes = fs::read(self.dir.path().join("log")).unwrap_or_default();
        String::from_utf8_lossy(&bytes).into_owned()
    }

    /// The process id.
    pub fn id(&self) -> u32 {
        self.child.id()
    }

    /// Whether it still runs.
    pub fn is_running(&mut self) -> Result<bool> {
        Ok(self.child.try_wait()?.is_none())
    }

    /// Stops it by SIGTERM; an unclean exit is an error with the server's log.
    pub fn stop(mut self) -> Result<()> {
        let status: ExitStatus =
            self.child.stop(STOP_TIMEOUT).with_context(|| format!("its log:\n{}", self.log()))?;
        if !status.success() {
            bail!("the server ended badly ({status}):\n{}", self.log());
        }
        Ok(())
    }
}

/// Looks without connecting: a probe that connects would take the daemon's one connection.
fn is_listening(socket: &Path) -> Result<bool> {
    let table = fs::read_to_string("/proc/net/unix").context("cannot list listening sockets")?;
    let path = socket.display().to_string();
    Ok(table.lines().any(|line| {
        let mut fields = line.split_whitespace();
        fields.nth(3) == Some(LISTENING) && fields.nth(3) == Some(path.as_str())
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

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
    fn a_server_that_ends_at_once_is_reported_with_its_words() {
        let dir = tempfile::tempdir().unwrap();
        let command = ServerCommand::template("ls /no-such-file {socket} {disk}").unwrap();
        let error = Server::start(&command, dir.path(), 1).unwrap_err();
        assert!(format!("{error:#}").contains("no-such-file"), "{error:#}");
    }

    #[test]
    fn a_server_command_without_its_placeholders_is_refused() {
        let error = ServerCommand::template("server {socket}").unwrap_err();
        assert!(error.to_string().contains("{disk}"), "{error}");
    }
}
