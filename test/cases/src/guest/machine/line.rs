// SPDX-License-Identifier: Apache-2.0
//! A line out of the machine: a virtio serial port, opened by name.

use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};

use kit::outcome::skip;
use kit::port::Port;

const PORTS: &str = "/sys/class/virtio-ports";

/// An open port, which only one process can open at a time.
#[derive(Debug)]
pub(crate) struct Line {
    port: BufReader<Port>,
    name: &'static str,
}

impl Line {
    /// Opens the port `name`, or skips the case if the machine has none.
    pub(crate) fn open(name: &'static str) -> Result<Self> {
        Ok(Self { port: BufReader::new(port(name)?), name })
    }

    /// Writes a line.
    pub(crate) fn say(&mut self, text: &str) -> Result<()> {
        let name = self.name;
        let port = self.port.get_mut();
        port.write_all(format!("{text}\n").as_bytes()).with_context(|| name.to_owned())
    }

    /// Reads a line.
    pub(crate) fn hear(&mut self) -> Result<String> {
        let mut line = String::new();
        if self.port.read_line(&mut line).with_context(|| self.name.to_owned())? == 0 {
            bail!("nobody is at the other end of {}", self.name);
        }
        Ok(line)
    }
}

/// Opens the port `name`, or skips the case if the machine has none.
pub(super) fn port(name: &str) -> Result<Port> {
    let path = find(name)
        .with_context(|| PORTS.to_owned())?
        .ok_or_else(|| skip(format!("no port {name}: run it in the lab's guest machine")))?;
    Port::open(&path).with_context(|| path.display().to_string())
}

fn find(name: &str) -> std::io::Result<Option<PathBuf>> {
    for entry in fs::read_dir(PORTS).into_iter().flatten() {
        let entry = entry?;
        let said = fs::read_to_string(entry.path().join("name")).unwrap_or_default();
        if said.trim() == name {
            return Ok(Some(Path::new("/dev").join(entry.file_name())));
        }
    }
    Ok(None)
}
