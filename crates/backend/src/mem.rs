// SPDX-License-Identifier: Apache-2.0
//! A disk in the daemon's own memory. Its content is lost when the daemon ends.
//!
//! Lanes copy without a lock: two requests in flight for the same sectors leave a mix of both, as
//! on real hardware.

mod map;

use crate::{Disk, Engine, Info, Io, IoError, IoKind, Lane, Slot, Step, Token};
use map::Map;
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
        // A range is short (1 GiB): it delays the queue for a bounded time.
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

    fn start(&mut self, io: &mut Io, _: Slot, _: &mut dyn Engine) -> Step {
        if !io.fits(self.map.len()) {
            return Step::Done(Err(IoError::EndOfStorage));
        }
        match io.kind {
            IoKind::Read => self.map.read(io.offset_bytes, io.len_bytes, &io.bufs),
            IoKind::Write => self.map.write(io.offset_bytes, io.len_bytes, &io.bufs),
            IoKind::Flush => {}
            IoKind::WriteZeroes { unmap: false } => {
                self.map.fill_zero(io.offset_bytes, io.len_bytes)
            }
            IoKind::Discard | IoKind::WriteZeroes { unmap: true } | IoKind::SecureErase => {
                self.map.free(io.offset_bytes, io.len_bytes);
            }
        }
        Step::Done(Ok(()))
    }

    fn event(&mut self, _: &mut Io, _: Token, _: i32, _: &mut dyn Engine) -> Step {
        unreachable!("a mem lane pushes no op")
    }
}
