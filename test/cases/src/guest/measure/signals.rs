// SPDX-License-Identifier: Apache-2.0
//! Kicks and interrupts. Under KVM each costs the guest an exit or an entry, many times the cost in
//! an emulated guest. So they are counted in a separate round, beside the rates.

use std::fs;

use anyhow::Result;
use kit::metric::Figures;
use kit::probe::Probe;
use kit::signals::{KICK, Signals};

use crate::guest::machine::disk::Disk;
use crate::guest::system;

/// Counts notifications of all virtio devices until dropped.
#[derive(Debug)]
pub(super) struct Counter(Probe);

impl Counter {
    /// Starts counting.
    pub(super) fn start() -> Result<Self> {
        Probe::start(KICK).map(Counter)
    }

    /// Counts the signals of `load`, during which no other virtio device may be used.
    pub(super) fn of<T>(
        &self,
        disk: &Disk<'_>,
        load: impl FnOnce() -> Result<T>,
    ) -> Result<Figures> {
        let before = self.signals(disk)?;
        load()?;
        before.until(&self.signals(disk)?)
    }

    /// The kernel's counters at one moment.
    fn signals(&self, disk: &Disk<'_>) -> Result<Signals> {
        let kicks = self.0.hits()?;
        let mut interrupts = 0;
        for entry in fs::read_dir(disk.pci().join("msi_irqs"))? {
            interrupts += system::interrupts(&entry?.file_name().to_string_lossy())?;
        }
        Ok(Signals { kicks, interrupts, requests: disk.stat()?.submitted() })
    }
}
