// SPDX-License-Identifier: Apache-2.0
//! The device is reset under load while its disk stays: suspend, resume, and a reset of its PCI
//! function.

use std::fs::{File, OpenOptions};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use kit::outcome::{expect_io_errors, expect_log, skip};

use crate::case::cases;
use crate::guest::load::everything::Everything;
use crate::guest::load::memory::Aligned;
use crate::guest::load::{Errors, Load, open_direct};
use crate::guest::machine::backing::Backing;
use crate::guest::machine::disk::{Disk, Plug, Way};
use crate::guest::mode::{Driver, MODULE, Mode};
use crate::guest::symbols::{Code, Refused, Symbols};
use crate::guest::system::{KernelLog, Setting, read, wait_for, write};
use crate::guest::{Context, Modes};
use kit::disks::Lie;

cases! { Guest;
    "guest-suspend", Modes::of(Mode::ALL),
        "the machine is suspended and resumed under load, and no request fails",
        suspend;
    "guest-suspend-silent", Modes::of(Mode::OURS),
        "the machine is suspended although a disk answers nothing: what it has fails, and after the reset it works",
        suspend_silent;
    "guest-reset-silent", Modes::of(Mode::OURS),
        "the reset of a PCI function that answers nothing does not wait for ever, and cures it",
        reset_silent;
    "guest-resume-fails", Modes::of(Mode::OURS),
        "a disk that gets no queues back when it is resumed fails all I/O, and works after the next resume",
        resume_fails;
    "guest-reset", Modes::of(Mode::ALL),
        "the PCI function is reset under load, and no request fails",
        reset;
}

