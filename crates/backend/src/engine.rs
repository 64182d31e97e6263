// SPDX-License-Identifier: Apache-2.0
//! What a lane may ask of its thread's engine.

use crate::bufs::BufList;
use crate::io::Slot;
use std::time::Duration;

/// Index into [`crate::Lane::files`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FileIndex(pub u32);

/// Tells whose op completed: the io's slot and the lane layer (0 innermost) that pushed it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Token {
    /// The io.
    pub slot: Slot,
    /// The layer that gets the event.
    pub layer: u8,
}

/// One asynchronous operation. Offsets and lengths are in bytes.
#[derive(Clone, Copy, Debug)]
pub enum Op {
    /// `preadv`. The buffers (and their list) stay in place until the event.
    Read {
        /// File to read.
        file: FileIndex,
        /// Where to.
        bufs: BufList,
        /// Position in the file.
        offset: u64,
    },
    /// `pwritev2`, with `RWF_DSYNC` if `dsync`. The buffers stay in place until the event.
    Write {
        /// File to write.
        file: FileIndex,
        /// Where from.
        bufs: BufList,
        /// Position in the file.
        offset: u64,
        /// Durable before the event.
        dsync: bool,
    },
    /// `fdatasync`.
    Fdatasync {
        /// File to sync.
        file: FileIndex,
    },
    /// `fallocate`.
    Fallocate {
        /// File to change.
        file: FileIndex,
        /// `FALLOC_FL_*`.
        mode: i32,
        /// Start of the range.
        offset: u64,
        /// Length of the range.
        len: u64,
    },
    /// An event with result 0 after this time.
    Timer {
        /// How long.
        delay: Duration,
    },
}

/// The thread's engine. Pushing never fails for want of room: the engine submits when it must.
pub trait Engine {
    /// Takes `op`; its result comes back as [`crate::Lane::event`] with `token`. One op per
    /// (slot, layer) is outstanding at a time.
    fn push(&mut self, op: Op, token: Token);
}
