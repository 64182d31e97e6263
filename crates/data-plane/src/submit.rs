// SPDX-License-Identifier: Apache-2.0
//! Stage *submit*: turns a request into backend I/O and starts it.
// UNSAFETY: the buffer list of an I/O borrows the segments of its request's entry until it
// completes.
#![expect(unsafe_code)]

use crate::event::{queue_and_entry, slot_of};
use crate::health::Verdict;
use crate::io_workers::room;
use crate::request_table::{Entry, Submitted, Taken};
use crate::running::RunningQueue;
use crate::uring::Uring;
use backend::{BufList, Io, IoError, IoKind, Lane, Slot, Step, Token};
use std::io;
use virtio_blk::{Completion, Kind, Range, Request};

const SECTOR_BYTES: u64 = virtio_spec::blk::SECTOR_BYTES;

/// The storage of a disk on a thread.
pub(crate) struct Storage {
    /// The thread's number of the disk.
    disk: u16,
    lane: Box<dyn Lane>,
    /// Requests that the storage works on.
    in_storage: u32,
}

impl Storage {
    pub(crate) fn new(disk: u16, lane: Box<dyn Lane>) -> Self {
        Storage { disk, lane, in_storage: 0 }
    }

    /// See [`Lane::moves_data_itself`].
    pub(crate) fn moves_data_itself(&self) -> bool {
        self.lane.moves_data_itself()
    }

    /// Returns the number of chains that the queue may take now: see [`crate::io_workers`].
    #[inline]
    pub(crate) fn room_for(&self, queue: &RunningQueue, uring: &Uring) -> usize {
        room(queue.requests.in_flight(), self.in_storage, uring.in_storage) as usize
    }

    /// Replaces the lane by a new one of the same disk, which has its present capacity. Returns the
    /// old lane; returns the new one if this fails. No I/O may be in flight.
    pub(crate) fn replace_lane(
        &mut self,
        uring: &mut Uring,
        lane: Box<dyn Lane>,
    ) -> (Box<dyn Lane>, io::Result<()>) {
        match uring.replace_files(self.disk, &self.lane.files(), &lane.files()) {
            Ok(()) => (std::mem::replace(&mut self.lane, lane), Ok(())),
            Err(error) => (lane, Err(error)),
        }
    }

    /// Unregisters the lane and returns it. No I/O may be in flight.
    pub(crate) fn close(self, uring: &mut Uring) -> Box<dyn Lane> {
        uring.close_port(self.disk);
        self.lane
    }

    /// Starts the I/O of a request of `queue`, which may complete at once.
    #[inline]
    pub(crate) fn submit(
        &mut self,
        uring: &mut Uring,
        queue: &mut RunningQueue,
        taken: Taken,
        request: Request,
    ) {
        let (slot, kind) = (slot_of(queue.id.queue, taken.index()), request.kind);
        queue.submitting(taken.index());
        let entry = queue.requests.entry(taken.index());
        let Some(io) = next_io(entry, kind) else {
            let id_bytes = give_id(entry, kind, queue.disk.id());
            return queue.complete(taken, request, Completion::of(kind, Ok(()), id_bytes));
        };
        let submitted = entry.submitted.insert(Submitted { taken, request, io });
        uring.in_storage += 1;
        self.in_storage += 1;
        match self.lane.start(&mut submitted.io, slot, &mut uring.of_disk(self.disk)) {
            Step::Done(result) => self.io_done(uring, queue, slot, kind, result),
            Step::Pending => queue.batch.began(kind.inflight_bytes()),
        }
    }

    /// Delivers the result of an operation to the lane.
    #[inline]
    pub(crate) fn event(
        &mut self,
        uring: &mut Uring,
        queue: &mut RunningQueue,
        token: Token,
        result: i32,
    ) {
        let (_, index) = queue_and_entry(token.slot);
        let submitted = queue.requests.submitted(index);
        let kind = submitted.request.kind;
        if let Step::Done(result) =
            self.lane.event(&mut submitted.io, token, result, &mut uring.of_disk(self.disk))
        {
            self.io_done(uring, queue, token.slot, kind, result);
        }
    }

