// SPDX-License-Identifier: Apache-2.0
//! Copies the clusters of a disk: first those that the guest is about to change, then the others in
//! their order.

use super::destination::Made;
use super::digest::Digest;
use super::reading::Reading;
use super::source::ImageReader;
use super::{Order, Work};
use crate::disks::converge::{STUCK, TargetQueue, Unfinished};
use crate::nbd::NbdError;
use crate::pace::{self, Pace};
use backend::wrap::{CLUSTER_BYTES_MAX, Clusters, Turn};
use std::io;
use std::mem;
use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;

/// Maximum bytes of one read: an I/O of the guest waits for one read and one write at most before its turn.
const RUN_MAX: u64 = CLUSTER_BYTES_MAX;

/// Copies a disk: reads, and lets the thread of the target write.
pub(super) struct Copier {
    reader: ImageReader,
    reading: Reading,
    target: Acting,
    /// The pace of the copier's own order.
    pace: Pace,
    /// Most bytes of zeroes at once.
    zeroes_max: u64,
    /// All clusters before this one are free.
    next: u64,
    /// The digest of what was copied, if the copy is verified.
    digest: Option<Digest>,
    /// Goes to the thread of the target and back.
    buffer: Vec<u8>,
}

/// Orders acts of the target. One that hangs holds neither the writes of the guest nor a cancel.
#[derive(Clone)]
pub(super) struct Acting {
    pub(super) acts: TargetQueue<Made>,
    pub(super) clusters: Arc<Clusters>,
}

impl Acting {
    /// Lets the thread of the target act. The copy ends if that takes [`STUCK`] and a write of the guest waits.
    pub(super) fn with<T: Send + 'static>(
        &self,
        act: impl FnOnce(&mut Made) -> Result<T, CopyError> + Send + 'static,
    ) -> Result<T, CopyError> {
        self.with_client(act, &mut || true)
    }

    /// The same for the thread of the client, which cancels by `false`.
    pub(super) fn with_client<T: Send + 'static>(
        &self,
        act: impl FnOnce(&mut Made) -> Result<T, CopyError> + Send + 'static,
        goes_on: &mut dyn FnMut() -> bool,
    ) -> Result<T, CopyError> {
        let (begun, mut failed) = (Instant::now(), None);
        let check = || {
            failed = if self.clusters.has_ended() || !goes_on() {
                Some(CopyError::Cancelled)
            } else if begun.elapsed() >= STUCK && self.clusters.has_waiting() {
                Some(CopyError::Stuck)
            } else {
                None
            };
            failed.as_ref().map_or(Ok(()), |why| Err(Unfinished::Ended(why.to_string())))
        };
        let done = self.acts.act(|made| Ok(act(made)), check);
        done.unwrap_or_else(|gone| Err(failed.unwrap_or_else(|| CopyError::Gone(gone.told()))))
    }
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
    /// An act of the target takes too long.
    #[error(
        "the target has not answered for {} s, and writes of the guest waited for it; check the storage of the \
         target",
        STUCK.as_secs()
    )]
    Stuck,
    /// A read of the disk takes too long.
    #[error(
        "the storage of the disk, or of a backing file, has not answered for {} s, and writes of the guest waited for it; \
         check that storage",
        STUCK.as_secs()
    )]
    StuckRead,
    /// The thread of the target has gone.
    #[error("{0}")]
    Gone(String),
    /// The thread cannot be started.
    #[error("{0}; raise the limit on threads (ulimit -u)")]
    Thread(io::Error),
}

impl Copier {
    pub(super) fn new(reader: ImageReader, target: Acting, order: &Order) -> Self {
        Copier {
            reader,
            reading: Reading::default(),
            target,
            pace: Pace::new(Arc::clone(&order.bandwidth)),
            zeroes_max: order.target.zeroes_max(),
            next: 0,
            digest: None,
            buffer: Vec::new(),
        }
    }

    /// The read that it waits for.
    pub(super) fn reading(&self) -> Reading {
        self.reading.clone()
    }

    /// The same as [`Copier::run`] on another thread.
    pub(super) fn work(self, verifies: bool) -> Work {
        Box::new(move || self.run(verifies))
    }

    fn clusters(&self) -> &Clusters {
        &self.target.clusters
    }

