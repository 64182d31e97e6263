// SPDX-License-Identifier: Apache-2.0
//! Faults that the kernel injects (only a debug kernel can): data is lost only with S_IOERR, and
//! lack of memory causes no S_IOERR.

use crate::case::cases;
use crate::host::env::Env;
use crate::host::fixture::{NullBlkOptions, null_blk};
use crate::host::integrity::{Setup, tell};
use crate::host::load::{Handles, allow_errors, under_load};
use crate::host::module;
use crate::host::target::{self, Target, check_serves, options};
use anyhow::{Context, Result, bail, ensure};
use driver::kernel::errno_of;
use kit::faults::{Fault, NthFault};
use kit::outcome::skip;
use kit::set::Set::{Full, Gating};
use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};
use virtio_spec::features::{VHOST_F_LOG_ALL, bit};

cases! { Host;
    "faults-bio", Gating,
        "bios fail (fail_make_request): S_IOERR, nothing else",
        |env| bios_fail(env, Setup::usual(0));
    "faults-slab", Gating,
        "allocations of the workers fail (failslab): no request does",
        |env| memory_fails(env, Setup::usual(0), "failslab", 10);
    "faults-slab-single", Gating,
        "the same with one request at a time, of which all allocations fail",
        |env| memory_fails(env, Setup { single: true, ..Setup::usual(0) }, "failslab", 100);
    "faults-page-alloc", Gating,
        "page allocations of the workers fail (fail_page_alloc): no request does",
        |env| memory_fails(env, Setup::usual(0), "fail_page_alloc", 10);
    "faults-page-alloc-single", Full,
        "the same with one request at a time",
        |env| memory_fails(env, Setup { single: true, ..Setup::usual(0) }, "fail_page_alloc", 30);
    "faults-log", Gating,
        "allocations of the workers fail while a dirty log is kept: no request does",
        |env| memory_fails_with_log(env, Setup { single: true, ..Setup::usual(0) });
    "faults-set-up", Gating,
        "each allocation and copy of a set-up fails in turn: an error, and nothing is left behind",
        set_up_fails;
}

/// Requests on each queue while faults are injected.
const STEPS: u64 = 60;
/// Most repetitions of [`STEPS`] until a fault was injected.
const ROUNDS_MAX: u32 = 20;

/// Most faults of a set-up, by far.
const NTH_MAX: u32 = 10_000;

/// A thread exposed to faults.
struct Exposed(File);

impl Exposed {
    fn of(task: &Path) -> Result<Self> {
        let file = File::options().write(true).open(task.join("make-it-fail"));
        file.map(Self).map_err(|_| skip("threads cannot be exposed to faults here"))
    }

    /// Turns faults for the thread on or off. The write to the file can fail by a fault.
    fn set(&mut self, on: bool) -> Result<()> {
        let mut outcome = Ok(());
        for _ in 0..100 {
            outcome = self.0.write_all(if on { b"1" } else { b"0" });
            if outcome.is_ok() {
                break;
            }
        }
        outcome.context("make-it-fail")
    }
}

/// The module's workers, which are threads of their owner.
fn workers() -> Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir("/proc/self/task")? {
        let path = entry?.path();
        if std::fs::read_to_string(path.join("comm"))?.starts_with("vhost-") {
            found.push(path);
        }
    }
    ensure!(!found.is_empty(), "no worker of the module among this process's threads");
    Ok(found)
}

/// Bios fail when they are submitted to the disk.
pub(crate) fn bios_fail(env: &Env, setup: Setup) -> Result<()> {
    let (disk, _) = null_blk(NullBlkOptions::default())?;
    let exposed = disk.sysfs()?.join("make-it-fail");
    if !exposed.exists() {
        return Err(skip("this kernel cannot fail bios"));
    }
    let errors = loaded(env, &disk, setup, true, |_| {
        std::fs::write(&exposed, "1")?;
        Fault::on("fail_make_request", 5, &[])
    })?;
    ensure!(errors > 0, "no bio has failed");
    Ok(())
}

/// Refuses the given percentage of the workers' allocations. Workers allocate vectors for requests
/// that touch more than 16 pages, and pages for unaligned buffers; the load has plenty of both. All
/// requests succeed.
pub(crate) fn memory_fails(
    env: &Env,
    setup: Setup,
    which: &'static str,
    percent: u32,
) -> Result<()> {
    let (disk, _) = null_blk(NullBlkOptions::default())?;
    loaded(env, &disk, setup, false, |_| workers_without_memory(which, percent)).map(drop)
}

