// SPDX-License-Identifier: Apache-2.0
//! Faults of QEMU's emulation that end a machine, and the evidence for each.
//!
//! * The local APIC of a virtual CPU keeps the timer's interrupt in service although the CPU has
//!   returned from it and is halted (QEMU 10.0.13). It holds back the interrupts of the timer and of
//!   most devices. The kernel ends this interrupt before its handler runs, so no handler can leave
//!   it in service.
//! * QEMU ends by an assertion of its own about the memory map, which one virtual CPU changes while
//!   another one uses it.
//!
//! No code in the machine can cause either. A run that shows the evidence, and had no verdict
//! before, is begun anew.

use std::collections::BTreeSet;
use std::fmt;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use anyhow::Result;
use kit::outcome::BOOTED_AGAIN;
use kit::qmp::Qmp;
use serde_json::json;

/// Arguments of a guest's kernel: the interrupt of a one-shot timer is lost now and then, after
/// which the timer is never programmed again. A periodic one is followed by the next.
pub(crate) const PERIODIC_TIMERS: &str = " highres=off nohz=off";

/// Maximum number of machines that may be lost: of each VM in a set of cases, of each test, and of
/// each step of `make run`. It includes those whose helper is late, and those that end before any
/// code of this project runs.
pub(crate) const RETRIES: u32 = 3;

/// Readings in a row that find an interrupt in service on a halted CPU, before it counts as lost.
const LOST_AFTER: u32 = 3;

/// Interval between two of them if nothing else is to do.
const PAUSE: Duration = Duration::from_secs(1);

/// Vector of the local APIC's timer in Linux (`LOCAL_TIMER_VECTOR`).
const TIMER: &str = "236";

/// Parts of assertions that QEMU fails in its emulation only.
const ASSERTIONS: [&str; 1] = ["iotlb_to_section: Assertion"];

/// The emulator has failed, and not its guest: another run may succeed.
#[derive(Debug, PartialEq, Eq)]
pub struct EmulatorFault(String);

impl EmulatorFault {
    /// A fault with its evidence.
    pub fn new(evidence: impl Into<String>) -> Self {
        Self(evidence.into())
    }
}

impl fmt::Display for EmulatorFault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for EmulatorFault {}

/// Calls `run`, and again after an [`EmulatorFault`], three times at most. Prints the evidence each
/// time.
///
/// # Errors
/// As `run`.
pub fn again_if_lost<T>(name: &str, run: impl FnMut() -> Result<T>) -> Result<T> {
    again(run, |fault| println!("{BOOTED_AGAIN}{name}: {fault}"))
}

fn again<T>(mut run: impl FnMut() -> Result<T>, tell: impl Fn(&EmulatorFault)) -> Result<T> {
    for _ in 0..RETRIES {
        let ended = run();
        match ended.as_ref().err().and_then(|error| error.downcast_ref()) {
            Some(fault) => tell(fault),
            None => return ended,
        }
    }
    run()
}

/// The assertion that ended QEMU, in its output.
pub(crate) fn assertion(output: &str) -> Option<EmulatorFault> {
    let is_one = |line: &&str| ASSERTIONS.iter().any(|part| line.contains(part));
    let line = output.lines().find(is_one)?;
    Some(EmulatorFault(format!("the emulator failed: {}", line.trim())))
}

/// A halted CPU and the interrupts that its local APIC has in service.
type InService = (usize, String);

/// Readings of the registers of a machine.
#[derive(Debug, Default)]
pub(crate) struct Readings {
    /// Interrupts that each of the last `number` readings has found.
    in_service: BTreeSet<InService>,
    number: u32,
}

impl Readings {
    /// Reads the registers of the machine whose monitor listens at `control`; returns the evidence
    /// once enough readings agree. A machine that is about to end does not answer.
    pub(crate) fn read(&mut self, control: &Path) -> Option<EmulatorFault> {
        let found = Qmp::connect(control).and_then(|mut monitor| in_service(&mut monitor));
        self.add(found.unwrap_or_default())
    }

    fn add(&mut self, found: BTreeSet<InService>) -> Option<EmulatorFault> {
        let both: BTreeSet<_> = self.in_service.intersection(&found).cloned().collect();
        (self.in_service, self.number) = match both.is_empty() {
            true => (found, 1),
            false => (both, self.number + 1),
        };
        let (cpu, interrupts) = self.in_service.first()?;
        (self.number >= LOST_AFTER).then(|| {
            EmulatorFault(format!(
                "the emulator lost the end of an interrupt: CPU {cpu} is halted with interrupt \
                 {interrupts} in service"
            ))
        })
    }
}

/// Looks for a lost interrupt in a machine that does not go on, for some seconds.
pub(crate) fn lost_interrupt(control: &Path) -> Option<EmulatorFault> {
    let mut readings = Readings::default();
    (0..LOST_AFTER).find_map(|number| {
        if number > 0 {
            std::thread::sleep(PAUSE);
        }
        readings.read(control)
    })
}

/// The interrupts in service on CPUs that are halted before and after their APIC is read.
fn in_service(monitor: &mut Qmp<UnixStream>) -> Result<BTreeSet<InService>> {
    let mut found = BTreeSet::new();
    for cpu in halted(&human(monitor, "info registers -a")?) {
        let apic = human(monitor, &format!("info lapic {cpu}"))?;
        found.extend(in_service_of(&apic).map(|interrupts| (cpu, interrupts)));
    }
    if !found.is_empty() {
        let halted = halted(&human(monitor, "info registers -a")?);
        found.retain(|(cpu, _)| halted.contains(cpu));
    }
    Ok(found)
}