/// Switches the mode of the cache.
fn switch_cache(disk: &Disk<'_>, round: u32) -> Result<&'static str> {
    let cache = ["write through", "write back"][round as usize % 2];
    disk.set("cache_type", cache)?;
    Ok(cache)
}

/// Checks that the cache's mode survived the reset, in which the device forgets it. The kernel's
/// own driver does not restore it.
fn has_kept(context: &Context, disk: &Disk<'_>, cache: &str) -> Result<()> {
    for name in ["cache_type", "queue/write_cache"] {
        let seen = disk.attribute(name)?;
        ensure!(seen == cache || context.mode.is_in_tree(), "{name} is {seen}, not {cache}");
    }
    Ok(())
}

const POWER: &str = "/sys/power";

/// Suspends and resumes all devices, with the kernel's own test of suspend, because the events that
/// wake an emulated machine differ between machines.
fn sleep_once() -> Result<()> {
    let test = Path::new(POWER).join("pm_test");
    write(&test, "devices")?;
    let slept = write(Path::new(POWER).join("state"), "freeze");
    write(&test, "none")?;
    slept
}

/// Common preparation of all cases that suspend.
fn prepare_to_sleep() -> Result<Setting> {
    if !Path::new(POWER).join("pm_test").exists() {
        return Err(skip("this kernel has no test of suspending (CONFIG_PM_DEBUG)"));
    }
    // A message about the root disk, not the disks under test: nvme in Linux 6.12 thaws its queues
    // in another task than it froze them in, and lockdep misses the locks that it takes that for.
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

fn suspend_silent(context: &Context) -> Result<()> {
    let _short = prepare_to_sleep()?;
    let _no_sync = Setting::change("/sys/power/sync_on_suspend", "0")?;
    cured_by(context, &|_| sleep_once())
}

fn reset_silent(context: &Context) -> Result<()> {
    needs_reset()?;
    cured_by(context, &|disk| write(disk.pci().join("reset"), "1"))
}

/// Requests that the device answers before it falls silent, and after each reset. The page cache
/// has more to write than that, but less than that remains when the device has its ring full.
const ANSWERED: u32 = 1000;
const GIVEN_UP: &str = "the device is given up";

/// Tests a device that answers nothing until it is reset. The page cache writes to it, because a
/// program that waits for a disk cannot be frozen, which would prevent the suspend.
fn cured_by(context: &Context, reset: &dyn Fn(&Disk<'_>) -> Result<()>) -> Result<()> {
    expect_io_errors();
    let _at_once = Setting::change("/proc/sys/vm/dirty_background_ratio", "0")?;
    let lie = Lie::SilentUntilReset;
    let plug = Plug::of(Backing::Liar { lie, after: ANSWERED, seed: context.seed });
    let disk = Disk::plug(&context.machine, &plug)?;
    let path = disk.path()?;
    disk.set("queue/max_sectors_kb", "4")?;
    let log = KernelLog::mark()?;
    let cached = cached_writes(&path)?;
    wait_for_silence(&disk)?;
    reset(&disk)?;
    let log = log.lines()?;
    ensure!(log.contains(GIVEN_UP), "the silent device was not given up: {log}");
    ensure!(cached.sync_all().is_err(), "what the device had was not refused");
    read_one(&path).context("after the reset")
}

/// Waits until a disk has requests in flight and has completed none for two seconds.
fn wait_for_silence(disk: &Disk<'_>) -> Result<()> {
    let mut before = None;
    wait_for("the device to fall silent", || {
        let stat = disk.stat().ok()?;
        let silent = stat.in_flight > 0 && before == Some(stat.writes);
        before = Some(stat.writes);
        std::thread::sleep(Duration::from_secs(2));
        silent.then_some(())
    })
}

/// Threads of the load, which uses the first half of the disk.
const THREADS: usize = 3;
const HALF: u64 = 8 << 20;
/// Requests of one to fourteen pages: half of the disk takes seven seconds.
const REQUESTS_A_SECOND: u64 = 20;

/// User space is frozen while devices sleep, but the kernel's writeback is not. Writeback has more
/// to write than the disk does in that time, and much more than the queue holds, so it waits for a
/// full queue when the resume fails.
fn resume_fails(context: &Context) -> Result<()> {
    expect_io_errors();
    let _short = prepare_to_sleep()?;
    let _no_sync = Setting::change("/sys/power/sync_on_suspend", "0")?;
    let _at_once = Setting::change("/proc/sys/vm/dirty_background_ratio", "0")?;
    let backing = Backing::Throttled { bytes: 2 * HALF, iops: REQUESTS_A_SECOND };
    let _driver = Driver::load(context.mode, &["queue_depth=16"])?;
    let disk = Disk::plug(&context.machine, &Plug::of(backing))?;
    let path = disk.path()?;
    // Read before the freeze, because this takes a minute on an emulated debug kernel.
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
        // The next resume works again.
        sleep_once().with_context(|| format!("round {round}"))?;
        read_one(&path).with_context(|| format!("round {round}, after the next resume"))?;
    }
    let load = Load::start(&path, HALF, THREADS, Errors::Fail, context.seed)?;
    load.wait_for(10).context("after the last resume")?;
    load.finish()?;
    // A driver without queues can also be unbound.
    sleep_once_without_memory(&resume)?;
    disk.unplug(Way::Orderly)
}

/// Suspends the machine; `resume` gets no memory when the machine resumes.
fn sleep_once_without_memory(resume: &Code) -> Result<()> {
    let fault = resume.refuse_memory(Refused::Any, 100)?;
    let slept = sleep_once();
    let injected = fault.injected()?;
    drop(fault);
    slept?;
    ensure!(injected > 0, "no memory was refused");
    Ok(())
}

/// Fills the second half of the disk in the page cache, without waiting.
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

fn needs_reset() -> Result<()> {
    let symbols = read("/proc/kallsyms")?;
    if !symbols.lines().any(|line| line.contains("virtio_device_reset_prepare")) {
        return Err(skip("this kernel's virtio does not tell drivers of resets"));
    }
    Ok(())
}

fn reset(context: &Context) -> Result<()> {
    needs_reset()?;
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
