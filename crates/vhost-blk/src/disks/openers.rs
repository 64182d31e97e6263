// SPDX-License-Identifier: Apache-2.0
//! Threads for work on the disks of the directory that may hang: openings, restarts, removals.
//!
//! A few of them have a permit at the same time. A thread that hangs loses it after a moment, so that dead storage
//! delays the disks after it by that moment only. There are at most as many threads as disks.

use super::{Disks, Origin, Slot};
use crate::disk::LockWait;
use crate::disks::reload::Outcome;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Threads that have a permit at the same time.
const PERMITS_MAX: usize = 8;
/// Maximum time of a permit. The thread goes on without one.
const PERMIT_MAX: Duration = Duration::from_millis(250);

/// Work on one disk.
pub(super) type Task = Box<dyn FnOnce() + Send>;

/// The permit of a thread; ends with the drop.
struct Permit {
    disks: Arc<Disks>,
    begun: Arc<Instant>,
}

impl Drop for Permit {
    fn drop(&mut self) {
        self.disks.lock().permits.retain(|begun| !Arc::ptr_eq(begun, &self.begun));
        self.disks.changed.notify_all();
    }
}

impl Disks {
    /// Begins all tasks, each on a thread of its own. Does not wait for their permits.
    pub(super) fn begin_all(self: &Arc<Self>, tasks: Vec<Task>) {
        if tasks.is_empty() {
            return;
        }
        let disks = Arc::clone(self);
        spawn("openings", Box::new(move || disks.dispatch(tasks)));
    }

    /// Begins all tasks, one after another with their permits.
    fn dispatch(self: &Arc<Self>, tasks: Vec<Task>) {
        for task in tasks {
            let permit = self.permit();
            let body = move || {
                let _permit = permit;
                task();
            };
            spawn("opening", Box::new(body));
        }
    }

    /// Waits for a permit, which at the end of the process comes at once.
    fn permit(self: &Arc<Self>) -> Permit {
        let mut state = self.lock();
        loop {
            state.permits.retain(|begun| begun.elapsed() < PERMIT_MAX);
            let oldest = match state.permits.first() {
                Some(oldest) if state.permits.len() >= PERMITS_MAX && !state.stopping => oldest,
                _ => break,
            };
            let left = PERMIT_MAX.saturating_sub(oldest.elapsed());
            let waited = self.changed.wait_timeout(state, left);
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
        let begun = Arc::new(Instant::now());
        state.permits.push(Arc::clone(&begun));
        drop(state);
        Permit { disks: Arc::clone(self), begun }
    }

    /// Tries the disks of the directory that have failed again, from now on. Starts once.
    pub(super) fn retry_failed(self: &Arc<Self>) {
        if self.retries.swap(true, Ordering::Relaxed) {
            return;
        }
        let disks = Arc::clone(self);
        let body = move || {
            while let Some(due) = disks.wait_for_due() {
                let tasks = due.into_iter().filter_map(|name| disks.retry(name));
                disks.dispatch(tasks.collect());
            }
        };
        if let Err(error) = std::thread::Builder::new().name("retry".into()).spawn(body) {
            self.retries.store(false, Ordering::Relaxed);
            tracing::error!(%error, "failed disks are not tried again before the next reload");
        }
    }

    /// Waits for disks whose next try is due; `None`: the process ends.
    fn wait_for_due(&self) -> Option<Vec<String>> {
        let mut state = self.lock();
        loop {
            if state.stopping {
                return None;
            }
            let now = Instant::now();
            let failed = state.table.iter().filter_map(|(name, slot)| match slot {
                Slot::Failed(failed) => Some((name, failed.next)),
                _ => None,
            });
            let due: Vec<String> = failed
                .clone()
                .filter(|(_, next)| *next <= now)
                .map(|(name, _)| name.clone())
                .collect();
            // During an upgrade no disk comes.
            let next = match state.is_held {
                false if !due.is_empty() => return Some(due),
                false => failed.map(|(_, next)| next).min(),
                true => None,
            };
            state = match next {
                None => self.changed.wait(state).unwrap_or_else(PoisonError::into_inner),
                Some(next) => {
                    let waited = self.changed.wait_timeout(state, next - now);
                    waited.unwrap_or_else(PoisonError::into_inner).0
                }
            };
        }
    }

    /// The next try of a disk of the directory, with its present file.
    fn retry(self: &Arc<Self>, name: String) -> Option<Task> {
        // It may have gone, or a reload tries it.
        let reservation = Arc::new(self.reserve(&name, None, Origin::Directory).ok()?);
        let disks = Arc::clone(self);
        Some(Box::new(move || {
            let (args, done) = match disks.file_of(&name) {
                Ok(Some(args)) => {
                    let opened = disks.open_of_directory(&reservation, args.clone(), LockWait::No);
                    (Some(args), opened)
                }
                Ok(None) => return reservation.give_back(),
                Err(failure) => (None, Err(failure)),
            };
            match done {
                Ok(()) => {
                    tracing::info!(disk = name, outcome = Outcome::Added.name(), "configuration")
                }
                Err(failure) => {
                    if reservation.fail(args, &failure) {
                        tracing::error!(disk = name, reason = %failure, "configuration");
                    }
                }
            }
        }))
    }

    /// Tries disks at once that have failed in an earlier program.
    pub fn retry_all(self: &Arc<Self>, names: Vec<String>) {
        let tasks = names.into_iter().filter_map(|name| self.retry(name));
        self.begin_all(tasks.collect());
    }
}

/// Runs the task on a new thread, or here if there can be none.
fn spawn(name: &str, task: Task) {
    let place = Arc::new(Mutex::new(Some(task)));
    let of_thread = Arc::clone(&place);
    let take =
        |place: &Mutex<Option<Task>>| place.lock().unwrap_or_else(PoisonError::into_inner).take();
    let body = move || take(&of_thread).into_iter().for_each(|task| task());
    if let Err(error) = std::thread::Builder::new().name(name.into()).spawn(body) {
        tracing::warn!(%error, "no thread for a disk; raise the limit on threads (ulimit -u)");
        take(&place).into_iter().for_each(|task| task());
    }
}
