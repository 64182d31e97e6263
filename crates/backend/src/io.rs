// SPDX-License-Identifier: Apache-2.0
//! One backend I/O and its outcome.

use crate::bufs::BufList;

/// Names an [`Io`] in flight; smaller than the bound given to the engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Slot(pub u32);

/// What is asked of the storage.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum IoKind {
    /// Fill the buffers from the range.
    Read,
    /// Store the buffers in the range.
    Write,
    /// Make every write that completed before `start` durable.
    Flush,
    /// The content of the range is no longer needed.
    Discard,
    /// The range reads as zeroes afterwards.
    WriteZeroes {
        /// The space may be freed.
        unmap: bool,
    },
    /// The range is erased so that it cannot be recovered.
    SecureErase,
}

/// One backend I/O. The progress fields belong to the lane.
#[derive(Debug)]
pub struct Io {
    /// What to do.
    pub kind: IoKind,
    /// Start of the range in bytes.
    pub offset_bytes: u64,
    /// Length of the range in bytes (0 for a flush); for Read and Write equal to the buffers' sum.
    pub len_bytes: u64,
    /// Complete only when the effect is on stable storage (write-through).
    pub durable: bool,
    /// Memory of a Read or Write.
    pub bufs: BufList,
    /// Lane: bytes of the range done so far.
    pub done_bytes: u64,
    /// Lane: resource held for this io (bounce buffer number), if any.
    pub held: Option<u16>,
    /// Innermost lane: step of a sequence of ops, 0 at start. Wrappers tell their own events by
    /// [`crate::Token::layer`] and need no state here.
    pub stage: u8,
}

impl Io {
    /// An I/O that has not been started.
    pub fn new(kind: IoKind, offset_bytes: u64, len_bytes: u64, bufs: BufList) -> Self {
        Io {
            kind,
            offset_bytes,
            len_bytes,
            durable: false,
            bufs,
            done_bytes: 0,
            held: None,
            stage: 0,
        }
    }

    /// Whether the range lies inside a storage of `capacity_bytes`.
    pub fn fits(&self, capacity_bytes: u64) -> bool {
        self.offset_bytes.checked_add(self.len_bytes).is_some_and(|end| end <= capacity_bytes)
    }

    /// Whether the I/O changes stored data.
    pub fn writes(&self) -> bool {
        !matches!(self.kind, IoKind::Read | IoKind::Flush)
    }
}

/// Why an I/O failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum IoError {
    /// The storage answered with this errno.
    #[error("storage error: {}", std::io::Error::from_raw_os_error(*.0))]
    Errno(i32),
    /// The storage ended before the range did (the file was truncated).
    #[error("the storage ends inside the range")]
    EndOfStorage,
    /// The storage cannot do this kind of I/O.
    #[error("not supported by this storage")]
    Unsupported,
}

/// What became of a `start` or an `event`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use = "a finished io must be completed"]
pub enum Step {
    /// Finished; the lane has forgotten the io.
    Done(Result<(), IoError>),
    /// An event for this slot will follow.
    Pending,
    /// Not started; see [`crate::Lane::start`].
    Busy,
}
