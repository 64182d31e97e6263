// SPDX-License-Identifier: Apache-2.0
//! The end of a disk: its thread drains it, closes it, and leaves the table.
//!
//! A removal closes the connection and the socket at once, so that no VMM waits for a disk that does not
//! come back. Storage that hangs keeps the thread of the disk, with the memory of the guest, the image and its
//! lock: the kernel may still use all of them. A removal by force takes only the name from such a disk. It is
//! *given up* then, and goes when its storage answers.

use super::restart::After;
use super::starting::Opening;
use super::{Disks, Entry, LOOK, Row, RowState, Slot, State, kept};
use crate::backup::Cause;
use crate::events::Change;
use crate::failure::{Failure, Sort};
use crate::stop::Stop;
use std::sync::{Arc, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use vhost_user::Control;

/// Time after which a removal by force does not wait for the storage any longer.
const FORCE_AFTER: Duration = Duration::from_secs(1);

/// The removal of a disk whose storage does not answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Force {
    /// The disk stays in the table until its storage answers.
    No,
    /// The disk is given up.
    Yes,
}

/// The end of a removal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Removed {
    /// The disk is drained and closed.
    Gone,
    /// It goes when its storage answers.
    GivenUp,
}

/// The purpose of the end of a disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Purpose {
    /// The reload that waits for the end starts the disk again.
    Restart,
    /// The disk goes. A restart that waits for the same end does not happen.
    Removal,
}

/// The identity of a disk of the table: another one of its name is not it.
#[derive(Clone)]
pub(super) enum Which {
    /// It is being opened.
    Starting(Arc<Opening>),
    /// It has failed to start.
    Failed,
    /// It is served.
    Served(Arc<Stop>),
}

impl Which {
    pub(super) fn of(slot: &Slot) -> Which {
        match slot {
            Slot::Starting(opening) => Which::Starting(Arc::clone(opening)),
            Slot::Failed(_) => Which::Failed,
            Slot::Served(entry) => Which::Served(Arc::clone(&entry.stop)),
        }
    }

    fn is(&self, slot: &Slot) -> bool {
        match (self, slot) {
            (Which::Starting(this), Slot::Starting(opening)) => Arc::ptr_eq(this, opening),
            (Which::Failed, Slot::Failed(_)) => true,
            (Which::Served(this), Slot::Served(entry)) => Arc::ptr_eq(this, &entry.stop),
            _ => false,
        }
    }
}

/// A disk that was given up.
pub(super) struct GivenUp {
    pub(super) name: String,
    pub(super) entry: Box<Entry>,
}

impl GivenUp {
    pub(super) fn row(&self) -> Row {
        Row { state: RowState::GivenUp, ..self.entry.row(&self.name) }
    }
}

impl Disks {
    /// Stops a disk and waits until it is drained and closed, for a moment at least and as long as `go_on` says so.
    /// The disk goes later if its storage takes longer; by force, it leaves its name after a second. A disk that is being
    /// opened leaves its name at once.
    ///
    /// # Errors
    /// [`Failure`] if there is no such disk, or it has not gone.
    pub fn remove(
        &self,
        name: &str,
        force: Force,
        go_on: impl Fn() -> bool,
    ) -> Result<Removed, Failure> {
        let state = self.lock();
        let Some(which) = state.table.get(name).map(Which::of) else {
            return Err(no_such_disk(name));
        };
        self.remove_from(state, name, (&which, Purpose::Removal), force, go_on)
    }

    /// As [`Disks::remove`], unless another disk has the name by now.
    ///
    /// # Errors
    /// As [`Disks::remove`].
    pub(super) fn remove_this(
        &self,
        name: &str,
        which: &Which,
        purpose: Purpose,
        go_on: impl Fn() -> bool,
    ) -> Result<Removed, Failure> {
        let state = self.lock();
        match state.table.get(name).is_some_and(|slot| which.is(slot)) {
            true => self.remove_from(state, name, (which, purpose), Force::No, go_on),
            false => Err(no_such_disk(name)),
        }
    }

