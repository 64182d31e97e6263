// SPDX-License-Identifier: Apache-2.0
//! The device is reset below a disk that stays, under load: suspend, resume, the reset of its PCI
//! function.

use std::fs::{File, OpenOptions};
use std::os::unix::fs::FileExt;
use std::path::Path;

use anyhow::{Context as _, Result, ensure};
use lab_case::outcome::{expect_log, skip};

use crate::case::{Case, Context};
use crate::load::everything::Everything;
use crate::load::memory::Aligned;
use crate::load::{Errors, Load, open_direct};
use crate::machine::backing::Backing;
use crate::machine::disk::{Disk, Plug, Way};
use crate::mode::{MODULE, Mode};
use crate::symbols::{Code, Refused, Symbols};
use crate::system::{Setting, read, write};

pub(crate) const CASES: &[Case] = &[
    Case {
        name: "guest-suspend",
        short: &[],
        modes: Mode::ALL,
        has_long: false,
        about: "the machine is suspended and resumed under load, and no request fails",
        run: suspend,
    },
    Case {
        name: "guest-resume-fails",
        short: &[],
        modes: Mode::OURS,
        has_long: false,
        about: "a disk that gets no queues back when it is resumed fails all I/O, and works after the next resume",
        run: resume_fails,
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

/// What all cases that suspend begin with.
fn prepare_to_sleep() -> Result<Setting> {
    if !Path::new(POWER).join("pm_test").exists() {
        return Err(skip("this kernel has no test of suspending (CONFIG_PM_DEBUG)"));
    }
    // Of the root disk, not of ours: nvme in Linux 6.12 thaws its queues in another task than it
    // froze them in, and lockdep misses the locks that it takes that for.
    expect_log("workqueue leaked atomic, lock or RCU");
    Setting::change("/sys/module/suspend/parameters/pm_test_delay", "1")
}

fn suspend(context: &Context) -> Result<()> {
    let _short = prepare_to_sleep()?;
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

/// Threads of the load, in the first half of the disk.
const THREADS: usize = 3;
const HALF: u64 = 8 << 20;
/// Of one page to fourteen, which is what a ring of 16 takes: half of the disk takes seven seconds.
const REQUESTS_A_SECOND: u64 = 20;

/// User space is frozen while devices sleep, the kernel's writeback is not: it has more to write
/// than the disk does in that time, and much more than the ring takes, so that it waits before a
/// full ring when the resume fails.
fn resume_fails(context: &Context) -> Result<()> {
    let _short = prepare_to_sleep()?;
    let _no_sync = Setting::change("/sys/power/sync_on_suspend", "0")?;
    let _at_once = Setting::change("/proc/sys/vm/dirty_background_ratio", "0")?;
    let backing = Backing::Throttled { bytes: 2 * HALF, iops: REQUESTS_A_SECOND };
    let disk = Disk::plug(&context.machine, &Plug::of(backing).queue_size(16))?;
    let path = disk.path()?;
    // Before anything is frozen: this takes a minute on an emulated debug kernel.
    let resume = Symbols::of(MODULE)?.function("virtblk_resume")?;
    for round in 0..(context.effort.rounds / 5).max(1) {
        let load = Load::start(&path, HALF, THREADS, Errors::End, context.seed)?;
        load.wait_for(10)?;
        let cached = cached_writes(&path)?;
        sleep_once_without_memory(&resume).with_context(|| format!("round {round}"))?;
        load.wait_for_errors(THREADS as u64)?;
        load.finish()?;
        ensure!(cached.sync_all().is_err(), "what the page cache had to write was not refused");
        ensure!(read_one(&path).is_err(), "a disk without queues is read");
        // It has another chance.
        sleep_once().with_context(|| format!("round {round}"))?;
        read_one(&path).with_context(|| format!("round {round}, after the next resume"))?;
    }
    let load = Load::start(&path, HALF, THREADS, Errors::Fail, context.seed)?;
    load.wait_for(10).context("after the last resume")?;
    load.finish()?;
    // A driver without queues is taken off, too.
    sleep_once_without_memory(&resume)?;
    disk.unplug(Way::Orderly)
}

/// Suspends the machine; this code gets no memory when it is resumed.
fn sleep_once_without_memory(resume: &Code) -> Result<()> {
    let fault = resume.refuse_memory(Refused::Any, 100)?;
    let slept = sleep_once();
    let injected = fault.injected()?;
    drop(fault);
    slept?;
    ensure!(injected > 0, "no memory was refused");
    Ok(())
}

/// Fills the second half of the disk in the page cache, and does not wait.
fn cached_writes(path: &str) -> Result<File> {
    let file = OpenOptions::new().write(true).open(path)?;
    let chunk = vec![0xa5; 1 << 20];
    for offset in (HALF..2 * HALF).step_by(chunk.len()) {
        file.write_all_at(&chunk, offset)?;
    }
    Ok(file)
}

fn read_one(path: &str) -> Result<()> {
    Ok(open_direct(path)?.read_exact_at(Aligned::new(4096).bytes(), 0)?)
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
