// SPDX-License-Identifier: Apache-2.0
//! One thread's handle on a file: which ops an io becomes, and what follows from each result.

use super::bounce::BouncePool;
use super::sys;
use super::zeroes::ZeroLists;
use crate::{BufList, Engine, FileIndex, Io, IoError, IoKind, Lane, Op, Slot, Step, Token};
use std::fs::File;
use std::os::fd::{AsRawFd, RawFd};
use std::sync::Arc;

const FILE: FileIndex = FileIndex(0);
/// Segments that one system call takes.
const SEGMENTS_MAX: u32 = libc::UIO_MAXIOV as u32;
/// EAGAIN and EINTR in a row before the io fails with them.
const RETRIES_MAX: u8 = 15;
/// System calls made at once for one io, before the rest goes through the engine.
const NOW_MAX: u32 = 8;

const PUNCH: i32 = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
const ZERO_RANGE: i32 = libc::FALLOC_FL_ZERO_RANGE | libc::FALLOC_FL_KEEP_SIZE;

/// What the io's outstanding op is; [`Io::stage`] holds it beside the retry count.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Stage {
    Transfer = 0,
    Punch = 1,
    ZeroRange = 2,
    ZeroWrite = 3,
    Sync = 4,
}

impl Stage {
    fn of(io: &Io) -> Stage {
        match io.stage & 15 {
            0 => Stage::Transfer,
            1 => Stage::Punch,
            2 => Stage::ZeroRange,
            3 => Stage::ZeroWrite,
            _ => Stage::Sync,
        }
    }

    fn retries(io: &Io) -> u8 {
        io.stage >> 4
    }

    fn with_retries(self, retries: u8) -> u8 {
        self as u8 | retries << 4
    }
}

/// What an io does after an op's result.
enum Next {
    /// Another op, by its stage and progress.
    Op,
    End(Result<(), IoError>),
}

/// What a lane needs to know of its file.
#[derive(Clone, Copy, Debug)]
pub(super) struct LaneLimits {
    pub(super) capacity_bytes: u64,
    pub(super) logical_block_bytes: u32,
    /// Opened with O_DIRECT, which wants this alignment of memory; `None` also where the file
    /// lies in memory, which wants none.
    pub(super) direct_memory_align: Option<u32>,
    pub(super) discard: bool,
    /// The file lies in memory: see [`FileLane::run_now`].
    pub(super) in_memory: bool,
}

/// See the module's head.
pub(super) struct FileLane {
    file: Arc<File>,
    limits: LaneLimits,
    bounce: BouncePool,
    zeroes: ZeroLists,
    can_punch: bool,
    can_zero_range: bool,
}

impl FileLane {
    pub(super) fn new(file: Arc<File>, limits: LaneLimits) -> Self {
        let align = limits.direct_memory_align.unwrap_or(1).max(limits.logical_block_bytes);
        FileLane {
            file,
            limits,
            bounce: BouncePool::new(align as usize),
            zeroes: ZeroLists::new(),
            can_punch: true,
            can_zero_range: true,
        }
    }

    /// Refuses what no caller that keeps the contract sends.
    fn check(&self, io: &Io) -> Result<(), IoError> {
        if (io.offset_bytes | io.len_bytes) & u64::from(self.limits.logical_block_bytes - 1) != 0 {
            return Err(IoError::Errno(libc::EINVAL));
        }
        if !io.fits(self.limits.capacity_bytes) {
            return Err(IoError::EndOfStorage);
        }
        Ok(())
    }

    fn first_stage(&self, io: &Io) -> Result<Stage, IoError> {
        match io.kind {
            IoKind::Read | IoKind::Write => Ok(Stage::Transfer),
            IoKind::Flush => Ok(Stage::Sync),
            IoKind::Discard if self.limits.discard => Ok(Stage::Punch),
            IoKind::WriteZeroes { unmap } => Ok(self.zeroing_stage(unmap)),
            IoKind::Discard | IoKind::SecureErase => Err(IoError::Unsupported),
        }
    }

