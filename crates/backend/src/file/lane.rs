// SPDX-License-Identifier: Apache-2.0
//! One thread's handle on a file: turns an I/O into operations and handles their results.
//!
//! [`Stage`] is the state of an I/O. A read has the stages `WaitBounce` and `Transfer` only. A write or zeroing may
//! change from each of its stages to `Sync`:
//!
//! ```text
//! WaitBounce -> WaitRange -> Transfer  <-> Fill -> Store      part of a block: read, modify, write back
//!                         -> ZeroWrite <-> Fill -> Store
//!                         -> Punch -> ZeroRange -> ZeroWrite  if the file system refuses the previous one
//!                         -> WaitSync -> Sync
//! ```

use super::bounce::BouncePool;
use super::piece::{DirectAlign, widened};
use super::range_lock::RangeLock;
use super::results::Next;
use super::sync::{self, Part, SyncEnd, SyncFailure, Syncs};
use super::write_cache::WriteCache;
use super::zeroes::ZeroLists;
use crate::lock::ImageFile;
use crate::{
    COPY_BYTES_MAX, Engine, FileIndex, Io, IoError, IoKind, Lane, Op, Remote, Slot, Step, Token,
};
use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::sync::Arc;
use std::sync::atomic::AtomicU32;
use std::time::Instant;

pub(super) const FILE: FileIndex = FileIndex(0);
/// The same file through the page cache, for its tail (see [`super::piece`]).
pub(super) const CACHED: FileIndex = FileIndex(1);
/// The same file, for its syncs.
pub(super) const SYNCED: FileIndex = FileIndex(2);
/// Maximum synchronous system calls for one I/O in a row, of [`COPY_BYTES_MAX`] together; the engine runs the rest.
const NOW_MAX: u32 = 8;

/// The outstanding operation of an I/O. [`Io::stage`] holds it together with the retry count.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Stage {
    Transfer = 0,
    Punch = 1,
    ZeroRange = 2,
    ZeroWrite = 3,
    /// A sync that the I/O leads.
    Sync = 4,
    /// Reads a block before a part of it is written.
    Fill = 5,
    /// Writes that block back.
    Store = 6,
    /// An earlier writer of the same blocks is not done: its end continues the I/O.
    WaitRange = 7,
    /// Waits for a sync ([`Syncs`]). The next event is the end of one that started later, or of its timer.
    WaitSync = 8,
    /// Discard command of a device.
    Discard = 9,
    /// All bounce buffers are in use: the end of an I/O that has one continues this one.
    WaitBounce = 10,
}

impl Stage {
    pub(super) fn of(io: &Io) -> Stage {
        match io.stage & 15 {
            0 => Stage::Transfer,
            1 => Stage::Punch,
            2 => Stage::ZeroRange,
            3 => Stage::ZeroWrite,
            4 => Stage::Sync,
            5 => Stage::Fill,
            6 => Stage::Store,
            7 => Stage::WaitRange,
            8 => Stage::WaitSync,
            9 => Stage::Discard,
            _ => Stage::WaitBounce,
        }
    }

    pub(super) fn retries(io: &Io) -> u8 {
        io.stage >> 4
    }

    pub(super) fn with_retries(self, retries: u8) -> u8 {
        self as u8 | retries << 4
    }
}

/// The operation that carries out a DISCARD.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum DiscardBy {
    /// `fallocate`: the range reads as zeroes afterwards.
    Punch,
    /// The command of the device: the content of the range is unspecified afterwards.
    Command,
}