/// The same with LOG_ALL, where each request needs memory for the list of ranges to mark.
pub(crate) fn memory_fails_with_log(env: &Env, setup: Setup) -> Result<()> {
    let (disk, _) = null_blk(NullBlkOptions::default())?;
    let mut log = None;
    loaded(env, &disk, setup, false, |handles| {
        let memory = handles.memory.clone();
        log = Some(handles.session.set_log(&memory)?);
        let features = handles.session.features() | bit(VHOST_F_LOG_ALL);
        handles.session.negotiate_features(features)?;
        workers_without_memory("failslab", 100)
    })
    .map(drop)
}

fn workers_without_memory(which: &str, percent: u32) -> Result<Fault> {
    let more: &[(&str, &str)] = match which {
        "fail_page_alloc" => &[("task-filter", "Y"), ("ignore-gfp-wait", "N"), ("min-order", "0")],
        _ => &[("task-filter", "Y"), ("ignore-gfp-wait", "N")],
    };
    let fault = Fault::on(which, percent, more)?;
    for worker in workers()? {
        Exposed::of(&worker)?.set(true)?;
    }
    Ok(fault)
}

/// Loads the disk, first with faults, at least one of which must occur, then without. Returns the
/// number of failed requests.
fn loaded(
    env: &Env,
    disk: &crate::host::fixture::Disk,
    setup: Setup,
    requests_may_fail: bool,
    inject: impl FnOnce(&mut Handles) -> Result<Fault>,
) -> Result<u64> {
    println!("on {disk}, {setup:?}");
    let specs = setup.specs(env, disk);
    let Target { device, daemon: _daemon } =
        target::serve_with(env, disk, &setup.options(&specs), &setup.kernel())?;
    let done = under_load(device, specs.clone(), |handles| {
        handles.wait_for_progress(5)?;
        allow_errors(&specs, requests_may_fail);
        let fault = inject(handles)?;
        for _ in 0..ROUNDS_MAX {
            handles.wait_for_progress(env.rounds(STEPS)).context("with faults")?;
            if fault.injected()? > 0 {
                break;
            }
        }
        let injected = fault.injected()?;
        println!("{injected} faults were injected");
        ensure!(injected > 0, "no fault was injected");
        drop(fault);
        handles.wait_for_progress(10).context("after the faults")?;
        allow_errors(&specs, false);
        handles.wait_for_progress(10).context("without faults")
    })?;
    tell(&done);
    Ok(done.iter().map(|done| done.errors).sum())
}

/// An error of the kernel for an allocation that failed, or a copy of memory. memfd_create() says for the former that
/// there is no space.
fn is_injected(cause: &(dyn std::error::Error + 'static)) -> bool {
    let errno = cause.downcast_ref::<std::io::Error>().and_then(errno_of);
    matches!(errno, Some(libc::ENOMEM | libc::ENOSPC | libc::EFAULT))
}

/// Sets a device up again and again. Each time the next of all allocations and copies of memory fails, until none is
/// left to fail.
pub(crate) fn set_up_fails(env: &Env) -> Result<()> {
    target::need_module()?;
    let (disk, _) = null_blk(NullBlkOptions::default())?;
    let refs = module::references()?;
    let mut fault = NthFault::of_this_thread()?;
    let no_wait = ("ignore-gfp-wait", "N");
    let _slab = Fault::on("failslab", 0, &[no_wait])?;
    let _pages = Fault::on("fail_page_alloc", 0, &[no_wait, ("min-order", "0")])?;
    let _copies = Fault::on("fail_usercopy", 0, &[])?;
    let (mut up, mut refused) = (0, 0);
    for n in 1..=NTH_MAX {
        fault.arm(n)?;
        let outcome = target::serve(env, &disk, &options());
        let was_injected = fault.disarm()?;
        match outcome {
            Ok(_) if !was_injected => {
                println!("of {} faults, {refused} stopped the set-up, and {up} did not", n - 1);
                ensure!(refused > 0, "no set-up has failed");
                drop(outcome);
                module::wait_for_references(refs).context("after set-ups that failed")?;
                return check_serves(env, &disk);
            }
            Ok(_) => up += 1,
            Err(why) => {
                let is_expected = was_injected && why.chain().any(is_injected);
                ensure!(is_expected, "fault {n}: the set-up failed for another reason: {why:#}");
                refused += 1;
            }
        }
    }
    bail!("{NTH_MAX} faults, and a set-up has more")
}
