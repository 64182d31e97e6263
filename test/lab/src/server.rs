// SPDX-License-Identifier: Apache-2.0
//! A vhost-user-blk server on a socket: the daemon, or any other program for comparison.

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Error, Result, anyhow, bail};
use kit::daemon::Daemon;
use tempfile::TempDir;

use crate::emulator::EmulatorFault;

const STOP_TIMEOUT: Duration = Duration::from_secs(20);

/// The command of a server: words, in which `{socket}`, `{disk}` and `{queues}` stand for values.
#[derive(Debug, Clone)]
pub struct ServerCommand {
    words: Vec<String>,
}

impl ServerCommand {
    /// The daemon, with the options that every user would give.
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

/// A running server with its own directory, ended on drop.
#[derive(Debug)]
pub struct Server {
    // Dropped before its directory.
    daemon: Daemon,
    _dir: TempDir,
}

impl Server {
    /// Starts a server on `disk` and waits until it listens.
    pub fn start(command: &ServerCommand, disk: &Path, queues: u32) -> Result<Self> {
        let dir = tempfile::Builder::new().prefix("lab-server-").tempdir()?;
        let socket = dir.path().join("socket");
        let args = command.with(&socket, disk, queues);
        let daemon = Daemon::start(args, &socket, &dir.path().join("log"))?;
        Ok(Self { daemon, _dir: dir })
    }

    /// Kills it (SIGKILL).
    pub fn kill(mut self) -> Result<()> {
        self.daemon.kill()
    }

    /// Kills it (SIGKILL) and starts another one on the same socket and disk.
    pub fn replace_killed(&mut self) -> Result<()> {
        self.daemon.replace_killed()
    }

    /// The socket it listens on.
    pub fn socket(&self) -> PathBuf {
        self.daemon.socket().to_owned()
    }

    /// Its output so far.
    pub fn log(&self) -> String {
        self.daemon.log()
    }

    /// The same error with the server's output. A fault of the emulator stays one if the server has
    /// survived it.
    pub fn with_log(&mut self, error: Error) -> Error {
        match error.is::<EmulatorFault>() && self.is_running().unwrap_or(false) {
            true => error,
            false => anyhow!("{error:#}\nthe server's log:\n{}", self.log()),
        }
    }

    /// The process id.
    pub fn id(&self) -> u32 {
        self.daemon.id()
    }

    /// True while it runs.
    pub fn is_running(&mut self) -> Result<bool> {
        self.daemon.is_running()
    }

    /// Stops it by SIGTERM; an unclean exit is an error with the server's log.
    pub fn stop(mut self) -> Result<()> {
        self.daemon.stop(STOP_TIMEOUT)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_server_command_without_its_placeholders_is_refused() {
        let error = ServerCommand::template("server {socket}").unwrap_err();
        assert!(error.to_string().contains("{disk}"), "{error}");
    }
}
