// SPDX-License-Identifier: Apache-2.0
//! The driver to load, and its parameters.

use std::fmt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use kit::outcome::skip;
use kit::system::run;
use kit::wait;

use super::system::read_number;

/// Name of the module, for the kernel's own driver and this project's.
pub(crate) const MODULE: &str = "virtio_blk";

/// Number of polled queues, of the four queues of most disks.
pub(crate) const POLL_QUEUES: u16 = 2;

/// Limit of the wait for the close of all disks.
const CLOSE_MAX: Duration = Duration::from_secs(10);

/// A driver and its parameters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Mode {
    /// The kernel's own driver.
    InTree,
    /// The kernel's own driver with polled queues.
    InTreePoll,
    /// This project's driver on the request path.
    Request,
    /// The request path with polled queues.
    RequestPoll,
    /// This project's driver on the bio path.
    Bio,
    /// The bio path with polled queues.
    BioPoll,
}

impl Mode {
    /// All modes of this project's driver.
    pub(crate) const OURS: &[Mode] = &[Mode::Request, Mode::Bio, Mode::RequestPoll, Mode::BioPoll];
    /// All modes.
    pub(crate) const ALL: &[Mode] = &[
        Mode::InTree,
        Mode::InTreePoll,
        Mode::Request,
        Mode::Bio,
        Mode::RequestPoll,
        Mode::BioPoll,
    ];
    /// The modes without polled queues.
    pub(crate) const INTERRUPTS: &[Mode] = &[Mode::InTree, Mode::Request, Mode::Bio];

    /// The second part of a case's name.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Mode::InTree => "in-tree",
            Mode::InTreePoll => "in-tree-poll",
            Mode::Request => "request",
            Mode::RequestPoll => "request-poll",
            Mode::Bio => "bio",
            Mode::BioPoll => "bio-poll",
        }
    }

    /// True for the kernel's own driver.
    pub(crate) fn is_in_tree(self) -> bool {
        matches!(self, Mode::InTree | Mode::InTreePoll)
    }

    /// True for the bio path.
    pub(crate) fn is_bio(self) -> bool {
        matches!(self, Mode::Bio | Mode::BioPoll)
    }

    /// True if the driver has polled queues.
    pub(crate) fn polls(self) -> bool {
        matches!(self, Mode::InTreePoll | Mode::RequestPoll | Mode::BioPoll)
    }

    /// The module's parameters.
    pub(crate) fn parameters(self) -> Vec<String> {
        let mut parameters = Vec::new();
        if self.is_bio() {
            parameters.push("use_bio=1".to_owned());
        }
        if self.polls() {
            parameters.push(format!("poll_queues={POLL_QUEUES}"));
        }
        parameters
    }
}

impl fmt::Display for Mode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// A loaded driver, unloaded on drop.
#[derive(Debug)]
pub(crate) struct Driver;

impl Driver {
    /// Loads the driver of a mode with `more` parameters, after unloading the current one.
    pub(crate) fn load(mode: Mode, more: &[&str]) -> Result<Self> {
        unload()?;
        let mut parameters = mode.parameters();
        parameters.extend(more.iter().map(|&word| word.to_owned()));
        insert(mode, &parameters)?;
        Ok(Driver)
    }
}

impl Drop for Driver {
    fn drop(&mut self) {
        if let Err(why) = unload() {
            eprintln!("clean-up: {why:#}");
        }
    }
}

/// Loads the module with these parameters; the error is the kernel's.
pub(crate) fn insert(mode: Mode, parameters: &[String]) -> Result<()> {
    let words: Vec<&str> = parameters.iter().map(String::as_str).collect();
    if mode.is_in_tree() {
        return run("modprobe", &[&[MODULE], words.as_slice()].concat()).map(drop);
    }
    let path = ours()?;
    let path = path.to_string_lossy();
    run("insmod", &[&[path.as_ref()], words.as_slice()].concat()).map(drop)
}

/// Unloads the module, if it is loaded. The kernel closes the files of an io_uring ring some time after the ring.
pub(crate) fn unload() -> Result<()> {
    let module = Path::new("/sys/module").join(MODULE);
    if !module.exists() {
        return Ok(());
    }
    let is_unused = || Ok((read_number(module.join("refcnt"))? == 0).then_some(()));
    wait::wait_until(CLOSE_MAX, "the last close of the disks", is_unused)
        .context("the driver is still in use")?;
    run("rmmod", &[MODULE]).map(drop)
}

/// A parameter of the loaded module, read from sysfs.
pub(crate) fn parameter(name: &str) -> Result<String> {
    let path = Path::new("/sys/module").join(MODULE).join("parameters").join(name);
    let text = std::fs::read_to_string(&path).with_context(|| path.display().to_string())?;
    match text.trim() {
        "" => bail!("{} is empty", path.display()),
        value => Ok(value.to_owned()),
    }
}

/// Path of this project's module, or a skip if it was not built.
pub(crate) fn ours() -> Result<PathBuf> {
    let directory = std::env::var_os("LAB_MODULES").unwrap_or_else(|| "/lab/modules".into());
    let path = Path::new(&directory).join(format!("{MODULE}.ko"));
    if !path.exists() {
        return Err(skip(format!("{} is missing: build the guest driver", path.display())));
    }
    Ok(path)
}
