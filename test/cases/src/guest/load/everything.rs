// SPDX-License-Identifier: Apache-2.0
//! A load of every kind: threads, io_uring, and polled io_uring if the disk has polled queues.

use anyhow::{Context as _, Result, ensure};

use super::fio::{Background, Engine};
use super::{Errors, Load};
use crate::guest::machine::disk::Disk;
use crate::guest::{Context, Effort};

const MIB: u64 = 1 << 20;
/// MiB at the start of the disk that the threads use; fio uses the same amount after them.
const THREADS_MIB: u64 = 32;

/// Concurrent loads.
pub(crate) struct Everything {
    threads: Load,
    jobs: Option<Background>,
}

impl Everything {
    /// MiB of the disk that this load uses.
    pub(crate) const DISK_MIB: u64 = 2 * THREADS_MIB;

    /// Starts the load; it is running when this returns.
    pub(crate) fn start(context: &Context, disk: &Disk<'_>, errors: Errors) -> Result<Self> {
        let path = disk.path()?;
        let threads = Load::start(&path, THREADS_MIB * MIB, 3, errors, context.seed)?;
        let jobs = start_jobs(context, &path)?;
        threads.wait_for(30)?;
        Ok(Self { threads, jobs })
    }

    /// Checks that no part of the load has ended, and that it makes progress.
    pub(crate) fn goes_on(&mut self) -> Result<()> {
        self.threads.wait_for(30)?;
        if let Some(jobs) = &mut self.jobs {
            ensure!(jobs.is_running()?, "fio has ended");
        }
        Ok(())
    }

    /// Ends the load; no part may have failed before.
    pub(crate) fn finish(mut self) -> Result<()> {
        self.goes_on()?;
        self.threads.finish().map(drop)
    }

    /// Waits for all parts to end by themselves after the disk was removed.
    pub(crate) fn end(self) -> Result<()> {
        self.threads.finish().context("threads")?;
        self.jobs.map_or(Ok(()), Background::wait)
    }
}

/// Starts the kinds of I/O that threads cannot do. A short case starts only polling, because fio
/// takes long to start.
fn start_jobs(context: &Context, path: &str) -> Result<Option<Background>> {
    let mut engines = Vec::new();
    if context.effort.rounds > Effort::SHORT.rounds {
        engines.push(Engine::Uring);
    }
    if context.mode.polls() {
        engines.push(Engine::Hipri);
    }
    if engines.is_empty() {
        return Ok(None);
    }
    let how = format!(
        "--rw=randrw --bsrange=4k-64k --offset={THREADS_MIB}M --size={THREADS_MIB}M --time_based \
         --runtime=3600"
    );
    let job = |engine: Engine| engine.job("all", path).with(&how);
    let mut jobs = Background::start(&engines.into_iter().map(job).collect::<Vec<_>>())?;
    jobs.wait_until_open(path)?;
    Ok(Some(jobs))
}