    /// The best way to zero a range that the file system has not refused yet.
    fn zeroing_stage(&self, unmap: bool) -> Stage {
        match unmap {
            true if self.can_punch => Stage::Punch,
            _ if self.can_zero_range => Stage::ZeroRange,
            _ => Stage::ZeroWrite,
        }
    }

    /// Takes a bounce buffer if the io needs one; false if none is free.
    fn hold_bounce(&mut self, io: &mut Io) -> Result<bool, IoError> {
        let Some(align) = self.limits.direct_memory_align else { return Ok(true) };
        if io.bufs.is_aligned(align as usize, self.limits.logical_block_bytes as usize) {
            return Ok(true);
        }
        io.held = self.bounce.take()?;
        Ok(io.held.is_some())
    }

    fn finish(&mut self, io: &mut Io, outcome: Result<(), IoError>) -> Step {
        if let Some(number) = io.held.take() {
            self.bounce.give(number);
        }
        Step::Done(outcome)
    }

    /// Goes on with the io until it has ended or waits for an op.
    fn go_on(&mut self, io: &mut Io, slot: Slot, engine: &mut dyn Engine) -> Step {
        for _ in 0..NOW_MAX {
            let op = self.next_op(io);
            let Some(result) = self.run_now(io, &op) else {
                return self.push(op, slot, engine);
            };
            if let Next::End(outcome) = self.take_result(io, result) {
                return self.finish(io, outcome);
            }
        }
        let op = self.next_op(io);
        self.push(op, slot, engine)
    }

    fn push(&self, op: Op, slot: Slot, engine: &mut dyn Engine) -> Step {
        engine.push(op, Token { slot, layer: 0 });
        Step::Pending
    }

    fn next_op(&mut self, io: &Io) -> Op {
        let offset = io.offset_bytes + io.done_bytes;
        let (whole, dsync) = ((io.offset_bytes, io.len_bytes), io.durable);
        let fallocate = |mode| Op::Fallocate { file: FILE, mode, offset: whole.0, len: whole.1 };
        match Stage::of(io) {
            Stage::Transfer if io.kind == IoKind::Read => {
                Op::Read { file: FILE, bufs: self.transfer_bufs(io), offset }
            }
            Stage::Transfer => {
                Op::Write { file: FILE, bufs: self.transfer_bufs(io), offset, dsync }
            }
            Stage::Punch => fallocate(PUNCH),
            Stage::ZeroRange => fallocate(ZERO_RANGE),
            Stage::ZeroWrite => {
                let bufs = self.zeroes.first_part_of(io.len_bytes - io.done_bytes);
                Op::Write { file: FILE, bufs, offset, dsync }
            }
            Stage::Sync => Op::Fdatasync { file: FILE },
        }
    }

    /// Runs a read or write of a file in memory here and now: io_uring would hand it to a kernel
    /// thread, as tmpfs does not say that it never blocks, and that takes longer than the copy.
    fn run_now(&self, io: &Io, op: &Op) -> Option<i32> {
        if !self.limits.in_memory || Stage::of(io) != Stage::Transfer {
            return None;
        }
        match *op {
            Op::Read { bufs, offset, .. } => Some(sys::read_now(&self.file, &bufs, offset)),
            Op::Write { bufs, offset, dsync, .. } => {
                Some(sys::write_now(&self.file, &bufs, offset, dsync))
            }
            _ => None,
        }
    }

    /// The memory of the next op: the io's own, or its bounce buffer.
    fn transfer_bufs(&mut self, io: &Io) -> BufList {
        let Some(number) = io.held else { return io.bufs.first(SEGMENTS_MAX) };
        let chunk = self.bounce.chunk(number, io.len_bytes - io.done_bytes);
        if io.kind == IoKind::Write {
            self.bounce.load(number, &io.bufs);
        }
        chunk
    }

