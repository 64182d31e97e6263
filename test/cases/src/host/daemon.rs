// SPDX-License-Identifier: Apache-2.0
//! `vhost-blk serve` as a process of the case.

use crate::host::env::{Env, Plane};
use crate::host::fixture::Disk;
use crate::host::target::{LIMIT, SERIAL, need_module};
use anyhow::{Context, Result, ensure};
use driver::kernel::abi;
use kit::daemon::Daemon as Process;
use serde_json::{Value, json};
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::time::Duration;
use tempfile::TempDir;

/// Longest time for the daemon to exit, far above the needs of emulation and KASAN.
const STOP_LIMIT: Duration = Duration::from_secs(30);

/// Failed exits of this process's daemons.
static BAD_ENDS: Mutex<Vec<String>> = Mutex::new(Vec::new());

/// Fails if a daemon of the case crashed, or did not exit in order after its stop.
///
/// # Errors
/// The failed exits.
pub(crate) fn all_ended_well() -> Result<()> {
    let bad = BAD_ENDS.lock().expect("no thread panics while it adds one");
    ensure!(bad.is_empty(), "{}", bad.join("; "));
    Ok(())
}

/// Sum of the samples at a socket of metrics that begin like this, after `vhost_blk_`.
pub(crate) fn total(socket: &Path, begin: &str) -> Result<u64> {
    let mut stream = UnixStream::connect(socket)?;
    stream.set_read_timeout(Some(LIMIT))?;
    stream.write_all(b"GET /metrics HTTP/1.1\r\n\r\n")?;
    let mut page = String::new();
    stream.read_to_string(&mut page).context("no metrics")?;
    let start = format!("vhost_blk_{begin}");
    let samples = page.lines().filter(|line| line.starts_with(&start));
    let values = samples.filter_map(|line| line.rsplit(' ').next()?.parse::<u64>().ok());
    let values: Vec<u64> = values.collect();
    ensure!(!values.is_empty(), "no metric {begin} in:\n{page}");
    Ok(values.iter().sum())
}

/// A running daemon. Drop tells it to exit; [`all_ended_well`] judges the exit.
pub(crate) struct Daemon {
    // Ends before its directory is removed.
    process: Process,
    program: PathBuf,
    directory: TempDir,
}