    fn remove_from<'a>(
        &'a self,
        mut state: MutexGuard<'a, State>,
        name: &str,
        (which, purpose): (&Which, Purpose),
        force: Force,
        go_on: impl Fn() -> bool,
    ) -> Result<Removed, Failure> {
        state.check_free(&format!("remove the disk {name}"))?;
        match which {
            Which::Starting(opening) => {
                // Before another disk has the name.
                if state.leave_opening(name, opening) && opening.has_told_failure() {
                    self.events.tell(name, &Change::Removed);
                }
                Ok(self.wait_for_left(state, name, opening))
            }
            Which::Failed => {
                state.table.remove(name);
                drop(state);
                self.events.tell(name, &Change::Removed);
                self.changed.notify_all();
                self.tell_manager();
                Ok(Removed::Gone)
            }
            Which::Served(stop) => {
                if purpose == Purpose::Removal
                    && let Some(entry) = state.served_with(stop)
                {
                    entry.after = After::Nothing;
                }
                self.remove_served(state, name, stop, force, go_on)
            }
        }
    }

    /// Waits a moment for the end of an opening whose disk was removed.
    fn wait_for_left<'a>(
        &'a self,
        mut state: MutexGuard<'a, State>,
        name: &str,
        opening: &Arc<Opening>,
    ) -> Removed {
        self.changed.notify_all();
        let begun = Instant::now();
        while state.is_left(opening) {
            let left = FORCE_AFTER.saturating_sub(begun.elapsed());
            if left.is_zero() {
                drop(state);
                tracing::warn!(
                    disk = name,
                    "removed while it is being opened; its image stays in use until its storage answers"
                );
                self.tell_manager();
                return Removed::GivenUp;
            }
            let waited = self.changed.wait_timeout(state, left);
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
        Removed::Gone
    }

    fn remove_served<'a>(
        &'a self,
        mut state: MutexGuard<'a, State>,
        name: &str,
        stop: &Arc<Stop>,
        force: Force,
        go_on: impl Fn() -> bool,
    ) -> Result<Removed, Failure> {
        let entry = state.entry(name)?;
        let (socket, parts) = (entry.socket.clone(), Arc::clone(&entry.parts));
        stop.request();
        entry.cancel_work();
        drop(state);
        // A socket without a file of this program is not this program's alone.
        if let (Some(file), Some(listening)) = (socket, &parts.front_ends) {
            file.remove();
            listening.close();
        }
        let begun = Instant::now();
        state = self.lock();
        while state.entry(name).is_ok_and(|entry| Arc::ptr_eq(&entry.stop, stop)) {
            let patience = match force {
                Force::Yes => FORCE_AFTER.saturating_sub(begun.elapsed()),
                Force::No => LOOK,
            };
            if patience.is_zero() {
                self.give_up(&mut state, name);
                return Ok(Removed::GivenUp);
            }
            // A client may hang up right after its call.
            if force == Force::No && begun.elapsed() >= LOOK && !go_on() {
                return Err(Failure::run(
                    format!("remove the disk {name} now"),
                    "its storage has not completed the requests in flight",
                    "check the storage; the disk goes as soon as they are complete, and `vhost-blk ctl remove \
                     --force` frees its name",
                ));
            }
            let waited = self.changed.wait_timeout(state, patience.min(LOOK));
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
        // Another client may have removed it by force.
        match state.served_with(stop) {
            Some(_) => Ok(Removed::GivenUp),
            None => Ok(Removed::Gone),
        }
    }

    /// Moves a served disk from the table to those that were given up.
    fn give_up(&self, state: &mut State, name: &str) {
        let Some(Slot::Served(entry)) = state.table.remove(name) else { return };
        tracing::warn!(
            disk = name,
            "given up: its requests are not complete; until they are, its image stays in use, and the storage \
             may read and write the memory of its guest"
        );
        entry.events.end(&Change::GivenUp);
        entry.health.trace(None);
        self.traces.end(name);
        state.given_up.push(GivenUp { name: name.to_owned(), entry });
        self.changed.notify_all();
    }

    /// Removes a disk whose thread has ended, and its socket file before:
    /// [`Disks::remove_socket_files`] finds each file that is still there.
    fn leave(self: &Arc<Self>, name: &str, stop: &Stop) {
        let mut state = self.lock();
        let Some(entry) = state.served_with(stop) else { return };
        let (file, backup) = (entry.socket.clone(), Arc::clone(&entry.backup));
        // From here on: the end of a copy may wait for its target, and the bitmaps wait for that end.
        state.closing += 1;
        drop(state);
        while backup.cancel(Cause::Disk).is_some_and(|it| backup.wait_for_end(&it, LOOK).is_none())
        {
        }
        if let Some(file) = file {
            file.remove();
        }
        self.end_job(stop);
        let mut state = self.lock();
        let kept = state.served_with(stop).map(|it| (it.image.clone(), Arc::clone(&it.layers)));
        drop(state);
        if let Some((Some(image), layers)) = kept {
            kept::keep(&image, &layers);
            // Before the disk leaves the table: the program may end when the last one has left.
            image.qcow2.iter().for_each(|qcow2| qcow2.close());
        }
        let mut state = self.lock();
        state.closing -= 1;
        let gone = state.take(stop);
        // Under one lock: no other thread finds the name free in between.
        let late = match &gone {
            Some((entry, false)) => state.follow(name, &entry.after),
            _ => None,
        };
        match &gone {
            Some((_, true)) => {
                tracing::info!(disk = name, "the disk that was given up has gone");
                self.events.tell(name, &Change::Released);
            }
            Some((entry, false)) => {
                entry.events.end(&Change::Removed);
                // The end of the process has a message of its own.
                if !state.stopping {
                    self.traces.end(name);
                }
            }
            None => {}
        }
        drop(state);
        drop(gone); // without the lock
        if let Some(failure) = late {
            tracing::error!(disk = name, reason = %failure, "configuration");
            self.events.tell(name, &Change::StartFailed(failure.to_string()));
            self.retry_failed();
        }
        self.changed.notify_all();
        self.tell_manager();
    }
}

