// SPDX-License-Identifier: Apache-2.0
//! QEMU's monitor protocol, as much as is needed here, over a Unix socket.

use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use serde_json::{Value, json};

/// How long QEMU may take for an answer.
const ANSWER_LIMIT: Duration = Duration::from_secs(60);

/// A connection to QEMU's monitor.
#[derive(Debug)]
pub struct Qmp {
    stream: BufReader<UnixStream>,
}

impl Qmp {
    /// Connects and gets ready for commands.
    pub fn connect(socket: &Path) -> Result<Self> {
        let stream = UnixStream::connect(socket).context("cannot connect to QEMU's monitor")?;
        stream.set_read_timeout(Some(ANSWER_LIMIT))?;
        let mut qmp = Self { stream: BufReader::new(stream) };
        qmp.read().context("QEMU's greeting")?;
        qmp.execute("qmp_capabilities", json!({}))?;
        Ok(qmp)
    }

    /// Runs a command and returns its result; events are passed over.
    pub fn execute(&mut self, command: &str, arguments: Value) -> Result<Value> {
        let message = json!({ "execute": command, "arguments": arguments });
        writeln!(self.stream.get_mut(), "{message}")?;
        loop {
            let mut answer = self.read().with_context(|| format!("QEMU's answer to {command}"))?;
            if let Some(error) = answer.get("error") {
                bail!("QEMU refused {command}: {error}");
            }
            if let Some(result) = answer.get_mut("return") {
                return Ok(result.take());
            }
        }
    }

    fn read(&mut self) -> Result<Value> {
        let mut line = String::new();
        if self.stream.read_line(&mut line)? == 0 {
            bail!("QEMU closed its monitor");
        }
        Ok(serde_json::from_str(&line)?)
    }
}