/// Properties of the file that a lane needs.
#[derive(Clone, Copy, Debug)]
pub(super) struct LaneLimits {
    pub(super) capacity_bytes: u64,
    pub(super) logical_block_bytes: u32,
    /// Alignment that O_DIRECT needs. `None` without O_DIRECT, and for a file in memory.
    pub(super) direct: Option<DirectAlign>,
    /// Start of the last block of O_DIRECT in bytes, if the file ends inside it.
    pub(super) tail: u64,
    pub(super) read_only: bool,
    /// Operation of a DISCARD, if it is offered.
    pub(super) discard: Option<DiscardBy>,
    /// WRITE_ZEROES may free space.
    pub(super) unmap: bool,
    /// The open file has O_DIRECT, and I/O goes through another one without it.
    pub(super) avoids_direct: bool,
    /// The file is in memory: see [`FileLane::run_now`].
    pub(super) in_memory: bool,
}

/// State shared by all lanes of a disk.
#[derive(Debug)]
pub(super) struct Shared {
    pub(super) file: ImageFile,
    /// For the log.
    pub(super) name: String,
    pub(super) write_cache: WriteCache,
    pub(super) sync_failure: SyncFailure,
    pub(super) writers: RangeLock,
    /// Number of times that the lock of the image was given up.
    pub(super) handovers: AtomicU32,
}

/// The lane of a [`super::File`].
pub(super) struct FileLane {
    pub(super) shared: Arc<Shared>,
    pub(super) limits: LaneLimits,
    pub(super) cached: Option<File>,
    pub(super) syncs: Syncs,
    pub(super) bounce: BouncePool,
    pub(super) zeroes: ZeroLists,
    pub(super) can_punch: bool,
    pub(super) can_zero_range: bool,
    /// The storage had a write-through cache at the last FLUSH.
    pub(super) write_through: bool,
    /// Continues I/Os that wait for writers of other lanes.
    remote: Option<Remote>,
}

impl FileLane {
    pub(super) fn new(shared: Arc<Shared>, limits: LaneLimits) -> io::Result<Self> {
        let align = limits.direct.map_or(1, |align| align.memory.max(align.write));
        let has_tail = limits.tail < limits.capacity_bytes;
        let open_again = || sync::open_again(&shared.file, limits.read_only, 0);
        Ok(FileLane {
            cached: (has_tail || limits.avoids_direct).then(open_again).transpose()?,
            syncs: Syncs::of(&shared, limits.read_only)?,
            shared,
            limits,
            bounce: BouncePool::new(align as usize),
            zeroes: ZeroLists::new(),
            can_punch: limits.unmap,
            can_zero_range: true,
            write_through: false,
            remote: None,
        })
    }

    /// Refuses an I/O that violates the contract of [`Lane`].
    fn check(&self, io: &Io) -> Result<(), IoError> {
        if (io.offset_bytes | io.len_bytes) & u64::from(self.limits.logical_block_bytes - 1) != 0 {
            return Err(IoError::Errno(libc::EINVAL));
        }
        if !io.fits(self.limits.capacity_bytes) {
            return Err(IoError::EndOfStorage);
        }
        Ok(())
    }

    pub(super) fn first_stage(&self, io: &Io) -> Result<Stage, IoError> {
        match io.kind {
            IoKind::Read | IoKind::Write => Ok(Stage::Transfer),
            IoKind::Flush => Ok(Stage::Sync),
            IoKind::WriteZeroes { unmap } => Ok(self.zeroing_stage(unmap)),
            IoKind::Discard => match self.limits.discard {
                Some(DiscardBy::Punch) => Ok(Stage::Punch),
                Some(DiscardBy::Command) => Ok(Stage::Discard),
                None => Err(IoError::Unsupported),
            },
            IoKind::SecureErase => Err(IoError::Unsupported),
        }
    }

    /// The best method to zero a range that the file system has not refused yet.
    pub(super) fn zeroing_stage(&self, unmap: bool) -> Stage {
        match unmap {
            true if self.can_punch => Stage::Punch,
            _ if self.can_zero_range => Stage::ZeroRange,
            _ => Stage::ZeroWrite,
        }
    }

    /// The alignment of positions and lengths in bytes that O_DIRECT needs for this I/O.
    pub(super) fn wanted_align(&self, io: &Io) -> u32 {
        match (self.limits.direct, io.kind) {
            (Some(direct), IoKind::Read) => direct.read,
            (Some(direct), _) => direct.write,
            (None, _) => 1,
        }
    }

