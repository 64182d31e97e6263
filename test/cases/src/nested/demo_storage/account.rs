// SPDX-License-Identifier: Apache-2.0
//! The account of the demonstration: numbered steps, each with what was done and what was checked.

use std::fmt::Display;

/// Numbers the steps; prints each line at once.
#[derive(Debug, Default)]
pub(super) struct Account {
    steps: u32,
    checks: u32,
}

impl Account {
    /// Begins a step.
    pub(super) fn step(&mut self, title: &str) {
        self.steps += 1;
        println!("\n{:2}. {title}", self.steps);
    }

    /// Says what was done.
    pub(super) fn done(&self, what: impl Display) {
        println!("    done     {what}");
    }

    /// Says what was checked, and found right.
    pub(super) fn checked(&mut self, what: impl Display) {
        self.checks += 1;
        println!("    checked  {what}");
    }

    /// Gives a figure that nothing depends on.
    pub(super) fn figure(&self, what: impl Display) {
        println!("    figure   {what}");
    }

    /// Ends the account, which only a run without a failure reaches.
    pub(super) fn end(&self) {
        println!("\nAll is right: {} steps, {} checks.", self.steps, self.checks);
    }
}
