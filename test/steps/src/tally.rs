// SPDX-License-Identifier: Apache-2.0
//! Counts outcomes. A skip that the list of expected skips does not have counts as failed.

use kit::outcome::{PARTLY_SKIPPED, SKIP};
use kit::skips;

/// The outcome of one test.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Outcome {
    /// The place, in the list of expected skips.
    pub place: String,
    /// The program or the kernel; empty for a step.
    pub class: String,
    /// The test, case or step.
    pub name: String,
    /// The verdict.
    pub verdict: Verdict,
    /// Reasons why a passed test left out parts of itself.
    pub left_out: Vec<String>,
    /// Lines that say why it was begun anew.
    pub booted_again: Vec<String>,
}

/// The verdict on one test.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Verdict {
    /// It passed.
    Passed,
    /// It failed, for this reason.
    Failed(String),
    /// It could not run, for this reason.
    Skipped(String),
}

/// The sum of all outcomes.
#[derive(Debug, Default)]
pub struct Tally {
    passed: usize,
    skipped: usize,
    skips: Vec<String>,
    failures: Vec<String>,
}

impl Tally {
    /// Counts one outcome.
    pub fn add(&mut self, outcome: &Outcome) {
        let Outcome { place, class, name, verdict, left_out, .. } = outcome;
        let shown = format!("{class} {name}");
        let shown = shown.trim();
        let mut unexpected = Vec::new();
        let mut expect = |label: &str, reason: &str| {
            let line = format!("{label}{shown}: {reason}");
            match skips::is_expected(place, name, reason) {
                true => self.skips.push(line),
                false => unexpected.push(line),
            }
        };
        left_out.iter().for_each(|reason| expect(PARTLY_SKIPPED, reason));
        if let Verdict::Skipped(reason) = verdict {
            expect(SKIP, reason);
        }
        if !unexpected.is_empty() {
            let list = skips::FILE;
            self.fail(&format!("a skip that {list} does not have: {}", unexpected.join("; ")));
            return;
        }
        match verdict {
            Verdict::Passed => self.passed += 1,
            Verdict::Skipped(_) => self.skipped += 1,
            Verdict::Failed(why) => self.fail(&format!("{shown}: {why}")),
        }
    }

    /// Counts one failure.
    pub fn fail(&mut self, why: &str) {
        self.failures.push(format!("FAILED: {why}"));
    }

    /// Number of failures.
    pub fn failed(&self) -> usize {
        self.failures.len()
    }

    /// The skips, sorted, and the failures, a line each.
    pub fn details(&self) -> Vec<String> {
        let mut lines = self.skips.clone();
        lines.sort();
        lines.dedup();
        if !lines.is_empty() {
            lines.insert(0, format!("skipped, as {} expects:", skips::FILE));
        }
        lines.extend(self.failures.iter().cloned());
        lines
    }

    /// `N passed, N failed, N skipped`.
    pub fn closing_line(&self) -> String {
        format!("{} passed, {} failed, {} skipped", self.passed, self.failed(), self.skipped)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn outcome(name: &str, verdict: Verdict, left_out: &[&str]) -> Outcome {
        Outcome {
            place: "step".into(),
            class: String::new(),
            name: name.into(),
            verdict,
            left_out: left_out.iter().copied().map(str::to_owned).collect(),
            booted_again: Vec::new(),
        }
    }

    #[test]
    fn unexpected_skips_count_as_failed_and_expected_ones_are_listed() {
        let mut tally = Tally::default();
        let sid = "set-up:_sid's_kernel";
        let reason = "sid is not to be had, as today";
        tally.add(&outcome("good", Verdict::Passed, &[]));
        tally.add(&outcome("bad", Verdict::Failed("exit code 1".into()), &[]));
        tally.add(&outcome("odd", Verdict::Skipped("a new reason".into()), &[]));
        tally.add(&outcome("part", Verdict::Passed, &["a new reason"]));
        tally.add(&outcome(sid, Verdict::Skipped(reason.into()), &[]));
        assert_eq!(tally.closing_line(), "1 passed, 3 failed, 1 skipped");
        let details = tally.details().join("\n");
        for line in [
            "FAILED: bad: exit code 1",
            "does not have: SKIP: odd: a new reason",
            "does not have: PARTLY SKIPPED: part: a new reason",
            "SKIP: set-up:_sid's_kernel: sid is not to be had, as today",
        ] {
            assert!(details.contains(line), "{details}");
        }
    }
}
