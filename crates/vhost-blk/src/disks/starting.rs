// SPDX-License-Identifier: Apache-2.0
//! The start of a disk. Its name is taken while a thread opens it, and a disk of the configuration directory keeps
//! its name when that fails. The states are those of [`super`]; all of them change under the lock of the table.
//!
//! A removal takes the name from a disk that is being opened. The opening is *left* to its thread then: it may
//! hang, and drops the disk when it comes to its end.

use super::removal::Served;
use super::{DISKS_MAX, Disks, Entry, Mode, Origin, Row, RowState, Slot, State};
use crate::events::Change;
use crate::failure::{Failure, Sort};
use crate::notify;
use crate::options::DiskArgs;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant, SystemTime};

/// Time until the second try of a disk of the directory that has failed. Each further wait is twice as long.
const RETRY_FIRST: Duration = Duration::from_secs(1);
/// Maximum time between two tries.
const RETRY_MAX: Duration = Duration::from_secs(300);

/// The opening of a disk. Its address is its identity.
pub(super) struct Opening {
    /// Its options; `None`: its file is about to be read.
    args: Option<DiskArgs>,
    origin: Origin,
    since: SystemTime,
    /// The end of the try before.
    before: Option<Failed>,
    /// Subscribers know of a failure: of a try before, or with other options. It orders nothing.
    has_told_failure: AtomicBool,
}

/// The end of a try to start a disk of the directory.
#[derive(Clone)]
pub(super) struct Failed {
    /// Its options; `None`: its file cannot be used.
    pub(super) args: Option<DiskArgs>,
    pub(super) failure: Failure,
    /// The end of the first try.
    pub(super) since: SystemTime,
    /// Number of tries.
    pub(super) tries: u32,
    /// The next try.
    pub(super) next: Instant,
}

/// The opening of a disk that was removed meanwhile.
pub(super) struct Left {
    pub(super) name: String,
    opening: Arc<Opening>,
}

/// The start of a disk that is not served.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Start {
    /// The end of the last try; `None`: there was none.
    pub failure: Option<Failure>,
    /// The begin of the opening, or the end of the first try that has failed.
    pub since: SystemTime,
    /// Number of tries that have failed.
    pub tries: u32,
}

/// A name that is taken for a disk; free again after the drop.
pub(super) struct Reservation {
    disks: Arc<Disks>,
    pub(super) name: String,
    opening: Arc<Opening>,
}

impl Opening {
    /// An opening that begins now.
    fn new(args: Option<DiskArgs>, origin: Origin, before: Option<Failed>) -> Opening {
        let has_told_failure = before.is_some().into();
        Opening { args, origin, since: SystemTime::now(), before, has_told_failure }
    }

    /// The opening of a disk of the directory that ends before it.
    pub(super) fn of_restart(args: DiskArgs) -> Opening {
        Opening::new(Some(args), Origin::Directory, None)
    }

    fn row(&self, name: &str, state: RowState) -> Row {
        let start = Start {
            failure: self.before.as_ref().map(|failed| failed.failure.clone()),
            since: self.since,
            tries: self.before.as_ref().map_or(0, |failed| failed.tries),
        };
        Row::of_start(name, self.args.clone(), self.origin, state, start)
    }

    pub(super) fn origin(&self) -> Origin {
        self.origin
    }

    /// Returns whether subscribers know of a failure of the disk.
    pub(super) fn has_told_failure(&self) -> bool {
        self.has_told_failure.load(Ordering::Relaxed)
    }
}

impl Left {
    pub(super) fn row(&self) -> Row {
        self.opening.row(&self.name, RowState::GivenUp)
    }
}

impl Failed {
    fn start(&self) -> Start {
        let Failed { failure, since, tries, .. } = self;
        Start { failure: Some(failure.clone()), since: *since, tries: *tries }
    }

    fn row(&self, name: &str) -> Row {
        Row::of_start(name, self.args.clone(), Origin::Directory, RowState::Failed, self.start())
    }

