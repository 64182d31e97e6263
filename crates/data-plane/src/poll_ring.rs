// SPDX-License-Identifier: Apache-2.0
//! The `IOPOLL` ring: reads and writes of a device with poll queues, completed by polling the
//! device instead of by its interrupts. Such a ring takes nothing else, so kicks, timers and the
//! other operations stay in the thread's main ring, and the thread does not sleep while I/O is in
//! flight here.
// UNSAFETY: submission entries carry raw addresses whose owners promise that they stay in place
// until the completion (`BufList::new`).
#![expect(unsafe_code)]

use crate::event::Event;
use crate::uring::{CQ_ENTRIES, GETEVENTS, SQ_ENTRIES};
use io_uring::{IoUring, squeue};
use std::io;
use std::os::fd::RawFd;

/// See the module's head.
pub(crate) struct PollRing {
    ring: IoUring,
    queued: u32,
    in_flight: usize,
    /// The device cannot be polled after all.
    refused: bool,
    /// Retries to come of transfers that found no tag, which the main ring can wait for.
    detours: usize,
}

impl PollRing {
    pub(crate) fn new() -> io::Result<Self> {
        let sized = || {
            let mut builder = IoUring::builder();
            builder.setup_cqsize(CQ_ENTRIES).setup_iopoll();
            builder
        };
        let ring = sized()
            .setup_single_issuer()
            .setup_defer_taskrun()
            .build(SQ_ENTRIES)
            .or_else(|_| sized().build(SQ_ENTRIES))?;
        Ok(PollRing { ring, queued: 0, in_flight: 0, refused: false, detours: 0 })
    }

    pub(crate) fn register_files(&self, files: &[RawFd]) -> io::Result<()> {
        self.ring.submitter().register_files(files)
    }

    /// Whether there is I/O in flight (or to submit).
    #[inline]
    pub(crate) fn is_busy(&self) -> bool {
        self.in_flight > 0
    }

    /// Whether the next transfer goes here; otherwise it goes to the main ring.
    #[inline]
    pub(crate) fn takes_next(&mut self) -> bool {
        let detour = self.detours > 0;
        self.detours -= usize::from(detour);
        !detour && !self.refused
    }

    #[inline]
    pub(crate) fn push(&mut self, entry: &squeue::Entry) {
        // SAFETY: callers keep the memory that the entry names until its completion.
        while unsafe { self.ring.submission().push(entry) }.is_err() {
            self.poll();
        }
        self.queued += 1;
        self.in_flight += 1;
    }

    /// Submits what was pushed and polls the device once.
    #[inline]
    pub(crate) fn poll(&mut self) {
        if self.in_flight == 0 {
            return;
        }
        let queued = self.queued;
        // SAFETY: the entries were made by `push`, whose callers keep their memory.
        let entered =
            unsafe { self.ring.submitter().enter::<libc::sigset_t>(queued, 0, GETEVENTS, None) };
        match entered.as_ref().map_err(io::Error::raw_os_error) {
            Ok(_) | Err(Some(libc::EINTR | libc::EBUSY | libc::EAGAIN)) => {}
            Err(_) => panic!("io_uring_enter of the poll ring failed: {entered:?}"),
        }
        self.queued = self.ring.submission().len() as u32;
    }

    #[inline]
    pub(crate) fn reap(&mut self, events: &mut Vec<(Event, i32)>) {
        for entry in self.ring.completion() {
            self.in_flight -= 1;
            let mut result = entry.result();
            if result == -libc::EOPNOTSUPP && !self.refused {
                tracing::warn!("the device's queues cannot be polled: going on with interrupts");
                self.refused = true;
            }
            if matches!(-result, libc::EOPNOTSUPP | libc::EAGAIN) {
                self.detours += 1;
                result = -libc::EAGAIN; // the lane tries again, and the main ring waits
            }
            events.push((Event::from_user_data(entry.user_data(), false), result));
        }
    }
}
