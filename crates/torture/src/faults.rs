// SPDX-License-Identifier: Apache-2.0
//! Faults that the kernel injects (a debug kernel has them): nothing is lost but by S_IOERR.

use crate::env::Env;
use crate::fixture::{NullBlkOptions, null_blk};
use crate::integrity::{Setup, tell};
use crate::load::under_load;
use crate::module;
use crate::target::{self, Target, check_serves, options};
use anyhow::{Context, Result, ensure};
use lab_case::faults::Fault;
use lab_case::outcome::skip;
use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering::Relaxed;

/// Requests on each queue while faults are injected.
const STEPS: u64 = 60;
/// How often as many more are waited for while no fault was injected.
const ROUNDS_MAX: u32 = 20;

/// A thread that faults can hit.
struct Exposed(File);

impl Exposed {
    fn of(task: &Path) -> Result<Self> {
        let file = File::options().write(true).open(task.join("make-it-fail"));
        file.map(Self).map_err(|_| skip("threads cannot be exposed to faults here"))
    }

    /// Lets faults hit it, or not. The write itself may be hit.
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

/// The module's workers are threads of their owner.
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

/// Bios fail on their way into the disk.
pub(crate) fn bios_fail(env: &Env, setup: Setup) -> Result<()> {
    let (disk, _) = null_blk(NullBlkOptions::default())?;
    let exposed = disk.sysfs()?.join("make-it-fail");
    if !exposed.exists() {
        return Err(skip("this kernel cannot fail bios"));
    }
    let errors = loaded(env, &disk, setup, || {
        std::fs::write(&exposed, "1")?;
        Fault::on("fail_make_request", 5, &[])
    })?;
    ensure!(errors > 0, "no bio has failed");
    Ok(())
}

/// Memory that the workers ask for is refused. They ask for vectors of requests that touch more
/// than 16 pages, and for pages where a buffer is not aligned; the load has plenty of both.
pub(crate) fn memory_fails(env: &Env, setup: Setup, which: &'static str) -> Result<()> {
    let (disk, _) = null_blk(NullBlkOptions::default())?;
    let more: &[(&str, &str)] = match which {
        "fail_page_alloc" => &[("task-filter", "Y"), ("ignore-gfp-wait", "N"), ("min-order", "0")],
        _ => &[("task-filter", "Y"), ("ignore-gfp-wait", "N")],
    };
    loaded(env, &disk, setup, || {
        let fault = Fault::on(which, 10, more)?;
        for worker in workers()? {
            Exposed::of(&worker)?.set(true)?;
        }
        Ok(fault)
    })?;
    Ok(())
}

/// Loads the disk, first with faults, of which there must be some, then without. Returns how many
/// requests failed.
fn loaded(
    env: &Env,
    disk: &crate::fixture::Disk,
    setup: Setup,
    inject: impl FnOnce() -> Result<Fault>,
) -> Result<u64> {
    println!("on {disk}, {setup:?}");
    let specs = setup.specs(env, disk);
    let Target { device, daemon: _daemon } =
        target::serve_with(env, disk, &setup.options(&specs), &setup.kernel())?;
    let done = under_load(device, specs.clone(), |handles| {
        handles.wait_for_progress(5)?;
        let allow = |yes| specs.iter().for_each(|spec| spec.errors_allowed.store(yes, Relaxed));
        allow(true);
        let fault = inject()?;
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
        allow(false);
        handles.wait_for_progress(10).context("without faults")
    })?;
    tell(&done);
    Ok(done.iter().map(|done| done.errors).sum())
}

/// Memory is refused while devices are opened, set up and closed.
pub(crate) fn set_up_fails(env: &Env, rounds: u64) -> Result<()> {
    target::need_module()?;
    let (disk, _) = null_blk(NullBlkOptions::default())?;
    let refs = module::references()?;
    let (mut up, mut refused) = (0, 0);
    {
        let more = [("task-filter", "Y"), ("ignore-gfp-wait", "N")];
        let fault = Fault::on("failslab", 3, &more)?;
        let mut myself = Exposed::of(Path::new("/proc/thread-self"))?;
        for _ in 0..env.rounds(rounds) {
            myself.set(true)?;
            let outcome = target::serve(env, &disk, &options());
            myself.set(false)?;
            match outcome {
                Ok(_) => up += 1,
                Err(_) => refused += 1,
            }
        }
        println!("{} faults were injected", fault.injected()?);
    }
    println!("{up} devices came up, {refused} did not");
    ensure!(refused > 0, "no set-up has failed");
    module::wait_for_references(refs).context("after set-ups that failed")?;
    check_serves(env, &disk)
}
