// SPDX-License-Identifier: Apache-2.0
//! The machine of the cases, seen from inside: slots for disks, QEMU's monitor, and the helper on
//! the real machine.
//!
//! * [`backing`]: storage of a disk's blocks, and the program that serves it.
//! * [`disk`]: a plugged disk, its files in sysfs and its removal.
//! * [`slot`]: a PCI Express slot.

pub(crate) mod backing;
pub(crate) mod disk;
mod line;
pub(crate) mod slot;

use std::cell::{Cell, RefCell};
use std::path::PathBuf;

use anyhow::{Context, Result, bail};
use serde_json::Value;

use kit::disks::{Answer, Ask};
use kit::port::Port;
use kit::qmp::Qmp;
use line::Line;

/// Lines to the monitor and the helper, and a source of unused names.
#[derive(Debug)]
pub(crate) struct Machine {
    monitor: RefCell<Qmp<Port>>,
    helper: RefCell<Line>,
    named: Cell<u32>,
    plugged: Cell<usize>,
}

impl Machine {
    /// Opens the lines, or skips the case if the machine has none.
    pub(crate) fn open() -> Result<Self> {
        let (monitor, helper) =
            (Qmp::shared(line::port("lab.monitor")?)?, Line::open("lab.helper")?);
        let (monitor, helper) = (RefCell::new(monitor), RefCell::new(helper));
        Ok(Self { monitor, helper, named: Cell::new(0), plugged: Cell::new(0) })
    }

    /// Sends a command to QEMU.
    pub(crate) fn qemu(&self, command: &str, arguments: Value) -> Result<Value> {
        self.monitor.borrow_mut().execute(command, arguments)
    }

    /// Sends a command that QEMU may refuse, which gives the inner error.
    pub(crate) fn try_qemu(
        &self,
        command: &str,
        arguments: Value,
    ) -> Result<std::result::Result<Value, String>> {
        self.monitor.borrow_mut().try_execute(command, arguments)
    }

    /// Sends a question to the helper.
    pub(crate) fn ask(&self, what: &Ask) -> Result<Answer> {
        let mut helper = self.helper.borrow_mut();
        helper.say(&serde_json::to_string(what)?)?;
        let said = helper.hear().with_context(|| format!("the helper's answer to {what:?}"))?;
        match serde_json::from_str(&said)? {
            Answer::Error(why) => bail!("the helper says: {why}"),
            answer => Ok(answer),
        }
    }

    /// Asks the helper for a path.
    pub(crate) fn ask_path(&self, what: &Ask) -> Result<PathBuf> {
        match self.ask(what)? {
            Answer::Path(path) => Ok(path),
            other => bail!("the helper answers {what:?} with {other:?}"),
        }
    }

    /// Asks the helper for a number.
    pub(crate) fn ask_count(&self, what: &Ask) -> Result<u64> {
        match self.ask(what)? {
            Answer::Count(count) => Ok(count),
            other => bail!("the helper answers {what:?} with {other:?}"),
        }
    }

    /// Number of disks that were plugged before this one.
    fn plugged(&self) -> usize {
        self.plugged.replace(self.plugged.get() + 1)
    }

    /// A new name for QEMU and the helper.
    fn fresh_name(&self, kind: &str) -> String {
        self.named.set(self.named.get() + 1);
        format!("{kind}-{}-{}", std::process::id(), self.named.get())
    }
}
