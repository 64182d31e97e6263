// SPDX-License-Identifier: Apache-2.0
//! Stage *submit*: turns a request into backend I/O and starts it.
// UNSAFETY: the buffer list of an I/O borrows the segments of its in-flight entry until it is done.
#![expect(unsafe_code)]

use crate::event::slot_of;
use crate::inflight::Entry;
use crate::running::RunningQueue;
use crate::uring::Uring;
use backend::{BufList, Io, IoError, IoKind, Lane, Slot, Step, Token};
use std::collections::VecDeque;
use virtio_blk::{Completion, Kind, Range};

const SECTOR_BYTES: u64 = virtio_spec::blk::SECTOR_BYTES;

/// The storage side of a thread: its lane, its ring, and the I/Os that found no resource.
pub(crate) struct Storage {
    pub(crate) lane: Box<dyn Lane>,
    pub(crate) engine: Uring,
    /// Entries whose `start` answered [`Step::Busy`], oldest first.
    pub(crate) stalled: VecDeque<Slot>,
}

impl Storage {
    /// Starts entry `index` of `queue` (the thread's `number`), which may finish at once.
    #[inline]
    pub(crate) fn submit(&mut self, queue: &mut RunningQueue, number: u16, index: u16) {
        let entry = queue.inflight.entry(index);
        let kind = entry.request.as_ref().expect("the request was parsed").kind;
        loop {
            let Some(io) = next_io(entry, kind) else {
                let id_bytes = give_id(entry, kind, queue.disk.id());
                return queue.complete(index, kind, Completion::of(kind, Ok(()), id_bytes));
            };
            let io = entry.io.insert(io);
            match self.lane.start(io, slot_of(number, index), &mut self.engine) {
                Step::Done(Ok(())) if has_ranges(kind) => {}
                Step::Done(result) => {
                    return queue.complete(index, kind, Completion::of(kind, result, 0));
                }
                Step::Pending => return,
                Step::Busy => return self.stalled.push_back(slot_of(number, index)),
            }
        }
    }

    /// Starts a stalled I/O again; `false` when it found no resource still.
    pub(crate) fn retry(&mut self, queue: &mut RunningQueue, slot: Slot, index: u16) -> bool {
        let entry = queue.inflight.entry(index);
        let io = entry.io.as_mut().expect("a stalled entry has an I/O");
        match self.lane.start(io, slot, &mut self.engine) {
            Step::Busy => return false,
            Step::Pending => {}
            Step::Done(result) => self.done(queue, slot, index, result),
        }
        true
    }

    /// Hands the lane the result of an operation it pushed.
    #[inline]
    pub(crate) fn event(
        &mut self,
        queue: &mut RunningQueue,
        token: Token,
        index: u16,
        result: i32,
    ) {
        let entry = queue.inflight.entry(index);
        let io = entry.io.as_mut().expect("an operation belongs to an I/O");
        if let Step::Done(result) = self.lane.event(io, token, result, &mut self.engine) {
            self.done(queue, token.slot, index, result);
        }
    }

    /// An I/O ended: goes on with the request's next range, or completes the request.
    #[inline]
    fn done(
        &mut self,
        queue: &mut RunningQueue,
        slot: Slot,
        index: u16,
        result: Result<(), IoError>,
    ) {
        let entry = queue.inflight.entry(index);
        let kind = entry.request.as_ref().expect("the request was parsed").kind;
        if result.is_ok() && has_ranges(kind) {
            return self.submit(queue, (slot.0 >> 16) as u16, index);
        }
        queue.complete(index, kind, Completion::of(kind, result, 0));
    }
}

/// The next I/O of a request; `None` when it needs none (any more).
#[inline]
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
        Kind::Discard { durable } => range_io(entry, durable, |_| IoKind::Discard),
        Kind::WriteZeroes { durable } => {
            range_io(entry, durable, |range| IoKind::WriteZeroes { unmap: range.unmap })
        }
        Kind::SecureErase => range_io(entry, true, |_| IoKind::SecureErase),
    }
}

/// Whether one request of this kind may be several I/Os.
#[inline]
fn has_ranges(kind: Kind) -> bool {
    matches!(kind, Kind::Discard { .. } | Kind::WriteZeroes { .. } | Kind::SecureErase)
}

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

/// Copies the id string for a GET_ID; returns how many bytes fitted.
fn give_id(entry: &mut Entry, kind: Kind, id: &[u8]) -> u32 {
    match kind {
        Kind::GetId => borrow(entry.chain.writable()).copy_in(0, id) as u32,
        _ => 0,
    }
}

#[inline]
fn borrow(segments: &mut [libc::iovec]) -> BufList {
    // SAFETY: the segments belong to an entry of the in-flight table, which is not moved nor
    // reused until its request completes; the queue keeps the guest's memory mapped until then.
    unsafe { BufList::new(segments.as_mut_ptr(), segments.len()) }
}
