// SPDX-License-Identifier: Apache-2.0
//! The restart of a disk of the directory with other options: its end, and its opening after that.
//!
//! The name of the disk is never free in between, so that a removal always finds the disk: it ends the restart.
//!
//! | State of the name | Begins | Next |
//! |---|---|---|
//! | served | | stopping, if nothing would be ended |
//! | stopping, then [`After::Opening`] | the restart requests the stop | starting, at the end of the disk; [`After::Failed`], if the disk is late; [`After::Nothing`], by a removal |
//! | stopping, then [`After::Failed`] | the restart waits no longer, or the reload that adds a removed disk again | failed, at the end of the disk; [`After::Nothing`], by a removal |
//! | starting | the thread of the disk has ended | served, with the new options or else the old ones; failed; absent, by a removal |

use super::live::Live;
use super::reload::{Known, Outcome, until};
use super::removal::{Purpose, Which};
use super::starting::{Failed, Opening, Reservation};
use super::{Disks, Origin, Slot, State, changing, saving};
use crate::disk::LockWait;
use crate::disks::changing::DISK_MAX;
use crate::failure::{Failure, Sort};
use crate::options::DiskArgs;
use std::sync::Arc;
use std::time::{Instant, SystemTime};
use vhost_user::Status;

/// The next state of the name of a served disk, after its end.
pub(super) enum After {
    /// Its name is free.
    Nothing,
    /// A restart has its name, and opens it.
    Opening(Arc<Opening>),
    /// It is listed as failed, and tried at once: no restart waits for its end any longer.
    Failed,
}

impl Disks {
    /// Starts a disk again with other options, or with the old ones if it does not start. A disk that was removed
    /// meanwhile stays away.
    pub(super) fn restart(
        self: &Arc<Self>,
        name: &str,
        known: &Known,
        new: DiskArgs,
    ) -> Result<Outcome, Failure> {
        let what = format!("restart the disk {name} with its changed options");
        let status = changing::status(&what, &known.control)?;
        if status.paused || status.health.halt.is_some() {
            let why = "it is paused or halted, and a restart would end that";
            return Err(Failure::run(what, why, "resume it, and reload again"));
        }
        let reservation = Arc::new(self.stop_for_restart(what, name, known, &new)?);
        self.wait_for_end(name, known)?;
        let opened = self.open_again(&reservation, new, known.args.clone());
        if !matches!(opened, Ok(Outcome::Removed)) {
            self.keep_live(name, known, &status);
        }
        opened
    }

    /// Gives a disk that has started again the options that commands had changed and that its file leaves as they were.
    fn keep_live(&self, name: &str, known: &Known, status: &Status) {
        let (started, shares_group) = {
            let state = self.lock();
            let started = match state.table.get(name) {
                Some(Slot::Served(entry)) if entry.origin == Origin::Directory => Known::of(entry),
                _ => return,
            };
            let shares_group = state.shares_group(name, &started.args);
            (started, shares_group)
        };
        // Apart: a front-end that has connected meanwhile refuses one cache mode.
        for part in [Live::Limits, Live::Errors, Live::Cache] {
            let live = Kept { started: &started.args, before: &known.args, shares_group };
            let Some((old, new)) = live.part(part, status) else { continue };
            let Err(failure) = changing::change(name, &started.control, &old, &new) else {
                continue;
            };
            tracing::warn!(%failure, "options that commands had changed have the values of the file again");
            if let Some(entry) = self.lock().in_table(&started.control) {
                let notice = format!("options that commands had changed are lost: {failure}");
                entry.notices.push(notice);
            }
        }
    }

    /// Requests the stop of a disk, unless that would end something. The result has its name after its end. Nothing
    /// begins in between: the table is locked.
    fn stop_for_restart(
        self: &Arc<Self>,
        what: String,
        name: &str,
        known: &Known,
        new: &DiskArgs,
    ) -> Result<Reservation, Failure> {
        let mut state = self.lock();
        state.check_free(&what)?;
        let Some(entry) = state.in_table(&known.control) else {
            let why = "it has gone meanwhile";
            return Err(Failure::run(what, why, "see vhost-blk ctl list, and reload again"));
        };
        if let Some(work) = entry.work() {
            return Err(Failure::told(what, work));
        }
        if entry.args != known.args {
            let why = "a command has changed its image meanwhile";
            return Err(Failure::run(what, why, "reload again"));
        }
        if !entry.stop.request_if_idle() {
            return Err(Failure::run(
                what,
                "a front-end is connected",
                "stop its VMM and reload again; limits, cache, on-error, on-read-error and io-timeout change \
                 without a restart",
            ));
        }
        let opening = Arc::new(Opening::of_restart(new.clone()));
        entry.after = After::Opening(Arc::clone(&opening));
        Ok(Reservation::of(self, name, &opening))
    }

