// SPDX-License-Identifier: Apache-2.0
//! Exits of the guest for each request, counted by KVM; kicks and interrupts, counted by the guest.
//! They are what emulation distorts in time and not in number.
//!
//! A load and one with three times the requests are counted. The figures are the difference of both
//! over the difference of their requests, so that the start of fio and the guest's agent do not count. The guest's clock ticks do.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use kit::fio::Job;
use kit::kick_probe::{DEFINITION, PROFILE, SWITCH, TRACING, kicks};
use kit::metric::{Figures, INTERRUPTS, KICKS, Metric};
use kit::stat::Stat;

use crate::nested::guest::Guest;

/// Exits for each request, for any reason.
pub(super) const EXITS: Metric = Metric::new("exits", "1");
/// Exits because a virtual CPU had nothing to do.
pub(super) const HALTS: Metric = Metric::new("halts", "1");

/// KVM's counters, a folder for each virtual machine (Documentation/virt/kvm, `debugfs`).
const KVM: &str = "/sys/kernel/debug/kvm";

/// Counts the exits of one guest.
#[derive(Debug)]
pub(super) struct Counter {
    folder: PathBuf,
}

/// A disk in the guest.
#[derive(Debug)]
pub(super) struct Watched<'a> {
    /// Node, such as `/dev/vda`.
    pub(super) node: &'a str,
    /// The virtio device that it belongs to, such as `virtio3`.
    pub(super) device: String,
}

impl<'a> Watched<'a> {
    /// Looks up the virtio device of the disk `node`.
    pub(super) fn find(guest: &mut Guest, node: &'a str) -> Result<Self> {
        let path = guest.ok(&format!("readlink -f /sys/block/{}/device", name(node)))?;
        let parts = path.trim().split('/');
        let device = parts.rev().find(|part| part.starts_with("virtio"));
        let device = device.with_context(|| format!("{node} is no virtio disk: {path}"))?;
        Ok(Self { node, device: device.to_owned() })
    }
}

impl Counter {
    /// Finds the counters of the guest and starts the probe in it.
    pub(super) fn start(guest: &mut Guest) -> Result<Self> {
        guest.ok(&format!(
            "grep -q ' {TRACING} ' /proc/mounts || mount -t tracefs tracefs {TRACING}; \
             echo '{DEFINITION}' >> {TRACING}/kprobe_events && echo 1 > {TRACING}/{SWITCH}"
        ))?;
        let prefix = format!("{}-", guest.process_id());
        let folders = fs::read_dir(KVM).with_context(|| KVM.to_owned())?;
        let mut names = folders.flatten().map(|entry| entry.path());
        let folder = names.find(|path| {
            path.file_name().is_some_and(|name| name.to_string_lossy().starts_with(&prefix))
        });
        let folder = folder.with_context(|| format!("{KVM} has no machine {prefix}*"))?;
        Ok(Self { folder })
    }

    /// Counts while `job` runs with so many `requests`, and with three times as many. No other disk of
    /// the guest may be used.
    pub(super) fn of(
        &self,
        guest: &mut Guest,
        disk: &Watched<'_>,
        job: impl Fn(u64) -> Job,
        requests: u64,
    ) -> Result<Figures> {
        let mut count = |requests| {
            let before = self.now(guest, disk)?;
            guest.ok(&job(requests).command_line())?;
            self.now(guest, disk)?.since(&before)
        };
        let (short, long) = (count(requests)?, count(3 * requests)?);
        long.beyond(&short)
    }

    fn now(&self, guest: &mut Guest, disk: &Watched<'_>) -> Result<Counts> {
        let own = |file| number(&self.folder, file);
        let node = name(disk.node);
        Ok(Counts {
            exits: own("exits")?,
            halts: own("halt_exits")?,
            kicks: kicks(&guest.ok(&format!("cat {TRACING}/{PROFILE}"))?)?,
            interrupts: interrupts(&guest.ok("cat /proc/interrupts")?, &disk.device)?,
            requests: Stat::parse(&guest.ok(&format!("cat /sys/block/{node}/stat"))?)?.submitted(),
        })
    }
}

