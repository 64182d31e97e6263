// SPDX-License-Identifier: Apache-2.0
//! A block device that disappears below a running disk, and the device that comes back at its path.
//!
//! The lock of the table guards the state of the device of a disk:
//!
//! | Device | Begins | Requests | Ends |
//! |---|---|---|---|
//! | present | the disk opens it, or gets it | are served | gone |
//! | gone | a look finds that it was removed, or that it fails and its path leads to another one | fail, or halt the disk | present: it answers again, or the disk goes on with the one at its path; refused |
//! | refused | the device at the path is not that of the disk, or the disk cannot have it now: the reason | the same | the same; gone: no device is at the path |
//!
//! A uevent, a failed request and a resume ask for a look. One thread looks at a disk at a time; it stays while
//! the device is gone, and exchanges it for the one at the path (`exchange`).

pub(super) mod device;
mod exchange;

use super::{Disks, Entry, Slot, growth};
use crate::events::Change;
use crate::failure::Failure;
use device::Device;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant, SystemTime};
use vhost_user::Control;

/// Interval of the looks at the path of a device that is gone: udev makes links after the kernel's message.
const LOOK: Duration = Duration::from_millis(500);
/// Longest wait of a resume for a look. The path may hang.
const RESUME_MAX: Duration = Duration::from_secs(5);
/// The reason while no device is at the path.
const GONE: &str = "its block device has gone; bring it back";

/// The device of a disk.
#[derive(Default)]
pub(super) struct Watch {
    /// `None`: the disk is on no block device, or on one that its path does not lead to.
    device: Option<Device>,
    loss: Option<Loss>,
    /// A thread looks at it.
    is_followed: bool,
    /// Number of the looks that were wanted.
    wanted: u64,
    /// The last wanted look that is done.
    done: u64,
}

/// The loss of a device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Loss {
    /// Time at which it was found.
    pub since: SystemTime,
    /// The reason for which the disk has no device, with the remedy.
    pub reason: String,
}

/// The result of a look.
#[derive(Debug, PartialEq, Eq)]
enum Found {
    /// The device of the disk answers.
    Present,
    /// It is gone, and so is the one at its path.
    Gone,
    /// The disk cannot have the device at its path, for this reason.
    Refused(String),
}

/// Names that wait for a look. A disk whose name finds no room sends it again at its next failure, a second later.
const FAILURES_MAX: usize = 256;

/// Names of disks whose storage has failed, from the threads of the data plane.
pub(super) struct Failures {
    names: SyncSender<String>,
    /// Locked by the thread that reads them.
    unread: Arc<Mutex<Receiver<String>>>,
}

impl Default for Failures {
    fn default() -> Self {
        let (names, unread) = sync_channel(FAILURES_MAX);
        Failures { names, unread: Arc::new(Mutex::new(unread)) }
    }
}

impl Failures {
    /// The end for the threads of the data plane. Without a disk on a block device nothing reads the names.
    pub(super) fn names(&self) -> SyncSender<String> {
        self.names.clone()
    }
}

impl Watch {
    /// The watch of a disk with this device.
    pub(super) fn of(device: Option<Device>) -> Watch {
        Watch { device, ..Watch::default() }
    }

    /// Replaces the device, after an exchange of the storage.
    pub(super) fn replace(&mut self, device: Option<Device>) {
        self.device = device;
    }

    pub(super) fn loss(&self) -> Option<&Loss> {
        self.loss.as_ref()
    }
}

/// Looks at the devices of disks whose storage fails, until the process ends. One thread does.
///
/// # Errors
/// [`Failure`] if no thread can be started.
pub(super) fn follow_failures(disks: &Arc<Disks>) -> Result<(), Failure> {
    let (unread, of_thread) = (Arc::clone(&disks.failures.unread), Arc::clone(disks));
    let body = move || {
        let Ok(names) = unread.try_lock() else { return };
        for name in names.iter() {
            of_thread.look_at_device(&name);
        }
    };
    let spawned = thread::Builder::new().name("devices".into()).spawn(body);
    spawned.map(drop).map_err(|error| {
        Failure::run(
            "watch the device of the disk",
            error,
            "raise the limit on threads (ulimit -u)",
        )
    })
}

impl Disks {
    /// Wants a look at the device of a disk. Returns its number; `None`: there is none to look at.
    fn look_at_device(self: &Arc<Self>, name: &str) -> Option<u64> {
        let mut state = self.lock();
        let Some(Slot::Served(entry)) = state.table.get_mut(name) else { return None };
        let watch = &mut entry.watch;
        watch.device.as_ref()?;
        watch.wanted += 1;
        let number = watch.wanted;
        if watch.is_followed {
            drop(state);
            self.changed.notify_all();
            return Some(number);
        }
        let (disks, control) = (Arc::clone(self), Arc::clone(&entry.control));
        let follower = Follower { disks, name: name.to_owned(), control };
        let spawned =
            thread::Builder::new().name("lost-device".into()).spawn(move || follower.run());
        match spawned {
            Ok(_) => watch.is_followed = true,
            Err(error) => tracing::warn!(disk = name, %error, "its device cannot be looked at"),
        }
        watch.is_followed.then_some(number)
    }

