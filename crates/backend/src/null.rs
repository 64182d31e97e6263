// SPDX-License-Identifier: Apache-2.0
//! A disk that stores nothing and completes every I/O at once, to measure the path to it.
//!
//! A read does not change its buffers: the guest reads the previous content of its own memory.

use crate::{Disk, Engine, Info, Io, IoError, Lane, Slot, Step, Token};

/// A disk that stores nothing.
#[derive(Clone, Debug)]
pub struct Null {
    capacity_bytes: u64,
}

impl Null {
    /// A null disk of `size_bytes` bytes, rounded down to whole sectors.
    pub fn new(size_bytes: u64) -> Self {
        Null { capacity_bytes: size_bytes & !511 }
    }
}

impl Disk for Null {
    fn info(&self) -> Info {
        Info::without_hardware("null (stores nothing)", self.capacity_bytes, u32::MAX)
    }

    fn sync(&self) -> std::io::Result<()> {
        Ok(())
    }

    fn open_lane(&self) -> std::io::Result<Box<dyn Lane>> {
        Ok(Box::new(NullLane { capacity_bytes: self.capacity_bytes }))
    }
}

struct NullLane {
    capacity_bytes: u64,
}

impl Lane for NullLane {
    fn start(&mut self, io: &mut Io, _: Slot, _: &mut dyn Engine) -> Step {
        Step::Done(if io.fits(self.capacity_bytes) { Ok(()) } else { Err(IoError::EndOfStorage) })
    }

    fn event(&mut self, _: &mut Io, _: Token, _: i32, _: &mut dyn Engine) -> Step {
        unreachable!("a null lane pushes no op")
    }
}
