// SPDX-License-Identifier: Apache-2.0
//! The turn of acts that exclude each other: a reload, an upgrade, and the short steps in which the storage or the
//! options of a disk are exchanged.
//!
//! | State | Begins | Next |
//! |---|---|---|
//! | free | at the start, and with the drop of [`HeldTurn`] | held |
//! | held | [`Turn::take`] or [`Turn::try_take`] finds it free | free |
//!
//! No owner waits for a target of a copy, or for a client: only for the requests in flight of one disk
//! ([`super::replacing::DRAIN_MAX`]), and before it for the file of its configuration ([`super::converge::STUCK`]). A
//! command that saves a disk, or removes its file, waits for the file system of the configuration without a bound. A
//! reload and the start of the daemon open the images of disks.

use super::Disks;
use crate::failure::Failure;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Maximum wait of a command for another act.
pub(super) const TURN_MAX: Duration = Duration::from_secs(10);
/// Interval of the look at the client.
const LOOK: Duration = Duration::from_millis(100);

/// The turn.
#[derive(Debug, Default)]
pub(super) struct Turn {
    held: Mutex<Option<Holder>>,
    /// It is free again.
    freed: Condvar,
}

/// The act that has the turn.
#[derive(Clone, Debug)]
pub(super) struct Holder {
    /// The act with its disk.
    act: String,
    since: Instant,
}

impl Holder {
    fn new(act: String) -> Holder {
        Holder { act, since: Instant::now() }
    }

    /// The act, in the same words as long as it lasts.
    pub(super) fn act(&self) -> &str {
        &self.act
    }

    /// The reason for which another act does not begin.
    pub(super) fn told(&self) -> String {
        format!("{} has been in progress for {} s", self.act, self.since.elapsed().as_secs())
    }
}

/// The turn, until this is dropped.
#[derive(Debug)]
pub struct HeldTurn<'a> {
    turn: &'a Turn,
}

impl Drop for HeldTurn<'_> {
    fn drop(&mut self) {
        *self.turn.lock() = None;
        self.turn.freed.notify_one();
    }
}

impl Turn {
    /// Takes the turn for an act, if it is free.
    ///
    /// # Errors
    /// The present holder.
    fn try_take(&self, act: String) -> Result<HeldTurn<'_>, Holder> {
        let mut held = self.lock();
        match &*held {
            Some(holder) => Err(holder.clone()),
            None => {
                *held = Some(Holder::new(act));
                Ok(HeldTurn { turn: self })
            }
        }
    }

    /// Takes the turn for an act. Waits until `deadline`, as long as `go_on` says so.
    ///
    /// # Errors
    /// The present holder.
    fn take(
        &self,
        act: String,
        deadline: Option<Instant>,
        go_on: &mut dyn FnMut() -> bool,
    ) -> Result<HeldTurn<'_>, Holder> {
        let mut held = self.lock();
        while let Some(holder) = &*held {
            if deadline.is_some_and(|deadline| Instant::now() >= deadline) || !go_on() {
                let holder = holder.clone();
                // The notice that this thread may have got is for another one.
                self.freed.notify_one();
                return Err(holder);
            }
            let waited = self.freed.wait_timeout(held, LOOK);
            held = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
        *held = Some(Holder::new(act));
        Ok(HeldTurn { turn: self })
    }

    fn lock(&self) -> MutexGuard<'_, Option<Holder>> {
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Disks {
    /// Lets reloads wait until the result is dropped. Waits for another act without a bound: no client waits for
    /// the start of the daemon, nor for a reload by a signal.
    pub fn turn_of_reload(&self) -> HeldTurn<'_> {
        let act = "the reload of the configuration".to_owned();
        self.turn.take(act, None, &mut || true).expect("it has no deadline")
    }

    /// As [`Disks::turn_of_reload`], for an `act` that does not wait.
    ///
    /// # Errors
    /// The act that has the turn.
    pub(super) fn try_turn(&self, act: String) -> Result<HeldTurn<'_>, Holder> {
        self.turn.try_take(act)
    }

    /// As [`Disks::turn_of_reload`], for an `act` of a client, which is refused after [`TURN_MAX`]. `what`: the command,
    /// for an error.
    ///
    /// # Errors
    /// [`Failure`] with the act that has the turn.
    pub(crate) fn turn(
        &self,
        what: &str,
        act: String,
        go_on: &mut dyn FnMut() -> bool,
    ) -> Result<HeldTurn<'_>, Failure> {
        let deadline = Instant::now() + TURN_MAX;
        self.turn.take(act, Some(deadline), go_on).map_err(|holder| {
            let remedy = "try again after it; if it lasts, check the storage that it waits for";
            Failure::run(what, holder.told(), remedy)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_turn_is_refused_with_its_holder_at_the_deadline_or_a_cancel_and_free_after_the_drop() {
        let turn = Turn::default();
        let held = turn.try_take("a snapshot of the disk a".to_owned()).unwrap();
        let soon = Instant::now() + Duration::from_millis(1);
        for (deadline, goes_on) in [(Some(soon), true), (None, false)] {
            let told = turn.take("b".to_owned(), deadline, &mut || goes_on).unwrap_err().told();
            let begin = "a snapshot of the disk a has been in progress for ";
            assert!(told.starts_with(begin) && told.ends_with(" s"), "{told}");
        }
        assert_eq!(turn.try_take("b".to_owned()).unwrap_err().act(), "a snapshot of the disk a");
        std::thread::scope(|scope| {
            let next = scope.spawn(|| turn.take("b".to_owned(), None, &mut || true).is_ok());
            drop(held);
            assert!(next.join().unwrap());
        });
        assert!(turn.try_take("c".to_owned()).is_ok());
    }
}