/// The numbers of the halted CPUs in the output of `info registers -a`.
fn halted(registers: &str) -> Vec<usize> {
    let mut cpu: Option<usize> = None;
    let mut halted = Vec::new();
    for line in registers.lines() {
        if let Some(number) = line.strip_prefix("CPU#") {
            cpu = number.trim().parse().ok();
        } else if line.contains(" HLT=1") {
            halted.extend(cpu);
        }
    }
    halted
}

/// The vectors in service in the output of `info lapic`, if the timer's is one of them.
fn in_service_of(apic: &str) -> Option<String> {
    let line = apic.lines().find_map(|line| line.strip_prefix("ISR"))?.trim();
    line.split_whitespace().any(|vector| vector == TIMER).then(|| line.to_owned())
}

/// The output of a monitor command for humans.
pub(crate) fn human(monitor: &mut Qmp<UnixStream>, command: &str) -> Result<String> {
    let said = monitor.execute("human-monitor-command", json!({ "command-line": command }))?;
    Ok(said.as_str().unwrap_or_default().replace('\r', ""))
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;

    use anyhow::{Context, bail};

    use super::*;

    #[test]
    fn halted_cpus_and_their_interrupts_are_found_in_the_outputs_of_the_monitor() {
        let registers = "CPU#0\nRAX=0\nRIP=1 RFL=2 [-----P-] CPL=0 II=0 A20=1 SMM=0 HLT=0\n\
                         CPU#1\nRAX=0\nRIP=1 RFL=2 [-----P-] CPL=0 II=0 A20=1 SMM=0 HLT=1\n\
                         CPU#2\nRIP=1 RFL=2 [-----P-] CPL=0 II=0 A20=1 SMM=0 HLT=1\n";
        assert_eq!(halted(registers), [1, 2]);
        let apic = "dumping local APIC state for CPU 2\n\nESR\t 0x00000000\nISR\t 236 \nIRR\t 34 35 236 \n";
        assert_eq!(in_service_of(apic).as_deref(), Some("236"));
        assert_eq!(in_service_of("ISR\t (none)\nIRR\t 236 \n"), None);
        assert_eq!(in_service_of("ISR\t 35 \nIRR\t 236 \n"), None, "a handler may sleep in it");
    }

    #[test]
    fn an_interrupt_counts_as_lost_if_all_of_several_readings_find_it() {
        let mut readings = Readings::default();
        let of = |found: &[InService]| found.iter().cloned().collect::<BTreeSet<_>>();
        let (one, two) = ((1, "236".to_owned()), (2, "236".to_owned()));
        assert!(readings.add(of(std::slice::from_ref(&one))).is_none());
        assert!(readings.add(of(&[one.clone(), two.clone()])).is_none());
        // A CPU that has returned from its interrupt in between.
        assert!(readings.add(of(std::slice::from_ref(&two))).is_none());
        assert!(readings.add(of(&[])).is_none());
        for _ in 1..LOST_AFTER {
            assert!(readings.add(of(&[one.clone(), two.clone()])).is_none());
        }
        let lost = readings.add(of(&[two])).expect("found in each reading").to_string();
        assert!(lost.contains("CPU 2") && lost.contains("236"), "{lost}");
    }

    #[test]
    fn only_an_assertion_of_the_emulation_is_evidence() {
        let said =
            "qemu: warning: x\nqemu: physmem.c:2671: iotlb_to_section: Assertion `a < b' failed.\n";
        let fault = assertion(said).expect("an assertion of the emulation").to_string();
        assert!(fault.contains("iotlb_to_section") && !fault.contains("warning"), "{fault}");
        assert!(
            assertion("qemu: kvm.c:3877: kvm_buf_set_msrs: Assertion `ret' failed.\n").is_none()
        );
    }

    #[test]
    fn a_lost_machine_is_begun_anew_some_times_and_any_other_failure_ends_the_run() {
        let told = RefCell::new(Vec::new());
        // Not by again_if_lost(), which would print the evidence as this test's own.
        let tell = |fault: &EmulatorFault| told.borrow_mut().push(fault.to_string());
        let fault = || anyhow::Error::new(EmulatorFault::new("evidence"));
        let mut runs = 0;
        let lost_once = || {
            runs += 1;
            if runs == 1 { Err(fault()).context("while it began") } else { Ok(runs) }
        };
        assert_eq!(again(lost_once, tell).unwrap(), 2);
        assert_eq!(told.take(), ["evidence"]);
        let mut runs = 0;
        let lost = || {
            runs += 1;
            Err::<(), _>(fault())
        };
        assert!(again(lost, tell).unwrap_err().is::<EmulatorFault>());
        assert_eq!((runs, told.take().len()), (RETRIES + 1, RETRIES as usize));
        let mut runs = 0;
        let failed = || {
            runs += 1;
            bail!("wrong data")
        };
        assert_eq!(again::<()>(failed, tell).unwrap_err().to_string(), "wrong data");
        assert_eq!((runs, told.take().len()), (1, 0));
    }
}
