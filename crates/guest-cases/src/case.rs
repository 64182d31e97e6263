// SPDX-License-Identifier: Apache-2.0
//! What a case is, and how it ends.

use std::fmt;

use anyhow::Result;

use crate::machine::Machine;
use crate::mode::Mode;

/// When a case is run: the lab's words.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Set {
    /// At every change; short.
    Guest,
    /// The longer ones.
    GuestFull,
}

impl fmt::Display for Set {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Guest => "guest",
            Self::GuestFull => "guest-full",
        })
    }
}

/// How much a case does.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Effort {
    /// How often something is done under load.
    pub(crate) rounds: u32,
    /// Data that a load moves, in MiB.
    pub(crate) mib: u32,
    /// Steps of random operations, points of a power cut.
    pub(crate) steps: u32,
}

impl Effort {
    /// For every change.
    pub(crate) const SHORT: Self = Self { rounds: 3, mib: 8, steps: 200 };
    /// For a thorough run.
    pub(crate) const LONG: Self = Self { rounds: 50, mib: 32, steps: 1000 };
}

/// What a case works with.
pub(crate) struct Context {
    /// The slots, QEMU's monitor and the helper.
    pub(crate) machine: Machine,
    /// The driver and its parameters; loaded.
    pub(crate) mode: Mode,
    /// How much to do.
    pub(crate) effort: Effort,
    /// What the case's random numbers come from.
    pub(crate) seed: u64,
}

/// One row of the registry.
pub(crate) struct Case {
    /// The first part of its name; the mode is the second.
    pub(crate) name: &'static str,
    /// Modes in which it runs at every change; in all others it is one of the longer cases.
    pub(crate) short: &'static [Mode],
    /// Modes in which it runs at all.
    pub(crate) modes: &'static [Mode],
    /// Whether the modes of `short` have a longer version as well.
    pub(crate) has_long: bool,
    /// What it shows, in one sentence.
    pub(crate) about: &'static str,
    /// The case. An error is a failure, or, with [`lab_case::outcome::Skip`] at its root, a reason not to run.
    pub(crate) run: fn(&Context) -> Result<()>,
}
