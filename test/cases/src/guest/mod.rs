// SPDX-License-Identifier: Apache-2.0
//! Cases of the guest machine: the guest driver. Each case loads the driver, plugs the disks that
//! it needs, and removes both again.
//!
//! * [`machine`]: slots, QEMU's monitor, the lab's helper that serves disks.
//! * [`mode`]: the driver and its parameters.
//! * [`load`]: reads and writes, by this program and by fio.
//! * [`symbols`], [`system`]: access to the kernel.
//! * [`measure`]: a comparison of the driver's paths and the kernel's own driver.
//!
//! Each other module has cases.

mod accounting;
mod change;
mod cpus;
mod cycle;
mod data;
mod file_ops;
mod file_systems;
mod flushes;
mod hostile;
mod installed;
mod load;
mod machine;
pub(crate) mod measure;
mod memory;
pub(crate) mod mode;
mod order;
mod parameters;
mod power;
mod queues;
mod requests;
mod silent;
mod stacked;
pub(crate) mod swap;
mod symbols;
mod system;
mod turns;

use anyhow::{Context as _, Result};
use kit::outcome::skip;
use kit::set::Set;

use crate::case::Row;
use machine::Machine;
use mode::{Driver, Mode};

/// Cases that the kernel's own driver fails, with the reason. Each failure would make the machine
/// unusable.
const IN_TREE_FAILS: &[(&str, &str)] = &[
    ("guest-surprise", SURPRISE),
    ("guest-hostile-answers", SURPRISE),
    ("guest-hostile-config", SURPRISE),
    ("guest-hostile-ring", BROKEN),
    ("guest-hostile-packed", BROKEN),
];
const BROKEN: &str = "Linux 6.12: requests of a ring that its device broke never end";
const SURPRISE: &str =
    "Linux 6.12: the removal waits for ever for requests that the device had when it vanished";

/// Amount of work in a case.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Effort {
    /// Number of repetitions of an operation under load.
    pub(crate) rounds: u32,
    /// MiB that a load transfers.
    pub(crate) mib: u32,
    /// Number of random operations, or of points of a power cut.
    pub(crate) steps: u32,
}

impl Effort {
    /// Effort at every change.
    const SHORT: Self = Self { rounds: 3, mib: 8, steps: 200 };
    /// Effort of a thorough run.
    const LONG: Self = Self { rounds: 50, mib: 32, steps: 1000 };
}

/// Inputs of a case.
pub(crate) struct Context {
    /// The slots, QEMU's monitor and the helper.
    pub(crate) machine: Machine,
    /// Driver and parameters, already loaded.
    pub(crate) mode: Mode,
    /// Amount of work.
    pub(crate) effort: Effort,
    /// Seed of the case's random numbers.
    pub(crate) seed: u64,
}

/// The modes of the driver in which a case runs.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Modes {
    all: &'static [Mode],
    short: &'static [Mode],
    has_long: bool,
}

impl Modes {
    /// All of these modes, in the set of the longer cases.
    pub(crate) const fn of(all: &'static [Mode]) -> Self {
        Self { all, short: &[], has_long: false }
    }

    /// Moves some of the modes to the set that runs at every change.
    pub(crate) const fn at_every_change(self, short: &'static [Mode]) -> Self {
        Self { short, ..self }
    }

    /// Adds a longer version of the modes that run at every change.
    pub(crate) const fn and_long(self) -> Self {
        Self { has_long: true, ..self }
    }

    /// Each mode, with its set and the suffix of the case's name.
    pub(crate) fn variants(self) -> impl Iterator<Item = (Mode, Set, &'static str)> {
        let short = self.short.iter().map(|&mode| (mode, Set::Guest, ""));
        let long = self.all.iter().filter_map(move |&mode| match self.short.contains(&mode) {
            false => Some((mode, Set::GuestFull, "")),
            true => self.has_long.then_some((mode, Set::GuestFull, "-long")),
        });
        short.chain(long)
    }

    /// True if all modes that run at every change are among the modes.
    #[cfg(test)]
    pub(crate) fn are_sound(self) -> bool {
        !self.all.is_empty() && self.short.iter().all(|mode| self.all.contains(mode))
    }
}

/// Runs a case in the mode of its row. A case that the kernel's own driver fails runs only with
/// `anyway`.
pub(crate) fn run(
    row: &Row,
    body: fn(&Context) -> Result<()>,
    seed: u64,
    anyway: bool,
) -> Result<()> {
    let mode = row.mode.context("a guest case has a mode")?;
    if let Some(how) = fails_in(row.case.name, mode).filter(|_| !anyway) {
        return Err(skip(format!("the kernel's own driver fails it ({how}); --anyway runs it")));
    }
    let machine = Machine::open()?;
    let _driver = Driver::load(mode, &[])?;
    let effort = if row.set == Set::Guest { Effort::SHORT } else { Effort::LONG };
    body(&Context { machine, mode, effort, seed })
}

/// Reason not to run a case in a mode.
fn fails_in(name: &str, mode: Mode) -> Option<&'static str> {
    let of_case = IN_TREE_FAILS.iter().find(|(case, _)| *case == name && mode.is_in_tree());
    of_case.map(|(_, how)| *how)
}
