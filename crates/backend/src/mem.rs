// SPDX-License-Identifier: Apache-2.0
//! A disk in the daemon's own memory. Its content is lost when the daemon ends.
//!
//! Lanes copy without a lock: two requests in flight for the same sectors leave a mix of both, as
//! on real hardware.

mod map;

use crate::{COPY_BYTES_MAX, Disk, Engine, Info, Io, IoError, IoKind, Lane, Op, Slot, Step, Token};
use map::{Map, PAGE};
use std::sync::Arc;

/// A disk in memory.
#[derive(Clone, Debug)]
pub struct Mem {
    map: Arc<Map>,
}

impl Mem {
    /// A zeroed disk of `size_bytes` bytes, rounded down to whole sectors. Writes allocate the
    /// memory.
    ///
    /// # Errors
    /// The error of `mmap`.
    pub fn new(size_bytes: u64) -> std::io::Result<Self> {
        Ok(Mem { map: Arc::new(Map::new(size_bytes & !511)?) })
    }
}

impl Disk for Mem {
    fn info(&self) -> Info {
        Info::without_hardware("mem (lost at exit)", self.map.len(), 1 << 21)
    }

    fn sync(&self) -> std::io::Result<()> {
        Ok(())
    }

    fn open_lane(&self) -> std::io::Result<Box<dyn Lane>> {
        Ok(Box::new(MemLane { map: Arc::clone(&self.map) }))
    }
}

struct MemLane {
    map: Arc<Map>,
}

impl Lane for MemLane {
    fn moves_data_itself(&self) -> bool {
        true
    }

    fn start(&mut self, io: &mut Io, slot: Slot, engine: &mut dyn Engine) -> Step {
        if !io.fits(self.map.len()) {
            return Step::Done(Err(IoError::EndOfStorage));
        }
        self.advance(io, slot, engine)
    }

    fn event(&mut self, io: &mut Io, token: Token, _: i32, engine: &mut dyn Engine) -> Step {
        self.advance(io, token.slot, engine)
    }
}

impl MemLane {
    /// Carries out the next [`COPY_BYTES_MAX`] of an I/O. The thread does other work before the rest.
    fn advance(&self, io: &mut Io, slot: Slot, engine: &mut dyn Engine) -> Step {
        let (at, left) = (io.offset_bytes + io.done_bytes, io.len_bytes - io.done_bytes);
        // Later parts begin with a page, so that each page is returned to the system.
        let end = (at + COPY_BYTES_MAX) / PAGE * PAGE;
        let len = left.min(end - at);
        match io.kind {
            IoKind::Read => self.map.read(at, len, &io.bufs),
            IoKind::Write => self.map.write(at, len, &io.bufs),
            IoKind::Flush => {}
            IoKind::WriteZeroes { unmap: false } => self.map.fill_zero(at, len),
            IoKind::Discard | IoKind::WriteZeroes { unmap: true } | IoKind::SecureErase => {
                self.map.free(at, len);
            }
        }
        if len == left {
            return Step::Done(Ok(()));
        }
        io.done_bytes += len;
        io.bufs.advance(len as usize);
        engine.push(Op::Nop, Token { slot, layer: 0 });
        Step::Pending
    }
}
