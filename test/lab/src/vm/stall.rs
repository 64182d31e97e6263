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
//! A machine whose emulator has lost the end of an interrupt cannot be repaired: see
//! [`crate::emulator`].

use std::fmt::Write;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::Result;
use kit::qmp::Qmp;
use serde_json::json;

use crate::emulator::{EmulatorFault, Readings, human};

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

/// The state of the CPUs of an emulated VM.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Cpus {
    /// Nothing to report.
    Fine,
    /// They have stood still for long, and were woken.
    Woken,
    /// The emulator has lost the machine.
    Lost(EmulatorFault),
}

/// Watches the process of an emulated VM, and wakes its CPUs.
#[derive(Debug)]
pub(crate) struct StallWatch {
    pid: u32,
    control: PathBuf,
    looked: Instant,
    used: Duration,
    still: Duration,
    woken: u32,
    readings: Readings,
    log: String,
}

impl StallWatch {
    /// Watches QEMU's process, whose monitor listens at `control`.
    pub(crate) fn new(pid: u32, control: PathBuf) -> Self {
        let used = processor_time(pid);
        let (looked, still) = (Instant::now(), Duration::ZERO);
        let (readings, log) = (Readings::default(), String::new());
        Self { pid, control, looked, used, still, woken: 0, readings, log }
    }

    /// Looks for a lost interrupt, and wakes the CPUs if the VM has stood still for long. Call it
    /// repeatedly.
    pub(crate) fn look(&mut self) -> Cpus {
        let passed = self.looked.elapsed();
        if passed < LOOK {
            return Cpus::Fine;
        }
        if let Some(lost) = self.readings.read(&self.control) {
            return Cpus::Lost(lost);
        }
        match self.wake_if_still(passed) {
            true => Cpus::Woken,
            false => Cpus::Fine,
        }
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
}
