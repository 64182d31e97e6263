// SPDX-License-Identifier: Apache-2.0
//! Handles the result of an operation and selects the next step of its I/O.

use super::lane::{FileLane, Stage};
use super::piece::WritePiece;
use super::sync;
use crate::{Io, IoError, IoKind};

/// Maximum retries of an operation after EAGAIN, EINTR or ECANCELED; then the I/O fails.
const RETRIES_MAX: u8 = 15;

/// The next step of an I/O.
pub(super) enum Next {
    /// Another operation, as selected by the stage and the progress.
    Op,
    End(Result<(), IoError>),
}

impl FileLane {
    /// Returns whether this result ends a transfer that holds nothing: the usual end of an I/O.
    #[inline]
    pub(super) fn ends_transfer(io: &Io, result: i32) -> bool {
        let holds = io.held.is_some() || io.ticket.is_some() || io.durable;
        let left = io.len_bytes - io.done_bytes;
        Stage::of(io) == Stage::Transfer && !holds && i64::from(result) == left as i64
    }

    /// Handles the result of the I/O's operation: number of bytes, or a negative errno.
    pub(super) fn take_result(&mut self, io: &mut Io, result: i32) -> Next {
        if result < 0 {
            return self.failed(io, -result);
        }
        match Stage::of(io) {
            Stage::Transfer if io.kind == IoKind::Read => self.read(io, result as u64),
            Stage::Transfer | Stage::ZeroWrite => self.wrote(io, result as u64),
            Stage::Fill => self.filled(io, result as u64),
            Stage::Store => self.stored(io, result as u64),
            Stage::Punch | Stage::ZeroRange | Stage::Discard => self.written(io, true),
            Stage::Sync => Next::End(self.shared.sync_failure.check()),
            Stage::WaitRange => self.waited(io),
            Stage::WaitBounce | Stage::WaitSync => unreachable!("its event has no result"),
        }
    }

    fn go_to(io: &mut Io, stage: Stage) -> Next {
        io.stage = stage.with_retries(0);
        Next::Op
    }

    /// The writers that the I/O has waited for are done.
    fn waited(&mut self, io: &mut Io) -> Next {
        match self.first_stage(io) {
            Ok(stage) => Self::go_to(io, stage),
            Err(why) => Next::End(Err(why)),
        }
    }

    /// The whole range is written. `unsynced`: the last operation did not make its data durable.
    fn written(&mut self, io: &mut Io, unsynced: bool) -> Next {
        if !io.durable || !unsynced {
            return Next::End(Ok(()));
        }
        self.release(io);
        Self::go_to(io, Stage::Sync)
    }

    /// A read returned `got` bytes. A bounced read starts at the boundary of its first block.
    fn read(&mut self, io: &mut Io, got: u64) -> Next {
        let left = Self::left(io);
        let align = u64::from(self.wanted_align(io));
        let moved = match io.held {
            // The next operation must start at a block boundary.
            None => got & !(align - 1),
            Some(number) => {
                let skip = left.start & (align - 1);
                let moved = got.saturating_sub(skip).min(left.end - left.start);
                self.bounce.unload(number, skip as usize, moved, &io.bufs);
                moved
            }
        };
        match moved {
            0 => Next::End(Err(IoError::EndOfStorage)),
            _ => self.moved(io, moved, false),
        }
    }

    /// A write of data or zeroes wrote `moved` bytes.
    fn wrote(&mut self, io: &mut Io, moved: u64) -> Next {
        let (moved, cached) = match self.next_piece(io) {
            WritePiece::Tail(len) => (moved.min(len), true),
            _ => (moved & !u64::from(self.wanted_align(io) - 1), self.syncs_separately()),
        };
        match moved {
            0 => Next::End(Err(IoError::Errno(libc::EIO))),
            _ => self.moved(io, moved, cached),
        }
    }

    /// The block of a partial write is read: modifies it.
    fn filled(&mut self, io: &mut Io, got: u64) -> Next {
        let (WritePiece::Part { block, len }, Some(number)) = (self.next_piece(io), io.held) else {
            unreachable!("only a part of a block is read before it is written");
        };
        if got < u64::from(self.wanted_align(io)) {
            return Next::End(Err(IoError::EndOfStorage));
        }
        let at = (Self::left(io).start - block) as usize;
        match io.kind {
            IoKind::Write => self.bounce.load(number, at, len, &io.bufs),
            _ => self.bounce.zero(number, at, len),
        }
        Self::go_to(io, Stage::Store)
    }

    /// The block of a partial write is written back.
    fn stored(&mut self, io: &mut Io, moved: u64) -> Next {
        let WritePiece::Part { len, .. } = self.next_piece(io) else {
            unreachable!("only a part of a block is written back");
        };
        if moved < u64::from(self.wanted_align(io)) {
            return Next::End(Err(IoError::Errno(libc::EIO)));
        }
        io.stage = if io.kind == IoKind::Write { Stage::Transfer } else { Stage::ZeroWrite } as u8;
        self.moved(io, len, false)
    }

    /// `moved` more bytes of the range are done.
    fn moved(&mut self, io: &mut Io, moved: u64, unsynced: bool) -> Next {
        io.done_bytes += moved;
        if io.done_bytes >= io.len_bytes {
            return self.written(io, unsynced && io.writes());
        }
        let stage = Stage::of(io);
        if stage == Stage::Transfer {
            io.bufs.advance(moved as usize);
        }
        Self::go_to(io, stage)
    }

    fn failed(&mut self, io: &mut Io, errno: i32) -> Next {
        let (stage, retries) = (Stage::of(io), Stage::retries(io));
        match errno {
            // ECANCELED: io_uring could not start a kernel thread for the operation.
            libc::EAGAIN | libc::EINTR | libc::ECANCELED if retries < RETRIES_MAX => {
                io.stage = stage.with_retries(retries + 1);
                return Next::Op;
            }
            libc::EOPNOTSUPP
                if matches!(stage, Stage::Punch | Stage::ZeroRange | Stage::Discard) =>
            {
                return self.refused(io, stage);
            }
            _ => {}
        }
        let synced = match stage {
            _ if errno == libc::ECANCELED => false, // it has not begun
            Stage::Sync => true,
            Stage::Transfer | Stage::ZeroWrite | Stage::Store => {
                io.durable && io.writes() && sync::may_be_of_a_sync(errno)
            }
            _ => false,
        };
        if synced {
            self.shared.sync_failure.remember(errno, &self.shared.name);
        }
        Next::End(Err(IoError::Errno(errno)))
    }

    /// The file system does not support this operation: remembers it and selects the next method.
    fn refused(&mut self, io: &mut Io, stage: Stage) -> Next {
        match stage {
            Stage::Punch => self.can_punch = false,
            Stage::ZeroRange => self.can_zero_range = false,
            _ => {}
        }
        let IoKind::WriteZeroes { unmap } = io.kind else {
            return Next::End(Err(IoError::Unsupported));
        };
        io.stage = self.zeroing_stage(unmap).with_retries(0);
        Next::Op
    }
}
