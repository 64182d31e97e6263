// SPDX-License-Identifier: Apache-2.0
//! One boot: follows case after case, and judges each by its exit code, its output and its part of
//! the kernel's log.

use std::io::{self, Read};
use std::time::{Duration, Instant};

use anyhow::Result;
use kit::outcome;

use crate::exec::tail_of;
use crate::guest::GuestReport;
use crate::suite::case::Case;
use crate::suite::klog::{self, LogReader};
use crate::suite::live::Live;
use crate::suite::report::{Outcome, Verdict};
use crate::suite::script::marks;
use crate::vm::boot::Vm;
use crate::vm::kernel::KernelName;
use crate::vm::stall::Cpus;
use kit::interrupt;
use kit::process::TICK;
use kit::skips;

/// Time limit of a boot; the debug kernel needs twenty seconds on an idle machine.
const BOOT_TIMEOUT: Duration = Duration::from_secs(300);

/// Time that the lab waits, outside, beyond the case's own time-out inside the VM.
const GRACE: Duration = Duration::from_secs(60);

/// Time that the end mark may take through the console, and the VM to its end.
const CONSOLE_DELAY: Duration = Duration::from_secs(10);

/// Exit codes of `timeout`.
const TIMED_OUT: [i32; 2] = [124, 137];

/// The state of a boot after a case.
pub(crate) enum Progress {
    /// The case has ended and the VM continues.
    Ended(Outcome),
    /// The case has ended, and lockdep has given up: only the unloading follows.
    Spoilt(Outcome),
    /// The case has ended and took the VM along.
    Last(Outcome),
    /// The emulator has failed, for this reason: the kernel did not come up before any of this
    /// project's code ran, or a CPU is in a state that no code in the VM can bring about. The case
    /// has no outcome.
    NoMachine(String),
}

/// A running VM and the position up to which its log was read.
pub(crate) struct Followed {
    vm: Vm,
    kernel: KernelName,
    log: LogReader,
    /// Shows the output of the cases.
    live: Option<Live>,
}

impl Followed {
    /// Follows a VM; shows the output of its cases if `show`.
    pub(crate) fn new(vm: Vm, kernel: KernelName, show: bool) -> Result<Self> {
        let live = show.then(|| vm.stream("stdout").map(Live::new)).transpose()?;
        Ok(Self { vm, kernel, log: LogReader::default(), live })
    }

    /// The whole console, and QEMU's output.
    pub(crate) fn console(&self) -> String {
        format!("{}{}", self.vm.console(), self.vm.qemu_log())
    }

    /// Follows one case, which has `timeout` inside of the VM, to its end.
    pub(crate) fn follow(
        &mut self,
        case: &Case,
        timeout: Duration,
        may_retry: bool,
    ) -> Result<Progress> {
        let mut began = None;
        let waiting = Instant::now();
        loop {
            interrupt::check()?;
            let vm_ended = self.vm.has_ended()?;
            let lost = self.look_at_cpus()?;
            let report = self.vm.report();
            // After the report, so that an ended case has been shown to its end.
            if let Some(live) = &mut self.live {
                live.pass_on(&mut io::stdout())?;
            }
            if began.is_none() && report.values("begin").any(|name| name == case.name) {
                began = Some(Instant::now());
            }
            let took = began.map_or(Duration::ZERO, |at| at.elapsed());
            if let Some(code) = exit_code(report.values("end"), &case.name) {
                return self.judge(case, code, took);
            }
            // A verdict that was there before the machine was lost counts.
            let lost = lost.filter(|_| report.value("fail").is_none());
            let is_lost = lost.is_some();
            let why = if is_lost {
                lost
            } else if vm_ended {
                Some(report.value("fail").unwrap_or("the VM ended during the case").to_owned())
            } else if took > timeout + GRACE {
                Some(format!("the VM hangs ({} s)", took.as_secs()))
            } else if began.is_none() && waiting.elapsed() > BOOT_TIMEOUT {
                Some(format!("the VM did not come to it within {} s", BOOT_TIMEOUT.as_secs()))
            } else {
                None
            };
            if let Some(why) = why {
                self.vm.note_state()?;
                if may_retry && self.is_no_outcome(case, is_lost, &report)? {
                    return Ok(Progress::NoMachine(why));
                }
                let outcome = self.outcome(case, Verdict::Failed(why), took)?;
                let findings = self.log.rest(&self.vm.console());
                return Ok(Progress::Last(with_findings(outcome, &findings)));
            }
            std::thread::sleep(TICK);
        }
    }