    /// Returns whether the I/O begins or ends inside a block of O_DIRECT.
    fn has_parts(&self, io: &Io) -> bool {
        let align = u64::from(self.wanted_align(io));
        (io.offset_bytes | io.len_bytes) & (align - 1) != 0
    }

    /// Takes a bounce buffer if the I/O needs one. Returns `false` if it waits for one.
    fn hold_bounce(&mut self, io: &mut Io, slot: Slot) -> Result<bool, IoError> {
        let Some(direct) = self.limits.direct else { return Ok(true) };
        let parts = self.has_parts(io);
        let needed = match io.kind {
            IoKind::Read | IoKind::Write => {
                let align = self.wanted_align(io) as usize;
                parts || !io.bufs.is_aligned(direct.memory as usize, align)
            }
            IoKind::WriteZeroes { .. } => parts,
            IoKind::Flush | IoKind::Discard | IoKind::SecureErase => false,
        };
        if needed {
            io.held = self.bounce.take(slot)?;
        }
        Ok(!needed || io.held.is_some())
    }

    /// Queues an I/O that changes data, if writers of this file may have to wait for each other.
    /// Returns whether the I/O may proceed.
    fn enter_writers(&mut self, io: &mut Io, slot: Slot, engine: &mut dyn Engine) -> bool {
        let align = self.wanted_align(io);
        if !io.writes() || align <= self.limits.logical_block_bytes {
            return true;
        }
        let modifies = self.has_parts(io) && io.kind != IoKind::Discard;
        let range = widened(&(io.offset_bytes..io.offset_bytes + io.len_bytes), align);
        let token = Token { slot, layer: 0 };
        let remote = &mut self.remote;
        let waiter = || (remote.get_or_insert_with(|| engine.remote()).clone(), token);
        let (ticket, may_proceed) = self.shared.writers.enter(range, modifies, waiter);
        io.ticket = Some(ticket);
        may_proceed
    }

    fn finish(
        &mut self,
        io: &mut Io,
        slot: Slot,
        outcome: Result<(), IoError>,
        engine: &mut dyn Engine,
    ) -> Step {
        if Stage::of(io) == Stage::Sync {
            let has_run = outcome != Err(IoError::Errno(libc::ECANCELED));
            let end = self.syncs.end(slot, has_run, Instant::now());
            let SyncEnd { followers, leader, gathers } = end;
            for slot in followers {
                engine.push(Op::Nop, Token { slot, layer: 0 });
            }
            if let Some(slot) = leader {
                engine.push(Self::SYNC, Token { slot, layer: 0 });
            }
            if let Some((slot, delay)) = gathers {
                engine.push(Op::Timer { delay }, Token { slot, layer: 0 });
            }
        }
        self.release(io);
        Step::Done(outcome)
    }

    /// Releases the bounce buffer and the place among the writers that the I/O holds.
    pub(super) fn release(&mut self, io: &mut Io) {
        if let Some(number) = io.held.take() {
            self.bounce.give(number);
        }
        if let Some(ticket) = io.ticket.take() {
            self.shared.writers.leave(ticket);
        }
    }

    /// Starts the first operation of an I/O that has the bounce buffer that it needs.
    fn begin(&mut self, io: &mut Io, stage: Stage, slot: Slot, engine: &mut dyn Engine) -> Step {
        let stage = if self.enter_writers(io, slot, engine) { stage } else { Stage::WaitRange };
        io.stage = stage.with_retries(0);
        if io.kind == IoKind::Read && io.held.is_none() && !self.limits.in_memory {
            // The usual read has one operation, which is known already.
            engine.push(self.read_op(io), Token { slot, layer: 0 });
            return Step::Pending;
        }
        self.advance(io, slot, engine)
    }

