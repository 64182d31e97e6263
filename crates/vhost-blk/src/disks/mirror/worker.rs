// SPDX-License-Identifier: Apache-2.0
//! The thread of a mirror.

use super::Completed;
use super::copier::{Copier, CopyError, SLOW};
use super::old::Old;
use super::plan::Plan;
use super::state::{CANCELLED, Mirror, Phase};
use crate::disks::Disks;
use crate::disks::converge::{self, Copier as _, STUCK, TargetThread, Unfinished};
use crate::disks::exchange::{Source, synced};
use crate::disks::job::Owner;
use crate::events::{Change, Work};
use crate::pace::{LOOK, Pace};
use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Interval between two copies of changed parts: several changes of a part cost one copy.
const PASS: Duration = Duration::from_millis(100);

/// The mirror of a disk.
pub(super) struct Worker {
    pub(super) disks: Arc<Disks>,
    pub(super) owner: Owner,
    pub(super) source: Source,
    pub(super) plan: Arc<Plan>,
    pub(super) mirror: Arc<Mirror>,
    pub(super) old: Old,
    pub(super) thread: TargetThread<Copier>,
    pub(super) pace: Pace,
}

impl From<CopyError> for Unfinished {
    fn from(error: CopyError) -> Self {
        Unfinished::Ended(error.to_string())
    }
}

impl Worker {
    /// Mirrors the disk to the end.
    pub(super) fn run(mut self) {
        let target = self.plan.path().display().to_string();
        self.source.events.tell(&Change::WorkBegun(Work::Mirror, target.clone()));
        let outcome = self.follow();
        let Worker { disks, owner, source, plan, mirror, old, thread, .. } = self;
        if outcome.is_err() {
            mirror.brake().release();
        }
        old.close();
        // Removes an incomplete file.
        if !thread.close() {
            let target = plan.path().display();
            tracing::warn!(disk = source.name, %target, "the target does not answer; an incomplete file is removed when it does");
        }
        if outcome.is_err() {
            source.end_following();
            // A growth of a block device is not adopted during the mirror.
            disks.adopt_size(&source.name);
        }
        let name = source.name.clone();
        let end = outcome.as_ref().map(drop);
        let end = end.map_err(|told| (told.clone(), mirror.is_cancelled()));
        owner.job().ends_with(Change::of_end(Work::Mirror, target, end));
        match &outcome {
            Ok(done) => tracing::info!(disk = name, image = %done.image.display(), "mirrored"),
            Err(told) => tracing::warn!(disk = name, told, "the mirror has ended"),
        }
        disks.note_last(&source, outcome.as_ref().err().cloned());
        // The client of a cancel, which waits for the end of the work, finds the outcome.
        mirror.enter(if outcome.is_ok() { Phase::Moved } else { Phase::Ended });
        // The next command of the client finds no work in progress.
        drop((source, owner));
        mirror.end(outcome);
    }

    fn follow(&mut self) -> Result<Completed, String> {
        // A disk whose sync has failed stays where each FLUSH tells that.
        synced(&*self.source.image.disk)?;
        self.copy_first().map_err(Unfinished::told)?;
        self.mirror.enter(Phase::Ready);
        self.source.events.tell(&Change::MirrorReady);
        loop {
            self.check().map_err(Unfinished::told)?;
            let Some(ordered) = self.mirror.ordered() else {
                self.pass().map_err(Unfinished::told)?;
                self.mirror.pause(PASS);
                continue;
            };
            self.mirror.enter(Phase::Completing);
            match self.complete(ordered) {
                Ok(done) => return Ok(done),
                Err(Unfinished::Ended(told)) => return Err(told),
                Err(Unfinished::Refused(why)) => {
                    self.mirror.enter(Phase::Ready);
                    self.mirror.refuse(ordered.number, why);
                    // An act of the completion may hang: those of the next one do not queue behind it.
                    self.with(|_| Ok(())).map_err(Unfinished::told)?;
                }
            }
        }
    }

    /// Returns an error if the mirror is cancelled, or another program may write to the image.
    pub(super) fn check(&self) -> Result<(), Unfinished> {
        match self.mirror.is_cancelled() {
            true => Err(Unfinished::Ended(CANCELLED.to_owned())),
            false => Ok(self.old.check_handover()?),
        }
    }

    /// As [`Worker::check`], for the wait for an act that began at `begun`. A target that hangs does not hold a
    /// client.
    fn check_since(&self, begun: Instant) -> Result<(), Unfinished> {
        self.check()?;
        if begun.elapsed() >= STUCK && self.mirror.progress().0 == Phase::Ready {
            let ordered = self.mirror.ordered();
            ordered.into_iter().for_each(|it| self.mirror.refuse(it.number, SLOW.to_owned()));
        }
        Ok(())
    }

    /// Waits for the bandwidth, or for an event that `ends` sees.
    fn keep_pace(&self, ends: impl Fn() -> bool) -> Result<(), Unfinished> {
        loop {
            self.check()?;
            match self.pace.wait() {
                Duration::ZERO => return Ok(()),
                _ if ends() => return Ok(()),
                wait => self.mirror.pause_unless_cancelled(wait.min(LOOK)),
            }
        }
    }

    /// Copies the whole disk once, durably.
    fn copy_first(&mut self) -> Result<(), Unfinished> {
        let (mut at, end) = (0, self.plan.capacity_bytes());
        while at < end {
            self.keep_pace(|| false)?;
            let max = converge::piece_max(&self.pace);
            let (done, read) = self.with(move |copier| copier.first(at..end, max))?;
            at += done;
            self.pace.copied(read);
            self.mirror.copied(at);
        }
        self.with(Copier::sync)
    }

    /// Copies the parts that the guest has changed, at the pace of the bandwidth until an order comes.
    fn pass(&mut self) -> Result<(), Unfinished> {
        if self.mirror.brake().written().bytes() == 0 {
            return Ok(());
        }
        let mut at = 0;
        while let Some(piece) = self.next(at, converge::piece_max(&self.pace))? {
            at = piece.end;
            self.pace.copied(piece.end - piece.start);
            let is_ordered = || self.mirror.ordered().is_some();
            self.keep_pace(is_ordered)?;
            if is_ordered() {
                // The completion copies the rest: its brake sees to the end.
                break;
            }
        }
        self.with(Copier::sync)
    }

    /// Copies the first changed piece from a position on.
    fn next(&self, from: u64, max: u64) -> Result<Option<Range<u64>>, Unfinished> {
        let mirror = Arc::clone(&self.mirror);
        self.with(move |copier| copier.next(mirror.brake().written(), from, max))
    }

    /// Lets the thread of the target act.
    fn with<T: Send + 'static>(
        &self,
        act: impl FnOnce(&mut Copier) -> Result<T, CopyError> + Send + 'static,
    ) -> Result<T, Unfinished> {
        let begun = Instant::now();
        self.thread.acts().act(act, || self.check_since(begun))
    }
}
