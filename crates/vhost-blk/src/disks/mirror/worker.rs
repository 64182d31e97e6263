// SPDX-License-Identifier: Apache-2.0
//! The thread of a mirror.

use super::Completed;
use super::copier::{CHUNK, Copier, CopyError};
use super::plan::Plan;
use super::state::{CANCELLED, Mirror, Phase};
use crate::disks::Disks;
use crate::disks::exchange::{Source, synced};
use crate::disks::job::Owner;
use crate::events::Change;
use crate::pace::Pace;
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// Interval between two copies of changed parts: several changes of a part cost one copy.
const PASS: Duration = Duration::from_millis(100);
/// Longest wait for the bandwidth before the next look at the order.
const LOOK: Duration = Duration::from_millis(50);
/// Smallest piece of a copy with a bandwidth.
const PIECE_MIN: u64 = 64 << 10;

/// The copier, which the exchange takes away.
pub(super) type Shared = Arc<Mutex<Option<Copier>>>;

/// The mirror of a disk.
pub(super) struct Worker {
    pub(super) disks: Arc<Disks>,
    pub(super) owner: Owner,
    pub(super) source: Source,
    pub(super) plan: Plan,
    pub(super) mirror: Arc<Mirror>,
    pub(super) copier: Shared,
    pub(super) pace: Pace,
}

/// The reasons for which an order is not carried out.
pub(super) enum Unfinished {
    /// The mirror goes on.
    Refused(String),
    /// The mirror has ended.
    Ended(String),
}

impl From<CopyError> for Unfinished {
    fn from(error: CopyError) -> Self {
        Unfinished::Ended(error.to_string())
    }
}

pub(super) fn lock(copier: &Shared) -> MutexGuard<'_, Option<Copier>> {
    copier.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Worker {
    /// Mirrors the disk to the end.
    pub(super) fn run(mut self) {
        let outcome = self.follow();
        let Worker { disks, owner, source, mirror, copier, .. } = self;
        if outcome.is_err() {
            mirror.brake().release();
            source.end_following();
        }
        // Removes an incomplete file.
        drop(lock(&copier).take());
        let name = source.name.clone();
        let change = match &outcome {
            Ok(Completed { image, .. }) => Change::MirrorCompleted(image.clone()),
            Err(told) => Change::MirrorEnded(told.clone()),
        };
        match &outcome {
            Ok(done) => tracing::info!(disk = name, image = %done.image.display(), "mirrored"),
            Err(told) => tracing::warn!(disk = name, told, "the mirror has ended"),
        }
        disks.note_end(&source, outcome.as_ref().err().cloned());
        disks.events.tell(&name, &change);
        // The next command of the client finds no work in progress.
        drop((source, owner));
        mirror.end(outcome);
    }

    fn follow(&mut self) -> Result<Completed, String> {
        let told = |error: Unfinished| match error {
            Unfinished::Refused(told) | Unfinished::Ended(told) => told,
        };
        // A hole of the old storage is one from now on, or noted as changed.
        synced(&*self.source.image.disk)?;
        self.copy_first().map_err(told)?;
        self.mirror.enter(Phase::Ready);
        self.disks.events.tell(&self.source.name, &Change::MirrorReady);
        loop {
            self.check().map_err(told)?;
            let Some(update_config) = self.mirror.ordered() else {
                self.pass().map_err(told)?;
                self.mirror.pause(PASS);
                continue;
            };
            self.mirror.enter(Phase::Completing);
            let done = self.complete(update_config);
            self.mirror.brake().release();
            match done {
                Ok(done) => return Ok(done),
                Err(Unfinished::Ended(told)) => return Err(told),
                Err(Unfinished::Refused(told)) => {
                    self.mirror.enter(Phase::Ready);
                    self.mirror.refuse(told);
                }
            }
        }
    }

    /// Returns an error if the mirror is cancelled, or another program may write to the image.
    pub(super) fn check(&self) -> Result<(), Unfinished> {
        if self.owner.is_cancelled() || self.mirror.is_cancelled() {
            return Err(Unfinished::Ended(CANCELLED.to_owned()));
        }
        match &*lock(&self.copier) {
            Some(copier) => Ok(copier.check_handover()?),
            None => Err(Unfinished::Ended(CANCELLED.to_owned())),
        }
    }

    /// Waits for the bandwidth.
    fn keep_pace(&self) -> Result<(), Unfinished> {
        loop {
            self.check()?;
            match self.pace.wait() {
                Duration::ZERO => return Ok(()),
                wait => self.mirror.pause_unless_cancelled(wait.min(LOOK)),
            }
        }
    }

    /// Copies the whole disk once, durably.
    fn copy_first(&mut self) -> Result<(), Unfinished> {
        let (mut at, end) = (0, self.plan.capacity_bytes());
        let max = self.piece_max();
        while at < end {
            self.keep_pace()?;
            let (done, read) = self.with(|copier| copier.first(at..end, max))?;
            at += done;
            self.pace.copied(read);
            self.mirror.copied(Some(at));
        }
        self.with(Copier::sync)
    }

    /// Copies the parts that the guest has changed, at the pace of the bandwidth until an order comes.
    fn pass(&mut self) -> Result<(), Unfinished> {
        if self.mirror.brake().written().bytes() == 0 {
            return Ok(());
        }
        let max = self.piece_max();
        let taken = self.mirror.brake().written().take();
        for piece in taken.into_iter().flat_map(|range| pieces(range, max)) {
            match self.mirror.ordered() {
                None => self.keep_pace()?,
                Some(_) => self.check()?,
            }
            let bytes = piece.end - piece.start;
            self.with(|copier| copier.again(piece))?;
            self.pace.copied(bytes);
        }
        // Before a part is copied again: the tables of an image may hold the start of a new cluster.
        self.with(Copier::sync)
    }

    /// Bytes of a piece: whole clusters, because none is written twice between two syncs.
    fn piece_max(&self) -> u64 {
        (self.pace.piece() / PIECE_MIN * PIECE_MIN).clamp(PIECE_MIN, CHUNK)
    }

    pub(super) fn with<T>(
        &self,
        act: impl FnOnce(&mut Copier) -> Result<T, CopyError>,
    ) -> Result<T, Unfinished> {
        match &mut *lock(&self.copier) {
            Some(copier) => Ok(act(copier)?),
            None => Err(Unfinished::Ended(CANCELLED.to_owned())),
        }
    }
}

/// A range in pieces of at most `max` bytes.
pub(super) fn pieces(range: Range<u64>, max: u64) -> impl Iterator<Item = Range<u64>> {
    let end = range.end;
    (range.start..end).step_by(max as usize).map(move |at| at..(at + max).min(end))
}
