// SPDX-License-Identifier: Apache-2.0
//! An engine that executes each operation as a system call, for tests without io_uring.
// UNSAFETY: preadv2 and pwritev2 take the raw segments of an operation.
#![expect(unsafe_code)]

use super::{Delivered, TestEngine};
use crate::file::sys;
use crate::{BufList, Engine, Op, Remote, Token};
use std::collections::VecDeque;
use std::fs::File;
use std::io;
use std::os::fd::{BorrowedFd, RawFd};
use std::time::{Duration, Instant};

/// Behaviour that a real engine may show and that every lane must handle.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Quirks {
    /// Maximum bytes that one read or write transfers.
    pub transfer_bytes_max: Option<usize>,
    /// Every operation fails with `EINTR` the first time.
    pub interrupts: bool,
    /// The engine executes and reports the last pushed operation first.
    pub newest_first: bool,
}

/// An engine of system calls. It executes an operation when the caller asks for an event.
#[derive(Debug, Default)]
pub struct SyncEngine {
    files: Vec<File>,
    queue: VecDeque<(Op, Token)>,
    timers: Vec<(Instant, Token)>,
    quirks: Quirks,
    delivered: Delivered,
    /// The next operation was already interrupted once.
    interrupted: bool,
}

impl SyncEngine {
    /// An engine without interruptions, short transfers or reordering.
    pub fn new() -> Self {
        Self::default()
    }

    /// An engine with this behaviour.
    pub fn with_quirks(quirks: Quirks) -> Self {
        SyncEngine { quirks, ..Self::default() }
    }

    fn execute(&mut self, op: &Op) -> i32 {
        self.interrupted = self.quirks.interrupts && !self.interrupted;
        if self.interrupted {
            return -libc::EINTR;
        }
        match *op {
            Op::Read { file, bufs, offset } => self.transfer(file.0, &bufs, offset, false, 0),
            Op::Write { file, bufs, offset, dsync } => {
                let flags = if dsync { libc::RWF_DSYNC } else { 0 };
                self.transfer(file.0, &bufs, offset, true, flags)
            }
            Op::Fdatasync { file } => sys::sync_now(&self.files[file.0 as usize]),
            Op::Fallocate { file, mode, offset, len } => {
                as_result(sys::fallocate(&self.files[file.0 as usize], mode, offset, len))
            }
            Op::Discard { file, offset, len } => {
                as_result(sys::device_discard(&self.files[file.0 as usize], offset, len))
            }
            Op::Nop | Op::Timer { .. } | Op::EndTimer => 0,
        }
    }

    fn transfer(&self, file: u32, bufs: &BufList, offset: u64, write: bool, flags: i32) -> i32 {
        use std::os::fd::AsRawFd;
        let mut iovs = bufs.iovs().to_vec();
        let mut room = self.quirks.transfer_bytes_max.unwrap_or(usize::MAX);
        for iov in &mut iovs {
            iov.iov_len = iov.iov_len.min(room);
            room -= iov.iov_len;
        }
        let (fd, count) = (self.files[file as usize].as_raw_fd(), iovs.len() as i32);
        // SAFETY: the segments are valid until the event of the operation (see `BufList::new`).
        let moved = unsafe {
            match write {
                true => libc::pwritev2(fd, iovs.as_ptr(), count, offset as i64, flags),
                false => libc::preadv2(fd, iovs.as_ptr(), count, offset as i64, flags),
            }
        };
        match moved {
            -1 => sys::errno_of(&io::Error::last_os_error()),
            moved => i32::try_from(moved).expect("a system call moves less than 2 GiB"),
        }
    }

    fn due_timer(&mut self) -> Option<(Token, i32)> {
        let earliest = (0..self.timers.len()).min_by_key(|&n| self.timers[n].0)?;
        let (due, token) = self.timers.remove(earliest);
        std::thread::sleep(due.saturating_duration_since(Instant::now()));
        Some((token, 0))
    }
}

fn as_result(outcome: io::Result<()>) -> i32 {
    outcome.map_or_else(|why| sys::errno_of(&why), |()| 0)
}

impl Engine for SyncEngine {
    fn push(&mut self, op: Op, token: Token) {
        match op {
            Op::Timer { delay } => self.timers.push((Instant::now() + delay, token)),
            Op::EndTimer => {
                let of_token = self.timers.iter_mut().filter(|(_, other)| *other == token);
                of_token.for_each(|(due, _)| *due = Instant::now());
            }
            op => self.queue.push_back((op, token)),
        }
    }

    fn remote(&mut self) -> Remote {
        self.delivered.remote()
    }
}

impl TestEngine for SyncEngine {
    fn register(&mut self, files: &[RawFd]) -> io::Result<()> {
        for &fd in files {
            // SAFETY: the lane keeps its files open during the registration.
            let fd = unsafe { BorrowedFd::borrow_raw(fd) };
            self.files.push(File::from(fd.try_clone_to_owned()?));
        }
        Ok(())
    }

    fn next_event(&mut self, limit: Duration) -> Option<(Token, i32)> {
        if let Some(event) = self.delivered.poll() {
            return Some(event);
        }
        let next = match self.quirks.newest_first {
            true => self.queue.pop_back(),
            false => self.queue.pop_front(),
        };
        match next {
            Some((op, token)) => Some((token, self.execute(&op))),
            None => self.due_timer().or_else(|| self.delivered.wait(limit)),
        }
    }
}
