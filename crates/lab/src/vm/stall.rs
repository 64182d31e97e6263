// SPDX-License-Identifier: Apache-2.0
//! Emulated CPUs that sleep although there is work for them.
//!
//! With guests inside, a virtual CPU of an emulated VM loses an interrupt now and then: both CPUs
//! are halted, a kernel thread is due on one of them, and nothing ever wakes it. QEMU's emulation
//! of VMRUN is suspected: it changes the set of the CPU's pending interrupts without the lock under
//! which other threads add to it (`helper_vmrun`, QEMU 7.2). A non-maskable interrupt ends the
//! halt, and the kernel finds its work. It mends nothing else: a wake-up that software has lost
//! leaves the CPUs nothing to find.

use std::fmt::Write;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::Result;
use lab_case::qmp::Qmp;
use serde_json::json;

/// How long a VM must stand still before it is woken. One that only waits looks the same, and does
/// not mind; cases do not wait so long, and what waits for guests waits longer.
const PATIENCE: Duration = Duration::from_secs(60);

/// How often the processors' time is read.
const LOOK: Duration = Duration::from_secs(5);

/// Time of processors between two looks below which a VM stands still.
const STILL: Duration = Duration::from_millis(50);

/// How often a VM is woken; then it is left to its time-out.
const WAKES: u32 = 5;

/// What a monitor shows of the CPUs before they are woken.
const STATE: [&str; 3] = ["info registers -a", "info lapic 0", "info lapic 1"];

/// Watches the process of an emulated VM, and wakes its CPUs.
#[derive(Debug)]
pub(crate) struct StallWatch {
    pid: u32,
    control: PathBuf,
    looked: Instant,
    used: Duration,
    still: Duration,
    woken: u32,
    log: String,
}

impl StallWatch {
    /// Watches QEMU's process, whose monitor listens at `control`.
    pub(crate) fn new(pid: u32, control: PathBuf) -> Self {
        let used = processor_time(pid);
        let (looked, still) = (Instant::now(), Duration::ZERO);
        Self { pid, control, looked, used, still, woken: 0, log: String::new() }
    }

    /// Wakes the CPUs if the VM has stood still for long; returns whether it did. Is to be called
    /// again and again.
    pub(crate) fn look(&mut self) -> bool {
        let passed = self.looked.elapsed();
        if passed < LOOK {
            return false;
        }
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
        let _ = match &state {
            Ok(state) => write!(self.log, "== stood still; woken by an NMI\n{state}"),
            // A VM that has ended meanwhile.
            Err(error) => writeln!(self.log, "== stood still; cannot be woken: {error:#}"),
        };
        state.is_ok()
    }

    /// The state of the CPUs each time before they were woken.
    pub(crate) fn log(&self) -> &str {
        &self.log
    }
}

/// Time of processors that all threads of a process have used; nothing if it is gone.
fn processor_time(pid: u32) -> Duration {
    let Ok(tasks) = fs::read_dir(format!("/proc/{pid}/task")) else { return Duration::ZERO };
    let of_task = |path: &Path| -> Option<u64> {
        fs::read_to_string(path.join("schedstat")).ok()?.split(' ').next()?.parse().ok()
    };
    Duration::from_nanos(tasks.flatten().filter_map(|task| of_task(&task.path())).sum())
}

/// Sends all CPUs a non-maskable interrupt; returns what state they were in.
fn wake(control: &Path) -> Result<String> {
    let mut monitor = Qmp::connect(control)?;
    let mut state = String::new();
    for command in STATE {
        let arguments = json!({ "command-line": command });
        let said = monitor.execute("human-monitor-command", arguments)?;
        state.push_str(said.as_str().unwrap_or_default());
    }
    monitor.execute("inject-nmi", json!({}))?;
    Ok(state.replace('\r', ""))
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
        assert!(!watch.look());
        assert!(watch.log().is_empty());
    }
}
