// SPDX-License-Identifier: Apache-2.0
//! Selects the next operation of an I/O from its stage and progress.

use super::lane::{CACHED, FILE, FileLane, SYNCED, Stage};
use super::piece::{WritePiece, widened, write_piece};
use super::sync::Part;
use super::sys;
use crate::{Io, IoError, IoKind, Op, Slot};
use std::ops::Range;
use std::time::Instant;

/// Maximum segments of one system call.
const SEGMENTS_MAX: u32 = libc::UIO_MAXIOV as u32;

const PUNCH: i32 = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
const ZERO_RANGE: i32 = libc::FALLOC_FL_ZERO_RANGE | libc::FALLOC_FL_KEEP_SIZE;

impl FileLane {
    /// The next operation; `None` if the I/O waits for a bounce buffer, a sync, or another writer.
    pub(super) fn next_op(&mut self, io: &mut Io, slot: Slot) -> Result<Option<Op>, IoError> {
        let (offset, len) = (io.offset_bytes, io.len_bytes);
        let fallocate = |mode| Op::Fallocate { file: FILE, mode, offset, len };
        Ok(Some(match Stage::of(io) {
            Stage::Transfer if io.kind == IoKind::Read => self.read_op(io),
            Stage::Transfer | Stage::ZeroWrite => self.write_op(io),
            Stage::Fill => self.block_op(io, false),
            Stage::Store => self.block_op(io, true),
            Stage::Punch => fallocate(PUNCH),
            Stage::Discard => Op::Discard { file: FILE, offset, len },
            Stage::ZeroRange => fallocate(ZERO_RANGE),
            Stage::Sync => return self.start_sync(io, slot),
            Stage::WaitBounce | Stage::WaitRange | Stage::WaitSync => return Ok(None),
        }))
    }

    /// The remaining bytes of the range.
    pub(super) fn left(io: &Io) -> Range<u64> {
        io.offset_bytes + io.done_bytes..io.offset_bytes + io.len_bytes
    }

    /// The operation of a read. A bounced read covers whole blocks.
    #[inline]
    pub(super) fn read_op(&mut self, io: &Io) -> Op {
        let left = Self::left(io);
        let Some(number) = io.held else {
            return Op::Read { file: FILE, bufs: io.bufs.first(SEGMENTS_MAX), offset: left.start };
        };
        let blocks = widened(&left, self.wanted_align(io));
        let bufs = self.bounce.chunk(number, blocks.end - blocks.start);
        Op::Read { file: FILE, bufs, offset: blocks.start }
    }

    pub(super) fn next_piece(&self, io: &Io) -> WritePiece {
        write_piece(Self::left(io), self.wanted_align(io), self.limits.tail)
    }

    /// The operation of a write of data or zeroes: writes whole blocks, or reads the block of a
    /// part.
    fn write_op(&mut self, io: &mut Io) -> Op {
        let offset = Self::left(io).start;
        let zeroes = Stage::of(io) == Stage::ZeroWrite;
        let (file, len) = match self.next_piece(io) {
            WritePiece::Whole(len) => (FILE, len),
            WritePiece::Tail(len) => (CACHED, len),
            WritePiece::Part { .. } => {
                io.stage = Stage::Fill.with_retries(0);
                return self.block_op(io, false);
            }
        };
        let bufs = match io.held {
            _ if zeroes => self.zeroes.first_part_of(len),
            Some(number) => {
                let chunk = self.bounce.chunk(number, len);
                self.bounce.load(number, 0, len, &io.bufs);
                chunk
            }
            None => io.bufs.first(SEGMENTS_MAX),
        };
        let dsync = io.durable && file == FILE && !self.syncs_separately();
        Op::Write { file, bufs, offset, dsync }
    }

    /// Reads the block that contains the next piece, or writes it back (`store`).
    fn block_op(&mut self, io: &Io, store: bool) -> Op {
        let align = self.wanted_align(io);
        let offset = Self::left(io).start & !u64::from(align - 1);
        let number = io.held.expect("an io with parts of blocks holds a buffer");
        let bufs = self.bounce.chunk(number, align.into());
        match store {
            true => Op::Write { file: FILE, bufs, offset, dsync: io.durable },
            false => Op::Read { file: FILE, bufs, offset },
        }
    }

    pub(super) const SYNC: Op = Op::Fdatasync { file: SYNCED };

    /// A sync, or the timer of a wait for others; `None` if the end of a sync, or the last of the others, continues
    /// it. Fails if an earlier sync has failed.
    fn start_sync(&mut self, io: &mut Io, slot: Slot) -> Result<Option<Op>, IoError> {
        self.shared.sync_failure.check()?;
        self.write_through = self.shared.write_cache.is_write_through();
        if self.write_through || self.limits.in_memory {
            return Ok(Some(Self::SYNC)); // `run_now` carries it out
        }
        let part = self.syncs.enter(slot, Instant::now());
        if part != Part::Leads {
            io.stage = Stage::WaitSync.with_retries(0);
        }
        Ok(match part {
            Part::Leads => Some(Self::SYNC),
            Part::Gathers(delay) => Some(Op::Timer { delay }),
            Part::Waits | Part::Ended => None,
        })
    }

    /// Returns whether a write-through write is a write plus a separate sync. With the page cache,
    /// `RWF_DSYNC` would report lost pages of other writes as an error of this write.
    pub(super) fn syncs_separately(&self) -> bool {
        self.limits.direct.is_none() && !self.limits.in_memory
    }

    /// Runs a read, a write or a sync of a file in memory synchronously. io_uring would pass it to a
    /// kernel thread, because tmpfs does not announce non-blocking I/O, and that takes longer than the
    /// copy; the sync does nothing. Nor does that of a device with a write-through cache.
    /// A transfer moves at most `bytes_max`.
    pub(super) fn run_now(&self, io: &Io, op: &Op, bytes_max: u64) -> Option<i32> {
        if matches!(op, Op::Fdatasync { .. }) && self.write_through {
            return Some(0);
        }
        if !self.limits.in_memory || !matches!(Stage::of(io), Stage::Transfer | Stage::Sync) {
            return None;
        }
        match *op {
            Op::Fdatasync { .. } => Some(sys::sync_now(&self.shared.file)),
            Op::Read { bufs, offset, .. } => {
                Some(sys::read_now(&self.shared.file, &bufs, offset, bytes_max))
            }
            Op::Write { bufs, offset, dsync, .. } => {
                Some(sys::write_now(&self.shared.file, &bufs, offset, dsync, bytes_max))
            }
            _ => None,
        }
    }
}
