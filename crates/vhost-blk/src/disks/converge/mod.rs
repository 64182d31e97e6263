// SPDX-License-Identifier: Apache-2.0
//! The end of a copy that follows the writes of a guest, however fast these are: a mirror, or a merge. The guest
//! goes on in the copy.
//!
//! | Step | The brake ([`backend::wrap::Brake`]) |
//! |---|---|
//! | 1. everything was copied once, and the changed parts at the pace of the user | off |
//! | 2. [`Convergence::converge`]: the changed parts are copied, again and again, as fast as possible | on; its bound sinks with the copy to the rest that the drained disk can copy in [`REST_TIME`] |
//! | 3. [`Convergence::sync_old`]: the old storage becomes durable, as before step 2 | on, at that bound |
//! | 4. [`Convergence::turn`]: a reload in progress comes to its end; [`Convergence::meanwhile`]: the new configuration is prepared | the same |
//! | 5. [`Convergence::exchange`]: the queues drain; the parts that the writes in flight change are copied | the same |
//! | 6. [`Convergence::last`]: the disk takes no request, and the target gets the rest | no write is left |
//! | 7. any end, also that of a step before | off: the drop of [`Convergence`] |
//!
//! Only one thread works on the target ([`TargetThread`]), and another one looks at the clock and at the client: an act of
//! the target that takes [`STUCK`] ends the convergence, and with it the wait of the guest's writes.

mod bound;
mod target_thread;

pub(super) use target_thread::{New, OwnedByTarget};
pub(crate) use target_thread::{Sign, TargetQueue, TargetThread, TargetUser, Words};

use super::Disks;
use super::exchange::{Source, check_writes};
use super::replacing::{DRAIN_MAX, wait_and};
use super::turn::{HeldTurn, TURN_MAX};
use crate::disk::Opened;
use crate::failure::Failure;
use crate::pace::{PIECE_MIN, Pace};
use backend::Disk;
use backend::wrap::{Brake, Written};
use bound::Bound;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::thread;
use std::time::{Duration, Instant};
use vhost_user::{Control, Replacement};

/// Bytes that are copied at once.
pub(super) const CHUNK: u64 = 1 << 20;
/// Bytes that are copied between two syncs, which bound the data that a sync waits for.
const SYNC_BYTES: u64 = 16 << 20;
/// Time in which the rest can be copied while the disk takes no request.
const REST_TIME: Duration = Duration::from_millis(30);
/// Bounds of the rest in bytes.
const REST_MIN: u64 = 256 << 10;
pub(super) const REST_MAX: u64 = 4 << 20;
/// Parts that it may have in any case.
const REST_PARTS_MIN: u64 = 4;
/// Copies of changed parts while the brake has its least bound, before the disk drains: the writes in flight
/// at the begin of the first are noted in the second.
const PASSES: usize = 2;
/// Interval of the copies while the disk drains: its writes may wait for them.
const TICK: Duration = Duration::from_millis(1);
/// Interval of the look at a reload that is in progress.
const LOOK: Duration = Duration::from_millis(20);
/// Longest time of one act of the target, in which writes of the guest may wait, or a client for the end. Also that of
/// a backup.
pub(crate) const STUCK: Duration = Duration::from_secs(5);
/// The act before the exchange, for an error.
const PREPARE: &str = "prepare the exchange of the storage";
/// Longest time in which the drained disk waits for its new storage.
const DRAINED_MAX: Duration = STUCK;

/// Takes the place of the storage of a disk.
pub(super) trait Exchanged: TargetUser {
    /// The failure of a target that hangs while the disk is drained.
    const LATE: &'static str = "did not take the rest of the copy";
    /// The storage in which the guest goes on then, and the remedy.
    const UNMOVED: &'static str;
}

/// Copies a disk to its target.
pub(super) trait Copier: Exchanged {
    /// The reason of an end by an act that took [`STUCK`].
    const SLOW: &'static str;

    /// Copies a range that the guest has changed, and that may have been copied before: one part of the notes, which
    /// is long if the disk is, or at most [`CHUNK`] bytes. Its buffers have [`CHUNK`] bytes.
    fn again(&mut self, range: Range<u64>) -> Result<(), Self::Error>;

    /// Makes everything that was copied durable.
    fn sync(&mut self) -> Result<(), Self::Error>;

    fn rate(&self) -> &Rate;