impl Daemon {
    /// Starts the daemon over `disk`; `flags` are options of the kernel device that the daemon has
    /// too, `more` are further options of its own.
    pub(crate) fn start(
        env: &Env,
        disk: &Disk,
        queues: u16,
        flags: u32,
        more: &[&str],
    ) -> Result<Self> {
        let directory = tempfile::tempdir().context("cannot make a directory for the socket")?;
        let on = |yes: bool| if yes { "on" } else { "off" };
        let path = |name: &str| directory.path().join(name).to_string_lossy().into_owned();
        let mut arguments: Vec<String> = [
            ("--socket-path", path("socket")),
            ("--blk-file", disk.path.to_string_lossy().into_owned()),
            ("--direct", on(disk.direct || disk.path.starts_with("/dev")).into()),
            ("--data-plane", env.plane.name().into()),
            ("--num-queues", queues.to_string()),
            ("--queue-size", "1024".into()),
            ("--serial", SERIAL.into()),
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
        arguments.extend(more.iter().map(ToString::to_string));
        arguments.extend(["--control-path".into(), path("control")]);
        arguments.extend(["--metrics".into(), format!("unix:{}", path("metrics"))]);
        if env.plane == Plane::Kernel {
            need_module()?;
        }
        let program = env.bin.join("vhost-blk");
        let begin = [program.to_string_lossy().into_owned(), "serve".into()];
        let end = ["--log-level".into(), "warn".into()];
        let arguments = begin.into_iter().chain(arguments).chain(end).collect();
        let (socket, log) = (directory.path().join("socket"), directory.path().join("log"));
        let process = Process::start_echoed(arguments, &socket, &log)?;
        Ok(Self { process, program, directory })
    }

    /// A connection to the daemon.
    pub(crate) fn connect(&self) -> Result<UnixStream> {
        UnixStream::connect(self.process.socket()).context("cannot connect to the daemon")
    }

    /// The socket on which it serves the disk.
    pub(crate) fn socket(&self) -> &Path {
        self.process.socket()
    }

    /// Sends a command to the running daemon through its control socket.
    pub(crate) fn control(&self, words: &[&str]) -> Result<String> {
        let path = self.directory.path().join("control").to_string_lossy().into_owned();
        let program = self.program.to_string_lossy().into_owned();
        kit::system::run(&program, &[&["ctl", "--control-path", &path], words].concat())
    }

    /// Begins a trace of slow requests.
    pub(crate) fn trace(&self, slower_than: Duration) -> Result<Trace> {
        let us = slower_than.as_micros();
        let (stream, first) = self.stream("Trace", &json!({"slower_than_us": us as u64}))?;
        ensure!(first["parameters"]["untraced"] == json!([]), "{first}");
        Ok(Trace(stream))
    }

    /// Begins to receive the events of the disk.
    pub(crate) fn events(&self) -> Result<Events> {
        Ok(Events(self.stream("Events", &json!({}))?.0))
    }

    /// Begins a stream of replies. Returns the first one, too.
    fn stream(&self, method: &str, parameters: &Value) -> Result<(Replies, Value)> {
        let mut stream = UnixStream::connect(self.directory.path().join("control"))?;
        stream.set_read_timeout(Some(LIMIT))?;
        let method = format!("io.vhostblk.{method}");
        let call = json!({"method": method, "more": true, "parameters": parameters});
        write!(stream, "{call}\0")?;
        let mut replies = Replies(BufReader::new(stream));
        let first = replies.next()?.with_context(|| format!("{method} has no reply"))?;
        Ok((replies, first))
    }

    /// Sum of a metric over all queues.
    pub(crate) fn total(&self, metric: &str) -> Result<u64> {
        total(&self.directory.path().join("metrics"), &format!("{metric}{{"))
    }

    /// Kills the daemon with SIGKILL and starts a successor on the same socket.
    pub(crate) fn replace(&mut self) -> Result<()> {
        self.process.replace_killed()
    }

    /// Kills the daemon with SIGKILL while its storage holds requests.
    pub(crate) fn kill_held(&self) -> Result<()> {
        self.process.kill_held()
    }

    /// Starts its successor on the same socket, after the storage has let the requests pass.
    pub(crate) fn replace_held(&mut self) -> Result<()> {
        self.process.replace_held()
    }

    /// Lines of the daemon's log, so far, that contain these words.
    pub(crate) fn lines_with(&self, words: &str) -> Vec<String> {
        let log = self.process.log();
        log.lines().filter(|line| line.contains(words)).map(str::to_owned).collect()
    }

    /// True while the daemon runs.
    pub(crate) fn is_alive(&mut self) -> bool {
        matches!(self.process.is_running(), Ok(true))
    }
}

/// The replies to one call.
struct Replies(BufReader<UnixStream>);

impl Replies {
    /// The next reply; `None` at the end of the connection.
    fn next(&mut self) -> Result<Option<Value>> {
        let mut message = Vec::new();
        self.0.read_until(0, &mut message).context("the daemon tells nothing")?;
        let text = message.strip_suffix(&[0]);
        text.map(serde_json::from_slice).transpose().context("the daemon tells no JSON")
    }
}

/// The changes of a disk.
pub(crate) struct Events(Replies);

impl Events {
    /// Waits for an event of this name, and returns it.
    pub(crate) fn wait_for(&mut self, name: &str) -> Result<Value> {
        loop {
            let mut reply = self.0.next()?.with_context(|| format!("no event {name}"))?;
            let event = reply["parameters"]["event"].take();
            if event["event"] == name {
                return Ok(event);
            }
        }
    }
}

/// A trace of slow requests.
pub(crate) struct Trace(Replies);

impl Trace {
    /// The next slow request, or number of lost ones; `None` at the end of the trace.
    pub(crate) fn next(&mut self) -> Result<Option<Value>> {
        let reply = self.0.next()?.map(|mut reply| reply["parameters"]["request"].take());
        Ok(reply.filter(|request| !request.is_null()))
    }
}

/// Tells a daemon to exit, which it must do in order.
fn terminate(process: &mut Process) -> Result<()> {
    ensure!(process.is_running()?, "the daemon had ended before");
    process.stop(STOP_LIMIT)
}

impl Drop for Daemon {
    fn drop(&mut self) {
        if let Err(why) = terminate(&mut self.process) {
            BAD_ENDS.lock().expect("no thread panics while it adds one").push(format!("{why:#}"));
        }
    }
}
