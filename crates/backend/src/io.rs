// SPDX-License-Identifier: Apache-2.0
//! One backend I/O and its outcome.

use crate::bufs::BufList;
use std::num::NonZeroU64;

/// Identifies an [`Io`] in flight.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Slot(pub u32);

/// Kinds of I/O.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum IoKind {
    /// Reads the range into the buffers.
    Read,
    /// Writes the buffers to the range.
    Write,
    /// Makes every write that completed before `start` durable. After a failed flush every later
    /// flush fails, because completed writes may be lost.
    Flush,
    /// Declares the content of the range unneeded.
    Discard,
    /// Fills the range with zeroes.
    WriteZeroes {
        /// The storage may free the space.
        unmap: bool,
    },
    /// Erases the range so that its content cannot be recovered.
    SecureErase,
}

/// One backend I/O. The lane owns the fields from `done_bytes` on.
#[derive(Debug)]
pub struct Io {
    /// Kind of the I/O.
    pub kind: IoKind,
    /// Start of the range in bytes.
    pub offset_bytes: u64,
    /// Length of the range in bytes (0 for a flush). Of a Read or Write: total length of the
    /// buffers.
    pub len_bytes: u64,
    /// The I/O completes only when its effect is on stable storage (write-through).
    pub durable: bool,
    /// Memory of a Read or Write.
    pub bufs: BufList,
    /// Lane: bytes of the range that are done.
    pub done_bytes: u64,
    /// Lane: number of the bounce buffer that this I/O holds.
    pub held: Option<u16>,
    /// Lane: position in the queue of overlapping writers.
    pub ticket: Option<NonZeroU64>,
    /// Innermost lane: current step of a sequence of operations; 0 at the start. Wrappers recognize
    /// their own events by [`crate::Token::layer`] and need no state here.
    pub stage: u8,
}

impl Io {
    /// An I/O that has not started.
    pub fn new(kind: IoKind, offset_bytes: u64, len_bytes: u64, bufs: BufList) -> Self {
        Io {
            kind,
            offset_bytes,
            len_bytes,
            durable: false,
            bufs,
            done_bytes: 0,
            held: None,
            ticket: None,
            stage: 0,
        }
    }

    /// Returns whether the range lies inside a disk of `capacity_bytes` bytes.
    pub fn fits(&self, capacity_bytes: u64) -> bool {
        self.offset_bytes.checked_add(self.len_bytes).is_some_and(|end| end <= capacity_bytes)
    }

    /// Returns whether the I/O changes stored data.
    pub fn writes(&self) -> bool {
        !matches!(self.kind, IoKind::Read | IoKind::Flush)
    }
}

/// Errors of an I/O.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum IoError {
    /// The storage returned this errno.
    #[error("storage error: {}", std::io::Error::from_raw_os_error(*.0))]
    Errno(i32),
    /// The range extends beyond the end of the storage (for example of a truncated file).
    #[error("the storage ends inside the range")]
    EndOfStorage,
    /// The storage does not support this kind of I/O.
    #[error("not supported by this storage")]
    Unsupported,
}

impl IoError {
    /// Returns whether the fault is one of the guest's memory, and not of the storage.
    pub fn is_of_memory(self) -> bool {
        matches!(self, IoError::Errno(libc::EFAULT | libc::EHWPOISON))
    }
}

/// Outcome of [`crate::Lane::start`] and [`crate::Lane::event`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use = "a finished io must be completed"]
pub enum Step {
    /// The I/O ended; the lane keeps no state of it.
    Done(Result<(), IoError>),
    /// An event for this slot follows.
    Pending,
}
