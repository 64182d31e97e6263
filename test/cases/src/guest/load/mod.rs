// SPDX-License-Identifier: Apache-2.0
//! Loads that run during operations on a disk.
//!
//! * [`everything`]: this load and loads of fio together.
//! * [`memory`]: memory for direct I/O.
//! * [`fio`]: loads of fio, which verifies or measures them.

pub(crate) mod everything;
pub(crate) mod fio;
pub(crate) mod memory;

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail, ensure};
use rustix::fs::OFlags;

use crate::guest::system;
use kit::rng::Rng;
use memory::Aligned;

/// Longest time for a load to end after its stop, or after its disk was removed.
const END_LIMIT: Duration = Duration::from_secs(120);

/// Largest transfer in bytes.
const BYTES_MAX: usize = 64 << 10;
const BLOCK: usize = 4096;

/// Pause after an error, if the load continues. Without it, threads whose requests all fail would
/// never let their CPUs sleep. An emulated CPU whose timer interrupt was lost does not set the next
/// one until it sleeps; until then no RCU grace period ends, and no removal (seen twice, 90 s
/// without a tick).
const AFTER_ERROR: Duration = Duration::from_micros(100);

/// Treatment of errors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Errors {
    /// Errors are not allowed.
    Fail,
    /// The first error ends a thread, because its disk was removed.
    End,
    /// Errors are counted, and data is not verified.
    Careless,
}

/// Threads that write, read back and compare, each in its own part of the disk.
pub(crate) struct Load {
    stop: Arc<AtomicBool>,
    shared: Arc<Shared>,
    ended: Receiver<Result<()>>,
    threads: usize,
}

#[derive(Default)]
struct Shared {
    operations: AtomicU64,
    errors: AtomicU64,
}

/// Totals of a load.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Summary {
    /// Successful reads, writes and flushes.
    pub(crate) operations: u64,
    /// Failed reads, writes and flushes.
    pub(crate) errors: u64,
}

impl Load {
    /// Starts threads on the first `bytes` bytes of a disk, past the page cache.
    pub(crate) fn start(
        path: &str,
        bytes: u64,
        threads: usize,
        errors: Errors,
        seed: u64,
    ) -> Result<Self> {
        let (stop, shared) = (Arc::new(AtomicBool::new(false)), Arc::new(Shared::default()));
        let (told, ended) = channel();
        let part = bytes / threads as u64 / BLOCK as u64 * BLOCK as u64;
        ensure!(part >= 4 * BYTES_MAX as u64, "the disk is too small for this load");
        for index in 0..threads as u64 {
            let file = open_direct(path)?;
            let rng = Rng::new(seed ^ (index + 1) << 32);
            let mut worker = Worker {
                file,
                start: index * part,
                blocks: vec![0; (part / BLOCK as u64) as usize],
                next: 1,
                buffer: Aligned::new(BYTES_MAX),
                rng,
                errors,
                shared: Arc::clone(&shared),
            };
            let (stop, told) = (Arc::clone(&stop), told.clone());
            let body = move || {
                let outcome = worker.run(&stop);
                let _ = told.send(outcome); // The case may have ended.
            };
            std::thread::Builder::new().name("load".into()).spawn(body)?;
        }
        Ok(Self { stop, shared, ended, threads })
    }

    /// Number of successful reads, writes and flushes so far.
    pub(crate) fn operations(&self) -> u64 {
        self.shared.operations.load(Ordering::Relaxed)
    }

    /// Waits for `count` more successful operations.
    pub(crate) fn wait_for(&self, count: u64) -> Result<()> {
        let (before, end) = (self.operations(), Instant::now() + END_LIMIT);
        while self.operations() < before + count {
            if let Ok(Err(why)) = self.ended.try_recv() {
                return Err(why.context("the load ended too early"));
            }
            ensure!(Instant::now() < end, "the load does not go on");
            std::thread::sleep(Duration::from_millis(1));
        }
        Ok(())
    }

    /// Waits until `count` reads, writes and flushes have failed.
    pub(crate) fn wait_for_errors(&self, count: u64) -> Result<()> {
        let errors = || self.shared.errors.load(Ordering::Relaxed);
        system::wait_for("all I/O to end and to fail", || (errors() >= count).then_some(()))
    }

    /// Ends all threads that have not ended by themselves.
    pub(crate) fn finish(self) -> Result<Summary> {
        self.stop.store(true, Ordering::Relaxed);
        let end = Instant::now() + END_LIMIT;
        for _ in 0..self.threads {
            let left = end.saturating_duration_since(Instant::now());
            match self.ended.recv_timeout(left) {
                Ok(outcome) => outcome?,
                Err(_) => bail!("an I/O did not end within {} s", END_LIMIT.as_secs()),
            }
        }
        let count = |number: &AtomicU64| number.load(Ordering::Relaxed);
        Ok(Summary { operations: self.operations(), errors: count(&self.shared.errors) })
    }
}

