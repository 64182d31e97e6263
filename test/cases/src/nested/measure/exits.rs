// SPDX-License-Identifier: Apache-2.0
//! Exits of the guest for each request, counted by KVM; kicks and interrupts, counted by the guest.
//! They are what emulation distorts in time and not in number.
//!
//! Exits are counted in the middle of a load, so that the start of fio, many times dearer, does not
//! count. The guest's clock ticks do. The served device counts the requests meanwhile.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use kit::fio::Job;
use kit::metric::{EXITS, Figures, Metric};
use kit::probe::{PROFILE, TRACING};
use kit::signals::{KICK, Signals};
use kit::stat::Stat;

use crate::nested::guest::Guest;

/// Exits because a virtual CPU had nothing to do.
pub(super) const HALTS: Metric = Metric::new("halts", "1");

/// KVM's counters, a directory for each virtual machine (Documentation/virt/kvm, `debugfs`).
const KVM: &str = "/sys/kernel/debug/kvm";
/// Interval between two looks at KVM's counters.
const LOOK: Duration = Duration::from_millis(20);

/// Counts the exits of one guest.
#[derive(Debug)]
pub(super) struct Counter {
    directory: PathBuf,
}

/// A disk in the guest.
#[derive(Debug)]
pub(super) struct Watched<'a> {
    /// Node, such as `/dev/vda`.
    node: &'a str,
    /// Directory of the device that serves it, in sysfs of the host.
    served: PathBuf,
    /// The virtio device that it belongs to, such as `virtio3`.
    device: String,
}

impl<'a> Watched<'a> {
    /// Looks up the virtio device of the disk `node`, which the device `served` of the host serves.
    pub(super) fn find(guest: &mut Guest, node: &'a str, served: &Path) -> Result<Self> {
        let served = Path::new("/sys/block").join(name(&served.to_string_lossy()));
        let path = guest.ok(&format!("readlink -f /sys/block/{}/device", name(node)))?;
        let parts = path.trim().split('/');
        let device = parts.rev().find(|part| part.starts_with("virtio"));
        let device = device.with_context(|| format!("{node} is no virtio disk: {path}"))?;
        Ok(Self { node, served, device: device.to_owned() })
    }
}

impl Counter {
    /// Finds the counters of the guest and starts the probe in it.
    pub(super) fn start(guest: &mut Guest) -> Result<Self> {
        let (definition, switch) = (KICK.definition(), KICK.switch());
        guest.ok(&format!(
            "grep -q ' {TRACING} ' /proc/mounts || mount -t tracefs tracefs {TRACING}; \
             echo '{definition}' >> {TRACING}/kprobe_events && echo 1 > {TRACING}/{switch}"
        ))?;
        let prefix = format!("{}-", guest.process_id());
        let directories = fs::read_dir(KVM).with_context(|| KVM.to_owned())?;
        let mut names = directories.flatten().map(|entry| entry.path());
        let directory = names.find(|path| {
            path.file_name().is_some_and(|name| name.to_string_lossy().starts_with(&prefix))
        });
        let directory = directory.with_context(|| format!("{KVM} has no machine {prefix}*"))?;
        Ok(Self { directory })
    }

    /// Counts while `job` runs. No other disk of the guest may be used.
    pub(super) fn of(&self, guest: &mut Guest, disk: &Watched<'_>, job: &Job) -> Result<Figures> {
        let before = signals(guest, disk)?;
        let (moments, ran) = self.watch(disk, || guest.ok(&job.command_line()));
        ran?;
        let mut figures = steady(&moments?)?;
        figures.extend(before.until(&signals(guest, disk)?)?);
        Ok(figures)
    }

    /// Takes a look at the counters again and again while `run` runs.
    fn watch<T>(&self, disk: &Watched<'_>, run: impl FnOnce() -> T) -> (Result<Vec<Moment>>, T) {
        let done = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let watcher = scope.spawn(|| {
                let mut moments = Vec::new();
                while !done.load(Ordering::Relaxed) {
                    moments.push(self.moment(disk)?);
                    std::thread::sleep(LOOK);
                }
                Ok(moments)
            });
            let ran = run();
            done.store(true, Ordering::Relaxed);
            (watcher.join().expect("the watcher panics nowhere"), ran)
        })
    }

    fn moment(&self, disk: &Watched<'_>) -> Result<Moment> {
        Ok(Moment {
            exits: number(&self.directory, "exits")?,
            halts: number(&self.directory, "halt_exits")?,
            requests: Stat::of(&disk.served)?.submitted(),
        })
    }
}

fn name(node: &str) -> &str {
    node.rsplit('/').next().unwrap_or(node)
}

fn number(directory: &Path, file: &str) -> Result<u64> {
    let path = directory.join(file);
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

/// KVM's counters of the guest and the requests of the served device at one moment.
#[derive(Clone, Copy, Debug)]
struct Moment {
    exits: u64,
    halts: u64,
    requests: u64,
}

/// Exits for each request in the middle three fifths of a load.
fn steady(moments: &[Moment]) -> Result<Figures> {
    let (Some(first), Some(last)) = (moments.first(), moments.last()) else {
        anyhow::bail!("the load was not watched");
    };
    let fifth = (last.requests - first.requests) / 5;
    let from = moments.iter().find(|moment| moment.requests > first.requests + fifth);
    let to = moments.iter().rfind(|moment| moment.requests < last.requests - fifth);
    let (Some(from), Some(to)) = (from, to) else { anyhow::bail!("the load was too short") };
    ensure!(to.requests > from.requests, "the load was too short");
    let requests = (to.requests - from.requests) as f64;
    let each = |to: u64, from: u64| (to - from) as f64 / requests;
    Ok(vec![(EXITS, each(to.exits, from.exits)), (HALTS, each(to.halts, from.halts))])
}

/// The guest's own counters of a disk.
fn signals(guest: &mut Guest, disk: &Watched<'_>) -> Result<Signals> {
    let stat = format!("cat /sys/block/{}/stat", name(disk.node));
    Ok(Signals {
        kicks: KICK.hits(&guest.ok(&format!("cat {TRACING}/{PROFILE}"))?)?,
        interrupts: interrupts(&guest.ok("cat /proc/interrupts")?, &disk.device)?,
        requests: Stat::parse(&guest.ok(&stat)?)?.submitted(),
    })
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
    fn the_start_and_the_end_of_a_load_do_not_count() {
        // Two exits and a halt for each request, and many more before and after.
        let moment = |requests: u64| Moment {
            exits: if requests == 0 { 0 } else { 5000 + 2 * requests + 900 * (requests / 1000) },
            halts: 10 + requests,
            requests,
        };
        let all: Vec<_> = (0..=1000).step_by(10).map(moment).collect();
        assert_eq!(steady(&all).unwrap(), [(EXITS, 2.0), (HALTS, 1.0)]);
        assert!(steady(&all[..1]).is_err());
        assert!(steady(&[moment(0), moment(1)]).is_err());
        assert!(steady(&[]).is_err());
    }
}