    /// What follows from the result of an op.
    fn take_result(&mut self, io: &mut Io, result: i32) -> Next {
        if result < 0 {
            return self.failed(io, -result);
        }
        match Stage::of(io) {
            Stage::Transfer | Stage::ZeroWrite => self.moved(io, result as u64),
            Stage::Punch | Stage::ZeroRange if io.durable => {
                io.stage = Stage::Sync.with_retries(0);
                Next::Op
            }
            Stage::Punch | Stage::ZeroRange | Stage::Sync => Next::End(Ok(())),
        }
    }

    /// A read or write (also of zeroes) moved `moved` bytes.
    fn moved(&mut self, io: &mut Io, moved: u64) -> Next {
        let moved = match self.limits.direct_memory_align {
            // A direct transfer goes on at a block's boundary only.
            Some(_) => moved & !u64::from(self.limits.logical_block_bytes - 1),
            None => moved,
        };
        if moved == 0 {
            let read = io.kind == IoKind::Read;
            return Next::End(Err(if read {
                IoError::EndOfStorage
            } else {
                IoError::Errno(libc::EIO)
            }));
        }
        if let (Some(number), IoKind::Read) = (io.held, io.kind) {
            self.bounce.unload(number, moved, &io.bufs);
        }
        io.done_bytes += moved;
        if io.done_bytes >= io.len_bytes {
            return Next::End(Ok(()));
        }
        let stage = Stage::of(io);
        if stage == Stage::Transfer {
            io.bufs.advance(moved as usize);
        }
        io.stage = stage.with_retries(0);
        Next::Op
    }

    fn failed(&mut self, io: &mut Io, errno: i32) -> Next {
        let (stage, retries) = (Stage::of(io), Stage::retries(io));
        match errno {
            libc::EAGAIN | libc::EINTR if retries < RETRIES_MAX => {
                io.stage = stage.with_retries(retries + 1);
                Next::Op
            }
            libc::EOPNOTSUPP if stage == Stage::Punch || stage == Stage::ZeroRange => {
                self.refused(io, stage)
            }
            _ => Next::End(Err(IoError::Errno(errno))),
        }
    }

    /// The file system does not know this `fallocate`: the next best way, remembered.
    fn refused(&mut self, io: &mut Io, stage: Stage) -> Next {
        match stage {
            Stage::Punch => self.can_punch = false,
            _ => self.can_zero_range = false,
        }
        let IoKind::WriteZeroes { unmap } = io.kind else {
            return Next::End(Err(IoError::Unsupported));
        };
        io.stage = self.zeroing_stage(unmap).with_retries(0);
        Next::Op
    }
}

impl Lane for FileLane {
    fn files(&self) -> Vec<RawFd> {
        vec![self.file.as_raw_fd()]
    }

    fn moves_data_itself(&self) -> bool {
        self.limits.in_memory
    }

    fn start(&mut self, io: &mut Io, slot: Slot, engine: &mut dyn Engine) -> Step {
        let stage = match self.check(io).and_then(|()| self.first_stage(io)) {
            Ok(stage) => stage,
            Err(why) => return Step::Done(Err(why)),
        };
        if io.len_bytes == 0 && stage != Stage::Sync {
            return Step::Done(Ok(()));
        }
        if stage == Stage::Transfer {
            match self.hold_bounce(io) {
                Ok(true) => {}
                Ok(false) => return Step::Busy,
                Err(why) => return Step::Done(Err(why)),
            }
        }
        io.stage = stage.with_retries(0);
        self.go_on(io, slot, engine)
    }

    fn event(&mut self, io: &mut Io, token: Token, result: i32, engine: &mut dyn Engine) -> Step {
        match self.take_result(io, result) {
            Next::End(outcome) => self.finish(io, outcome),
            Next::Op => self.go_on(io, token.slot, engine),
        }
    }
}
