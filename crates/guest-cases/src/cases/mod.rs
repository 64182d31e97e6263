// SPDX-License-Identifier: Apache-2.0
//! The cases, by what happens to the disk.

mod accounting;
mod change;
mod cycle;
mod data;
mod file_ops;
mod file_systems;
mod hostile;
mod installed;
mod memory;
mod order;
mod parameters;
mod power;
mod queues;
mod requests;
mod silent;
mod stacked;
pub(crate) mod swap;
mod turns;

use crate::case::Case;
use crate::mode::Mode;

/// What the kernel's own driver fails, and how. It would take the machine along each time.
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

/// Why a case is not to be run in a mode.
pub(crate) fn fails_in(name: &str, mode: Mode) -> Option<&'static str> {
    let of_case = IN_TREE_FAILS.iter().find(|(case, _)| *case == name && mode.is_in_tree());
    of_case.map(|(_, how)| *how)
}

/// All of them.
pub(crate) const ALL: &[&[Case]] = &[
    data::CASES,
    file_systems::CASES,
    stacked::CASES,
    swap::CASES,
    memory::CASES,
    requests::CASES,
    accounting::CASES,
    queues::CASES,
    turns::CASES,
    change::CASES,
    cycle::CASES,
    power::CASES,
    order::CASES,
    silent::CASES,
    parameters::CASES,
    installed::CASES,
    hostile::CASES,
];