    /// The machine ended before any of this project's code ran, or is lost without a finding in the
    /// kernel's log.
    fn is_no_outcome(&self, case: &Case, is_lost: bool, report: &GuestReport) -> Result<bool> {
        let console = self.vm.console();
        if is_lost {
            let provoked = klog::expected_in(&self.output(case)?);
            return Ok(!self.log.has_findings_beside_stalls(&console, provoked));
        }
        Ok(is_booting(report, &console))
    }

    /// Keeps emulated CPUs going; returns the evidence if the emulator has lost the machine.
    fn look_at_cpus(&mut self) -> Result<Option<String>> {
        match self.vm.look_at_cpus()? {
            Cpus::Lost(fault) => return Ok(Some(fault.to_string())),
            Cpus::Woken => {
                let kernel = self.kernel.as_str();
                println!("{kernel}: the VM stood still; its CPUs were woken by an NMI");
            }
            Cpus::Fine => {}
        }
        Ok(None)
    }

    /// Judges a case that ended with `code`, with its part of the kernel's log.
    fn judge(&mut self, case: &Case, code: i32, took: Duration) -> Result<Progress> {
        let marks = marks(&case.name);
        let is_complete = |console: &str| {
            klog::between(console, &marks.0, &marks.1).is_some_and(|(_, ended)| ended)
        };
        wait_for(CONSOLE_DELAY, || Ok(is_complete(&self.vm.console())))?;
        let output = self.output(case)?;
        let expected = klog::expected_in(&output);
        let (verdict, findings) =
            match self.log.case(&self.vm.console(), &case.name, &marks, expected) {
                Ok(findings) => (self.verdict(case, code, &output, &findings), findings),
                Err(lost) => (Verdict::Failed(lost), self.log.rest(&self.vm.console())),
            };
        if let Verdict::Failed(_) = &verdict {
            self.vm.note_state()?;
        }
        let is_sane = findings.is_empty() && !TIMED_OUT.contains(&code);
        let mut outcome = with_findings(self.outcome(case, verdict, took)?, &findings);
        self.judge_left_out(&mut outcome, &output);
        let is_spoilt = self.vm.report().values("spoilt").any(|name| name == case.name);
        Ok(match (is_sane, is_spoilt) {
            (false, _) => Progress::Last(outcome),
            (true, true) => Progress::Spoilt(outcome),
            (true, false) => Progress::Ended(outcome),
        })
    }

    fn verdict(&self, case: &Case, code: i32, output: &str, findings: &[String]) -> Verdict {
        match verdict(code, output, findings) {
            Verdict::Skipped(why)
                if !skips::is_expected(self.kernel.as_str(), &case.name, &why) =>
            {
                Verdict::Failed(unexpected(&why))
            }
            verdict => verdict,
        }
    }

    /// A passed case that left out a part must be on the list of expected skips.
    fn judge_left_out(&self, outcome: &mut Outcome, output: &str) {
        if outcome.verdict != Verdict::Passed {
            return;
        }
        let said = output.lines().filter_map(|line| line.strip_prefix(outcome::PARTLY_SKIPPED));
        outcome.left_out = said.map(|why| why.trim().to_owned()).collect();
        outcome.left_out.dedup();
        let is_new = |why: &&String| !skips::is_expected(self.kernel.as_str(), &outcome.name, why);
        if let Some(why) = outcome.left_out.iter().find(is_new) {
            outcome.verdict = Verdict::Failed(unexpected(why));
        }
    }

    /// Waits for the VM's end and judges the kernel's log since the last case.
    pub(crate) fn follow_to_the_end(&mut self, mut outcome: Outcome) -> Result<Outcome> {
        let vm = &mut self.vm;
        wait_for(CONSOLE_DELAY, || vm.has_ended())?;
        let findings = self.log.rest(&self.vm.console());
        if let (Verdict::Passed, Some(first)) = (&outcome.verdict, findings.first()) {
            outcome.verdict = Verdict::Failed(format!("in the kernel's log: {}", first.trim()));
        }
        Ok(with_findings(outcome, &findings))
    }

    pub(crate) fn outcome(&self, case: &Case, verdict: Verdict, took: Duration) -> Result<Outcome> {
        let (begin, end) = marks(&case.name);
        let console = self.vm.console();
        let log = match klog::between(&console, &begin, &end) {
            Some((part, _)) => part.to_owned(),
            None => format!("{}{}", self.vm.qemu_log(), tail_of(&console)),
        };
        let output = format!("{}\n== kernel log\n{log}", self.output(case)?);
        let name = case.name.clone();
        Ok(Outcome { kernel: self.kernel, name, verdict, took, output, left_out: Vec::new() })
    }

