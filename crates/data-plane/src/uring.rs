// SPDX-License-Identifier: Apache-2.0
//! The thread's io_uring: lane operations, kicks and mail, awaited together.
// UNSAFETY: submission entries carry raw addresses whose owners promise that they stay in place
// until the completion (`BufList::new`, and this struct for timers and registered buffers).
#![expect(unsafe_code)]

use crate::event::Event;
use crate::poll_ring::PollRing;
use crate::transfer::transfer;
use backend::{BufList, Engine, Op, Token};
use io_uring::types::{CancelBuilder, Fixed, FsyncFlags, SubmitArgs, Timespec};
use io_uring::{IoUring, Probe, opcode, squeue};
use std::io;
use std::os::fd::RawFd;
use std::time::Duration;
use virtqueue::GuestMemory;

/// Entries of the submission ring; a batch that is larger is submitted in pieces.
pub(crate) const SQ_ENTRIES: u32 = 256;
/// Entries of the completion ring. More completions than this are kept by the kernel.
pub(crate) const CQ_ENTRIES: u32 = 4096;
/// `IORING_ENTER_GETEVENTS`: run deferred completions, and poll a polled device.
pub(crate) const GETEVENTS: u32 = 1;
/// io_uring's limit on one registered buffer.
const FIXED_BUFFER_BYTES_MAX: u64 = 1 << 30;

/// One registered buffer.
#[derive(Clone, Copy, Debug)]
struct FixedBuffer {
    start: usize,
    end: usize,
    index: u16,
}

/// One thread's ring.
pub(crate) struct Uring {
    ring: IoUring,
    timers: Vec<Timespec>,
    next_timer: usize,
    fixed: Vec<FixedBuffer>,
    vectored_fixed: bool,
    queued: u32,
    poll_ring: Option<PollRing>,
}

impl Uring {
    /// Sets a ring up for the calling thread, with the best mode that the kernel has.
    pub(crate) fn new(iopoll: bool) -> io::Result<Self> {
        let ring = build_ring()?;
        let mut probe = Probe::new();
        let probed = ring.submitter().register_probe(&mut probe).is_ok();
        let vectored_fixed = probed
            && probe.is_supported(opcode::ReadvFixed::CODE)
            && probe.is_supported(opcode::WritevFixed::CODE);
        let timers = vec![Timespec::new(); SQ_ENTRIES as usize + 1];
        let poll_ring = if iopoll { Some(PollRing::new()?) } else { None };
        Ok(Uring {
            ring,
            timers,
            next_timer: 0,
            fixed: Vec::new(),
            vectored_fixed,
            queued: 0,
            poll_ring,
        })
    }

    /// Registers the lane's files; their position is their [`backend::FileIndex`].
    pub(crate) fn register_files(&mut self, files: &[RawFd]) -> io::Result<()> {
        if files.is_empty() {
            return Ok(());
        }
        if let Some(poll_ring) = &self.poll_ring {
            poll_ring.register_files(files)?;
        }
        self.ring.submitter().register_files(files)
    }

    /// Replaces the registered buffers by the regions of `memory`. The regions stay mapped until
    /// the next call.
    ///
    /// # Errors
    /// Mostly ENOMEM: RLIMIT_MEMLOCK. The ring then works without registered buffers.
    pub(crate) fn register_memory(&mut self, memory: &GuestMemory) -> io::Result<()> {
        self.unregister_memory();
        let (mut iovecs, mut fixed) = (Vec::new(), Vec::new());
        for region in memory.regions() {
            let mut offset = 0;
            while offset < region.len() {
                let len = (region.len() - offset).min(FIXED_BUFFER_BYTES_MAX);
                let base = region.host().wrapping_add(offset as usize);
                let index = u16::try_from(iovecs.len()).map_err(|_| io::ErrorKind::OutOfMemory)?;
                let start = base as usize;
                fixed.push(FixedBuffer { start, end: start + len as usize, index });
                iovecs.push(libc::iovec { iov_base: base.cast(), iov_len: len as usize });
                offset += len;
            }
        }
        // SAFETY: the buffers are shared mappings that the caller keeps until the next call.
        unsafe { self.ring.submitter().register_buffers(&iovecs)? };
        self.fixed = fixed;
        Ok(())
    }

    /// Forgets the registered buffers.
    pub(crate) fn unregister_memory(&mut self) {
        if !self.fixed.is_empty() {
            self.fixed.clear();
            // Fails only when nothing is registered.
            let _ = self.ring.submitter().unregister_buffers();
        }
    }

    /// Asks for an event at every signal of an eventfd. The counter is never read: the poll is
    /// edge-triggered and stays armed, so that a kick costs no system call.
    pub(crate) fn poll_eventfd(&mut self, fd: RawFd, event: Event) {
        let entry = opcode::PollAdd::new(io_uring::types::Fd(fd), libc::POLLIN as u32)
            .multi(true)
            .build()
            .user_data(event.to_user_data());
        self.push_entry(&entry);
    }

    /// Cancels what [`Uring::poll_eventfd`] asked; the event comes once more, final.
    pub(crate) fn cancel(&mut self, event: Event) {
        let target = CancelBuilder::user_data(event.to_user_data());
        let entry =
            opcode::AsyncCancel2::new(target).build().user_data(Event::Ignored.to_user_data());
        self.push_entry(&entry);
    }

    /// Submits what was pushed, without waiting; at most one system call, none when there is
    /// nothing to submit and the kernel holds no completion back.
    #[inline]
    pub(crate) fn submit(&mut self) {
        if let Some(poll_ring) = &mut self.poll_ring {
            poll_ring.poll();
        }
        if self.queued == 0 && !self.ring.submission().taskrun() {
            return;
        }
        self.enter(0, None);
    }