    /// Takes the first noted piece from a position on, and copies it. The taking is a part of the act: no other thread
    /// can give the copy up between both, and lose the piece. `None`: nothing is noted there.
    fn next(
        &mut self,
        written: &Written,
        from: u64,
        max: u64,
    ) -> Result<Option<Range<u64>>, Self::Error> {
        let piece = written.take_from(from, max).next();
        piece.clone().map_or(Ok(()), |range| self.again(range))?;
        Ok(piece)
    }

    /// Copies the parts that are noted, but for those that are noted again meanwhile behind the present
    /// position. Returns their bytes.
    fn rest(&mut self, written: &Written) -> Result<u64, Self::Error> {
        written.take(CHUNK).try_fold(0, |bytes, range| {
            let more = range.end - range.start;
            self.again(range).map(|()| bytes + more)
        })
    }
}

/// The pace of a copier, and its need of a sync.
#[derive(Debug, Default)]
pub(super) struct Rate {
    /// Bytes since the last sync.
    unsynced: u64,
    /// Bytes of all reads and writes.
    bytes: u64,
    /// The time that they took.
    taken: Duration,
}

impl Rate {
    /// Records a copy that began at this moment. Returns whether a sync is due.
    pub(super) fn copied(&mut self, bytes: u64, begun: Instant) -> bool {
        self.unsynced += bytes;
        self.bytes += bytes;
        self.taken += begun.elapsed();
        self.unsynced >= SYNC_BYTES
    }

    /// Records a sync that began at this moment.
    pub(super) fn synced(&mut self, begun: Instant) {
        self.unsynced = 0;
        self.taken += begun.elapsed();
    }

    /// Bytes that were copied in this time on average.
    fn bytes_in(&self, time: Duration) -> u64 {
        let share = time.as_secs_f64() / self.taken.as_secs_f64().max(1e-6);
        (self.bytes as f64 * share) as u64
    }
}

/// Bytes that are copied at once with this pace: whole parts.
pub(super) fn piece_max(pace: &Pace) -> u64 {
    (pace.piece() / PIECE_MIN * PIECE_MIN).clamp(PIECE_MIN, CHUNK)
}

/// The reasons for which the guest does not go on in the target.
pub(crate) enum Unfinished {
    /// A mirror goes on; a merge has ended.
    Refused(String),
    /// The copy has ended.
    Ended(String),
}

impl Unfinished {
    /// The text.
    pub(crate) fn told(self) -> String {
        match self {
            Unfinished::Refused(told) | Unfinished::Ended(told) => told,
        }
    }
}

impl From<Failure> for Unfinished {
    fn from(failure: Failure) -> Self {
        Unfinished::Refused(failure.cause())
    }
}

/// The end of a copy. The brake is off when this is dropped.
pub(super) struct Convergence<'a, C: Copier> {
    pub(super) acts: &'a TargetQueue<C>,
    pub(super) brake: &'a Arc<Brake>,
    /// Returns an error if the end is not wanted any more.
    pub(super) check: &'a dyn Fn() -> Result<(), Unfinished>,
}

impl<C: Copier> Drop for Convergence<'_, C> {
    fn drop(&mut self) {
        self.brake.release();
    }
}

