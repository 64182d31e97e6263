// SPDX-License-Identifier: Apache-2.0
//! Runs cases in as few boots as possible: one, and another after each case that crashed the
//! kernel, left a finding in its log, or made lockdep give up.

use std::collections::VecDeque;
use std::fs;
use std::path::PathBuf;
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result};
use kit::outcome::BOOTED_AGAIN;

use crate::emulator::RETRIES;
use crate::suite::case::Case;
use crate::suite::follow::{Followed, Progress};
use crate::suite::report::{Outcome, Verdict};
use crate::suite::script::{script_for, unload_case};
use crate::vm::boot::{Vm, VmBase, VmShape};
use crate::vm::machine::HelperLate;
use crate::vm::payload::Payload;

/// Lines of a failed case's output to show at once.
const SHOWN_LINES: usize = 20;

/// Runs cases on one kernel.
#[derive(Debug)]
pub struct Runner<'a> {
    /// The files that the VM boots from.
    pub base: &'a VmBase,
    /// The machine.
    pub shape: VmShape,
    /// The programs and modules for the VM.
    pub payload: &'a Payload,
    /// The directory for logs.
    pub logs: PathBuf,
    /// Time limit of a case, in place of its set's.
    pub timeout: Option<Duration>,
    /// Shows the output of the cases while they run.
    pub show: bool,
}

impl Runner<'_> {
    /// Runs all cases on `machines` machines at once. Each boot ends with the unloading of the module,
    /// which counts as a case; if a boot ends earlier, the unloading counts as failed.
    ///
    /// # Errors
    /// A machine cannot be started, or a log cannot be written.
    pub fn run(&self, machines: usize, cases: &[&Case]) -> Result<Vec<Outcome>> {
        fs::create_dir_all(&self.logs)
            .with_context(|| format!("cannot make {}", self.logs.display()))?;
        let run = |(machine, cases)| move || self.on_machine(machine, cases);
        let outcomes: Result<Vec<_>> = thread::scope(|scope| {
            let parts = dealt(cases, machines).into_iter().enumerate();
            let runs = Vec::from_iter(parts.map(|part| scope.spawn(run(part))));
            runs.into_iter().map(|run| run.join().expect("a run does not panic")).collect()
        });
        Ok(outcomes?.concat())
    }

    /// Runs cases one after the other, on the machine of this number.
    fn on_machine(&self, machine: usize, mut pending: VecDeque<&Case>) -> Result<Vec<Outcome>> {
        let mut outcomes = Vec::new();
        let mut boot = Boot { machine, number: 0 };
        let mut retries = RETRIES;
        while !pending.is_empty() {
            boot.number += 1;
            let end = self.one_boot(boot, retries > 0, &mut pending, &mut outcomes)?;
            retries -= u32::from(matches!(end, BootEnd::NoMachine(_)));
        }
        Ok(outcomes)
    }

    /// Boots and follows the cases until the VM is unusable, then the unloading; removes from
    /// `pending` the cases with an outcome. `may_retry` if a machine that the emulator has lost is no
    /// failure yet.
    fn one_boot(
        &self,
        at: Boot,
        may_retry: bool,
        pending: &mut VecDeque<&Case>,
        outcomes: &mut Vec<Outcome>,
    ) -> Result<BootEnd> {
        let unload = unload_case(self.shape.machine, self.base.kernel().name());
        let script = script_for(pending.iter().map(|case| (*case, self.timeout_of(case))), &unload);
        let vm = match Vm::boot(self.base, &self.shape, self.payload, &script) {
            Err(why) if may_retry && why.is::<HelperLate>() => {
                self.tell_new_boot(pending, &why.to_string());
                return Ok(BootEnd::NoMachine(why.to_string()));
            }
            booted => booted?,
        };
        let mut boot = Followed::new(vm, self.base.kernel().name(), self.show)?;
        let finished = self.cases_of(&mut boot, may_retry, pending, outcomes);
        let finished = match finished {
            Ok(BootEnd::NoMachine(why)) => Ok(BootEnd::NoMachine(why)),
            Ok(end) => self.unload_of(&mut boot, &unload, at, &end, outcomes).map(|()| end),
            Err(error) => Err(error),
        };
        let machine = self.shape.machine.log_prefix();
        let lost = if matches!(finished, Ok(BootEnd::NoMachine(_))) { "-lost" } else { "" };
        let name = format!("{}-{machine}{}{lost}.log", self.kernel(), at.log_name());
        let console = self.logs.join(name);
        fs::write(&console, boot.console())?;
        if let Ok(BootEnd::NoMachine(why)) = &finished {
            self.tell_new_boot(pending, why);
            println!("  | all of it: {}", console.display());
        }
        finished
    }

    fn tell_new_boot(&self, pending: &VecDeque<&Case>, why: &str) {
        let next = pending.front().map_or("the end", |case| &case.name);
        println!("{BOOTED_AGAIN}{}, at {next}: {why}", self.kernel());
    }

    /// Follows the cases of a boot.
    fn cases_of(
        &self,
        boot: &mut Followed,
        may_retry: bool,
        pending: &mut VecDeque<&Case>,
        outcomes: &mut Vec<Outcome>,
    ) -> Result<BootEnd> {
        while let Some(case) = pending.front().copied() {
            let (outcome, end) = match boot.follow(case, self.timeout_of(case), may_retry)? {
                Progress::Ended(outcome) => (outcome, None),
                Progress::Spoilt(outcome) => (outcome, Some(BootEnd::Unloads)),
                Progress::Last(outcome) => (outcome, Some(BootEnd::ThrownAway(case.name.clone()))),
                Progress::NoMachine(why) => return Ok(BootEnd::NoMachine(why)),
            };
            pending.pop_front();
            self.publish(&outcome)?;
            outcomes.push(outcome);
            if let Some(end) = end {
                return Ok(end);
            }
        }
        Ok(BootEnd::Unloads)
    }

    /// The outcome of the check at the end of a boot.
    fn unload_of(
        &self,
        boot: &mut Followed,
        unload: &Case,
        at: Boot,
        end: &BootEnd,
        outcomes: &mut Vec<Outcome>,
    ) -> Result<()> {
        let mut outcome = match end {
            BootEnd::ThrownAway(case) => {
                let why = format!("not checked: the VM was thrown away after {case}");
                boot.outcome(unload, Verdict::Failed(why), Duration::ZERO)?
            }
            _ => match boot.follow(unload, unload.set.timeout(), false)? {
                Progress::Ended(outcome) | Progress::Spoilt(outcome) => {
                    boot.follow_to_the_end(outcome)?
                }
                Progress::Last(outcome) => outcome,
                Progress::NoMachine(_) => unreachable!("it is not to be booted again"),
            },
        };
        outcome.name = format!("{}{}", unload.name, at.suffix());
        self.publish(&outcome)?;
        outcomes.push(outcome);
        Ok(())
    }

    /// Prints the outcome of a case and stores its output.
    fn publish(&self, outcome: &Outcome) -> Result<()> {
        println!("{outcome}");
        for reason in &outcome.left_out {
            println!("PARTLY SKIPPED: {} {}: {reason}", self.kernel(), outcome.name);
        }
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
        self.timeout.unwrap_or_else(|| case.set.timeout())
    }

    fn kernel(&self) -> &'static str {
        self.base.kernel().name().as_str()
    }
}