    /// Handles the end of an I/O: starts the next range of the request, or completes the request.
    #[inline]
    fn io_done(
        &mut self,
        uring: &mut Uring,
        queue: &mut RunningQueue,
        slot: Slot,
        kind: Kind,
        result: Result<(), IoError>,
    ) {
        // A discard is advisory: a stop does not wait for the rest of its ranges.
        let skips = || matches!(kind, Kind::Discard { .. }) && queue.stopping.is_some();
        match has_ranges(kind) && !skips() {
            true => self.next_range(uring, queue, slot, kind, result),
            false => self.complete_submitted(uring, queue, slot, result),
        }
    }

    /// After the end of a range: starts the next one, or completes the request.
    #[inline(never)]
    fn next_range(
        &mut self,
        uring: &mut Uring,
        queue: &mut RunningQueue,
        slot: Slot,
        kind: Kind,
        mut result: Result<(), IoError>,
    ) {
        let (_, index) = queue_and_entry(slot);
        while result.is_ok() {
            let Some(io) = next_io(queue.requests.entry(index), kind) else { break };
            let current = &mut queue.requests.submitted(index).io;
            *current = io;
            result = match self.lane.start(current, slot, &mut uring.of_disk(self.disk)) {
                Step::Done(result) => result,
                Step::Pending => return,
            };
        }
        self.complete_submitted(uring, queue, slot, result);
    }

    /// Completes a submitted request.
    #[inline]
    fn complete_submitted(
        &mut self,
        uring: &mut Uring,
        queue: &mut RunningQueue,
        slot: Slot,
        result: Result<(), IoError>,
    ) {
        uring.in_storage -= 1;
        self.in_storage -= 1;
        let (_, index) = queue_and_entry(slot);
        let Submitted { taken, request, io } = queue.requests.take_submitted(index);
        if let Err(error) = result
            && queue.handle_failure(request.kind, &io, error) == Verdict::Keep
        {
            return queue.keep(taken, request);
        }
        let completion = Completion::of(request.kind, result, 0);
        queue.complete(taken, request, completion);
    }
}

/// The next I/O of a request; `None` if it needs no further one. Inlined, so that the I/O is built in
/// its place.
#[inline(always)]
fn next_io(entry: &mut Entry, kind: Kind) -> Option<Io> {
    match kind {
        Kind::Read { bytes: 0, .. } | Kind::Write { bytes: 0, .. } | Kind::GetId => None,
        Kind::Read { sector, bytes } => {
            let bufs = borrow(entry.chain.writable());
            Some(Io::new(IoKind::Read, sector * SECTOR_BYTES, bytes, bufs))
        }
        Kind::Write { sector, bytes, durable } => {
            let bufs = borrow(entry.chain.readable());
            let io = Io::new(IoKind::Write, sector * SECTOR_BYTES, bytes, bufs);
            Some(Io { durable, ..io })
        }
        Kind::Flush => Some(Io::new(IoKind::Flush, 0, 0, BufList::EMPTY)),
        Kind::Discard { durable, .. } => range_io(entry, durable, |_| IoKind::Discard),
        Kind::WriteZeroes { durable, .. } => {
            range_io(entry, durable, |range| IoKind::WriteZeroes { unmap: range.unmap })
        }
        Kind::SecureErase { .. } => range_io(entry, true, |_| IoKind::SecureErase),
    }
}

/// Returns whether a request of this kind may need several I/Os.
#[inline]
fn has_ranges(kind: Kind) -> bool {
    matches!(kind, Kind::Discard { .. } | Kind::WriteZeroes { .. } | Kind::SecureErase { .. })
}

#[inline(never)]
fn range_io(entry: &mut Entry, durable: bool, kind: impl Fn(&Range) -> IoKind) -> Option<Io> {
    loop {
        let range = entry.ranges.next_range()?;
        if range.sectors > 0 {
            let (offset, len) =
                (range.sector * SECTOR_BYTES, u64::from(range.sectors) * SECTOR_BYTES);
            let io = Io::new(kind(&range), offset, len, BufList::EMPTY);
            return Some(Io { durable, ..io });
        }
    }
}

/// Copies the device id for a GET_ID; returns the number of bytes copied.
fn give_id(entry: &mut Entry, kind: Kind, id: &[u8]) -> u32 {
    match kind {
        Kind::GetId => borrow(entry.chain.writable()).copy_in(0, id) as u32,
        _ => 0,
    }
}

#[inline]
fn borrow(segments: &mut [libc::iovec]) -> BufList {
    // SAFETY: the segments belong to an entry of the request table, which neither moves nor is
    // reused until its request completes. The queue keeps the guest's memory mapped until then.
    unsafe { BufList::new(segments.as_mut_ptr(), segments.len()) }
}