    /// The answer to a command for the disk.
    pub(super) fn refusal(&self, name: &str) -> Failure {
        let Failure { what, why, remedy, .. } = &self.failure;
        let why = format!("it has failed to start: cannot {what}: {why}");
        Failure {
            sort: Sort::NoSuchDisk,
            ..Failure::run(format!("find the disk {name}"), why, remedy)
        }
    }
}

impl Row {
    fn of_start(
        name: &str,
        args: Option<DiskArgs>,
        origin: Origin,
        state: RowState,
        start: Start,
    ) -> Row {
        Row {
            name: name.to_owned(),
            args,
            origin,
            state,
            start: Some(start),
            unmapped_bytes: 0,
            mirror: None,
            loss: None,
            jobs: Vec::new(),
            status: None,
        }
    }
}

impl Slot {
    /// The row of a disk that is not served.
    pub(super) fn start_row(&self, name: &str) -> Option<Row> {
        match self {
            Slot::Starting(opening) => Some(opening.row(name, RowState::Starting)),
            Slot::Failed(failed) => Some(failed.row(name)),
            Slot::Served(_) => None,
        }
    }

    pub(super) fn origin(&self) -> Origin {
        match self {
            Slot::Starting(opening) => opening.origin(),
            Slot::Failed(_) => Origin::Directory,
            Slot::Served(entry) => entry.origin,
        }
    }

    /// Returns whether a disk that has failed is tried again.
    pub(super) fn is_tried_again(&self) -> bool {
        matches!(self, Slot::Starting(opening) if opening.before.is_some())
    }

    pub(super) fn is_opening(&self, opening: &Arc<Opening>) -> bool {
        matches!(self, Slot::Starting(it) if Arc::ptr_eq(it, opening))
    }
}

impl Disks {
    /// Takes a name that is free. A disk of the directory also takes its own, after a try that has failed.
    pub(super) fn reserve(
        self: &Arc<Self>,
        name: &str,
        args: Option<&DiskArgs>,
        origin: Origin,
    ) -> Result<Reservation, Failure> {
        let mut state = self.lock();
        let what = format!("add the disk {name}");
        state.check_free(&what)?;
        let at_limit = format!("there are {DISKS_MAX} disks, as many as one process serves");
        let is_full = state.table.len() + state.given_up.len() + state.left.len() >= DISKS_MAX;
        let (why, remedy) = match state.table.get(name) {
            _ if state.stopping => ("the daemon is about to end", "start it again"),
            Some(Slot::Starting(_)) => {
                ("a disk of this name is being added", "choose another name")
            }
            Some(Slot::Served(entry)) if entry.stop.asked() => (
                "a disk of this name is being removed",
                "wait until it is gone, or check its storage",
            ),
            Some(Slot::Served(_)) => {
                ("there is a disk of this name", "choose another name, or remove that disk")
            }
            Some(Slot::Failed(_)) if origin == Origin::Command => (
                "the directory of configuration files has a disk of this name, which does not start",
                "choose another name, or remove that disk and its file",
            ),
            None if is_full => (&*at_limit, "start another daemon"),
            _ => {
                let before = match state.table.remove(name) {
                    Some(Slot::Failed(failed)) => Some(*failed),
                    _ => None,
                };
                let opening = Arc::new(Opening::new(args.cloned(), origin, before));
                state.table.insert(name.to_owned(), Slot::Starting(Arc::clone(&opening)));
                let (disks, name) = (Arc::clone(self), name.to_owned());
                return Ok(Reservation { disks, name, opening });
            }
        };
        Err(Failure::run(what, why, remedy))
    }

    /// The start of a disk that is not served, or of the only one.
    pub fn start_of(&self, wanted: Option<&str>) -> Option<Row> {
        let state = self.lock();
        let name = match wanted {
            None if state.table.len() == 1 => state.table.keys().next()?,
            wanted => wanted?,
        };
        state.table.get(name)?.start_row(name)
    }

