// SPDX-License-Identifier: Apache-2.0
//! The thread's io_uring: waits for lane operations, kicks and mail together.
// UNSAFETY: submission entries contain raw addresses. The caller of `BufList::new`, and this struct
// for timers, keep the memory in place until the completion.
#![expect(unsafe_code)]

use crate::event::Event;
use crate::io_workers::IoWorkers;
use crate::poll_ring::{GETEVENTS, PollRing};
use crate::port::{self, Port};
use crate::remote::{RemoteEvents, Sender};
use crate::table::Table;
use crate::transfer::transfer;
use backend::{Engine, Op, Remote, Token};
use io_uring::types::{CancelBuilder, Fixed, FsyncFlags, SubmitArgs, Timespec};
use io_uring::{IoUring, Probe, opcode, squeue};
use std::io;
use std::os::fd::RawFd;
use std::sync::Arc;
use std::time::Duration;

/// Entries of the submission ring. A larger batch takes several submissions.
pub(crate) const SQ_ENTRIES: u32 = 256;
/// Entries of the completion ring. The kernel keeps further completions.
pub(crate) const CQ_ENTRIES: u32 = 4096;

/// One thread's ring.
pub(crate) struct Uring {
    pub(crate) ring: IoUring,
    timers: Vec<Timespec>,
    next_timer: usize,
    /// By the thread's number of the disk.
    pub(crate) ports: Vec<Port>,
    /// Places for files in both rings.
    pub(crate) files: Table,
    /// Places for buffers; made when a disk pins memory.
    pub(crate) buffers: Option<Table>,
    vectored_fixed: bool,
    queued: u32,
    /// Requests that the storage of the thread's disks works on.
    pub(crate) in_storage: u32,
    /// Operations that threads of the kernel carry out.
    pub(crate) in_kernel_threads: u32,
    /// Exists while a disk wants it.
    pub(crate) poll_ring: Option<PollRing>,
    /// Events of other threads, if a lane uses some.
    remote_events: Arc<RemoteEvents>,
    /// The ring polls for them, since their first use.
    polls_remote_events: bool,
    pub(crate) io_workers: IoWorkers,
}

impl Uring {
    /// Sets up a ring for the calling thread, in the best mode that the kernel supports.
    pub(crate) fn new() -> io::Result<Self> {
        let ring = build_ring()?;
        let mut probe = Probe::new();
        let probed = ring.submitter().register_probe(&mut probe).is_ok();
        let vectored_fixed = probed
            && probe.is_supported(opcode::ReadvFixed::CODE)
            && probe.is_supported(opcode::WritevFixed::CODE);
        let timers = vec![Timespec::new(); SQ_ENTRIES as usize + 1];
        let files = port::register_table(&ring.submitter())?;
        Ok(Uring {
            ring,
            timers,
            next_timer: 0,
            ports: Vec::new(),
            files,
            buffers: None,
            vectored_fixed,
            queued: 0,
            in_storage: 0,
            in_kernel_threads: 0,
            poll_ring: None,
            remote_events: Arc::new(RemoteEvents::new()?),
            polls_remote_events: false,
            io_workers: IoWorkers::default(),
        })
    }

    /// Requests an event for every signal of an eventfd. The poll is edge-triggered and stays
    /// armed; no code reads the counter, so a kick costs no system call.
    pub(crate) fn poll_eventfd(&mut self, fd: RawFd, event: Event) {
        let entry = opcode::PollAdd::new(io_uring::types::Fd(fd), libc::POLLIN as u32)
            .multi(true)
            .build()
            .user_data(event.to_user_data());
        self.push_entry(&entry);
    }

    /// Cancels a poll of [`Uring::poll_eventfd`]; a final event follows.
    pub(crate) fn cancel(&mut self, event: Event) {
        let target = CancelBuilder::user_data(event.to_user_data());
        let entry =
            opcode::AsyncCancel2::new(target).build().user_data(Event::Ignored.to_user_data());
        self.push_entry(&entry);
    }

    /// Submits the pushed entries without waiting. Makes at most one system call, and none if there
    /// is nothing to submit and the kernel holds back no completion; another one polls a busy polling ring.
    #[inline]
    pub(crate) fn submit(&mut self) {
        if let Some(poll_ring) = &mut self.poll_ring {
            poll_ring.poll();
        }
        if self.queued == 0 && !self.holds_back() {
            return;
        }
        self.enter(0, None);
    }