/// Opens a disk for direct I/O.
pub(crate) fn open_direct(path: &str) -> Result<File> {
    let direct = OFlags::DIRECT.bits() as i32;
    let file = OpenOptions::new().read(true).write(true).custom_flags(direct).open(path);
    file.with_context(|| path.to_owned())
}

struct Worker {
    file: File,
    start: u64,
    /// Number of the last write to each block; 0: none yet.
    blocks: Vec<u64>,
    next: u64,
    buffer: Aligned,
    rng: Rng,
    errors: Errors,
    shared: Arc<Shared>,
}

impl Worker {
    fn run(&mut self, stop: &AtomicBool) -> Result<()> {
        while !stop.load(Ordering::Relaxed) {
            match self.step() {
                Ok(()) => {
                    self.shared.operations.fetch_add(1, Ordering::Relaxed);
                }
                Err(Trouble::Lie(why)) => return Err(why),
                Err(Trouble::Io(why)) => {
                    self.shared.errors.fetch_add(1, Ordering::Relaxed);
                    if self.errors == Errors::Careless && is_gone(&why) {
                        return Ok(());
                    }
                    match self.errors {
                        Errors::Fail => return Err(anyhow!(why).context("under load")),
                        Errors::End => return Ok(()),
                        Errors::Careless => std::thread::sleep(AFTER_ERROR),
                    }
                }
            }
        }
        Ok(())
    }

    fn step(&mut self) -> Result<(), Trouble> {
        if self.rng.one_in(32) {
            return Ok(self.file.sync_data()?);
        }
        let most = (BYTES_MAX / BLOCK).min(self.blocks.len()) as u64;
        let count = 1 + self.rng.below(most) as usize;
        let first = self.rng.below((self.blocks.len() - count + 1) as u64) as usize;
        if self.rng.one_in(2) { self.write(first, count) } else { self.read(first, count) }
    }

    fn offset(&self, block: usize) -> u64 {
        self.start + (block * BLOCK) as u64
    }

    fn write(&mut self, first: usize, count: usize) -> Result<(), Trouble> {
        let (stamp, offset) = (self.next, self.offset(first));
        self.next += 1;
        // The content is unknown until the write has succeeded.
        self.blocks[first..first + count].fill(0);
        let buffer = &mut self.buffer.bytes()[..count * BLOCK];
        for (index, block) in buffer.chunks_mut(BLOCK).enumerate() {
            stamp_block(block, offset + (index * BLOCK) as u64, stamp);
        }
        self.file.write_all_at(buffer, offset)?;
        self.blocks[first..first + count].fill(stamp);
        Ok(())
    }

    fn read(&mut self, first: usize, count: usize) -> Result<(), Trouble> {
        let offset = self.offset(first);
        let buffer = &mut self.buffer.bytes()[..count * BLOCK];
        self.file.read_exact_at(buffer, offset)?;
        for (index, block) in buffer.chunks(BLOCK).enumerate() {
            let (at, stamp) = (offset + (index * BLOCK) as u64, self.blocks[first + index]);
            let may_lie = self.errors == Errors::Careless;
            if stamp != 0 && !may_lie && !has_stamp(block, at, stamp) {
                let why = anyhow!("at byte {at} there is not what was written there (as {stamp})");
                return Err(Trouble::Lie(why));
            }
        }
        Ok(())
    }
}

/// True if the disk is removed, so that all further requests will fail.
fn is_gone(why: &io::Error) -> bool {
    use rustix::io::Errno;
    [Errno::NODEV, Errno::NXIO].iter().any(|gone| why.raw_os_error() == Some(gone.raw_os_error()))
}

enum Trouble {
    /// An error that a system call returned.
    Io(io::Error),
    /// Wrong data without an error.
    Lie(anyhow::Error),
}

impl From<io::Error> for Trouble {
    fn from(why: io::Error) -> Self {
        Trouble::Io(why)
    }
}

/// Fills a block so that each 16 bytes of it contain their offset and the number of the write.
fn stamp_block(block: &mut [u8], offset: u64, stamp: u64) {
    for (index, cell) in block.chunks_mut(16).enumerate() {
        cell[..8].copy_from_slice(&(offset + 16 * index as u64).to_le_bytes());
        cell[8..].copy_from_slice(&stamp.to_le_bytes());
    }
}

fn has_stamp(block: &[u8], offset: u64, stamp: u64) -> bool {
    block.chunks(16).enumerate().all(|(index, cell)| {
        cell[..8] == (offset + 16 * index as u64).to_le_bytes() && cell[8..] == stamp.to_le_bytes()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stamp_tells_its_place_and_its_time() {
        let mut block = vec![0; BLOCK];
        stamp_block(&mut block, 8192, 3);
        assert!(has_stamp(&block, 8192, 3));
        assert!(!has_stamp(&block, 4096, 3) && !has_stamp(&block, 8192, 4));
        block[BLOCK - 1] ^= 1;
        assert!(!has_stamp(&block, 8192, 3));
    }
}