    /// Submits what was pushed and waits for an event, or for `timeout`.
    pub(crate) fn wait(&mut self, timeout: Option<Duration>) {
        self.enter(1, timeout);
    }

    fn enter(&mut self, want: usize, timeout: Option<Duration>) {
        let result = match timeout {
            None => {
                // SAFETY: the entries were made by `push_entry`, whose callers keep their memory.
                unsafe {
                    let queued = self.queued;
                    self.ring.submitter().enter::<libc::sigset_t>(
                        queued,
                        want as u32,
                        GETEVENTS,
                        None,
                    )
                }
            }
            Some(timeout) => {
                let timespec = Timespec::from(timeout);
                let args = SubmitArgs::new().timespec(&timespec);
                self.ring.submitter().submit_with_args(want, &args)
            }
        };
        match result {
            Ok(_) => self.queued = self.ring.submission().len() as u32,
            Err(error) => match error.raw_os_error() {
                Some(libc::EINTR | libc::ETIME | libc::EBUSY | libc::EAGAIN) => {
                    self.queued = self.ring.submission().len() as u32;
                }
                // The ring is this thread's only way to work: a bug or a broken kernel.
                _ => panic!("io_uring_enter failed: {error}"),
            },
        }
    }

    /// Takes the completions that are there into `events`, oldest first.
    #[inline]
    pub(crate) fn reap(&mut self, events: &mut Vec<(Event, i32)>) {
        if let Some(poll_ring) = &mut self.poll_ring {
            poll_ring.reap(events);
        }
        for entry in self.ring.completion() {
            let more = io_uring::cqueue::more(entry.flags());
            let event = Event::from_user_data(entry.user_data(), more);
            events.push(match (event, entry.result()) {
                // A timer's success is ETIME; for anything else it is an error of the device.
                (Event::Timer(token), result) if result == -libc::ETIME => (Event::Lane(token), 0),
                (Event::Timer(token), result) => (Event::Lane(token), result),
                other => other,
            });
        }
    }

    /// Whether a completion is there to reap, or held back by the kernel until asked for.
    #[inline]
    pub(crate) fn has_events(&mut self) -> bool {
        if self.poll_ring.as_ref().is_some_and(PollRing::is_busy) {
            return true;
        }
        !self.ring.completion().is_empty() || self.ring.submission().taskrun()
    }

    #[inline]
    fn push_entry(&mut self, entry: &squeue::Entry) {
        // SAFETY: callers keep the memory that the entry names until its completion.
        while unsafe { self.ring.submission().push(entry) }.is_err() {
            self.enter(0, None);
        }
        self.queued += 1;
    }

    /// The registered buffer to use for a transfer, if any.
    #[inline]
    fn fixed_index(&self, bufs: &BufList) -> Option<u16> {
        if self.fixed.is_empty() || (bufs.iovs().len() > 1 && !self.vectored_fixed) {
            return None;
        }
        let inside = |buffer: &&FixedBuffer| {
            bufs.iovs().iter().all(|iov| {
                let start = iov.iov_base as usize;
                start >= buffer.start && start + iov.iov_len <= buffer.end
            })
        };
        self.fixed.iter().find(inside).map(|buffer| buffer.index)
    }

    fn timer(&mut self, delay: Duration) -> squeue::Entry {
        // The kernel reads the time at submission; there is a cell for each unsubmitted entry, and
        // one for the entry to come.
        self.next_timer = (self.next_timer + 1) % self.timers.len();
        let cell = &mut self.timers[self.next_timer];
        *cell = Timespec::from(delay);
        opcode::Timeout::new(cell).build()
    }
}

impl Engine for Uring {
    #[inline]
    fn push(&mut self, op: Op, token: Token) {
        let user_data = Event::Lane(token).to_user_data();
        let entry = match op {
            Op::Read { bufs, .. } | Op::Write { bufs, .. } => {
                if let Some(poll_ring) = &mut self.poll_ring
                    && poll_ring.takes_next()
                {
                    return poll_ring.push(&transfer(&op, None).user_data(user_data));
                }
                transfer(&op, self.fixed_index(&bufs))
            }
            Op::Fdatasync { file } => {
                opcode::Fsync::new(Fixed(file.0)).flags(FsyncFlags::DATASYNC).build()
            }
            Op::Fallocate { file, mode, offset, len } => {
                opcode::Fallocate::new(Fixed(file.0), len).offset(offset).mode(mode).build()
            }
            Op::Timer { delay } => {
                let entry = self.timer(delay).user_data(Event::Timer(token).to_user_data());
                return self.push_entry(&entry);
            }
        };
        self.push_entry(&entry.user_data(user_data));
    }
}

/// The best mode that the kernel has: completions run only when this thread asks (6.1), else only
/// when it enters the kernel anyway (5.19), else as they come.
fn build_ring() -> io::Result<IoUring> {
    let sized = || {
        let mut builder = IoUring::builder();
        builder.setup_cqsize(CQ_ENTRIES);
        builder
    };
    let ring = sized()
        .setup_single_issuer()
        .setup_defer_taskrun()
        .setup_taskrun_flag()
        .build(SQ_ENTRIES)
        .or_else(|_| sized().setup_coop_taskrun().setup_taskrun_flag().build(SQ_ENTRIES))
        .or_else(|_| sized().build(SQ_ENTRIES))?;
    // Only saves a look-up of the ring's descriptor at each system call (5.18).
    let _ = ring.submitter().register_ring_fd();
    Ok(ring)
}
