// SPDX-License-Identifier: Apache-2.0
//! Kicks and interrupts. Under KVM each costs the guest an exit or an entry, many times the cost in
//! an emulated guest. So they are counted in a separate round, beside the rates.

use std::fs::{self, OpenOptions};
use std::io::Write;
use std::path::Path;

use anyhow::{Context, Result};
use kit::kick_probe::{DEFINITION, PROFILE, REMOVAL, SWITCH, TRACING, kicks};
use kit::metric::{Figures, INTERRUPTS, KICKS};

use crate::guest::machine::disk::Disk;
use crate::guest::system::{self, read, write};

/// Makes the kernel count notifications of all virtio devices until dropped.
#[derive(Debug)]
pub(super) struct Counter;

impl Counter {
    /// Starts counting.
    pub(super) fn start() -> Result<Self> {
        change_probes(DEFINITION)?;
        let counter = Self;
        counter.enable("1")?;
        Ok(counter)
    }

    fn enable(&self, on: &str) -> Result<()> {
        write(Path::new(TRACING).join(SWITCH), on)
    }

    /// Counts the signals of `load`, during which no other virtio device may be used.
    pub(super) fn of<T>(
        &self,
        disk: &Disk<'_>,
        load: impl FnOnce() -> Result<T>,
    ) -> Result<Figures> {
        let before = Counts::now(disk)?;
        load()?;
        Ok(before.until(&Counts::now(disk)?))
    }
}

impl Drop for Counter {
    fn drop(&mut self) {
        let removed = self.enable("0").and_then(|()| change_probes(REMOVAL));
        if let Err(why) = removed {
            eprintln!("clean-up: {why:#}");
        }
    }
}

/// Appends a definition to the existing ones (Documentation/trace/kprobetrace.rst).
fn change_probes(definition: &str) -> Result<()> {
    let path = Path::new(TRACING).join("kprobe_events");
    let file = OpenOptions::new().append(true).open(&path);
    file.and_then(|mut file| file.write_all(format!("{definition}\n").as_bytes()))
        .with_context(|| format!("'{definition}' to {}", path.display()))
}

/// The kernel's counters at one moment.
#[derive(Clone, Copy, Debug)]
struct Counts {
    kicks: u64,
    interrupts: u64,
    requests: u64,
}

impl Counts {
    fn now(disk: &Disk<'_>) -> Result<Self> {
        let kicks = kicks(&read(Path::new(TRACING).join(PROFILE))?)?;
        let mut interrupts = 0;
        for entry in fs::read_dir(disk.pci().join("msi_irqs"))? {
            interrupts += system::interrupts(&entry?.file_name().to_string_lossy())?;
        }
        Ok(Self { kicks, interrupts, requests: disk.stat()?.submitted() })
    }

    fn until(&self, later: &Self) -> Figures {
        let requests = (later.requests - self.requests).max(1) as f64;
        vec![
            (KICKS, (later.kicks - self.kicks) as f64 / requests),
            (INTERRUPTS, (later.interrupts - self.interrupts) as f64 / requests),
        ]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_are_for_each_request() {
        let before = Counts { kicks: 100, interrupts: 50, requests: 1000 };
        let later = Counts { kicks: 600, interrupts: 300, requests: 2000 };
        assert_eq!(before.until(&later), [(KICKS, 0.5), (INTERRUPTS, 0.25)]);
    }
}