    /// Continues an I/O that has waited for a bounce buffer.
    fn begin_with_bounce(&mut self, io: &mut Io, slot: Slot, engine: &mut dyn Engine) -> Step {
        let stage = self.bounce.take_promised().and_then(|number| {
            io.held = Some(number);
            self.first_stage(io)
        });
        match stage {
            Ok(stage) => self.begin(io, stage, slot, engine),
            Err(why) => self.finish(io, slot, Err(why), engine),
        }
    }

    /// Continues an I/O that has waited for a sync.
    fn end_wait_for_sync(&mut self, io: &mut Io, slot: Slot, engine: &mut dyn Engine) -> Step {
        match self.syncs.event(slot, Instant::now()) {
            Part::Ended => self.finish(io, slot, self.shared.sync_failure.check(), engine),
            Part::Waits | Part::Gathers(_) => Step::Pending,
            Part::Leads => {
                io.stage = Stage::Sync.with_retries(0);
                engine.push(Self::SYNC, Token { slot, layer: 0 });
                Step::Pending
            }
        }
    }

    /// Continues I/Os for which bounce buffers have become free, and ends a timer that has no purpose any more.
    #[inline]
    fn end_waits(&mut self, engine: &mut dyn Engine) {
        if let Some(slot) = self.syncs.take_late_timer() {
            engine.push(Op::EndTimer, Token { slot, layer: 0 });
        }
        while let Some(slot) = self.bounce.end_of_wait() {
            engine.push(Op::Nop, Token { slot, layer: 0 });
        }
    }

    /// Advances the I/O until it ends or waits for an operation.
    fn advance(&mut self, io: &mut Io, slot: Slot, engine: &mut dyn Engine) -> Step {
        let begin = io.done_bytes;
        for calls in 0.. {
            let op = match self.next_op(io, slot) {
                Ok(Some(op)) => op,
                Ok(None) => break, // the end of the running sync, or of another writer, continues it
                Err(why) => return self.finish(io, slot, Err(why), engine),
            };
            let left = COPY_BYTES_MAX.saturating_sub(io.done_bytes - begin);
            let may_run = calls < NOW_MAX && left > 0;
            let now = if may_run { self.run_now(io, &op, left) } else { None };
            let Some(result) = now else {
                engine.push(op, Token { slot, layer: 0 });
                break;
            };
            if let Next::End(outcome) = self.take_result(io, result) {
                return self.finish(io, slot, outcome, engine);
            }
        }
        Step::Pending
    }
}

impl Lane for FileLane {
    fn files(&self) -> Vec<RawFd> {
        let own = self.shared.file.as_raw_fd();
        let cached = self.cached.as_ref().map_or(own, AsRawFd::as_raw_fd);
        let data = if self.limits.avoids_direct { cached } else { own };
        vec![data, cached, self.syncs.fd()]
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
        let step = match self.hold_bounce(io, slot) {
            Ok(true) => self.begin(io, stage, slot, engine),
            Ok(false) => {
                io.stage = Stage::WaitBounce.with_retries(0);
                Step::Pending
            }
            Err(why) => Step::Done(Err(why)),
        };
        self.end_waits(engine);
        step
    }

