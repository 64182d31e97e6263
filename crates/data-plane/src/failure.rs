// SPDX-License-Identifier: Apache-2.0
//! Failures of a disk's storage, as both data planes tell them.

use crate::latency::Operation;
use crate::once_per_second::OncePerSecond;
use backend::IoError;
use std::time::Instant;
use virtio_blk::Kind;
use virtio_spec::blk::SECTOR_BYTES;

/// The kind of a failure.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FailureKind {
    /// Any other error.
    Io,
    /// The image has no space left.
    NoSpace,
    /// The storage became read-only.
    ReadOnly,
    /// The block device was removed.
    Removed,
    /// The storage did not answer in time.
    Timeout,
}

impl FailureKind {
    /// All kinds, in the order of their numbers.
    pub const ALL: [FailureKind; 5] = [
        FailureKind::Io,
        FailureKind::NoSpace,
        FailureKind::ReadOnly,
        FailureKind::Removed,
        FailureKind::Timeout,
    ];

    /// The name in events and metrics.
    pub fn name(self) -> &'static str {
        match self {
            FailureKind::Io => "io",
            FailureKind::NoSpace => "no_space",
            FailureKind::ReadOnly => "read_only",
            FailureKind::Removed => "removed",
            FailureKind::Timeout => "timeout",
        }
    }

    fn of_errno(errno: i32) -> Self {
        match errno {
            libc::ENOSPC | libc::EDQUOT => FailureKind::NoSpace,
            libc::EROFS => FailureKind::ReadOnly,
            libc::ENODEV | libc::ENXIO => FailureKind::Removed,
            libc::ETIMEDOUT => FailureKind::Timeout,
            _ => FailureKind::Io,
        }
    }
}

/// Failures of the storage, described by the first one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StorageFailure {
    /// The kind.
    pub kind: FailureKind,
    /// The operation; `None`: the kernel module does not tell it.
    pub operation: Option<Operation>,
    /// The first sector of the I/O; `None`: it has none, as a flush.
    pub sector: Option<u64>,
    /// The error.
    pub reason: String,
    /// Number of requests that have failed.
    pub requests: u64,
}

impl StorageFailure {
    /// The failure of one I/O. `None`: the storage does not support the I/O, and has not failed.
    pub(crate) fn of_io(kind: Kind, offset_bytes: u64, error: IoError) -> Option<Self> {
        Some(StorageFailure {
            kind: match error {
                IoError::Errno(errno) => FailureKind::of_errno(errno),
                IoError::EndOfStorage => FailureKind::Io,
                IoError::Unsupported => return None,
            },
            operation: Operation::of(kind),
            sector: (kind != Kind::Flush).then_some(offset_bytes / SECTOR_BYTES),
            reason: error.to_string(),
            requests: 1,
        })
    }
}

/// Number of failures of each kind, and the events about them.
#[derive(Debug, Default)]
pub(crate) struct Failures {
    pub(crate) counts: [u64; FailureKind::ALL.len()],
    events: OncePerSecond,
    /// Failed requests that no event has told.
    untold: u64,
}

impl Failures {
    /// Counts a failure. Returns it, with those that were not told before, if an event is due.
    pub(crate) fn add(&mut self, failure: StorageFailure, now: Instant) -> Option<StorageFailure> {
        self.counts[failure.kind as usize] += failure.requests;
        self.untold += failure.requests;
        self.events.due(now)?;
        let requests = std::mem::take(&mut self.untold);
        Some(StorageFailure { requests, ..failure })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    const WRITE: Kind = Kind::Write { sector: 0, bytes: 512, durable: false };

    #[test]
    fn a_failure_has_the_kind_of_its_error_and_the_sector_of_its_io() {
        for (errno, kind) in [
            (libc::EIO, "io"),
            (libc::ENOSPC, "no_space"),
            (libc::EDQUOT, "no_space"),
            (libc::EROFS, "read_only"),
            (libc::ENODEV, "removed"),
            (libc::ETIMEDOUT, "timeout"),
        ] {
            let failure = StorageFailure::of_io(WRITE, 8 * 512, IoError::Errno(errno)).unwrap();
            assert_eq!((failure.kind.name(), failure.sector), (kind, Some(8)));
            assert_eq!(failure.operation, Some(Operation::Write));
        }
        let flush = StorageFailure::of_io(Kind::Flush, 0, IoError::EndOfStorage).unwrap();
        assert_eq!((flush.kind, flush.sector), (FailureKind::Io, None));
        assert_eq!(StorageFailure::of_io(WRITE, 0, IoError::Unsupported), None);
        for (number, kind) in FailureKind::ALL.into_iter().enumerate() {
            assert_eq!(kind as usize, number);
        }
    }

    #[test]
    fn the_first_failure_of_a_second_is_told_and_all_are_counted() {
        let mut failures = Failures::default();
        let start = Instant::now();
        let mut add = |millis, sector: u64| {
            let failure = StorageFailure::of_io(WRITE, sector * 512, IoError::Errno(libc::EIO));
            let told = failures.add(failure.unwrap(), start + Duration::from_millis(millis));
            told.map(|told| (told.sector, told.requests))
        };
        assert_eq!(add(0, 1), Some((Some(1), 1)));
        assert_eq!((add(1, 2), add(900, 3)), (None, None));
        assert_eq!(add(1100, 4), Some((Some(4), 3)));
        assert_eq!(failures.counts, [4, 0, 0, 0, 0]);
    }
}