impl<C: Copier> Convergence<'_, C> {
    /// Lets the thread of the target act. One that hangs holds neither the writes of the guest nor a client.
    pub(super) fn with<T: Send + 'static>(
        &self,
        act: impl FnOnce(&mut C) -> Result<T, C::Error> + Send + 'static,
    ) -> Result<T, Unfinished> {
        self.acts.act(act, self.bounded())
    }

    /// The check while an act lasts that begins now.
    fn bounded(&self) -> impl Fn() -> Result<(), Unfinished> {
        let begun = Instant::now();
        move || {
            (self.check)()?;
            match begun.elapsed() < STUCK {
                true => Ok(()),
                false => Err(Unfinished::Refused(C::SLOW.to_owned())),
            }
        }
    }

    /// Copies changed parts durably until few are left, however fast the guest writes: [`Bound`].
    pub(super) fn converge(&self) -> Result<(), Unfinished> {
        // The syncs from here on are short.
        self.with(C::sync)?;
        let few = self.with(|copier| Ok(copier.rate().bytes_in(REST_TIME)))?;
        let written = self.brake.written();
        let few = few.clamp(REST_MIN, REST_MAX).max(REST_PARTS_MIN * written.part_bytes());
        let (mut bound, mut passes) = (Bound::new(written.bytes(), few), 0);
        self.brake.hold(bound.bytes());
        tracing::debug!(noted = written.bytes(), few, "the brake is on");
        while passes < PASSES {
            passes += usize::from(bound.is_least());
            let mut at = 0;
            while let Some(piece) = self.next(at)? {
                at = piece.end;
                bound.copied(piece.end - piece.start);
                self.slow(&bound);
                (self.check)()?;
            }
            self.with(C::sync)?;
            bound.passed(written.bytes());
            self.slow(&bound);
        }
        (self.check)()
    }

    /// Copies the first changed piece from a position on.
    fn next(&self, from: u64) -> Result<Option<Range<u64>>, Unfinished> {
        let brake = Arc::clone(self.brake);
        self.with(move |copier| copier.next(brake.written(), from, CHUNK))
    }

    /// Changes the bound of the brake, unless a cancel has released it, and starts the writes that may start.
    fn slow(&self, bound: &Bound) {
        if self.brake.lower(bound.bytes()) {
            self.brake.proceed();
        }
    }

    /// Lets reloads wait. One in progress may wait for the end of the copy, or for another disk: the
    /// copy goes on meanwhile, so that no write of the guest waits for it.
    /// It is refused after [`TURN_MAX`]. `act`: the end of the copy, for others.
    pub(super) fn turn<'d>(&self, disks: &'d Disks, act: &str) -> Result<HeldTurn<'d>, Unfinished> {
        let begun = Instant::now();
        loop {
            (self.check)()?;
            match disks.try_turn(act.to_owned()) {
                Ok(turn) => return Ok(turn),
                Err(holder) if begun.elapsed() >= TURN_MAX => {
                    return Err(Unfinished::Refused(format!(
                        "{}; try again after it",
                        holder.told()
                    )));
                }
                Err(_) => {}
            }
            self.copy_rest()?;
            thread::sleep(LOOK);
        }
    }

    /// Prepares the exchange on a thread of its own, which may wait for a file system: [`Disks::prepare_apart`]. While the
    /// brake is on, the copy goes on, so that no write of the guest waits for that.
    pub(super) fn meanwhile<T: Send + 'static>(
        &self,
        disks: &Arc<Disks>,
        name: &str,
        limit: Option<Duration>,
        act: impl FnOnce() -> Result<T, Unfinished> + Send + 'static,
    ) -> Result<T, Unfinished> {
        let mut at = 0;
        disks.prepare_apart((name, PREPARE), (limit, Duration::ZERO), act, || {
            (self.check)()?;
            if !self.brake.is_on() {
                return Ok(LOOK);
            }
            let next = self.copy_next(at)?;
            at = next.unwrap_or(0);
            Ok(if next.is_some() { Duration::ZERO } else { TICK })
        })
    }

    /// As [`Convergence::converge`], with the old storage synced before and after it.
    pub(super) fn converge_synced(
        &self,
        disks: &Arc<Disks>,
        source: &Source,
    ) -> Result<(), Unfinished> {
        self.sync_old(disks, source)?;
        self.converge()?;
        self.sync_old(disks, source)
    }

    /// Makes the completed writes of the old storage durable, so that the drained disk has few, and learns of lost
    /// ones.
    fn sync_old(&self, disks: &Arc<Disks>, source: &Source) -> Result<(), Unfinished> {
        let top = Arc::clone(&source.image.top);
        let act = move || check_writes(&top).map_err(Unfinished::Ended);
        self.meanwhile(disks, &source.name, None, act)
    }

    /// Exchanges the storage of the disk as soon as it is drained. `begin` may refuse that then. Returns the
    /// time in which the disk took no request.
    pub(super) fn exchange(
        &self,
        control: &Control,
        begin: impl FnOnce() -> Result<(), String> + Send + 'static,
        replace: impl FnOnce() -> Result<Replacement, String> + Send + 'static,
    ) -> Result<Duration, Unfinished> {
        // Data that was copied in the waits before would delay the sync of the drained disk.
        self.with(C::sync)?;
        self.copy_rest()?;
        let has_begun = Arc::new(AtomicBool::new(false));
        let begun = Arc::clone(&has_begun);
        let order = control.replace_storage(Box::new(move |_: &Arc<dyn Disk>| {
            begin()?;
            // Read after the answer, which orders it.
            begun.store(true, Ordering::Relaxed);
            replace()
        }));
        let mut failed = None;
        let waited = wait_and(&order, DRAIN_MAX, TICK, || {
            if failed.is_none() {
                failed = (self.check)().and_then(|()| self.copy_rest()).err();
            }
            failed.is_none()
        });
        match (waited, failed) {
            (Ok(pause), _) => Ok(pause),
            (Err(_), Some(failed)) if !has_begun.load(Ordering::Relaxed) => Err(failed),
            (Err(unfinished), _) if !has_begun.load(Ordering::Relaxed) => {
                Err(Unfinished::Refused(unfinished.to_string()))
            }
            (Err(unfinished), _) => Err(Unfinished::Ended(unfinished.to_string())),
        }
    }

    /// Copies the parts that are noted, and lets writes that wait for that go on. The thread of the target
    /// takes them itself: none is between the notes and the new storage when the last act begins.
    fn copy_rest(&self) -> Result<(), Unfinished> {
        let mut at = 0;
        while let Some(next) = self.copy_next(at)? {
            at = next;
        }
        Ok(())
    }

    /// The same for the first noted part from a position on. Returns its end; `None`: there is none.
    fn copy_next(&self, from: u64) -> Result<Option<u64>, Unfinished> {
        let brake = Arc::clone(self.brake);
        let act = move |copier: &mut C| copier.next(brake.written(), from, CHUNK);
        // Without the copier, the exchange has begun to copy the rest itself.
        let next = self.acts.ask(act, self.bounded())?;
        self.brake.proceed();
        Ok(next.flatten().map(|piece| piece.end))
    }

    /// Orders the last act of the target, whose disk is drained: the rest becomes durable there, and `open`
    /// gets the copier.
    pub(super) fn last<T: Send + 'static>(
        acts: &TargetQueue<C>,
        brake: Arc<Brake>,
        open: impl FnOnce(C) -> Result<(Opened, T), String> + Send + 'static,
    ) -> Last<C, T> {
        Last::order(acts, move |mut copier, wanted| {
            let rest = copier.rest(brake.written());
            let rest = rest.and_then(|bytes| copier.sync().map(|()| bytes));
            let rest_bytes = rest.map_err(|error| error.to_string())?;
            // The guest goes on in the old storage: nothing of that is changed any more.
            if !wanted.load(Ordering::Acquire) {
                return Err(C::WORDS.cancelled.to_owned());
            }
            let (opened, made) = open(copier)?;
            Ok(New { opened, rest_bytes: Some(rest_bytes), made })
        })
    }
}