    /// Looks at the devices of the disks on a device that the kernel has removed or changed.
    pub(super) fn device_changed(self: &Arc<Self>, is_it: impl Fn((u32, u32)) -> bool) {
        let of_entry = |(name, slot): (&String, &Slot)| match slot {
            Slot::Served(entry) if entry.device.is_some_and(&is_it) => Some(name.clone()),
            _ => None,
        };
        let names: Vec<_> = self.lock().table.iter().filter_map(of_entry).collect();
        for name in names {
            self.look_at_device(&name);
        }
    }

    /// The loss of the device of a disk.
    ///
    /// # Errors
    /// [`Failure`] if there is no such disk.
    pub fn loss(&self, name: &str) -> Result<Option<Loss>, Failure> {
        Ok(self.lock().entry(name)?.watch.loss().cloned())
    }

    /// Exchanges the device of a halted disk for the one at its path, if it is gone. Waits as long as `go_on` says so.
    ///
    /// # Errors
    /// [`Failure`] if it cannot have that one: a resume would halt it again.
    pub fn before_resume(
        self: &Arc<Self>,
        name: &str,
        go_on: impl Fn() -> bool,
    ) -> Result<(), Failure> {
        let is_affected = |entry: &Entry| entry.health.is_halted() || entry.watch.loss.is_some();
        if !self.lock().entry(name).is_ok_and(is_affected) {
            return Ok(());
        }
        let Some(number) = self.look_at_device(name) else { return Ok(()) };
        let deadline = Instant::now() + RESUME_MAX;
        let mut state = self.lock();
        while state.entry(name).is_ok_and(|entry| entry.watch.done < number)
            && Instant::now() < deadline
            && go_on()
        {
            let waited = self.changed.wait_timeout(state, LOOK);
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
        match state.entry(name).ok().and_then(|entry| entry.watch.loss.as_ref()) {
            None => Ok(()),
            Some(loss) => Err(Failure::told(format!("resume the disk {name}"), &loss.reason)),
        }
    }
}

/// Looks at the device of a disk while it is gone.
struct Follower {
    disks: Arc<Disks>,
    name: String,
    control: Arc<Control>,
}

impl Follower {
    fn run(&self) {
        while let Some(number) = self.begin() {
            match self.look() {
                Some(found) => self.end(number, found),
                None => thread::sleep(LOOK),
            }
        }
    }

    /// Waits until a look is due, and returns its number. `None`: none is due, and this thread ends.
    fn begin(&self) -> Option<u64> {
        let deadline = Instant::now() + LOOK;
        let mut state = self.disks.lock();
        loop {
            let entry = state.with_device(&self.control)?;
            let watch = &mut entry.watch;
            if entry.stop.asked() || watch.wanted == watch.done && watch.loss.is_none() {
                watch.is_followed = false;
                return None;
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if watch.wanted > watch.done || left.is_zero() {
                return Some(watch.wanted);
            }
            let waited = self.disks.changed.wait_timeout(state, left);
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Notes the result of a look, and tells what is new.
    fn end(&self, number: u64, found: Found) {
        let mut state = self.disks.lock();
        if let Some(entry) = state.with_device(&self.control) {
            entry.watch.done = number;
            entry.note(found);
        }
        drop(state);
        self.disks.changed.notify_all();
    }
}

impl Entry {
    /// Records the state of the device, and reports each change once.
    fn note(&mut self, found: Found) {
        let path = self.args.blk_file.clone().unwrap_or_default();
        let reason = match found {
            Found::Present => {
                if self.watch.loss.take().is_some() {
                    tracing::warn!(device = %path.display(), "the device of the disk is back");
                    self.events.tell(&Change::StorageReturned(path));
                }
                return;
            }
            Found::Gone => GONE.to_owned(),
            Found::Refused(reason) => reason,
        };
        let before = self.watch.loss.as_ref();
        if before.is_some_and(|before| before.reason == reason) {
            return;
        }
        tracing::error!(device = %path.display(), reason, "the disk has no device");
        let since = before.map_or_else(SystemTime::now, |before| before.since);
        let change = if reason == GONE { Change::StorageGone } else { Change::StorageRefused };
        self.events.tell(&change(reason.clone()));
        self.watch.loss = Some(Loss { since, reason });
    }
}
