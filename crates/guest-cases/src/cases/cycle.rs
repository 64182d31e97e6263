// SPDX-License-Identifier: Apache-2.0
//! The disk, its driver or the machine goes and comes again, under load.

use std::path::Path;

use anyhow::{Context as _, Result, ensure};
use lab_case::outcome::{expect_log, skip};

use crate::case::{Case, Context};
use crate::load::Errors;
use crate::load::everything::Everything;
use crate::machine::disk::{Disk, Plug, Way};
use crate::mode::Mode;
use crate::system::{read, wait_for, write};

pub(crate) const CASES: &[Case] = &[
    Case {
        name: "guest-unplug",
        short: &[Mode::Request, Mode::BioPoll],
        modes: Mode::ALL,
        has_long: true,
        about: "a disk is unplugged under load: every request ends, and the next disk works",
        run: |context| unplug(context, Way::Orderly),
    },
    Case {
        name: "guest-surprise",
        short: &[Mode::RequestPoll, Mode::Bio],
        modes: Mode::ALL,
        has_long: true,
        about: "a disk loses its power under load, before the kernel knows: every request ends, and the next disk works",
        run: |context| unplug(context, Way::Surprise),
    },
    Case {
        name: "guest-button",
        short: &[],
        modes: Mode::INTERRUPTS,
        has_long: false,
        about: "a disk whose button is pressed goes in order after five seconds, under load",
        run: button,
    },
    Case {
        name: "guest-bind",
        short: &[Mode::Bio],
        modes: Mode::ALL,
        has_long: true,
        about: "the driver is taken off a disk under load, and put on again",
        run: rebind,
    },
    Case {
        name: "guest-suspend",
        short: &[],
        modes: Mode::ALL,
        has_long: false,
        about: "the machine is suspended and resumed under load, and no request fails",
        run: suspend,
    },
    Case {
        name: "guest-reset",
        short: &[],
        modes: Mode::ALL,
        has_long: false,
        about: "the PCI function is reset under load, and no request fails",
        run: reset,
    },
];

fn plug_and_load<'a>(context: &'a Context) -> Result<(Disk<'a>, Everything)> {
    let disk = Disk::plug(&context.machine, &Plug::file(Everything::DISK_MIB))?;
    let load = Everything::start(context, &disk, Errors::End)?;
    Ok((disk, load))
}

fn unplug(context: &Context, way: Way) -> Result<()> {
    for round in 0..context.effort.rounds {
        let (disk, load) = plug_and_load(context).with_context(|| format!("round {round}"))?;
        let gone = disk.unplug(way);
        load.end().with_context(|| format!("round {round}"))?;
        gone.with_context(|| format!("round {round}"))?;
    }
    Ok(())
}

fn button(context: &Context) -> Result<()> {
    let (mut disk, load) = plug_and_load(context)?;
    if !disk.is_hot_plugged() {
        return Err(skip("the slots of a kernel with lockdep have no button: see machine/slot.rs"));
    }
    let pci = disk.pci().to_owned();
    disk.ask_to_go()?;
    wait_for("the kernel to let the disk go", || (!pci.exists()).then_some(()))?;
    load.end()
}

fn rebind(context: &Context) -> Result<()> {
    let disk = Disk::plug(&context.machine, &Plug::file(Everything::DISK_MIB))?;
    for round in 0..context.effort.rounds {
        let load = Everything::start(context, &disk, Errors::End)?;
        let unbound = disk.unbind();
        load.end().with_context(|| format!("round {round}"))?;
        unbound?;
        ensure!(disk.block().is_none(), "the block device is still there");
        disk.bind()?;
        disk.wait_for_block()?;
    }
    Ok(())
}

/// Another mode of the cache than before.
fn switch_cache(disk: &Disk<'_>, round: u32) -> Result<&'static str> {
    let cache = ["write through", "write back"][round as usize % 2];
    disk.set("cache_type", cache)?;
    Ok(cache)
}

/// The device has forgotten it with its reset. The kernel's own driver lets it.
fn has_kept(context: &Context, disk: &Disk<'_>, cache: &str) -> Result<()> {
    for name in ["cache_type", "queue/write_cache"] {
        let seen = disk.attribute(name)?;
        ensure!(seen == cache || context.mode.is_in_tree(), "{name} is {seen}, not {cache}");
    }
    Ok(())
}

const POWER: &str = "/sys/power";

/// Suspends and resumes all devices, by the kernel's own test of it: what would wake an emulated
/// machine up differs from one to the next.
fn sleep_once() -> Result<()> {
    let test = Path::new(POWER).join("pm_test");
    write(&test, "devices")?;
    let slept = write(Path::new(POWER).join("state"), "freeze");
    write(&test, "none")?;
    slept
}

fn suspend(context: &Context) -> Result<()> {
    if !Path::new(POWER).join("pm_test").exists() {
        return Err(skip("this kernel has no test of suspending (CONFIG_PM_DEBUG)"));
    }
    // Of the root disk, not of ours: nvme in Linux 6.12 thaws its queues in another task than it
    // froze them in, and lockdep misses the locks that it takes that for.
    expect_log("workqueue leaked atomic, lock or RCU");
    write("/sys/module/suspend/parameters/pm_test_delay", "1")?;
    let disk = Disk::plug(&context.machine, &Plug::file(Everything::DISK_MIB))?;
    let mut load = Everything::start(context, &disk, Errors::Fail)?;
    for round in 0..context.effort.rounds {
        let cache = switch_cache(&disk, round)?;
        sleep_once().with_context(|| format!("round {round}"))?;
        has_kept(context, &disk, cache).with_context(|| format!("round {round}"))?;
        load.goes_on().with_context(|| format!("round {round}"))?;
    }
    load.finish()
}

fn reset(context: &Context) -> Result<()> {
    let symbols = read("/proc/kallsyms")?;
    if !symbols.lines().any(|line| line.contains("virtio_device_reset_prepare")) {
        return Err(skip("this kernel's virtio does not tell drivers of resets"));
    }
    let disk = Disk::plug(&context.machine, &Plug::file(Everything::DISK_MIB))?;
    let mut load = Everything::start(context, &disk, Errors::Fail)?;
    for round in 0..context.effort.rounds {
        let cache = switch_cache(&disk, round)?;
        write(disk.pci().join("reset"), "1")?;
        has_kept(context, &disk, cache).with_context(|| format!("round {round}"))?;
        load.goes_on().with_context(|| format!("round {round}"))?;
    }
    load.finish()
}
