// SPDX-License-Identifier: Apache-2.0
//! A generator of requests that costs as little as possible, so that the driver's own share shows:
//! one thread, io_uring with a registered file and registered buffers, batches, no clock for each
//! request. fio's `t/io_uring` works in the same way, and Debian's package of fio has it not.
// UNSAFETY: submission entries name buffers by their address. The buffers are registered, so that the
// kernel holds their pages until each I/O has ended, and live as long as the ring.
#![expect(unsafe_code)]

use std::fs::OpenOptions;
use std::io::{Seek, SeekFrom};
use std::os::fd::AsRawFd;
use std::os::unix::fs::OpenOptionsExt;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use fastrand::Rng;
use io_uring::{IoUring, opcode, squeue, types};

/// Bytes of each request.
const BLOCK: usize = 4096;

/// The buffer of a request.
#[derive(Clone)]
#[repr(C, align(4096))]
struct Block([u8; BLOCK]);

/// The requests of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Operation {
    /// Random reads.
    Read,
    /// Random writes.
    Write,
    /// No I/O: the path of the generator and of io_uring alone.
    Nop,
}

/// A load.
#[derive(Clone, Copy, Debug)]
pub(super) struct Generator {
    pub(super) operation: Operation,
    /// Requests in flight.
    pub(super) depth: u32,
    /// Requests that are submitted, and waited for, in one system call.
    pub(super) batch: u32,
    /// Completions are polled for at the device.
    pub(super) is_polled: bool,
}

/// The result of a run.
#[derive(Clone, Copy, Debug)]
pub(super) struct Run {
    /// Completed requests.
    pub(super) requests: u64,
    /// System calls.
    pub(super) calls: u64,
    pub(super) elapsed: Duration,
}

/// The ring, the buffers, and the state of a run.
struct Running {
    // Dropped first.
    ring: IoUring,
    buffers: Vec<Block>,
    /// Buffers without a request.
    free: Vec<u16>,
    blocks: u64,
    random: Rng,
    operation: Operation,
}

impl Generator {
    /// Completes `requests` (rounded up to whole batches) on a disk or a file.
    ///
    /// # Errors
    /// The kernel refuses the ring, or a request fails.
    pub(super) fn run(&self, path: &str, requests: u64) -> Result<Run> {
        let Self { depth, batch, .. } = *self;
        ensure!((1..=depth).contains(&batch), "batches of {batch} with {depth} in flight");
        let mut running = self.start(path)?;
        let begin = Instant::now();
        let (mut submitted, mut done, mut calls) = (0, 0, 0);
        while done < requests {
            while submitted < requests && submitted - done + u64::from(batch) <= u64::from(depth) {
                // All but the last batch that fits go without a wait.
                running.push(batch)?;
                submitted += u64::from(batch);
                if submitted < requests && submitted - done + u64::from(batch) <= u64::from(depth) {
                    running.ring.submit()?;
                    calls += 1;
                }
            }
            let wait = u64::from(batch).min(submitted - done);
            running.ring.submit_and_wait(wait as usize).context("io_uring_enter")?;
            calls += 1;
            done += running.reap()?;
        }
        Ok(Run { requests: done, calls, elapsed: begin.elapsed() })
    }

    fn start(&self, path: &str) -> Result<Running> {
        let mut builder = IoUring::builder();
        builder.setup_single_issuer();
        if self.is_polled {
            builder.setup_iopoll();
        } else {
            builder.setup_defer_taskrun();
        }
        let ring: IoUring = builder.build(self.depth.next_power_of_two())?;
        let file = OpenOptions::new()
            .read(true)
            .write(self.operation == Operation::Write)
            .custom_flags(libc::O_DIRECT)
            .open(path)
            .with_context(|| path.to_owned())?;
        let blocks = (&file).seek(SeekFrom::End(0))? / BLOCK as u64;
        ensure!(blocks > 0, "{path} has less than a block");
        ring.submitter().register_files(&[file.as_raw_fd()])?;
        let mut buffers = vec![Block([0x5a; BLOCK]); self.depth as usize];
        let vectors: Vec<libc::iovec> = buffers
            .iter_mut()
            .map(|block| libc::iovec { iov_base: block.0.as_mut_ptr().cast(), iov_len: BLOCK })
            .collect();
        // SAFETY: `Running` keeps the buffers at their place as long as the ring.
        unsafe { ring.submitter().register_buffers(&vectors) }.context("registering buffers")?;
        let (free, operation) = ((0..self.depth as u16).collect(), self.operation);
        Ok(Running { ring, buffers, free, blocks, random: Rng::with_seed(1), operation })
    }
}