/// The last act of a target.
pub(super) struct Last<C, T> {
    acts: TargetQueue<C>,
    answer: Receiver<Result<New<T>, String>>,
    deadline: Instant,
    /// A thread waits for the answer.
    is_wanted: Arc<AtomicBool>,
}

impl<C: Exchanged, T: Send + 'static> Last<C, T> {
    /// Orders an act that opens the new disk. Its flag is false once the owner has stopped waiting.
    pub(super) fn order(
        acts: &TargetQueue<C>,
        open: impl FnOnce(C, &AtomicBool) -> Result<New<T>, String> + Send + 'static,
    ) -> Last<C, T> {
        let deadline = Instant::now() + DRAINED_MAX;
        let is_wanted = Arc::new(AtomicBool::new(true));
        let wanted = Arc::clone(&is_wanted);
        let answer = acts.last(move |user| open(user, &wanted));
        Last { acts: acts.clone(), answer, deadline, is_wanted }
    }

    /// Waits for the new disk, and for what was made with it. If the target hangs, the guest of the disk of this
    /// name goes on in the old storage.
    ///
    /// # Errors
    /// Cause and remedy.
    pub(super) fn wait(self, disk: &str) -> Result<(Opened, OwnedByTarget<T>), String> {
        let patience = self.deadline.saturating_duration_since(Instant::now());
        match self.answer.recv_timeout(patience) {
            Ok(done) => {
                let New { opened, rest_bytes, made } = done?;
                if let Some(rest_bytes) = rest_bytes {
                    tracing::info!(disk, rest_bytes, "copied while drained");
                }
                Ok((opened, self.acts.own_on_target(made)))
            }
            Err(RecvTimeoutError::Disconnected) => Err(C::WORDS.cancelled.to_owned()),
            Err(RecvTimeoutError::Timeout) => {
                self.is_wanted.store(false, Ordering::Release);
                Err(format!(
                    "the {} {} in {} s, and {}",
                    C::WORDS.target,
                    C::LATE,
                    DRAINED_MAX.as_secs(),
                    C::UNMOVED
                ))
            }
        }
    }
}

#[cfg(test)]
mod tests;
