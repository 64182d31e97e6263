// SPDX-License-Identifier: Apache-2.0
//! Runs cases in as few boots as it can: one, and another after each case that took the kernel
//! down or left something in its log.

use std::collections::VecDeque;
use std::fs;
use std::io::Read;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use lab_case::outcome;

use crate::exec::tail_of;
use crate::interrupt;
use crate::process::TICK;
use crate::suite::case::Case;
use crate::suite::klog;
use crate::suite::report::{Outcome, Verdict};
use crate::suite::script::{last_case, marks, script_for};
use crate::vm::boot::{Vm, VmBase, VmShape};
use crate::vm::machine::Machine;
use crate::vm::payload::Payload;

/// How long a boot may take; the debug kernel needs twenty seconds on an idle machine.
const BOOT_TIMEOUT: Duration = Duration::from_secs(300);

/// Boots that may end before anything of this project runs. Emulated kernels do that, rarely.
const BOOT_RETRIES: u32 = 3;

/// How much longer than the case's own time-out, inside the VM, the lab waits outside.
const GRACE: Duration = Duration::from_secs(60);

/// How long the end mark may take through the console.
const CONSOLE_DELAY: Duration = Duration::from_secs(10);

/// Exit codes of `timeout`.
const TIMED_OUT: [i32; 2] = [124, 137];

/// Lines of a failed case's output that are shown at once.
const SHOWN_LINES: usize = 20;

/// Runs cases on one kernel.
#[derive(Debug)]
pub struct Runner<'a> {
    /// What is booted.
    pub base: &'a VmBase,
    /// The machine.
    pub shape: VmShape,
    /// What goes along.
    pub payload: &'a Payload,
    /// Where logs go.
    pub logs: PathBuf,
    /// The most a case may take, in place of what its set says.
    pub timeout: Option<Duration>,
}

/// What a boot has come to.
enum Progress {
    /// The next case has ended and the VM goes on.
    Ended(Outcome),
    /// The next case has ended and took the VM along.
    Last(Outcome),
    /// The VM ended while its kernel booted.
    NotBooted,
}

