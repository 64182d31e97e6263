// SPDX-License-Identifier: Apache-2.0
//! The order of submitters that wait for a short queue.

use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use anyhow::{Result, anyhow, bail, ensure};

use crate::case::cases;
use crate::guest::load::memory::Aligned;
use crate::guest::load::open_direct;
use crate::guest::machine::backing::Backing;
use crate::guest::machine::disk::{Disk, Plug};
use crate::guest::mode::{Driver, Mode};
use crate::guest::{Context, Modes};

cases! { Guest;
    "guest-turns", Modes::of(Mode::INTERRUPTS).at_every_change(&[Mode::Bio]),
        "many submitters of a short queue all get their turn, and nobody is passed for long",
        turns;
}

/// Number of threads, many times the queue and the list of waiting bios.
const THREADS: u64 = 40;
/// Requests of the queue in flight.
const DEPTH: u16 = 4;
/// Number of reads of all threads together.
const READS: u64 = 8000;
/// Number of reads with which each other thread may pass a waiting read on the bio path, where
/// sleepers continue in order. (Tags of the request path have no order.)
const PASSED_MAX: u64 = 10 * THREADS;
/// Number of rounds that have to be within the limit.
const WITHIN: usize = 3;
/// Most rounds: a thread that gets no CPU is passed, too, and spoils its round.
const ROUNDS: usize = 15;

/// Observations of a thread.
struct Seen {
    reads: u64,
    /// The most reads of other threads that ended while a read of this thread waited.
    passed: u64,
}

fn turns(context: &Context) -> Result<()> {
    let backing = Backing::Null { bytes: 64 << 20, latency_ns: 50_000, limits: None };
    let _driver = Driver::load(context.mode, &[&format!("queue_depth={DEPTH}")])?;
    let disk = Disk::plug(&context.machine, &Plug::of(backing).queues(1))?;
    let path = disk.path()?;
    let mut passed = Vec::new();
    while passed.len() < ROUNDS {
        passed.push(round(&path)?);
        let within = passed.iter().filter(|passed| **passed < PASSED_MAX).count();
        if !context.mode.is_bio() || within == WITHIN {
            return Ok(());
        }
    }
    bail!("{passed:?} reads of others came first");
}

/// Runs all threads once. Returns the most reads of others that passed a waiting read.
fn round(path: &str) -> Result<u64> {
    let ended = Arc::new(AtomicU64::new(0));
    let mut threads = Vec::new();
    for index in 0..THREADS {
        let (file, ended) = (open_direct(path)?, Arc::clone(&ended));
        threads.push(std::thread::spawn(move || read(&file, index, &ended)));
    }
    let mut seen = Vec::new();
    for thread in threads {
        seen.push(thread.join().map_err(|_| anyhow!("a reader panicked"))??);
    }
    let reads = || seen.iter().map(|seen| seen.reads);
    let (least, most) = (reads().min().unwrap_or(0), reads().max().unwrap_or(0));
    let passed = seen.iter().map(|seen| seen.passed).max().unwrap_or(0);
    println!("{least} to {most} reads each; {passed} of others came first at most");
    ensure!(least > 0, "a thread got no turn");
    Ok(passed)
}

/// Reads until all threads together have done enough reads.
fn read(file: &std::fs::File, index: u64, ended: &AtomicU64) -> Result<Seen> {
    let mut buffer = Aligned::new(4096);
    let mut seen = Seen { reads: 0, passed: 0 };
    while ended.load(Ordering::Relaxed) < READS {
        let before = ended.load(Ordering::Relaxed);
        file.read_exact_at(buffer.bytes(), index << 16)?;
        let after = ended.fetch_add(1, Ordering::Relaxed);
        seen.reads += 1;
        seen.passed = seen.passed.max(after - before);
    }
    Ok(seen)
}