    /// Waits until a disk that restarts has ended. After that it is tried as a failed one.
    fn wait_for_end(&self, name: &str, known: &Known) -> Result<(), Failure> {
        let which = Which::Served(Arc::clone(&known.stop));
        match self.remove_this(name, &which, Purpose::Restart, until(DISK_MAX)) {
            Ok(_) => Ok(()),
            // It has gone by itself.
            Err(failure) if failure.sort == Sort::NoSuchDisk => Ok(()),
            Err(failure) => self.leave_restart(known, failure),
        }
    }

    /// Lets a disk that is stopping be tried as a failed one after its end.
    pub(super) fn start_later(&self, known: &Known) {
        if let Some(entry) = self.lock().in_table(&known.control) {
            entry.after = After::Failed;
        }
    }

    /// Lets a disk that has not ended be tried as a failed one after its end. It may have ended meanwhile.
    fn leave_restart(&self, known: &Known, failure: Failure) -> Result<(), Failure> {
        let mut state = self.lock();
        let Some(entry) = state.in_table(&known.control) else { return Ok(()) };
        if matches!(entry.after, After::Nothing) {
            return Err(failure); // it was removed
        }
        entry.after = After::Failed;
        let why = format!("{}; it starts with the options of its file after that", failure.why);
        Err(Failure { why, ..failure })
    }

    /// Opens a disk that has ended, which is listed as failed if it starts neither with the new options nor with the
    /// old ones.
    fn open_again(
        self: &Arc<Self>,
        reservation: &Arc<Reservation>,
        new: DiskArgs,
        old: DiskArgs,
    ) -> Result<Outcome, Failure> {
        let Err(failure) = self.open_of_directory(reservation, new, LockWait::from_now()) else {
            return Ok(Outcome::Restarted);
        };
        if reservation.check().is_err() && !self.is_stopping() {
            return Ok(Outcome::Removed);
        }
        reservation.tell_failure(&failure);
        let opened = self.open_of_directory(reservation, old.clone(), LockWait::from_now());
        if let Err(of_old) = opened {
            tracing::error!(failure = %of_old, "the disk does not start with its old options either");
            reservation.fail(Some(old), &of_old);
        }
        Err(failure)
    }
}

impl State {
    /// Returns whether another served disk is of the same group by its options.
    fn shares_group(&self, name: &str, args: &DiskArgs) -> bool {
        let is_other = |(other, slot): (&String, &Slot)| match slot {
            Slot::Served(entry) => other != name && entry.args.limit_group == args.limit_group,
            Slot::Starting(_) | Slot::Failed(_) => false,
        };
        args.limit_group.is_some() && self.table.iter().any(is_other)
    }

    /// Gives the name of a disk that has ended to what follows it. Returns the failure of one that is listed as failed.
    pub(super) fn follow(&mut self, name: &str, after: &After) -> Option<Failure> {
        if self.stopping {
            return None;
        }
        match after {
            After::Nothing => None,
            After::Opening(opening) => {
                self.table.insert(name.to_owned(), Slot::Starting(Arc::clone(opening)));
                None
            }
            After::Failed => Some(self.list_late(name)),
        }
    }

    /// Lists a disk of the directory as failed that has ended too late for its restart, and returns the failure. It is
    /// tried at once.
    fn list_late(&mut self, name: &str) -> Failure {
        let failure = Failure::run(
            format!("start the disk {name} again"),
            "its requests in flight were complete too late",
            "check its storage; the disk is tried again",
        );
        let (since, next) = (SystemTime::now(), Instant::now());
        let failed = Failed { args: None, failure: failure.clone(), since, tries: 1, next };
        self.table.insert(name.to_owned(), Slot::Failed(Box::new(failed)));
        failure
    }
}

/// The options of a disk that has started again.
struct Kept<'a> {
    started: &'a DiskArgs,
    /// Those before.
    before: &'a DiskArgs,
    /// Its group has other disks: the start of this disk has not changed the limits of the group.
    shares_group: bool,
}

impl Kept<'_> {
    /// The change of a part that the disk needs: from the first options to the second ones. `status`: that of before.
    fn part(&self, part: Live, status: &Status) -> Option<(DiskArgs, DiskArgs)> {
        let Kept { started, before, shares_group } = *self;
        let has_changed = part.put(started, before.clone()) != *before;
        if part == Live::Limits && shares_group {
            let limit_group = started.limit_group.clone();
            let none = || DiskArgs { limit_group, ..started.without_limits() };
            return has_changed.then(|| (none(), started.clone()));
        }
        if has_changed {
            return None;
        }
        let present = saving::present(before.clone(), status);
        let kept = part.put(&present, started.clone());
        (kept != *started).then(|| (started.clone(), kept))
    }
}

#[cfg(test)]
mod tests;
