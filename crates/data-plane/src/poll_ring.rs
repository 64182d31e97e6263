// SPDX-License-Identifier: Apache-2.0
//! The `IOPOLL` ring: reads and writes of a device with poll queues. The kernel polls the device
//! for completions instead of waiting for interrupts. Such a ring accepts no other operation:
//! kicks, timers and other operations stay in the thread's main ring, and the thread does not sleep
//! while I/O is in flight here.
// UNSAFETY: submission entries contain raw addresses. The caller of `BufList::new` guarantees that
// the memory stays in place until the completion.
#![expect(unsafe_code)]

use crate::event::Event;
use io_uring::{IoUring, Submitter, squeue};
use std::io;
use std::os::fd::RawFd;

/// `IORING_ENTER_GETEVENTS`: run deferred completions, and poll a polled device.
pub(crate) const GETEVENTS: u32 = 1;

/// A ring for polled reads and writes.
pub(crate) struct PollRing {
    ring: IoUring,
    queued: u32,
    in_flight: usize,
    /// The device does not support polling.
    refused: bool,
    /// Number of next transfers for the main ring: retries of transfers that found no free tag.
    detours: usize,
}

impl PollRing {
    /// A ring with these numbers of submission and completion entries.
    pub(crate) fn new(sq_entries: u32, cq_entries: u32) -> io::Result<Self> {
        let sized = || {
            let mut builder = IoUring::builder();
            builder.setup_cqsize(cq_entries).setup_iopoll();
            builder
        };
        let ring = sized()
            .setup_single_issuer()
            .setup_defer_taskrun()
            .build(sq_entries)
            .or_else(|_| sized().build(sq_entries))?;
        Ok(PollRing { ring, queued: 0, in_flight: 0, refused: false, detours: 0 })
    }

    pub(crate) fn submitter(&self) -> Submitter<'_> {
        self.ring.submitter()
    }

    pub(crate) fn register_files(&self, files: &[RawFd]) -> io::Result<()> {
        self.ring.submitter().register_files(files)
    }

    pub(crate) fn unregister_files(&self) {
        // It fails only if no file is registered.
        let _ = self.ring.submitter().unregister_files();
    }

    /// Returns whether I/O is in flight or waits for submission.
    #[inline]
    pub(crate) fn is_busy(&self) -> bool {
        self.in_flight > 0
    }

    /// Returns whether the next transfer belongs here; `false`: it belongs to the main ring.
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

    /// Submits the pushed entries and polls the device once.
    #[inline]
    pub(crate) fn poll(&mut self) {
        if self.in_flight == 0 {
            return;
        }
        let queued = self.queued;
        // SAFETY: callers of `push` keep the memory of the entries.
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
                tracing::warn!("the device's queues cannot be polled: using interrupts");
                self.refused = true;
            }
            if matches!(-result, libc::EOPNOTSUPP | libc::EAGAIN) {
                self.detours += 1;
                result = -libc::EAGAIN; // the lane retries, and the main ring waits for a tag
            }
            events.push((Event::from_user_data(entry.user_data(), false), result));
        }
    }
}
