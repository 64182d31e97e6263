// SPDX-License-Identifier: Apache-2.0
//! The `IOPOLL` ring: reads and writes of a device with poll queues. The kernel polls the device
//! for completions instead of waiting for interrupts. Such a ring accepts no other operation:
//! kicks, timers and other operations stay in the thread's main ring, and the thread does not sleep
//! while I/O is in flight here.
// UNSAFETY: submission entries contain raw addresses. The caller of `BufList::new` guarantees that
// the memory stays in place until the completion.
#![expect(unsafe_code)]

use crate::event::Event;
use crate::poll_trial::PollTrial;
use crate::port::Port;
use io_uring::{IoUring, Submitter, squeue};
use std::io;

/// `IORING_ENTER_GETEVENTS`: run deferred completions, and poll a polled device.
pub(crate) const GETEVENTS: u32 = 1;

/// A ring for polled reads and writes.
pub(crate) struct PollRing {
    ring: IoUring,
    queued: u32,
    in_flight: usize,
    /// The trial of disks with `--iopoll auto`.
    pub(crate) trial: PollTrial,
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
        Ok(PollRing { ring, queued: 0, in_flight: 0, trial: PollTrial::new() })
    }

    pub(crate) fn submitter(&self) -> Submitter<'_> {
        self.ring.submitter()
    }

    /// Returns whether I/O is in flight or waits for submission.
    #[inline]
    pub(crate) fn is_busy(&self) -> bool {
        self.in_flight > 0
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

    /// Moves all completions to `events`. `ports` has the disks of the thread.
    #[inline]
    pub(crate) fn reap(&mut self, ports: &mut [Port], events: &mut Vec<(Event, i32)>) {
        for entry in self.ring.completion() {
            self.in_flight -= 1;
            let event = Event::from_user_data(entry.user_data(), false);
            let mut result = entry.result();
            if let Event::Lane { disk, .. } = event {
                result = ports[usize::from(disk)].result_for_lane(result);
            }
            events.push((event, result));
        }
    }
}