    /// The output of the case.
    fn output(&self, case: &Case) -> Result<String> {
        let mut bytes = Vec::new();
        self.vm.stream("stdout")?.read_to_end(&mut bytes)?;
        let text = String::from_utf8_lossy(&bytes);
        let (begin, end) = marks(&case.name);
        let part = klog::between(&text, &begin, &end).map_or("", |(part, _)| part);
        Ok(part.trim_end().trim_end_matches(end.as_str()).trim_end().to_owned())
    }
}

/// True until the VM reports its first step and loads the first module of this project: a fault
/// before that is the kernel's or the emulator's.
fn is_booting(report: &GuestReport, console: &str) -> bool {
    report.is_empty() && !console.contains("out-of-tree")
}

/// Polls until `done` is true or `limit` has passed.
fn wait_for(limit: Duration, mut done: impl FnMut() -> Result<bool>) -> Result<()> {
    let deadline = Instant::now() + limit;
    while !done()? && Instant::now() < deadline {
        std::thread::sleep(TICK);
    }
    Ok(())
}

fn unexpected(why: &str) -> String {
    format!("skipped for a reason that {} does not have: {why}", skips::FILE)
}

/// Adds the findings in the log to the end of the output.
fn with_findings(mut outcome: Outcome, findings: &[String]) -> Outcome {
    if !findings.is_empty() {
        outcome.output.push_str("== must not be in the kernel log:\n");
        outcome.output.extend(findings.iter().map(|line| format!("{line}\n")));
    }
    outcome
}

/// The code in `NAME CODE`.
fn exit_code<'a>(mut ends: impl Iterator<Item = &'a str>, name: &str) -> Option<i32> {
    ends.find_map(|end| {
        let (ended, code) = end.rsplit_once(' ')?;
        (ended == name).then(|| code.parse().ok()).flatten()
    })
}

/// The reason why the case could not run, from its output.
fn reason_in(output: &str) -> Option<&str> {
    output.lines().rev().find_map(|line| line.strip_prefix(outcome::SKIP))
}

fn verdict(code: i32, output: &str, findings: &[String]) -> Verdict {
    if TIMED_OUT.contains(&code) {
        return Verdict::Failed("it took too long; its log has all blocked tasks".to_owned());
    }
    if let Some(first) = findings.first() {
        let more = findings.len() - 1;
        return Verdict::Failed(format!("in the kernel's log: {} (and {more} more)", first.trim()));
    }
    match code {
        0 => Verdict::Passed,
        code if code == i32::from(outcome::SKIPPED) => match reason_in(output) {
            Some(reason) => Verdict::Skipped(reason.trim().to_owned()),
            None => Verdict::Failed("it says it was skipped (exit code 4), but not why".to_owned()),
        },
        code => Verdict::Failed(format!("exit code {code}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_boot_has_failed_by_itself_only_before_any_code_of_ours() {
        let nothing = GuestReport::default();
        assert!(is_booting(&nothing, "[ 2.5] nvme nvme0: pci function"));
        assert!(!is_booting(
            &nothing,
            "[ 5.2] vhost_blk: loading out-of-tree module taints kernel."
        ));
        for said in ["begin first", "fail cannot load vhost_blk.ko"] {
            assert!(!is_booting(&GuestReport::parse(said), ""), "{said}");
        }
    }

    #[test]
    fn a_splat_fails_a_case_that_ended_well() {
        let found = ["[ 1.0] BUG: KASAN".to_owned()];
        assert!(matches!(verdict(0, "", &found), Verdict::Failed(why) if why.contains("KASAN")));
        assert!(
            matches!(verdict(124, "", &found), Verdict::Failed(why) if why.contains("too long"))
        );
        assert_eq!(verdict(0, "", &[]), Verdict::Passed);
    }

    #[test]
    fn a_skipped_case_must_say_why() {
        let skipped = Verdict::Skipped("no xfs".to_owned());
        assert_eq!(verdict(4, "tried\nSKIP: no xfs\n", &[]), skipped);
        assert!(matches!(verdict(4, "tried\n", &[]), Verdict::Failed(_)));
        assert!(matches!(verdict(1, "SKIP: x\n", &[]), Verdict::Failed(_)));
    }

    #[test]
    fn the_exit_code_is_that_of_the_case_and_no_other() {
        let ends = ["a-long 1", "a 0"];
        assert_eq!(exit_code(ends.into_iter(), "a"), Some(0));
        assert_eq!(exit_code(ends.into_iter(), "a-long"), Some(1));
        assert_eq!(exit_code(ends.into_iter(), "b"), None);
    }
}