    fn event(&mut self, io: &mut Io, token: Token, result: i32, engine: &mut dyn Engine) -> Step {
        if Self::ends_transfer(io, result) {
            return Step::Done(Ok(()));
        }
        if Stage::of(io) == Stage::WaitSync && self.syncs.leads(token.slot) {
            io.stage = Stage::Sync.with_retries(0);
        }
        let step = match Stage::of(io) {
            Stage::WaitBounce => self.begin_with_bounce(io, token.slot, engine),
            Stage::WaitSync => self.end_wait_for_sync(io, token.slot, engine),
            _ => match self.take_result(io, result) {
                Next::End(outcome) => self.finish(io, token.slot, outcome, engine),
                Next::Op => self.advance(io, token.slot, engine),
            },
        };
        self.end_waits(engine);
        step
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{Seek, Write};

    #[derive(Default)]
    struct Pushed(Vec<Op>);

    impl Engine for Pushed {
        fn push(&mut self, op: Op, _: Token) {
            self.0.push(op);
        }

        fn remote(&mut self) -> crate::Remote {
            unreachable!("a file needs no other thread")
        }
    }

    fn lane_of(discard: DiscardBy, write_cache: WriteCache) -> FileLane {
        let shared = Shared {
            file: ImageFile(tempfile::tempfile().expect("a file")),
            name: String::new(),
            write_cache,
            sync_failure: SyncFailure::default(),
            writers: RangeLock::default(),
            handovers: AtomicU32::new(0),
        };
        let limits = LaneLimits {
            capacity_bytes: 1 << 20,
            logical_block_bytes: 512,
            direct: None,
            tail: u64::MAX,
            read_only: false,
            discard: Some(discard),
            unmap: true,
            avoids_direct: false,
            in_memory: false,
        };
        FileLane::new(Arc::new(shared), limits).expect("a lane")
    }

    #[test]
    fn a_device_that_cannot_zero_is_discarded_by_its_own_command() {
        for (durable, errno) in [(false, 0), (true, 0), (false, libc::EOPNOTSUPP)] {
            let mut lane = lane_of(DiscardBy::Command, WriteCache::UNKNOWN);
            let mut engine = Pushed::default();
            let io = Io::new(IoKind::Discard, 4096, 8192, crate::BufList::EMPTY);
            let mut io = Io { durable, ..io };
            assert_eq!(lane.start(&mut io, Slot(0), &mut engine), Step::Pending);
            let op = engine.0.pop();
            let range = (4096, 8192);
            assert!(matches!(op, Some(Op::Discard { offset, len, .. }) if (offset, len) == range));
            let token = Token { slot: Slot(0), layer: 0 };
            let step = lane.event(&mut io, token, -errno, &mut engine);
            match (durable, errno) {
                (true, _) => assert!(matches!(engine.0.pop(), Some(Op::Fdatasync { .. }))),
                (_, 0) => assert_eq!(step, Step::Done(Ok(()))),
                _ => assert_eq!(step, Step::Done(Err(IoError::Unsupported))),
            }
        }
    }

    #[test]
    fn a_flush_of_a_write_through_device_needs_no_sync_until_the_cache_is_write_back() {
        let mut attribute = tempfile::NamedTempFile::new().expect("a file");
        let mut lane = lane_of(
            DiscardBy::Punch,
            WriteCache::of_attribute(File::open(attribute.path()).expect("the attribute")),
        );
        let mut engine = Pushed::default();
        let mut flush = |lane: &mut FileLane, text: &str| {
            attribute.as_file().set_len(0).expect("an empty file");
            attribute.rewind().and_then(|()| attribute.write_all(text.as_bytes())).expect("a text");
            let mut io = Io::new(IoKind::Flush, 0, 0, crate::BufList::EMPTY);
            let step = lane.start(&mut io, Slot(0), &mut engine);
            let syncs = engine.0.drain(..).filter(|op| matches!(op, Op::Fdatasync { .. })).count();
            if step == Step::Pending {
                let token = Token { slot: Slot(0), layer: 0 };
                assert_eq!(lane.event(&mut io, token, 0, &mut engine), Step::Done(Ok(())));
            }
            (step, syncs)
        };
        let at_once = (Step::Done(Ok(())), 0);
        assert_eq!(flush(&mut lane, "write through\n"), at_once);
        assert_eq!(flush(&mut lane, "write back\n"), (Step::Pending, 1));
        assert_eq!(flush(&mut lane, "write through\n"), at_once);
        assert_eq!(flush(&mut lane, ""), (Step::Pending, 1), "the device is gone");
        lane.shared.sync_failure.remember(libc::EIO, "disk");
        let failed = Step::Done(Err(IoError::Errno(libc::EIO)));
        assert_eq!(flush(&mut lane, "write through\n"), (failed, 0));
    }
}
