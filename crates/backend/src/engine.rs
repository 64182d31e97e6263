// SPDX-License-Identifier: Apache-2.0
//! The asynchronous operations that a lane may start on its thread's engine.

use crate::Remote;
use crate::bufs::BufList;
use crate::io::Slot;
use std::time::Duration;

/// Index into [`crate::Lane::files`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FileIndex(pub u32);

/// Identifies a completed operation: the slot of its I/O, and the lane layer (0 is the innermost)
/// that pushed it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Token {
    /// Slot of the I/O.
    pub slot: Slot,
    /// Layer that receives the event.
    pub layer: u8,
}

/// One asynchronous operation. Offsets and lengths are in bytes.
#[derive(Clone, Copy, Debug)]
pub enum Op {
    /// `preadv`. The buffers and their list stay in place until the event.
    Read {
        /// File to read.
        file: FileIndex,
        /// Destination.
        bufs: BufList,
        /// Position in the file.
        offset: u64,
    },
    /// `pwritev2`, with `RWF_DSYNC` if `dsync`. The buffers and their list stay in place until the
    /// event.
    Write {
        /// File to write.
        file: FileIndex,
        /// Source.
        bufs: BufList,
        /// Position in the file.
        offset: u64,
        /// The data is durable before the event.
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
    /// The ioctl `BLKDISCARD`: it leaves the content of a block device's range unspecified. Linux
    /// 6.12 and later do it asynchronously; older kernels answer `EOPNOTSUPP`.
    Discard {
        /// The block device.
        file: FileIndex,
        /// Start of the range.
        offset: u64,
        /// Length of the range.
        len: u64,
    },
    /// Delivers an event with result 0.
    Nop,
    /// Delivers an event with result 0 after a delay.
    Timer {
        /// Time until the event.
        delay: Duration,
    },
    /// Makes the event of the [`Op::Timer`] with this token come at once, with any result. Has no event of its own.
    EndTimer,
}

/// The engine of one data-plane thread. A full engine submits and then accepts the operation.
pub trait Engine {
    /// Accepts `op`. The engine's owner delivers the result to [`crate::Lane::event`] with `token`.
    /// At most one operation of a (slot, layer) pair is outstanding, [`Op::EndTimer`] aside.
    fn push(&mut self, op: Op, token: Token);

    /// A handle with which another thread delivers an event to a lane of this engine. It counts as
    /// the outstanding operation of its (slot, layer) pair. A lane asks once and keeps it.
    fn remote(&mut self) -> Remote;
}
