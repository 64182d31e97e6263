// SPDX-License-Identifier: Apache-2.0
//! Emulated CPUs that sleep although they have work.
//!
//! With guests inside, a virtual CPU of an emulated VM loses an interrupt now and then: both CPUs
//! are halted, a kernel thread is due on one of them, and nothing ever wakes it. The suspect is
//! QEMU's emulation of VMRUN: it changes the set of the CPU's pending interrupts without the lock
//! under which other threads add to it (`helper_vmrun`, QEMU 7.2). A non-maskable interrupt ends
//! the halt, and the kernel finds its work. It repairs nothing else: after a wake-up lost by
//! software the CPUs find no work.
//!
//! The emulator of a machine with four virtual CPUs also loses the end of an interrupt now and then
//! (QEMU 10.0.13): the local APIC keeps the interrupt in service although the CPU has returned from
//! it and is halted, and holds back all interrupts of the same and lower priority, those of the
//! timer among them. No kernel halts a CPU inside of an interrupt, and nothing but the APIC itself
//! can end this state, so the machine is beyond repair.

use std::collections::BTreeSet;
use std::fmt::Write;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::Result;
use kit::qmp::Qmp;
use serde_json::json;

/// Time that a VM must stand still before it is woken. A VM that only waits looks the same, but a
/// wake-up does it no harm. Cases do not wait so long; waits for guests are longer.
const PATIENCE: Duration = Duration::from_secs(60);

/// Interval between two readings of the process's CPU time.
const LOOK: Duration = Duration::from_secs(5);

/// CPU time between two readings below which the VM stands still.
const STILL: Duration = Duration::from_millis(50);

/// Maximum number of wake-ups of a VM; after them it runs into its time-out.
const WAKES: u32 = 5;

/// Maximum number of queues of a device whose state is read: those of the serial ports.
const QUEUES: u32 = 12;

/// Readings of a machine that hangs: one that runs shows other registers in each.
const READINGS: u32 = 3;

/// Readings in a row that find an interrupt in service on a halted CPU, before it counts as lost.
const LOST_AFTER: u32 = 3;

/// The state of the CPUs of an emulated VM.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Cpus {
    /// Nothing to report.
    Fine,
    /// They have stood still for long, and were woken.
    Woken,
    /// The emulator has lost the end of an interrupt; the evidence.
    Lost(String),
}

/// A halted CPU and the interrupts that its local APIC has in service.
type InService = (usize, String);

/// Watches the process of an emulated VM, and wakes its CPUs.
#[derive(Debug)]
pub(crate) struct StallWatch {
    pid: u32,
    control: PathBuf,
    looked: Instant,
    used: Duration,
    still: Duration,
    woken: u32,
    /// Interrupts that each of the last `readings` readings has found.
    in_service: BTreeSet<InService>,
    readings: u32,
    log: String,
}

impl StallWatch {
    /// Watches QEMU's process, whose monitor listens at `control`.
    pub(crate) fn new(pid: u32, control: PathBuf) -> Self {
        let used = processor_time(pid);
        let (looked, still) = (Instant::now(), Duration::ZERO);
        let (in_service, log) = (BTreeSet::new(), String::new());
        Self { pid, control, looked, used, still, woken: 0, in_service, readings: 0, log }
    }

    /// Looks for a lost interrupt, and wakes the CPUs if the VM has stood still for long. Call it
    /// repeatedly.
    pub(crate) fn look(&mut self) -> Cpus {
        let passed = self.looked.elapsed();
        if passed < LOOK {
            return Cpus::Fine;
        }
        // A machine that is about to end does not answer.
        let found = Qmp::connect(&self.control).and_then(|mut monitor| in_service(&mut monitor));
        if let Some(lost) = self.count(found.unwrap_or_default()) {
            return Cpus::Lost(lost);
        }
        match self.wake_if_still(passed) {
            true => Cpus::Woken,
            false => Cpus::Fine,
        }
    }

    /// Counts a reading; returns the evidence once `LOST_AFTER` of them agree.
    fn count(&mut self, found: BTreeSet<InService>) -> Option<String> {
        let both: BTreeSet<_> = self.in_service.intersection(&found).cloned().collect();
        (self.in_service, self.readings) = match both.is_empty() {
            true => (found, 1),
            false => (both, self.readings + 1),
        };
        let (cpu, interrupts) = self.in_service.first()?;
        (self.readings >= LOST_AFTER).then(|| {
            format!(
                "the emulator lost the end of an interrupt: CPU {cpu} is halted with interrupt \
                 {interrupts} in service"
            )
        })
    }

    fn wake_if_still(&mut self, passed: Duration) -> bool {
        let used = processor_time(self.pid);
        let stood = used.saturating_sub(self.used) < STILL;
        self.still = if stood { self.still + passed } else { Duration::ZERO };
        (self.looked, self.used) = (Instant::now(), used);
        if self.still < PATIENCE || self.woken == WAKES {
            return false;
        }
        self.still = Duration::ZERO;
        self.woken += 1;
        let state = wake(&self.control);
        let is_woken = state.is_ok();
        self.write("stood still; woken by an NMI", state);
        is_woken
    }

    /// Adds the state of CPUs and serial ports to the log, for a machine that hangs.
    pub(crate) fn note_state(&mut self) {
        for _ in 0..READINGS {
            let state = Qmp::connect(&self.control).and_then(|mut monitor| state(&mut monitor));
            self.write("the state of the machine", state);
        }
    }

