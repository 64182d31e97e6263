// SPDX-License-Identifier: Apache-2.0
//! Many threads that make their data durable share the flushes of their disk, and each thread's
//! data is durable when its flush returns.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::mpsc::{Sender, channel};

use anyhow::{Context as _, Result, anyhow, ensure};
use kit::power_cut;
use kit::rng::Rng;
use kit::sched::{this_task, waits_in};

use crate::case::cases;
use crate::guest::load::memory::Aligned;
use crate::guest::load::open_direct;
use crate::guest::machine::backing::Backing;
use crate::guest::machine::disk::{Disk, Plug};
use crate::guest::mode::{Driver, Mode};
use crate::guest::system::wait_for;
use crate::guest::{Context, Modes};
use kit::disks::Ask;

cases! { Guest;
    "guest-flushes", Modes::of(Mode::ALL).at_every_change(&[Mode::Request, Mode::Bio]),
        "threads that flush at the same time share two flushes of the device, and a power cut takes nothing that was durable",
        flushes;
    "guest-flushes-one", Modes::of(Mode::OURS).at_every_change(&[Mode::Bio]),
        "a queue of one request at a time flushes for many threads, and all of them get on",
        one_at_a_time;
}

const THREADS: usize = 12;
const BLOCK: usize = 4096;
const JOURNAL: Backing =
    Backing::Journal { bytes: 16 << 20, physical_block_bytes: power_cut::SECTOR };
/// One flush in flight on the device, and one for all flushes that arrive in the meantime.
const SHARED: u64 = 2;
/// The kernel's function in which a thread waits for its flush.
const FLUSHES: &str = "blkdev_issue_flush";

fn flushes(context: &Context) -> Result<()> {
    // One queue, because each queue has its own flushes.
    let plug = Plug::of(JOURNAL).queues(1);
    let disk = Disk::plug(&context.machine, &plug)?;
    let journal = disk.served()?.to_owned();
    let file = open_direct(&disk.path()?)?;
    for round in 0..context.effort.rounds.min(10) {
        shared(context, &journal, &file).with_context(|| format!("round {round}"))?;
    }
    let records = durable(context, &journal, &file)?;
    let end = entries(context, &journal)?;
    let mut rng = Rng::new(context.seed);
    for _ in 0..context.effort.rounds.min(10) {
        let at = records.first().map_or(0, |first| first.entries);
        let at = at + rng.below(end - at + 1);
        let (image, seed) = (format!("cut-{at}"), rng.number());
        let cut = Ask::Cut { journal: journal.clone(), image: image.clone(), at, seed };
        let seen = has_all(context, &context.machine.ask_path(&cut)?, &records, at);
        context.machine.ask(&Ask::RemoveImage { name: image })?;
        seen.with_context(|| format!("a power cut after {at} of {end} entries, seed {seed}"))?;
    }
    Ok(())
}

fn one_at_a_time(context: &Context) -> Result<()> {
    let _driver = Driver::load(context.mode, &["queue_depth=1"])?;
    let plug = Plug::of(JOURNAL).queues(1);
    let disk = Disk::plug(&context.machine, &plug)?;
    let journal = disk.served()?.to_owned();
    let file = open_direct(&disk.path()?)?;
    for _ in 0..context.effort.rounds.min(10) {
        // When the device continues, all flushes except one wait for the slot.
        let flushes = flush_at_once(context, &journal, &file)?;
        ensure!(flushes > 0, "no flush came to the device");
    }
    durable(context, &journal, &file).map(drop)
}

fn entries(context: &Context, journal: &str) -> Result<u64> {
    context.machine.ask_count(&Ask::Count { journal: journal.to_owned() })
}

/// A journal that completes no request until dropped.
struct Held<'a>(&'a Context, &'a str);

impl<'a> Held<'a> {
    fn new(context: &'a Context, journal: &'a str) -> Result<Self> {
        let held = Self(context, journal);
        held.set(true)?;
        Ok(held)
    }

    fn set(&self, held: bool) -> Result<()> {
        self.0.machine.ask(&Ask::Hold { journal: self.1.to_owned(), held }).map(drop)
    }
}

