// SPDX-License-Identifier: Apache-2.0
//! Copies the clusters of a disk: first those that the guest is about to change, then the others in
//! their order.

use super::Work;
use super::digest::Digest;
use super::source::ImageReader;
use super::target::Target;
use crate::nbd::NbdError;
use crate::pace::Pace;
use backend::wrap::{CLUSTER_BYTES, Clusters, Turn};
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
    /// The digest of what was copied, if the copy is verified.
    digest: Option<Digest>,
}

/// Clusters that the copier copies in its own order.
enum Own {
    /// They may have data.
    Data(Range<u64>),
    /// They are zero.
    Hole(Range<u64>),
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
    /// The complete copy cannot be read.
    #[error("reading the copy again: {0}; check the storage of the target")]
    ReadCopy(String),
    /// The complete copy has another content than was written to it.
    #[error(
        "the copy has another content than was written to it; check the storage of the target and the \
         memory of this host"
    )]
    Differs,
    /// The target cannot be written.
    #[error("writing the copy: {0}; check the storage of the target")]
    Write(io::Error),
    /// The server of the target fails.
    #[error("the NBD server of the target: {0}")]
    Server(#[from] NbdError),
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
        Copier { reader, target, clusters, pace: Pace::new(bandwidth), next: 0, digest: None }
    }

    /// The same as [`Copier::run`] on another thread.
    pub(super) fn work(self, verifies: bool) -> Work {
        Box::new(move || self.run(verifies))
    }

    /// Copies all clusters and makes the target durable. If it `verifies`, reads the target again, and
    /// compares. Nothing waits for the copier afterwards.
    fn run(mut self, verifies: bool) -> Result<(), CopyError> {
        let all = verifies.then(|| self.clusters.held_now()); // none is copied yet
        self.digest = verifies.then(Digest::default);
        self.copy_all().inspect_err(|_| self.clusters.end())?;
        let mut durable = self.target.finish()?;
        if let Some((all, expected)) = all.zip(self.digest) {
            let goes_on = &mut |_| !self.clusters.has_ended();
            if durable.read_again(&all, goes_on)? != expected {
                return Err(CopyError::Differs);
            }
        }
        durable.end();
        Ok(())
    }

    fn copy_all(&mut self) -> Result<(), CopyError> {
        while let Some(own) = self.next_own()? {
            match (self.clusters.turn(self.pace.due()), own) {
                (Turn::Ended, _) => return Err(CopyError::Cancelled),
                (Turn::Wanted(number), _) => self.copy(number..number + 1)?,
                (Turn::Own, Own::Data(run)) => {
                    let bytes = self.clusters.bytes_of(run.clone());
                    self.copy(run)?;
                    self.pace.copied(bytes.end - bytes.start);
                }
                (Turn::Own, Own::Hole(run)) => self.skip(run)?,
            }
        }
        Ok(())
    }

    /// Clusters of one read: at most a tenth of a second of the bandwidth.
    fn run_max(&self) -> u64 {
        (self.pace.piece() / CLUSTER_BYTES).clamp(1, RUN_MAX)
    }

    /// The next held clusters. A hole may have free ones, too.
    fn next_own(&mut self) -> Result<Option<Own>, CopyError> {
        let (end, run_max) = (self.clusters.len(), self.run_max());
        let Some(run) = self.clusters.first_held(self.next..end, run_max) else { return Ok(None) };
        self.next = run.start;
        let hole_max = self.target.zeroes_max() / CLUSTER_BYTES;
        let rest = self.clusters.bytes_of(run.start..end);
        let (start, capacity) = (rest.start, rest.end);
        let data = self.reader.skip_hole(rest).map_err(|why| CopyError::Read(start, why))?;
        let hole_end = if data == capacity { end } else { data / CLUSTER_BYTES };
        Ok(Some(match hole_end <= run.start {
            true => Own::Data(run),
            false => Own::Hole(run.start..hole_end.min(run.start.saturating_add(hole_max))),
        }))
    }

    /// Frees held clusters that are zero.
    fn skip(&mut self, numbers: Range<u64>) -> Result<(), CopyError> {
        self.check_handover()?;
        let (mut at, end) = (numbers.start, numbers.end);
        let mut held = Vec::new();
        while let Some(run) = self.clusters.first_held(at..end, u64::MAX) {
            at = run.end;
            held.push(self.clusters.bytes_of(run));
        }
        // The content is known: the guest need not wait for the target.
        self.clusters.free(numbers);
        held.into_iter().try_for_each(|zeroes| self.target.zero(zeroes))
    }

    fn copy(&mut self, numbers: Range<u64>) -> Result<(), CopyError> {
        let bytes = self.clusters.bytes_of(numbers.clone());
        let at = bytes.start;
        self.reader.read(bytes).map_err(|why| CopyError::Read(at, why))?;
        self.check_handover()?;
        // The content is safe: the guest need not wait for the target.
        self.clusters.free(numbers);
        if let Some(digest) = &mut self.digest {
            digest.add(at, self.reader.content());
        }
        self.target.write(at, self.reader.content())
    }

    fn check_handover(&self) -> Result<(), CopyError> {
        if self.reader.was_handed_over() { Err(CopyError::HandedOver) } else { Ok(()) }
    }
}