    fn write(&mut self, heading: &str, state: Result<String>) {
        let _ = match state {
            Ok(state) => write!(self.log, "== {heading}\n{state}"),
            // The VM may have ended in the meantime.
            Err(error) => writeln!(self.log, "== {heading}; no state of its CPUs: {error:#}"),
        };
    }

    /// The states of the CPUs so far.
    pub(crate) fn log(&self) -> &str {
        &self.log
    }
}

/// CPU time of all threads of a process; zero if it has ended.
fn processor_time(pid: u32) -> Duration {
    let threads = kit::sched::threads(pid).unwrap_or_default();
    threads.iter().map(|(_, times)| times.busy).sum()
}

/// Sends all CPUs a non-maskable interrupt; returns their state before it.
fn wake(control: &Path) -> Result<String> {
    let mut monitor = Qmp::connect(control)?;
    let state = state(&mut monitor)?;
    monitor.execute("inject-nmi", json!({}))?;
    Ok(state)
}

/// The interrupts in service on halted CPUs.
fn in_service(monitor: &mut Qmp<UnixStream>) -> Result<BTreeSet<InService>> {
    let registers = human(monitor, "info registers -a")?;
    let mut found = BTreeSet::new();
    for cpu in halted(&registers) {
        let apic = human(monitor, &format!("info lapic {cpu}"))?;
        found.extend(in_service_of(&apic).map(|interrupts| (cpu, interrupts)));
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

/// The vectors in service in the output of `info lapic`; `None`: none.
fn in_service_of(apic: &str) -> Option<String> {
    let line = apic.lines().find_map(|line| line.strip_prefix("ISR"))?.trim();
    (line != "(none)").then(|| line.to_owned())
}

/// The registers and interrupts of all CPUs, and the rings of the serial ports.
fn state(monitor: &mut Qmp<UnixStream>) -> Result<String> {
    let mut state = human(monitor, "info registers -a")?;
    let cpus = monitor.execute("query-cpus-fast", json!({}))?;
    for number in 0..cpus.as_array().map_or(0, Vec::len) {
        state += &human(monitor, &format!("info lapic {number}"))?;
    }
    let devices = human(monitor, "info virtio")?;
    for path in devices.lines().filter_map(|line| line.strip_suffix(" [virtio-serial]")) {
        for queue in 0..QUEUES {
            let command = format!("info virtio-queue-status {} {queue}", path.trim());
            let said = human(monitor, &command)?;
            let shown = |line: &&str| {
                ["name", "_idx", "avail", "used"].iter().any(|word| line.contains(word))
            };
            state.extend(said.lines().filter(shown).map(|line| format!("queue {queue}: {line}\n")));
        }
    }
    Ok(state)
}

/// The output of a monitor command for humans.
fn human(monitor: &mut Qmp<UnixStream>, command: &str) -> Result<String> {
    let said = monitor.execute("human-monitor-command", json!({ "command-line": command }))?;
    Ok(said.as_str().unwrap_or_default().replace('\r', ""))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_that_works_uses_time_and_one_that_is_gone_none() {
        let before = processor_time(std::process::id());
        let end = Instant::now() + Duration::from_secs(60);
        while processor_time(std::process::id()) == before {
            assert!(Instant::now() < end, "a process that works for a minute used no time");
        }
        assert_eq!(processor_time(u32::MAX), Duration::ZERO);
    }

    #[test]
    fn a_vm_is_not_woken_at_the_first_look() {
        let mut watch = StallWatch::new(std::process::id(), PathBuf::from("/nowhere"));
        assert_eq!(watch.look(), Cpus::Fine);
        assert!(watch.log().is_empty());
    }

    #[test]
    fn halted_cpus_and_their_interrupts_are_found_in_the_outputs_of_the_monitor() {
        let registers = "CPU#0\nRAX=0\nRIP=1 RFL=2 [-----P-] CPL=0 II=0 A20=1 SMM=0 HLT=0\n\
                         CPU#1\nRAX=0\nRIP=1 RFL=2 [-----P-] CPL=0 II=0 A20=1 SMM=0 HLT=1\n\
                         CPU#2\nRIP=1 RFL=2 [-----P-] CPL=0 II=0 A20=1 SMM=0 HLT=1\n";
        assert_eq!(halted(registers), [1, 2]);
        let apic = "dumping local APIC state for CPU 2\n\nESR\t 0x00000000\nISR\t 236 \nIRR\t 34 35 236 \n";
        assert_eq!(in_service_of(apic).as_deref(), Some("236"));
        assert_eq!(in_service_of("ISR\t (none)\nIRR\t 236 \n"), None);
    }

    #[test]
    fn an_interrupt_counts_as_lost_if_all_of_several_readings_find_it() {
        let mut watch = StallWatch::new(std::process::id(), PathBuf::from("/nowhere"));
        let of = |found: &[InService]| found.iter().cloned().collect::<BTreeSet<_>>();
        let (one, two) = ((1, "236".to_owned()), (2, "236".to_owned()));
        assert_eq!(watch.count(of(std::slice::from_ref(&one))), None);
        assert_eq!(watch.count(of(&[one.clone(), two.clone()])), None);
        // A CPU that has returned from its interrupt in between.
        assert_eq!(watch.count(of(std::slice::from_ref(&two))), None);
        assert_eq!(watch.count(of(&[])), None);
        for _ in 1..LOST_AFTER {
            assert_eq!(watch.count(of(&[one.clone(), two.clone()])), None);
        }
        let lost = watch.count(of(&[two])).expect("found in each reading");
        assert!(lost.contains("CPU 2") && lost.contains("236"), "{lost}");
    }
}