    /// Submits the pushed entries and waits for an event or the timeout.
    pub(crate) fn wait(&mut self, timeout: Option<Duration>) {
        self.enter(1, timeout);
    }

    fn enter(&mut self, want: usize, timeout: Option<Duration>) {
        let result = match timeout {
            None => {
                // SAFETY: callers of `push_entry` keep the memory of the entries.
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
                // Without the ring the thread cannot work: this is a bug or a broken kernel.
                _ => panic!("io_uring_enter failed: {error}"),
            },
        }
    }

    /// Number of pushed entries that the kernel does not have yet.
    #[inline]
    pub(crate) fn queued(&self) -> usize {
        self.queued as usize
    }

    /// Moves available completions to `events`, oldest first. Stops after `max` lane events; kicks,
    /// mail and events of other threads or the `IOPOLL` ring do not count. Returns `true` if none
    /// is left.
    #[inline]
    pub(crate) fn reap(&mut self, events: &mut Vec<(Event, i32)>, max: usize) -> bool {
        if let Some(poll_ring) = &mut self.poll_ring {
            poll_ring.reap(&mut self.ports, events);
        }
        let (mut delivered, mut left) = (None, max);
        // At most `CQ_ENTRIES`: completions that come meanwhile are not seen.
        let mut completions = self.ring.completion();
        while left > 0 {
            let Some(entry) = completions.next() else { break };
            let (data, result) = (entry.user_data(), entry.result());
            if let Some((disk, token)) = Event::lane_of(data) {
                events.push((Event::Lane { disk, token }, result)); // the usual event
                left -= 1;
                continue;
            }
            match Event::from_user_data(data, io_uring::cqueue::more(entry.flags())) {
                Event::Remote { armed } => delivered = Some(armed && delivered.unwrap_or(true)),
                // ETIME is the success of a timer, and an error for any other operation.
                Event::Timer { disk, token } => {
                    let result = if result == -libc::ETIME { 0 } else { result };
                    events.push((Event::Lane { disk, token }, result));
                    left -= 1;
                }
                Event::InKernelThread { disk, token } => {
                    self.in_kernel_threads -= 1;
                    events.push((Event::Lane { disk, token }, result));
                    left -= 1;
                }
                other => events.push((other, result)),
            }
        }
        drop(completions);
        if let Some(armed) = delivered {
            self.drain_remote(armed, events);
        }
        left > 0
    }

    /// The list of events of other threads. The ring polls for them from the first use on.
    fn remote_events(&mut self) -> Arc<RemoteEvents> {
        if !std::mem::replace(&mut self.polls_remote_events, true) {
            self.poll_eventfd(self.remote_events.fd(), Event::Remote { armed: true });
        }
        Arc::clone(&self.remote_events)
    }

    /// Moves the events of other threads to `events`, and arms the poll again if it has ended.
    #[cold]
    fn drain_remote(&mut self, armed: bool, events: &mut Vec<(Event, i32)>) {
        let (fd, delivered) = (self.remote_events.fd(), self.remote_events.take());
        let lane_event = |(disk, token, result)| (Event::Lane { disk, token }, result);
        events.extend(delivered.into_iter().map(lane_event));
        if !armed {
            self.poll_eventfd(fd, Event::Remote { armed: true });
        }
    }

    /// Returns whether a completion is available, or the kernel holds one back until the next call.
    #[inline]
    pub(crate) fn has_events(&mut self) -> bool {
        if self.poll_ring.as_ref().is_some_and(PollRing::is_busy) {
            return true;
        }
        !self.ring.completion().is_empty() || self.holds_back()
    }

    /// Returns whether the kernel has completions that only the next call puts into the ring.
    #[inline]
    fn holds_back(&mut self) -> bool {
        let submission = self.ring.submission();
        submission.taskrun() || submission.cq_overflow()
    }

    #[inline]
    pub(crate) fn push_entry(&mut self, entry: &squeue::Entry) {
        // SAFETY: callers keep the memory that the entry names until its completion.
        while unsafe { self.ring.submission().push(entry) }.is_err() {
            self.enter(0, None);
        }
        self.queued += 1;
    }

