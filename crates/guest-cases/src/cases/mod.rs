// SPDX-License-Identifier: Apache-2.0
//! The cases, by what happens to the disk.

mod accounting;
mod change;
mod cycle;
mod data;
mod file_ops;
mod file_systems;
mod hostile;
mod order;
mod parameters;
mod queues;
mod requests;
mod silent;
mod stacked;
pub(crate) mod swap;

use crate::case::Case;

/// All of them.
pub(crate) const ALL: &[&[Case]] = &[
    data::CASES,
    file_systems::CASES,
    stacked::CASES,
    swap::CASES,
    requests::CASES,
    accounting::CASES,
    queues::CASES,
    change::CASES,
    cycle::CASES,
    order::CASES,
    silent::CASES,
    parameters::CASES,
    hostile::CASES,
];