/// Deals cases to machines in turn. Each machine runs its cases in their order.
fn dealt<'a>(cases: &[&'a Case], machines: usize) -> Vec<VecDeque<&'a Case>> {
    let mut parts = vec![VecDeque::new(); machines.clamp(1, cases.len().max(1))];
    let count = parts.len();
    cases.iter().enumerate().for_each(|(at, case)| parts[at % count].push_back(*case));
    parts
}

/// A boot of a machine.
#[derive(Clone, Copy, Debug)]
struct Boot {
    /// The number of the machine, from 0.
    machine: usize,
    /// The number of the boot, from 1.
    number: usize,
}

impl Boot {
    /// A part of the name of its log.
    fn log_name(self) -> String {
        match self.machine {
            0 => format!("boot{}", self.number),
            machine => format!("vm{}-boot{}", machine + 1, self.number),
        }
    }

    /// The end of the name of its unloading: nothing for the first boot of the first machine.
    fn suffix(self) -> String {
        let vm = (self.machine > 0).then(|| format!("/vm{}", self.machine + 1));
        let boot = (self.number > 1).then(|| format!("/boot{}", self.number));
        [vm, boot].into_iter().flatten().collect()
    }
}

/// The end of a boot's cases.
enum BootEnd {
    /// The VM continues with the unloading.
    Unloads,
    /// After this case the VM is unusable.
    ThrownAway(String),
    /// The emulator has lost the machine, or its helper was late, for this reason.
    NoMachine(String),
}

#[cfg(test)]
mod tests {
    use super::*;
    use kit::set::Set;

    fn case(name: &str) -> Case {
        let (name, text) = (name.to_owned(), String::new());
        Case { name, set: Set::Gating, description: text.clone(), command: text }
    }

    #[test]
    fn each_case_is_dealt_to_one_machine_and_keeps_its_order() {
        let cases = ["a", "b", "c", "d", "e"].map(case);
        let cases = Vec::from_iter(&cases);
        let names = |machines| {
            let of_part = |part: &VecDeque<&Case>| part.iter().map(|case| &*case.name).collect();
            dealt(&cases, machines).iter().map(of_part).collect::<Vec<String>>()
        };
        assert_eq!(names(1), ["abcde"]);
        assert_eq!(names(2), ["ace", "bd"]);
        assert_eq!(names(9), ["a", "b", "c", "d", "e"], "a machine without cases");
        assert_eq!(dealt(&[], 2).len(), 1);
    }

    #[test]
    fn boots_have_names_of_their_own() {
        let boots =
            [(0, 1), (0, 2), (1, 1), (1, 2)].map(|(machine, number)| Boot { machine, number });
        assert_eq!(boots.map(Boot::suffix), ["", "/boot2", "/vm2", "/vm2/boot2"]);
        assert_eq!(boots.map(Boot::log_name), ["boot1", "boot2", "vm2-boot1", "vm2-boot2"]);
    }
}