    /// Requests an event after a delay.
    pub(crate) fn notify_in(&mut self, delay: Duration, event: Event) {
        let entry = self.timer(delay).user_data(event.to_user_data());
        self.push_entry(&entry);
    }

    fn timer(&mut self, delay: Duration) -> squeue::Entry {
        // The kernel reads the time at the submission. There is a cell for each unsubmitted entry,
        // and one for the next entry.
        self.next_timer = (self.next_timer + 1) % self.timers.len();
        let cell = &mut self.timers[self.next_timer];
        *cell = Timespec::from(delay);
        opcode::Timeout::new(cell).build()
    }
}

/// The engine of one disk's lane.
pub(crate) struct LaneEngine<'a> {
    uring: &'a mut Uring,
    disk: u16,
}

impl Uring {
    /// The engine of the lane of the thread's disk `disk`.
    #[inline]
    pub(crate) fn of_disk(&mut self, disk: u16) -> LaneEngine<'_> {
        LaneEngine { uring: self, disk }
    }
}

impl Engine for LaneEngine<'_> {
    #[inline]
    fn push(&mut self, op: Op, token: Token) {
        let (uring, disk) = (&mut *self.uring, self.disk);
        let port = &mut uring.ports[usize::from(disk)];
        let files = port.first_file();
        let user_data = Event::Lane { disk, token }.to_user_data();
        let entry = match op {
            Op::Read { bufs, .. } | Op::Write { bufs, .. } => {
                if let Some(poll_ring) = &mut uring.poll_ring
                    && port.polls_next(&mut poll_ring.trial)
                {
                    return poll_ring.push(&transfer(&op, files, None).user_data(user_data));
                }
                transfer(&op, files, port.fixed_index(&bufs, uring.vectored_fixed))
            }
            Op::Fdatasync { file } => {
                opcode::Fsync::new(Fixed(files + file.0)).flags(FsyncFlags::DATASYNC).build()
            }
            Op::Fallocate { file, mode, offset, len } => {
                let file = Fixed(files + file.0);
                opcode::Fallocate::new(file, len).offset(offset).mode(mode).build()
            }
            Op::Discard { file, offset, len } => discard(files + file.0, offset, len),
            Op::Nop => return uring.push_entry(&opcode::Nop::new().build().user_data(user_data)),
            Op::Timer { delay } => {
                let user_data = Event::Timer { disk, token }.to_user_data();
                let entry = uring.timer(delay).user_data(user_data);
                return uring.push_entry(&entry);
            }
            Op::EndTimer => {
                let timer = Event::Timer { disk, token }.to_user_data();
                let entry = opcode::TimeoutRemove::new(timer).build();
                let entry = entry.flags(squeue::Flags::SKIP_SUCCESS);
                return uring.push_entry(&entry.user_data(Event::Ignored.to_user_data()));
            }
        };
        let user_data = match op {
            Op::Fdatasync { .. } | Op::Fallocate { .. } => {
                uring.in_kernel_threads += 1;
                Event::InKernelThread { disk, token }.to_user_data()
            }
            _ => user_data,
        };
        let entry = match uring.ports[usize::from(disk)].force_async {
            true => entry.flags(squeue::Flags::ASYNC),
            false => entry,
        };
        uring.push_entry(&entry.user_data(user_data));
    }

    #[cold]
    fn remote(&mut self) -> Remote {
        Remote::new(Arc::new(Sender { remote_events: self.uring.remote_events(), disk: self.disk }))
    }
}

/// `BLOCK_URING_CMD_DISCARD` (Linux 6.12), with the range in `addr` and `addr3`.
fn discard(file: u32, offset: u64, len: u64) -> squeue::Entry {
    const BLOCK_URING_CMD_DISCARD: u32 = 0x1200; // _IO(0x12, 0)
    let mut addr3 = [0; 16]; // the entry's first 8 command bytes
    addr3[..8].copy_from_slice(&len.to_ne_bytes());
    let command = opcode::UringCmd16::new(Fixed(file), BLOCK_URING_CMD_DISCARD);
    command.addr(Some(offset)).cmd(addr3).build()
}

/// Builds a ring in the best mode that the kernel supports. Completions run only when this thread
/// asks (Linux 6.1), else only when it enters the kernel (5.19), else at any time.
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
    // This only avoids the lookup of the ring's descriptor at each system call (5.18).
    let _ = ring.submitter().register_ring_fd();
    Ok(ring)
}