    /// Waits until a disk is not being opened any more. Returns whether that was so before the deadline.
    pub(super) fn wait_for_opening(&self, name: &str, deadline: Instant) -> bool {
        let mut state = self.lock();
        while matches!(state.table.get(name), Some(Slot::Starting(_))) {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() || state.stopping {
                return false;
            }
            let waited = self.changed.wait_timeout(state, left);
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
        true
    }

    /// Lists a disk of the directory as failed. Returns whether this is news.
    pub(super) fn note_failed(self: &Arc<Self>, name: &str, failure: &Failure) -> bool {
        let reservation = self.reserve(name, None, Origin::Directory);
        reservation.is_ok_and(|it| it.fail(None, failure))
    }

    /// Tells the service manager from now on of the disks, first with `first` such as `READY=1`.
    pub fn tell_manager_from_now(&self, first: &str) {
        self.tells_manager.store(true, Ordering::Relaxed);
        match self.mode {
            Mode::One => {
                notify::notify(first);
            }
            Mode::Many(_) => self.tell(Some(first)),
        }
    }

    /// Tells the service manager the number of disks in each state, if that has changed.
    pub(super) fn tell_manager(&self) {
        if self.tells_manager.load(Ordering::Relaxed) && self.mode != Mode::One {
            self.tell(None);
        }
    }

    fn tell(&self, first: Option<&str>) {
        // Locked until the message is sent: the last message has the last numbers.
        let mut told = self.told_manager.lock().unwrap_or_else(PoisonError::into_inner);
        let status = self.lock().counted();
        let is_told = match first {
            Some(first) => notify::notify(&format!("{first}\nSTATUS={status}")),
            None if *told != status => notify::notify(&format!("STATUS={status}")),
            None => return,
        };
        if is_told {
            *told = status;
        }
    }
}

impl State {
    /// The number of disks in each state, in words.
    fn counted(&self) -> String {
        let (mut served, mut starting, mut failed) = (0, 0, 0);
        for slot in self.table.values() {
            *match slot {
                Slot::Served(_) => &mut served,
                Slot::Starting(_) => &mut starting,
                Slot::Failed(_) => &mut failed,
            } += 1;
        }
        let noun = if served == 1 { "disk is" } else { "disks are" };
        let mut text = format!("{served} {noun} served");
        for (count, state) in [(starting, "starting"), (failed, "failed")] {
            if count > 0 {
                text += &format!(", {count} {state}");
            }
        }
        text
    }

    /// Takes the name from a disk that is being opened. Returns whether it had the name.
    pub(super) fn leave_opening(&mut self, name: &str, opening: &Arc<Opening>) -> bool {
        let has_name = self.free_name(name, opening);
        if has_name {
            self.left.push(Left { name: name.to_owned(), opening: Arc::clone(opening) });
        }
        has_name
    }

    /// Returns whether an opening has the name.
    fn has_name(&self, name: &str, opening: &Arc<Opening>) -> bool {
        self.table.get(name).is_some_and(|slot| slot.is_opening(opening))
    }

    /// Frees the name of an opening. Returns whether it had the name.
    fn free_name(&mut self, name: &str, opening: &Arc<Opening>) -> bool {
        let has_name = self.has_name(name, opening);
        if has_name {
            self.table.remove(name);
        }
        has_name
    }

    /// Returns whether the thread of a removed disk still opens it.
    pub(super) fn is_left(&self, opening: &Arc<Opening>) -> bool {
        self.left.iter().any(|left| Arc::ptr_eq(&left.opening, opening))
    }
}

/// The failure of an opening whose disk was removed meanwhile.
pub(super) fn removed_while_opening(name: &str) -> Failure {
    let why = "it was removed while it was being opened";
    Failure::run(format!("add the disk {name}"), why, "add it again")
}

impl Reservation {
    /// The reservation of a name that is given to the opening at the end of a disk.
    pub(super) fn of(disks: &Arc<Disks>, name: &str, opening: &Arc<Opening>) -> Reservation {
        let (disks, name, opening) = (Arc::clone(disks), name.to_owned(), Arc::clone(opening));
        Reservation { disks, name, opening }
    }