impl Running {
    /// Lays out requests; the next system call submits them.
    fn push(&mut self, count: u32) -> Result<()> {
        for _ in 0..count {
            let Some(slot) = self.free.pop() else { bail!("more requests than buffers") };
            let entry = self.entry(slot).user_data(slot.into());
            // SAFETY: the entry names a buffer of this struct, which has no other request.
            let pushed = unsafe { self.ring.submission().push(&entry) };
            pushed.context("the submission queue is full")?;
        }
        Ok(())
    }

    fn entry(&mut self, slot: u16) -> squeue::Entry {
        let offset = self.random.u64(..self.blocks) * BLOCK as u64;
        let (file, length) = (types::Fixed(0), BLOCK as u32);
        let buffer = self.buffers[usize::from(slot)].0.as_mut_ptr();
        match self.operation {
            Operation::Read => {
                opcode::ReadFixed::new(file, buffer, length, slot).offset(offset).build()
            }
            Operation::Write => {
                opcode::WriteFixed::new(file, buffer, length, slot).offset(offset).build()
            }
            Operation::Nop => opcode::Nop::new().build(),
        }
    }

    /// Takes all completions; gives their number.
    fn reap(&mut self) -> Result<u64> {
        let wanted = if self.operation == Operation::Nop { 0 } else { BLOCK as i32 };
        let mut count = 0;
        for completion in self.ring.completion() {
            if completion.result() != wanted {
                bail!("a request of {BLOCK} bytes gave {}", completion.result());
            }
            self.free.push(completion.user_data() as u16);
            count += 1;
        }
        Ok(count)
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::FileExt;

    use super::*;

    fn file(blocks: u64) -> tempfile::NamedTempFile {
        let file = tempfile::NamedTempFile::new_in(".").unwrap();
        file.as_file().write_all_at(&vec![1; BLOCK * blocks as usize], 0).unwrap();
        file
    }

    fn run(operation: Operation, (depth, batch): (u32, u32), path: &str) -> Result<Run> {
        Generator { operation, depth, batch, is_polled: false }.run(path, 64)
    }

    #[test]
    fn a_batch_takes_one_system_call() {
        let file = file(16);
        let path = file.path().display().to_string();
        let calls = |shape| {
            let run = run(Operation::Nop, shape, &path).unwrap();
            assert_eq!(run.requests, 64, "{shape:?}");
            run.calls
        };
        assert_eq!([calls((1, 1)), calls((16, 16)), calls((32, 32))], [64, 4, 2]);
        assert!(run(Operation::Read, (8, 9), &path).is_err());
    }

    #[test]
    fn reads_and_writes_reach_the_file() {
        let file = file(1);
        let path = file.path().display().to_string();
        assert_eq!(run(Operation::Read, (8, 4), &path).unwrap().requests, 64);
        assert_eq!(std::fs::read(&path).unwrap(), [1; BLOCK]);
        run(Operation::Write, (1, 1), &path).unwrap();
        assert_eq!(std::fs::read(&path).unwrap(), [0x5a; BLOCK]);
    }

    #[test]
    fn a_request_that_fails_ends_the_run() {
        let file = file(16);
        // The last block ends behind the file.
        file.as_file().set_len(BLOCK as u64 + 512).unwrap();
        let generator =
            Generator { operation: Operation::Read, depth: 1, batch: 1, is_polled: false };
        let mut running = generator.start(&file.path().display().to_string()).unwrap();
        running.blocks = 1000;
        running.push(1).unwrap();
        running.ring.submit_and_wait(1).unwrap();
        assert!(running.reap().unwrap_err().to_string().contains("4096 bytes gave"));
    }
}
