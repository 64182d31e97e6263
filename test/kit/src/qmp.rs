// SPDX-License-Identifier: Apache-2.0
//! The part of QEMU's monitor protocol that the tests need, over a Unix socket or over a port of
//! the machine that QEMU runs.

use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, SystemTime};

use anyhow::{Context, Result, bail};
use serde_json::{Value, json};

/// Time that QEMU may take for an answer on a socket.
const ANSWER_LIMIT: Duration = Duration::from_secs(60);

/// A connection to QEMU's monitor.
#[derive(Debug)]
pub struct Qmp<S> {
    stream: BufReader<S>,
    /// Distinguishes our commands from those of earlier users of the connection.
    session: u128,
    next: u64,
}

impl Qmp<UnixStream> {
    /// Connects and negotiates command mode.
    pub fn connect(socket: &Path) -> Result<Self> {
        let stream = UnixStream::connect(socket).context("cannot connect to QEMU's monitor")?;
        stream.set_read_timeout(Some(ANSWER_LIMIT))?;
        let mut qmp = Self::new(stream);
        qmp.execute("qmp_capabilities", json!({}))?;
        Ok(qmp)
    }
}

impl<S: Read + Write> Qmp<S> {
    fn new(stream: S) -> Self {
        let session = SystemTime::UNIX_EPOCH.elapsed().map_or(0, |time| time.as_nanos());
        Self { stream: BufReader::new(stream), session, next: 0 }
    }

    /// Negotiates command mode on a connection that outlives its users; skips answers to earlier
    /// users.
    pub fn shared(stream: S) -> Result<Self> {
        let mut qmp = Self::new(stream);
        // QEMU refuses this if an earlier user has done it.
        let _ = qmp.try_execute("qmp_capabilities", json!({}))?;
        Ok(qmp)
    }

    /// Runs a command and returns its result.
    pub fn execute(&mut self, command: &str, arguments: Value) -> Result<Value> {
        match self.try_execute(command, arguments)? {
            Ok(result) => Ok(result),
            Err(why) => bail!("QEMU refused {command}: {why}"),
        }
    }

    /// Runs a command that QEMU may refuse; the inner error is the refusal.
    pub fn try_execute(
        &mut self,
        command: &str,
        arguments: Value,
    ) -> Result<std::result::Result<Value, String>> {
        self.next += 1;
        let id = format!("{}-{}", self.session, self.next);
        let message = json!({ "execute": command, "arguments": arguments, "id": id });
        self.stream.get_mut().write_all(format!("{message}\n").as_bytes())?;
        loop {
            let mut answer = self.read().with_context(|| format!("QEMU's answer to {command}"))?;
            // The greeting, events, and answers to others have another id or none.
            if answer["id"] != id.as_str() {
                continue;
            }
            if let Some(why) = answer.get("error") {
                return Ok(Err(why["desc"].as_str().unwrap_or("no reason given").to_owned()));
            }
            return Ok(Ok(answer["return"].take()));
        }
    }

    fn read(&mut self) -> Result<Value> {
        let mut line = String::new();
        if self.stream.read_line(&mut line)? == 0 {
            bail!("QEMU closed its monitor");
        }
        serde_json::from_str(&line).with_context(|| format!("the monitor says {line}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A monitor that answers all commands with `answer`, after a greeting and an event.
    fn monitor(stream: UnixStream, answer: Value) {
        let mut out = stream.try_clone().unwrap();
        writeln!(out, "{}", json!({ "QMP": {} })).unwrap();
        for line in BufReader::new(stream).lines().map_while(Result::ok) {
            let command: Value = serde_json::from_str(&line).unwrap();
            let mut said = answer.clone();
            said["id"] = command["id"].clone();
            writeln!(out, "{}\n{said}", json!({ "event": "RESUME" })).unwrap();
        }
    }

    fn ask(answer: Value) -> Result<Value> {
        let (ours, theirs) = UnixStream::pair().unwrap();
        std::thread::spawn(move || monitor(theirs, answer));
        Qmp::shared(ours)?.execute("query-kvm", json!({}))
    }

    #[test]
    fn a_greeting_and_events_are_passed_over() {
        assert_eq!(ask(json!({ "return": 7 })).unwrap(), json!(7));
    }

    #[test]
    fn a_refusal_is_told_with_its_reason() {
        let why = ask(json!({ "error": { "desc": "no such thing" } })).unwrap_err();
        assert_eq!(why.to_string(), "QEMU refused query-kvm: no such thing");
    }
}