    /// Copies all clusters and makes the target durable. If it `verifies`, reads the target again, and
    /// compares. Nothing waits for the copier afterwards.
    fn run(mut self, verifies: bool) -> Result<(), CopyError> {
        let all = verifies.then(|| self.clusters().held_now()); // none is copied yet
        self.digest = verifies.then(Digest::default);
        self.copy_all().inspect_err(|_| self.clusters().end())?;
        self.target.with(Made::finish)?;
        if let Some((all, expected)) = all.zip(self.digest) {
            let clusters = Arc::clone(&self.target.clusters);
            let found = self.target.with(move |made| {
                let goes_on = &mut |_| !clusters.has_ended();
                made.read_again(&all, goes_on)
            })?;
            if found != expected {
                return Err(CopyError::Differs);
            }
        }
        Ok(())
    }

    fn copy_all(&mut self) -> Result<(), CopyError> {
        while let Some(own) = self.next_own()? {
            match (self.turn(), own) {
                (Turn::Ended, _) => return Err(CopyError::Cancelled),
                (Turn::Wanted(number), _) => self.copy(number..number + 1, true)?,
                (Turn::Own, Own::Data(run)) => {
                    let bytes = self.clusters().bytes_of(run.clone());
                    self.copy(run, false)?;
                    self.pace.copied(bytes.end - bytes.start);
                }
                (Turn::Own, Own::Hole(run)) => self.skip(run)?,
            }
        }
        Ok(())
    }

    /// Waits for the next task. The bandwidth may change meanwhile.
    fn turn(&self) -> Turn {
        loop {
            let wait = self.pace.wait();
            match self.clusters().turn(Instant::now() + wait.min(pace::LOOK)) {
                Turn::Own if wait > pace::LOOK => {}
                turn => return turn,
            }
        }
    }

    /// Clusters of one read: at most a tenth of a second of the bandwidth.
    fn run_max(&self) -> u64 {
        let bytes = self.clusters().cluster_bytes();
        (self.pace.piece() / bytes).clamp(1, RUN_MAX / bytes)
    }

    /// The next held clusters. A hole may have free ones, too.
    fn next_own(&mut self) -> Result<Option<Own>, CopyError> {
        let (end, run_max) = (self.clusters().len(), self.run_max());
        let Some(run) = self.clusters().first_held(self.next..end, run_max) else {
            return Ok(None);
        };
        self.next = run.start;
        let bytes = self.clusters().cluster_bytes();
        // No further than the zeroes that one turn takes: a look at a long hole of a qcow2 image has many questions.
        let hole_max = (self.zeroes_max / bytes).max(1);
        let last = end.min(run.start.saturating_add(hole_max));
        let looked_at = self.clusters().bytes_of(run.start..last);
        let (start, stop) = (looked_at.start, looked_at.end);
        let data = self.reading.with(false, || self.reader.skip_hole(looked_at));
        let data = data.map_err(|why| CopyError::Read(start, why))?;
        let hole_end = if data == stop { last } else { data / bytes };
        Ok(Some(match hole_end <= run.start {
            true => Own::Data(run),
            false => Own::Hole(run.start..hole_end),
        }))
    }

    /// Frees held clusters that are zero.
    fn skip(&mut self, numbers: Range<u64>) -> Result<(), CopyError> {
        self.check_handover()?;
        let (mut at, end) = (numbers.start, numbers.end);
        let mut held = Vec::new();
        while let Some(run) = self.clusters().first_held(at..end, u64::MAX) {
            at = run.end;
            held.push(self.clusters().bytes_of(run));
        }
        // The content is known: the guest need not wait for the target.
        self.clusters().free(numbers);
        self.target.with(|made| made.zero(held))
    }

    /// Copies clusters. `is_wanted`: a write of the guest waits for them.
    fn copy(&mut self, numbers: Range<u64>, is_wanted: bool) -> Result<(), CopyError> {
        let bytes = self.clusters().bytes_of(numbers.clone());
        let at = bytes.start;
        let read = self.reading.with(is_wanted, || self.reader.read(bytes).map(drop));
        read.map_err(|why| CopyError::Read(at, why))?;
        self.check_handover()?;
        // The content is safe: the guest need not wait for the target.
        self.clusters().free(numbers);
        if let Some(digest) = &mut self.digest {
            digest.add(at, self.reader.content());
        }
        let mut buffer = mem::take(&mut self.buffer);
        buffer.clear();
        buffer.extend_from_slice(self.reader.content());
        self.buffer = self.target.with(move |made| made.write(at, &buffer).map(|()| buffer))?;
        Ok(())
    }

    fn check_handover(&self) -> Result<(), CopyError> {
        if self.reader.was_handed_over() { Err(CopyError::HandedOver) } else { Ok(()) }
    }
}