impl Drop for Held<'_> {
    fn drop(&mut self) {
        if let Err(why) = self.set(false) {
            eprintln!("clean-up: {why:#}");
        }
    }
}

fn shared(context: &Context, journal: &str, file: &File) -> Result<()> {
    let flushes = flush_at_once(context, journal, file)?;
    ensure!(flushes > 0, "no flush came to the device");
    ensure!(flushes <= SHARED, "{flushes} flushes came to the device, {SHARED} are enough");
    Ok(())
}

/// Starts the flushes of all threads while the device has one in flight. Returns the number of
/// flushes that the device received.
fn flush_at_once(context: &Context, journal: &str, file: &File) -> Result<u64> {
    let before = entries(context, journal)?;
    let held = Held::new(context, journal)?;
    let threads: [AtomicU32; THREADS] = Default::default();
    std::thread::scope(|scope| {
        let flushing: Vec<_> = threads
            .iter()
            .map(|thread| {
                scope.spawn(|| {
                    thread.store(this_task(), Ordering::Relaxed);
                    file.sync_data()
                })
            })
            .collect();
        let waiting = wait_for("all threads to wait for their flush", || {
            let waits = |thread: &AtomicU32| waits_in(thread.load(Ordering::Relaxed), FLUSHES);
            threads.iter().all(waits).then_some(())
        });
        drop(held);
        for thread in flushing {
            thread.join().map_err(|_| anyhow!("a thread panicked"))??;
        }
        waiting
    })?;
    let flushes = entries(context, journal)? - before;
    println!("{flushes} flushes for {THREADS} threads");
    Ok(flushes)
}

/// A block that was durable when the journal had this number of entries.
struct Durable {
    thread: usize,
    stamp: u64,
    entries: u64,
}

/// Each thread repeatedly writes its own block, each time with a flush.
fn durable(context: &Context, journal: &str, file: &File) -> Result<Vec<Durable>> {
    let writes = u64::from(context.effort.steps / 20);
    let (told, durable) = channel();
    let mut records = Vec::new();
    std::thread::scope(|scope| {
        let mut threads = Vec::new();
        for thread in 0..THREADS {
            let told = told.clone();
            threads.push(scope.spawn(move || rewrite(file, thread, writes, &told)));
        }
        drop(told);
        for (thread, stamp) in durable {
            records.push(Durable { thread, stamp, entries: entries(context, journal)? });
        }
        threads
            .into_iter()
            .try_for_each(|thread| thread.join().map_err(|_| anyhow!("a thread panicked"))?)
    })?;
    Ok(records)
}

fn rewrite(file: &File, thread: usize, writes: u64, told: &Sender<(usize, u64)>) -> Result<()> {
    let mut buffer = Aligned::new(BLOCK);
    for stamp in 1..=writes {
        buffer.bytes().copy_from_slice(&block_of(stamp));
        file.write_all_at(buffer.bytes(), (thread * BLOCK) as u64)?;
        file.sync_data()?;
        told.send((thread, stamp))?;
    }
    Ok(())
}

fn block_of(stamp: u64) -> Vec<u8> {
    stamp.to_le_bytes().repeat(BLOCK / 8)
}

/// Checks that the disk after a power cut has each thread's last durable block, or a newer one. (A
/// newer block that was not durable may be there in part, so each sector is checked separately.)
fn has_all(context: &Context, image: &Path, records: &[Durable], at: u64) -> Result<()> {
    let disk = Disk::plug_image(&context.machine, image)?;
    let file = open_direct(&disk.path()?)?;
    let mut buffer = Aligned::new(BLOCK);
    for thread in 0..THREADS {
        let of_thread = records.iter().filter(|record| record.thread == thread);
        let last = of_thread.filter(|record| record.entries <= at).map(|record| record.stamp).max();
        file.read_exact_at(buffer.bytes(), (thread * BLOCK) as u64)?;
        for sector in buffer.bytes().chunks(512) {
            let seen = u64::from_le_bytes(sector[..8].try_into()?);
            ensure!(Some(seen) >= last, "thread {thread}: {seen} is there, {last:?} was durable");
        }
    }
    Ok(())
}
