// SPDX-License-Identifier: Apache-2.0
//! The steps of `make test`: their order, limits, skips and counts.
//!
//! * [`plan`]: the list of steps.
//! * [`run`]: runs one step after another within the time of the whole run.
//! * [`command`]: one command with a time limit, its output shown and kept.
//! * [`junit`]: outcomes of single tests, from the JUnit files of nextest and the lab.
//! * [`tally`]: counts all outcomes, and says what was skipped and what failed.

pub mod command;
pub mod junit;
pub mod plan;
pub mod run;
pub mod tally;
