// SPDX-License-Identifier: Apache-2.0
//! The order of submitters that wait for a short queue.

use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Result, anyhow, bail, ensure};
use kit::sched::Times;

use crate::case::cases;
use crate::guest::load::memory::Aligned;
use crate::guest::load::open_direct;
use crate::guest::machine::backing::Backing;
use crate::guest::machine::disk::{Disk, Plug};
use crate::guest::mode::{Driver, Mode};
use crate::guest::{Context, Modes};

cases! { Guest;
    "guest-turns", Modes::of(Mode::INTERRUPTS).at_every_change(&[Mode::Bio]),
        "many submitters of a short queue all get their turn, and none is passed for long",
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
/// Most rounds.
const ROUNDS: usize = 15;

/// Observations of a thread.
struct Seen {
    reads: u64,
    /// The most reads of other threads that ended while a read of this thread waited for the disk.
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
        let (begin, times) = (Instant::now(), Times::of_this_thread()?);
        let before = ended.load(Ordering::Relaxed);
        file.read_exact_at(buffer.bytes(), index << 16)?;
        let after = ended.fetch_add(1, Ordering::Relaxed);
        let awake = Times::of_this_thread()?.since(&times);
        seen.reads += 1;
        seen.passed = seen.passed.max(while_asleep(after - before, begin.elapsed(), awake));
    }
    Ok(seen)
}

/// The part of the reads that ended in `took` for the time in which the thread slept. A thread that got a CPU late, or
/// whose CPU stood still, was passed by no fault of the driver.
fn while_asleep(reads: u64, took: Duration, awake: Times) -> u64 {
    let asleep = took.saturating_sub(awake.busy + awake.waited);
    (reads as f64 * asleep.as_secs_f64() / took.as_secs_f64().max(f64::MIN_POSITIVE)) as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_that_pass_a_thread_without_a_cpu_do_not_count() {
        let [whole, half] = [40, 20].map(Duration::from_millis);
        let awake = |busy, waited| Times { busy, waited };
        assert_eq!(while_asleep(500, whole, awake(Duration::ZERO, Duration::ZERO)), 500);
        assert_eq!(while_asleep(500, whole, awake(half, Duration::ZERO)), 250);
        assert_eq!(while_asleep(500, whole, awake(half, whole)), 0);
    }
}
