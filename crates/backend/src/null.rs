// SPDX-License-Identifier: Apache-2.0
//! A disk that stores nothing and finishes everything at once, for measuring the path to it.
//!
//! A read leaves its buffers as they are: what a guest reads is what it had in memory before.

use crate::{Disk, Engine, Info, Io, IoError, Lane, RangeLimits, Slot, Step, Token};

/// See the module's head.
#[derive(Clone, Debug)]
pub struct Null {
    capacity_bytes: u64,
}

impl Null {
    /// A null disk of `size_bytes`, rounded down to whole sectors.
    pub fn new(size_bytes: u64) -> Self {
        Null { capacity_bytes: size_bytes & !511 }
    }
}

impl Disk for Null {
    fn info(&self) -> Info {
        let any_range = Some(RangeLimits { sectors_max: u32::MAX, align_sectors: 1 });
        Info {
            description: "null (stores nothing)".into(),
            capacity_sectors: self.capacity_bytes / 512,
            logical_block_bytes: 512,
            physical_block_bytes: 512,
            io_min_bytes: 0,
            io_opt_bytes: 0,
            memory_align_bytes: 1,
            read_only: false,
            volatile_cache: false,
            discard: any_range,
            write_zeroes: any_range,
            write_zeroes_unmaps: true,
            secure_erase: any_range,
            io_poll: false,
        }
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