    /// The opening that has the name.
    pub(super) fn opening(&self) -> Arc<Opening> {
        Arc::clone(&self.opening)
    }

    /// Refuses to go on after a removal, or at the end of the process.
    pub(super) fn check(&self) -> Result<(), Failure> {
        self.check_in(&self.disks.lock())
    }

    fn check_in(&self, state: &State) -> Result<(), Failure> {
        match state.table.get(&self.name) {
            _ if state.stopping => {
                let what = format!("add the disk {}", self.name);
                Err(Failure::run(what, "the daemon is about to end", "start it again"))
            }
            Some(slot) if slot.is_opening(&self.opening) => Ok(()),
            _ => Err(removed_while_opening(&self.name)),
        }
    }

    /// Enters the disk in the table. It leaves it when the result is dropped.
    pub(super) fn enter(&self, entry: Entry) -> Result<Served, Failure> {
        let (disks, name) = (Arc::clone(&self.disks), self.name.clone());
        let (stop, events) = (Arc::clone(&entry.stop), Arc::clone(&entry.events));
        let mut state = disks.lock();
        if let Err(failure) = self.check_in(&state) {
            drop(state);
            return Err(failure);
        }
        state.table.insert(name.clone(), Slot::Served(Box::new(entry)));
        drop(state);
        disks.adopt_bounds();
        events.tell(&Change::Added);
        disks.changed.notify_all();
        disks.tell_manager();
        Ok(Served { disks, name, stop })
    }

    /// Tells subscribers of a failure.
    pub(super) fn tell_failure(&self, failure: &Failure) {
        self.opening.has_told_failure.store(true, Ordering::Relaxed);
        self.disks.events.tell(&self.name, &Change::StartFailed(failure.to_string()));
    }

    /// Ends the tries of a disk whose file has gone, unless it was removed meanwhile.
    pub(super) fn give_back(&self) {
        let mut state = self.disks.lock();
        if state.free_name(&self.name, &self.opening) {
            tracing::info!(disk = self.name, "the file of the failed disk has gone");
            self.disks.events.tell(&self.name, &Change::Removed);
        }
    }

    /// Lists the disk of the directory as failed, until its next try. Returns whether the failure is another one than
    /// that of the try before.
    pub(super) fn fail(&self, args: Option<DiskArgs>, failure: &Failure) -> bool {
        let before = self.opening.before.as_ref();
        let (since, tries) = match before {
            Some(before) => (before.since, before.tries + 1),
            None => (SystemTime::now(), 1),
        };
        let next = Instant::now() + pause_after(tries);
        let failed = Failed { args, failure: failure.clone(), since, tries, next };
        let mut state = self.disks.lock();
        // After a removal the name may be that of another disk.
        if state.stopping || !state.has_name(&self.name, &self.opening) {
            return true;
        }
        state.table.insert(self.name.clone(), Slot::Failed(Box::new(failed)));
        drop(state);
        let is_new = before.is_none_or(|before| before.failure != *failure);
        if is_new {
            self.tell_failure(failure);
        }
        self.disks.changed.notify_all();
        self.disks.tell_manager();
        self.disks.retry_failed();
        is_new
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        let mut state = self.disks.lock();
        // The disk may have gone already, and the name may be that of another reservation.
        state.free_name(&self.name, &self.opening);
        state.left.retain(|left| !Arc::ptr_eq(&left.opening, &self.opening));
        drop(state);
        self.disks.changed.notify_all();
        self.disks.tell_manager();
    }
}

/// The time from the end of a try to the next one.
fn pause_after(tries: u32) -> Duration {
    let factor = 1_u32.checked_shl(tries.saturating_sub(1)).unwrap_or(u32::MAX);
    RETRY_FIRST.saturating_mul(factor).min(RETRY_MAX)
}

#[cfg(test)]
pub(super) mod tests;