impl Runner<'_> {
    /// Runs all cases and, after them, the unloading of the module.
    pub fn run(&self, cases: &[&Case]) -> Result<Vec<Outcome>> {
        fs::create_dir_all(&self.logs)
            .with_context(|| format!("cannot make {}", self.logs.display()))?;
        let last = last_case(self.shape.machine);
        let mut pending: VecDeque<&Case> = cases.iter().copied().chain([&last]).collect();
        let mut outcomes = Vec::new();
        let mut boots = 0;
        let mut retries = BOOT_RETRIES;
        while !pending.is_empty() {
            boots += 1;
            // Nothing but the check is left, and a new VM has nothing that it could check.
            if !outcomes.is_empty() && pending.len() == 1 {
                break;
            }
            if !self.one_boot(boots, retries > 0, &mut pending, &mut outcomes)? {
                println!("{}: the VM ended while it booted; once more", self.kernel());
                retries -= 1;
            }
        }
        Ok(outcomes)
    }

    /// Boots and follows the cases until the VM is no good any more; takes from `pending` what has
    /// an outcome. Returns `false`, where it `may_retry`, if its kernel did not come up.
    fn one_boot(
        &self,
        number: usize,
        may_retry: bool,
        pending: &mut VecDeque<&Case>,
        outcomes: &mut Vec<Outcome>,
    ) -> Result<bool> {
        let script = script_for(pending.iter().map(|case| (*case, self.timeout_of(case))));
        let mut vm = Vm::boot(self.base, &self.shape, self.payload, &script)?;
        let mut finished = Ok(true);
        while let Some(case) = pending.front().copied() {
            let progress = match self.follow(&mut vm, case, may_retry) {
                Ok(progress) => progress,
                Err(error) => {
                    finished = Err(error);
                    break;
                }
            };
            let (outcome, goes_on) = match progress {
                Progress::Ended(outcome) => (outcome, true),
                Progress::Last(outcome) => (outcome, false),
                Progress::NotBooted => {
                    finished = Ok(false);
                    break;
                }
            };
            pending.pop_front();
            self.publish(&outcome)?;
            outcomes.push(outcome);
            if !goes_on {
                break;
            }
        }
        let machine = match self.shape.machine {
            Machine::Host => "",
            Machine::Guest => "guest-",
        };
        let console = self.logs.join(format!("{}-{machine}boot{number}.log", self.kernel()));
        fs::write(console, format!("{}{}", vm.console(), vm.qemu_log()))?;
        finished
    }

    /// Follows one case to its end.
    fn follow(&self, vm: &mut Vm, case: &Case, may_retry: bool) -> Result<Progress> {
        let mut began = None;
        let waiting = Instant::now();
        loop {
            interrupt::check()?;
            let vm_ended = vm.has_ended()?;
            if !vm_ended && vm.wake_if_stalled() {
                println!("{}: the VM stood still; its CPUs were woken by an NMI", self.kernel());
            }
            let report = vm.report();
            if began.is_none() && report.values("begin").any(|name| name == case.name) {
                began = Some(Instant::now());
            }
            let took = began.map_or(Duration::ZERO, |at| at.elapsed());
            if let Some(code) = exit_code(report.values("end"), &case.name) {
                return self.judge(vm, case, code, took);
            }
            let nothing_began = report.values("begin").next().is_none();
            // No module of this project was there yet: this is between the kernel and the emulator.
            if vm_ended && nothing_began && may_retry && !vm.console().contains("out-of-tree") {
                return Ok(Progress::NotBooted);
            }
            let why = if vm_ended {
                Some(report.value("fail").unwrap_or("the VM ended during the case").to_owned())
            } else if took > self.timeout_of(case) + GRACE {
                Some(format!("the VM hangs ({} s)", took.as_secs()))
            } else if began.is_none() && waiting.elapsed() > BOOT_TIMEOUT {
                Some(format!("the VM did not come to it within {} s", BOOT_TIMEOUT.as_secs()))
            } else {
                None
            };
            if let Some(why) = why {
                let outcome = self.outcome(vm, case, Verdict::Failed(why), took)?;
                return Ok(Progress::Last(with_findings(
                    outcome,
                    &klog::findings(&vm.console(), &[]),
                )));
            }
            std::thread::sleep(TICK);
        }
    }

    /// A case has ended with `code`: looks at its part of the kernel's log as well.
    fn judge(&self, vm: &Vm, case: &Case, code: i32, took: Duration) -> Result<Progress> {
        let (begin, end) = marks(&case.name);
        let first = vm.report().values("begin").next() == Some(case.name.as_str());
        let deadline = Instant::now() + CONSOLE_DELAY;
        while !klog::between(&vm.console(), &begin, &end).is_some_and(|(_, ended)| ended)
            && Instant::now() < deadline
        {
            std::thread::sleep(TICK);
        }
        let (console, output) = (vm.console(), self.output(vm, case)?);
        let log = match klog::between(&console, &begin, &end) {
            // What was said while booting counts for the first case.
            Some(_) if first => console.as_str(),
            Some((part, _)) => part,
            None => "",
        };
        let findings = klog::findings(log, &klog::expected_in(&output));
        let verdict = verdict(code, &output, &findings);
        let outcome = with_findings(self.outcome(vm, case, verdict, took)?, &findings);
        let spoilt = TIMED_OUT.contains(&code) || klog::spoils_the_kernel(log);
        Ok(if findings.is_empty() && !spoilt {
            Progress::Ended(outcome)
        } else {
            Progress::Last(outcome)
        })
    }

    fn outcome(&self, vm: &Vm, case: &Case, verdict: Verdict, took: Duration) -> Result<Outcome> {
        let (begin, end) = marks(&case.name);
        let console = vm.console();
        let log = match klog::between(&console, &begin, &end) {
            Some((part, _)) => part.to_owned(),
            None => format!("{}{}", vm.qemu_log(), tail_of(&console)),
        };
        let output = format!("{}\n== kernel log\n{log}", self.output(vm, case)?);
        let (kernel, name) = (self.base.kernel().name(), case.name.clone());
        Ok(Outcome { kernel, name, verdict, took, output })
    }

    /// What the case has written.
    fn output(&self, vm: &Vm, case: &Case) -> Result<String> {
        let mut bytes = Vec::new();
        vm.stream("stdout")?.read_to_end(&mut bytes)?;
        let text = String::from_utf8_lossy(&bytes);
        let (begin, end) = marks(&case.name);
        let part = klog::between(&text, &begin, &end).map_or("", |(part, _)| part);
        Ok(part.trim_end().trim_end_matches(end.as_str()).trim_end().to_owned())
    }

    /// Tells what became of a case, and keeps what it said.
    fn publish(&self, outcome: &Outcome) -> Result<()> {
        println!("{outcome}");
        let name = format!("{}-{}.log", self.kernel(), outcome.name.replace('/', "_"));
        let path = self.logs.join(name);
        fs::write(&path, &outcome.output)?;
        if matches!(outcome.verdict, Verdict::Failed(_)) {
            let lines: Vec<&str> = outcome.output.lines().collect();
            for line in &lines[lines.len().saturating_sub(SHOWN_LINES)..] {
                println!("  | {line}");
            }
            println!("  | all of it: {}", path.display());
        }
        Ok(())
    }

    fn timeout_of(&self, case: &Case) -> Duration {
        let is_last = case.name == last_case(self.shape.machine).name;
        self.timeout.filter(|_| !is_last).unwrap_or_else(|| case.set.timeout())
    }

    fn kernel(&self) -> &'static str {
        self.base.kernel().name().as_str()
    }
}

/// Says at the end of the output, where it is seen, what was found in the log.
fn with_findings(mut outcome: Outcome, findings: &[&str]) -> Outcome {
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

/// Why the case could not run, as its output has it.
fn reason_in(output: &str) -> Option<&str> {
    output.lines().rev().find_map(|line| line.strip_prefix(outcome::SKIP))
}

fn verdict(code: i32, output: &str, findings: &[&str]) -> Verdict {
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
    fn a_splat_fails_a_case_that_ended_well() {
        let found = ["[ 1.0] BUG: KASAN"];
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