fn name(node: &str) -> &str {
    node.rsplit('/').next().unwrap_or(node)
}

fn number(folder: &Path, file: &str) -> Result<u64> {
    let path = folder.join(file);
    let text = fs::read_to_string(&path).with_context(|| path.display().to_string())?;
    text.trim().parse().with_context(|| path.display().to_string())
}

/// Interrupts of all queues of a virtio device, from the text of `/proc/interrupts`.
fn interrupts(text: &str, device: &str) -> Result<u64> {
    let action = format!("{device}-");
    let mut of_device = text.lines().filter(|line| line.contains(&action)).peekable();
    ensure!(of_device.peek().is_some(), "no interrupt of {device} in '{text}'");
    let counts = |line: &str| -> u64 {
        line.split_whitespace().skip(1).map_while(|word| word.parse::<u64>().ok()).sum()
    };
    Ok(of_device.map(counts).sum())
}

/// All counters at one moment, or their growth.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Counts {
    exits: u64,
    halts: u64,
    kicks: u64,
    interrupts: u64,
    requests: u64,
}

impl Counts {
    fn since(&self, before: &Self) -> Result<Self> {
        let grown = |later: u64, earlier: u64| later.checked_sub(earlier).context("a counter fell");
        Ok(Self {
            exits: grown(self.exits, before.exits)?,
            halts: grown(self.halts, before.halts)?,
            kicks: grown(self.kicks, before.kicks)?,
            interrupts: grown(self.interrupts, before.interrupts)?,
            requests: grown(self.requests, before.requests)?,
        })
    }

    /// The figures of the part by which this load is longer than the other one.
    fn beyond(&self, short: &Self) -> Result<Figures> {
        ensure!(self.requests > short.requests, "the longer load had no more requests");
        let requests = (self.requests - short.requests) as f64;
        let each = |long: u64, short: u64| (long as f64 - short as f64) / requests;
        Ok(vec![
            (EXITS, each(self.exits, short.exits)),
            (HALTS, each(self.halts, short.halts)),
            (KICKS, each(self.kicks, short.kicks)),
            (INTERRUPTS, each(self.interrupts, short.interrupts)),
        ])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn interrupts_of_all_queues_of_the_device_count_and_no_others() {
        let text = "            CPU0       CPU1\n \
            24:          1          0 PCI-MSIX-0000:00:02.0   0-edge      virtio1-config\n \
            25:         20        300 PCI-MSIX-0000:00:02.0   1-edge      virtio1-req.0\n \
            26:       4000          0 PCI-MSIX-0000:00:03.0   1-edge      virtio12-req.0\n";
        assert_eq!(interrupts(text, "virtio1").unwrap(), 321);
        assert!(interrupts(text, "virtio2").is_err());
    }

    #[test]
    fn the_start_of_a_load_does_not_count() {
        let load = |requests| Counts {
            exits: 5000 + 2 * requests,
            halts: 100 + requests,
            kicks: 40 + requests / 2,
            interrupts: 10 + requests / 4,
            requests,
        };
        let figures = load(3000).beyond(&load(1000)).unwrap();
        assert_eq!(figures, [(EXITS, 2.0), (HALTS, 1.0), (KICKS, 0.5), (INTERRUPTS, 0.25)]);
        assert!(load(1000).beyond(&load(1000)).is_err());
    }

    #[test]
    fn a_counter_that_falls_is_an_error() {
        let counts = |exits| Counts { exits, halts: 0, kicks: 0, interrupts: 0, requests: 0 };
        assert!(counts(1).since(&counts(2)).is_err());
        assert_eq!(counts(3).since(&counts(1)).unwrap(), counts(2));
    }
}
