// SPDX-License-Identifier: Apache-2.0
//! The machine that the cases run in, as they see it: slots that disks are plugged into, QEMU's
//! monitor, the helper on the real machine.
//!
//! * [`backing`]: what stores a disk's blocks, and who serves it.
//! * [`disk`]: a plugged disk: where it is found, how it goes.
//! * [`slot`]: a PCI Express slot.

pub(crate) mod backing;
pub(crate) mod disk;
mod line;
mod monitor;
pub(crate) mod slot;

use std::cell::{Cell, RefCell};
use std::path::PathBuf;

use anyhow::{Result, bail};
use serde_json::Value;

use crate::protocol::{Answer, Ask};
use line::Line;
use monitor::Monitor;

/// Both lines, and names that nobody has used before.
#[derive(Debug)]
pub(crate) struct Machine {
    monitor: RefCell<Monitor>,
    helper: RefCell<Line>,
    named: Cell<u32>,
    plugged: Cell<usize>,
}

impl Machine {
    /// Opens the lines; skips the case in a machine that has none.
    pub(crate) fn open() -> Result<Self> {
        let (monitor, helper) = (Monitor::open()?, Line::open("lab.helper")?);
        let (monitor, helper) = (RefCell::new(monitor), RefCell::new(helper));
        Ok(Self { monitor, helper, named: Cell::new(0), plugged: Cell::new(0) })
    }

    /// A command for QEMU.
    pub(crate) fn qemu(&self, command: &str, arguments: Value) -> Result<Value> {
        self.monitor.borrow_mut().execute(command, arguments)
    }

    /// A command for QEMU that it may refuse, which is the inner error.
    pub(crate) fn try_qemu(
        &self,
        command: &str,
        arguments: Value,
    ) -> Result<std::result::Result<Value, String>> {
        self.monitor.borrow_mut().try_execute(command, arguments)
    }

    /// Asks the helper.
    pub(crate) fn ask(&self, what: &Ask) -> Result<Answer> {
        let mut helper = self.helper.borrow_mut();
        helper.say(&serde_json::to_string(what)?)?;
        match serde_json::from_str(&helper.hear()?)? {
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

    /// How many disks were plugged before this one.
    fn plugged(&self) -> usize {
        self.plugged.replace(self.plugged.get() + 1)
    }

    /// A name for QEMU and the helper.
    fn fresh_name(&self, kind: &str) -> String {
        self.named.set(self.named.get() + 1);
        format!("{kind}-{}-{}", std::process::id(), self.named.get())
    }
}
