// SPDX-License-Identifier: Apache-2.0
//! Copies the clusters of a disk: first those that the guest is about to change, then the others in
//! their order.

use super::source::ImageReader;
use crate::pace::Pace;
use backend::wrap::{CLUSTER_BYTES, Clusters, Turn};
use qcow2::copy::Target;
use std::io;
use std::num::NonZeroU64;
use std::ops::Range;
use std::sync::Arc;

/// Maximum clusters of one read: an I/O of the guest waits for one read and one write at most before
/// its turn.
const RUN_MAX: u64 = 16;

/// Copies a disk.
pub(super) struct Copier {
    reader: ImageReader,
    target: Target,
    clusters: Arc<Clusters>,
    /// The pace of the copier's own order.
    pace: Pace,
    /// All clusters before this one are free.
    next: u64,
}

/// Errors of a copy.
#[derive(Debug, thiserror::Error)]
pub(super) enum CopyError {
    /// The copy has ended before.
    #[error("cancelled")]
    Cancelled,
    /// Another program may write to the image.
    #[error("the guest has moved to another host, which writes the image; repeat it there")]
    HandedOver,
    /// The disk cannot be read at this position.
    #[error("reading at {0}: {1}; check the storage of the disk")]
    Read(u64, io::Error),
    /// The target cannot be written.
    #[error("writing the copy: {0}; check the storage of the target")]
    Write(io::Error),
    /// The thread cannot be started.
    #[error("{0}; raise the limit on threads (ulimit -u)")]
    Thread(io::Error),
}

impl Copier {
    pub(super) fn new(
        reader: ImageReader,
        target: Target,
        clusters: Arc<Clusters>,
        bandwidth: Option<NonZeroU64>,
    ) -> Self {
        Copier { reader, target, clusters, pace: Pace::new(bandwidth), next: 0 }
    }

    /// Copies all clusters and makes the target durable. Nothing waits for the copier afterwards.
    pub(super) fn run(mut self) -> Result<(), CopyError> {
        let copied = self.copy_all();
        if copied.is_err() {
            self.clusters.end();
        }
        copied?;
        self.target.finish().map_err(CopyError::Write)
    }

    fn copy_all(&mut self) -> Result<(), CopyError> {
        while let Some(own) = self.next_own()? {
            match self.clusters.turn(self.pace.due()) {
                Turn::Ended => return Err(CopyError::Cancelled),
                Turn::Wanted(number) => self.copy(number..number + 1)?,
                Turn::Own => {
                    let bytes = self.clusters.bytes_of(own.clone());
                    self.copy(own)?;
                    self.pace.copied(bytes.end - bytes.start);
                }
            }
        }
        Ok(())
    }

    /// Clusters of one read: at most a tenth of a second of the bandwidth.
    fn run_max(&self) -> u64 {
        (self.pace.piece() / CLUSTER_BYTES).clamp(1, RUN_MAX)
    }

    /// The next held clusters; frees those in holes.
    fn next_own(&mut self) -> Result<Option<Range<u64>>, CopyError> {
        let (end, run_max) = (self.clusters.len(), self.run_max());
        while let Some(run) = self.clusters.first_held(self.next..end, run_max) {
            let rest = self.clusters.bytes_of(run.start..end);
            let (start, capacity) = (rest.start, rest.end);
            let data = self.reader.skip_hole(rest).map_err(|why| CopyError::Read(start, why))?;
            let hole_end = if data == capacity { end } else { data / CLUSTER_BYTES };
            self.next = run.start.max(hole_end);
            if hole_end <= run.start {
                return Ok(Some(run));
            }
            self.check_handover()?;
            self.clusters.free(run.start..hole_end);
        }
        Ok(None)
    }

    fn copy(&mut self, numbers: Range<u64>) -> Result<(), CopyError> {
        let bytes = self.clusters.bytes_of(numbers.clone());
        let at = bytes.start;
        self.reader.read(bytes).map_err(|why| CopyError::Read(at, why))?;
        self.check_handover()?;
        // The content is safe: the guest need not wait for the target.
        self.clusters.free(numbers);
        self.target.write(at, self.reader.content()).map_err(CopyError::Write)
    }

    fn check_handover(&self) -> Result<(), CopyError> {
        if self.reader.was_handed_over() { Err(CopyError::HandedOver) } else { Ok(()) }
    }
}
