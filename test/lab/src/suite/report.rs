// SPDX-License-Identifier: Apache-2.0
//! Outcomes of the cases: lines for people, JUnit XML for machines.

use std::fmt;
use std::fs::File;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result};
use quick_junit::{NonSuccessKind, Report, TestCase, TestCaseStatus, TestSuite};

use crate::vm::kernel::KernelName;

/// The verdict on a case.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Verdict {
    /// It passed.
    Passed,
    /// It failed, for this reason.
    Failed(String),
    /// It could not run, for this reason.
    Skipped(String),
}

/// One case on one kernel.
#[derive(Debug, Clone)]
pub struct Outcome {
    /// The kernel.
    pub kernel: KernelName,
    /// The case.
    pub name: String,
    /// The verdict.
    pub verdict: Verdict,
    /// The duration.
    pub took: Duration,
    /// Its output, and its part of the kernel's log.
    pub output: String,
    /// The reasons why a passed case left out parts of itself.
    pub left_out: Vec<String>,
}

impl fmt::Display for Outcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (kernel, name, seconds) = (self.kernel.as_str(), &self.name, self.took.as_secs_f64());
        match &self.verdict {
            Verdict::Passed => write!(f, "passed  {kernel:5} {name} ({seconds:.0} s)"),
            Verdict::Failed(why) => write!(f, "FAILED  {kernel:5} {name}: {why}"),
            Verdict::Skipped(why) => write!(f, "SKIP: {kernel} {name}: {why}"),
        }
    }
}

/// `N passed, N failed, N skipped`.
pub fn closing_line(outcomes: &[Outcome]) -> String {
    let count = |of: fn(&Verdict) -> bool| outcomes.iter().filter(|o| of(&o.verdict)).count();
    format!(
        "{} passed, {} failed, {} skipped",
        count(|verdict| matches!(verdict, Verdict::Passed)),
        count(|verdict| matches!(verdict, Verdict::Failed(_))),
        count(|verdict| matches!(verdict, Verdict::Skipped(_)))
    )
}

/// True if there are outcomes and none failed.
pub fn is_good(outcomes: &[Outcome]) -> bool {
    let failed = |outcome: &Outcome| matches!(outcome.verdict, Verdict::Failed(_));
    !outcomes.is_empty() && !outcomes.iter().any(failed)
}

/// Writes the outcomes as JUnit XML, a suite for each kernel.
pub fn write_junit(outcomes: &[Outcome], path: &Path) -> Result<()> {
    let mut report = Report::new("lab");
    let mut kernels: Vec<KernelName> = outcomes.iter().map(|outcome| outcome.kernel).collect();
    kernels.dedup();
    for kernel in kernels {
        let mut suite = TestSuite::new(format!("lab.{}", kernel.as_str()));
        let of_kernel = outcomes.iter().filter(|outcome| outcome.kernel == kernel);
        suite.add_test_cases(of_kernel.map(test_case));
        report.add_test_suite(suite);
    }
    let file = File::create(path).with_context(|| format!("cannot write {}", path.display()))?;
    report.serialize(file)?;
    Ok(())
}

fn test_case(outcome: &Outcome) -> TestCase {
    let status = match &outcome.verdict {
        Verdict::Passed => TestCaseStatus::success(),
        Verdict::Failed(why) => {
            let mut status = TestCaseStatus::non_success(NonSuccessKind::Failure);
            status.set_message(why.as_str());
            status
        }
        Verdict::Skipped(why) => {
            let mut status = TestCaseStatus::skipped();
            status.set_message(why.as_str());
            status
        }
    };
    let mut case = TestCase::new(outcome.name.as_str(), status);
    case.set_classname(outcome.kernel.as_str()).set_time(outcome.took);
    case.set_system_out(outcome.output.as_str());
    case
}

#[cfg(test)]
mod tests {
    use super::*;

    fn outcomes() -> Vec<Outcome> {
        let verdicts = [
            Verdict::Passed,
            Verdict::Failed("a < b".to_owned()),
            Verdict::Skipped("no device".to_owned()),
        ];
        let outcome = |verdict| Outcome {
            kernel: KernelName::Debug,
            name: "a-case".to_owned(),
            verdict,
            took: Duration::from_secs(2),
            output: "it said & did".to_owned(),
            left_out: Vec::new(),
        };
        verdicts.map(outcome).to_vec()
    }

    #[test]
    fn the_closing_line_counts_each_verdict() {
        assert_eq!(closing_line(&outcomes()), "1 passed, 1 failed, 1 skipped");
        assert!(!is_good(&outcomes()));
        assert!(is_good(&outcomes()[..1]));
    }

    #[test]
    fn a_run_without_cases_is_not_good() {
        assert!(!is_good(&[]));
    }

    #[test]
    fn the_xml_has_every_case_with_reason_and_output() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("junit.xml");
        write_junit(&outcomes(), &path).unwrap();
        let text = std::fs::read_to_string(path).unwrap();
        for part in
            ["lab.debug", "tests=\"3\"", "failures=\"1\"", "a &lt; b", "no device", "&amp; did"]
        {
            assert!(text.contains(part), "no {part} in {text}");
        }
    }
}
