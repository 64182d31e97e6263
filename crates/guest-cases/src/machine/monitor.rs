// SPDX-License-Identifier: Apache-2.0
//! QEMU's monitor, from inside the machine.

use std::time::SystemTime;

use anyhow::{Context, Result, bail};
use serde_json::{Value, json};

use super::line::Line;

/// A connection that outlives its users: what was meant for another one is passed over.
#[derive(Debug)]
pub(crate) struct Monitor {
    line: Line,
    session: u64,
    next: u64,
}

impl Monitor {
    /// Gets ready for commands.
    pub(crate) fn open() -> Result<Self> {
        let line = Line::open("lab.monitor")?;
        let now = SystemTime::UNIX_EPOCH.elapsed().map_or(0, |time| time.as_nanos() as u64);
        let mut monitor = Self { line, session: now, next: 0 };
        // Refused where an earlier user did it.
        let _ = monitor.try_execute("qmp_capabilities", json!({}))?;
        Ok(monitor)
    }

    /// Runs a command and returns its result.
    pub(crate) fn execute(&mut self, command: &str, arguments: Value) -> Result<Value> {
        match self.try_execute(command, arguments)? {
            Ok(result) => Ok(result),
            Err(why) => bail!("QEMU refused {command}: {why}"),
        }
    }

    /// Runs a command; the inner error is QEMU's.
    pub(crate) fn try_execute(
        &mut self,
        command: &str,
        arguments: Value,
    ) -> Result<std::result::Result<Value, String>> {
        self.next += 1;
        let id = format!("{}-{}", self.session, self.next);
        let message = json!({ "execute": command, "arguments": arguments, "id": id });
        self.line.say(&message.to_string())?;
        loop {
            let said = self.line.hear()?;
            let mut answer: Value =
                serde_json::from_str(&said).with_context(|| format!("the monitor says {said}"))?;
            if answer["id"] != id.as_str() {
                continue;
            }
            if let Some(why) = answer.get("error") {
                return Ok(Err(why["desc"].as_str().unwrap_or("no reason given").to_owned()));
            }
            return Ok(Ok(answer["return"].take()));
        }
    }
}
