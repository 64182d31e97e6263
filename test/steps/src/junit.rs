// SPDX-License-Identifier: Apache-2.0
//! Outcomes of single tests from a JUnit file.

use std::fs::File;
use std::io::BufReader;
use std::path::Path;

use anyhow::{Context, Result};
use kit::outcome::{BOOTED_AGAIN, PARTLY_SKIPPED, SKIP};
use quick_junit::{Report, TestCase, TestCaseStatus};

use crate::tally::{Outcome, Verdict};

/// Maximum length of a shown reason.
const REASON_MAX: usize = 240;

/// Reads the outcomes of `path`. `place` names where a test ran, in the list of expected skips; it
/// is the class of the test for `None`.
///
/// # Errors
/// The file cannot be read, or is no JUnit file.
pub fn read(path: &Path, place: Option<&str>) -> Result<Vec<Outcome>> {
    let shown = path.display();
    let file = File::open(path).with_context(|| format!("cannot open {shown}"))?;
    let report = Report::deserialize(BufReader::new(file));
    let report = report.with_context(|| format!("cannot read {shown}"))?;
    let cases = report.test_suites.iter().flat_map(|suite| &suite.test_cases);
    Ok(cases.map(|case| outcome(case, place)).collect())
}

fn outcome(case: &TestCase, place: Option<&str>) -> Outcome {
    let class = case.classname.as_deref().unwrap_or_default();
    let said = case.system_out.as_deref().unwrap_or_default();
    let reasons =
        |prefix: &'static str| said.lines().filter_map(move |line| line.strip_prefix(prefix));
    let mut left_out = Vec::new();
    let begun_anew = said.lines().filter(|line| line.starts_with(BOOTED_AGAIN));
    let booted_again = begun_anew.map(str::to_owned).collect();
    let verdict = match &case.status {
        TestCaseStatus::Success { .. } => match reasons(SKIP).next() {
            Some(reason) => Verdict::Skipped(reason.to_owned()),
            None => {
                left_out.extend(reasons(PARTLY_SKIPPED).map(str::to_owned));
                Verdict::Passed
            }
        },
        TestCaseStatus::NonSuccess { message, description, .. } => {
            let all = description.as_deref().filter(|text| !text.trim().is_empty());
            let all = all.or(message.as_deref()).unwrap_or("no reason is given");
            Verdict::Failed(reason(all))
        }
        TestCaseStatus::Skipped { message, .. } => {
            Verdict::Skipped(message.as_deref().unwrap_or("no reason is given").to_owned())
        }
    };
    let place = place.unwrap_or(class).to_owned();
    let (class, name) = (class.to_owned(), case.name.to_string());
    Outcome { place, class, name, verdict, left_out, booted_again }
}

/// The text in front of a backtrace, in one line.
fn reason(text: &str) -> String {
    let is_reason =
        |line: &&str| !line.starts_with("stack backtrace:") && !line.starts_with("note:");
    let lines: Vec<_> = text.lines().map(str::trim).take_while(is_reason).collect();
    lines.join(" ").chars().take(REASON_MAX).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const FILE: &str = r#"<?xml version="1.0" encoding="UTF-8"?>
<testsuites name="cargo" tests="4" failures="1" errors="0">
  <testsuite name="kit" tests="4" disabled="0" errors="0" failures="1">
    <testcase name="good" classname="kit::a"><system-out>PARTLY SKIPPED: no xfs
BOOTED AGAIN: good: the emulator failed
SKIP that is not one</system-out></testcase>
    <testcase name="bad" classname="kit::a"><failure message="it panicked">it broke:
  left: 1
stack backtrace: long</failure></testcase>
    <testcase name="left" classname="kit::a"><system-out>first
SKIP: no such device</system-out></testcase>
    <testcase name="lab" classname="6.12"><skipped message="no fault injection"/></testcase>
  </testsuite>
</testsuites>"#;

    #[test]
    fn verdicts_and_reasons_are_read() {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), FILE).unwrap();
        let outcomes = read(file.path(), Some("cargo")).unwrap();
        let verdicts: Vec<_> = outcomes.iter().map(|outcome| outcome.verdict.clone()).collect();
        let skipped = |reason: &str| Verdict::Skipped(reason.to_owned());
        let failed = Verdict::Failed("it broke: left: 1".to_owned());
        let expected =
            [Verdict::Passed, failed, skipped("no such device"), skipped("no fault injection")];
        assert_eq!(verdicts, expected);
        assert_eq!(outcomes[0].left_out, ["no xfs"]);
        assert_eq!(outcomes[0].booted_again, ["BOOTED AGAIN: good: the emulator failed"]);
        assert_eq!(outcomes[0].place, "cargo");
        assert_eq!(read(file.path(), None).unwrap()[3].place, "6.12");
    }

    #[test]
    fn a_file_that_is_missing_or_cut_off_is_an_error() {
        assert!(read(Path::new("/no/such.xml"), None).is_err());
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), &FILE[..FILE.len() / 2]).unwrap();
        assert!(read(file.path(), None).is_err());
    }
}
