// SPDX-License-Identifier: Apache-2.0
//! Kicks and interrupts. Under KVM each costs the guest an exit or an entry, many times the cost in
//! an emulated guest. So they are counted in a separate round, beside the rates.

use std::fs::{self, OpenOptions};
use std::io::Write;
use std::path::Path;

use anyhow::{Context, Result};
use kit::metric::Figures;
use kit::signals::{DEFINITION, PROFILE, REMOVAL, SWITCH, Signals, TRACING, kicks};

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
        let before = signals(disk)?;
        load()?;
        before.until(&signals(disk)?)
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
fn signals(disk: &Disk<'_>) -> Result<Signals> {
    let kicks = kicks(&read(Path::new(TRACING).join(PROFILE))?)?;
    let mut interrupts = 0;
    for entry in fs::read_dir(disk.pci().join("msi_irqs"))? {
        interrupts += system::interrupts(&entry?.file_name().to_string_lossy())?;
    }
    Ok(Signals { kicks, interrupts, requests: disk.stat()?.submitted() })
}
