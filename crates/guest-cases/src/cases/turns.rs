// SPDX-License-Identifier: Apache-2.0
//! Whose turn it is when many want into a small ring.

use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use anyhow::{Result, anyhow, bail, ensure};

use crate::case::{Case, Context};
use crate::load::memory::Aligned;
use crate::load::open_direct;
use crate::machine::backing::Backing;
use crate::machine::disk::{Disk, Plug};
use crate::mode::Mode;

pub(crate) const CASES: &[Case] = &[Case {
    name: "guest-turns",
    short: &[Mode::Bio],
    modes: Mode::INTERRUPTS,
    has_long: false,
    about: "many submitters of a small ring all get their turn, and nobody is passed for long",
    run: turns,
}];

/// Many times what fits into the ring and into the list before it.
const THREADS: u64 = 40;
const RING: u16 = 4;
/// Reads of all threads together.
const READS: u64 = 8000;
/// How often each of the others may come first while a read waits on the bio path, which lets
/// sleepers on in order. (Tags of the request path have no order.)
const PASSED_MAX: u64 = 10 * THREADS;
/// A thread that gets no CPU is passed, too; so it must go well in one of these rounds only.
const ROUNDS: u32 = 5;

/// What a thread saw.
struct Seen {
    reads: u64,
    /// Reads of others that ended while one of its own waited, at most.
    passed: u64,
}

fn turns(context: &Context) -> Result<()> {
    let backing = Backing::Null { bytes: 64 << 20, latency_ns: 50_000, limits: None };
    let plug = Plug::of(backing).queues(1).queue_size(RING);
    let disk = Disk::plug(&context.machine, &plug)?;
    let path = disk.path()?;
    let mut passed = Vec::new();
    for _ in 0..ROUNDS {
        passed.push(round(&path)?);
        if !context.mode.is_bio() || passed.last() < Some(&PASSED_MAX) {
            return Ok(());
        }
    }
    bail!("{passed:?} reads of others came first")
}

/// All threads once. Returns how many reads of others came before one that waited, at most.
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

/// Reads until all threads together have done enough.
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