/// The answer to a command for a disk that does not exist.
pub(super) fn no_such_disk(name: &str) -> Failure {
    let (why, remedy) = ("there is none of this name", "see vhost-blk ctl list");
    Failure { sort: Sort::NoSuchDisk, ..Failure::run(format!("find the disk {name}"), why, remedy) }
}

/// The end of a disk's thread, which has dropped the device: the image is unlocked.
pub(super) struct Served {
    pub(super) disks: Arc<Disks>,
    pub(super) name: String,
    pub(super) stop: Arc<Stop>,
}

impl Drop for Served {
    fn drop(&mut self) {
        self.disks.leave(&self.name, &self.stop);
    }
}

impl State {
    /// Takes the disk of this stop from the table, or from those that were given up (`true`).
    fn take(&mut self, stop: &Stop) -> Option<(Box<Entry>, bool)> {
        let is_it = |entry: &Entry| std::ptr::eq(&*entry.stop, stop);
        if let Some(at) = self.given_up.iter().position(|disk| is_it(&disk.entry)) {
            return Some((self.given_up.remove(at).entry, true));
        }
        let is_served = |slot: &Slot| matches!(slot, Slot::Served(entry) if is_it(entry));
        let name = self.table.iter().find(|(_, slot)| is_served(slot))?.0.clone();
        match self.table.remove(&name) {
            Some(Slot::Served(entry)) => Some((entry, false)),
            _ => None,
        }
    }

    /// Name of a disk that was given up.
    pub(super) fn first_given_up(&self) -> Option<&str> {
        let left = self.left.first().map(|left| &*left.name);
        self.given_up.first().map(|disk| &*disk.name).or(left)
    }

    /// The disk of this stop, also one that was given up.
    pub(super) fn served_with(&mut self, stop: &Stop) -> Option<&mut Entry> {
        self.all_served().find(|entry| std::ptr::eq(&*entry.stop, stop))
    }

    /// The served disks, with those that were given up.
    pub(super) fn all_served(&mut self) -> impl Iterator<Item = &mut Entry> {
        let served = self.table.values_mut().filter_map(|slot| match slot {
            Slot::Served(entry) => Some(&mut **entry),
            Slot::Starting(_) | Slot::Failed(_) => None,
        });
        served.chain(self.given_up.iter_mut().map(|disk| &mut *disk.entry))
    }

    /// The disk with this device, also one that was given up. Another disk may have its name by now.
    pub(super) fn with_device(&mut self, control: &Arc<Control>) -> Option<&mut Entry> {
        self.all_served().find(|entry| Arc::ptr_eq(&entry.control, control))
    }

    /// The same, unless it was given up.
    pub(super) fn in_table(&mut self, control: &Arc<Control>) -> Option<&mut Entry> {
        self.table.values_mut().find_map(|slot| match slot {
            Slot::Served(entry) if Arc::ptr_eq(&entry.control, control) => Some(&mut **entry),
            _ => None,
        })
    }
}
