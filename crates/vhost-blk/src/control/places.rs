// SPDX-License-Identifier: Apache-2.0
//! The connections of the control socket. Some are kept for commands that look at the disks or end something: an
//! operator can see and end the work that has all others.

use super::protocol::INTERFACE;
use crate::failure::{Failure, Sort};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Maximum connections at the same time; further ones get an error.
pub(super) const CONNECTIONS_MAX: usize = 32;
/// Maximum commands that may wait for storage, for other work, or for the end of their client.
const WORK_MAX: usize = 24;
/// The same with the commands that end work or a disk, and may wait for that.
const CLIENTS_WITH_ENDS_MAX: usize = 28;

/// The connections and the commands in progress on all of them.
#[derive(Clone, Debug, Default)]
pub struct Places {
    open: Arc<AtomicUsize>,
    working: Arc<AtomicUsize>,
}

/// A connection or the place of a command, until the drop.
#[derive(Debug)]
pub(super) struct Taken(Arc<AtomicUsize>);

/// Maximum commands in progress with one of this method; `None`: it does not count.
fn limit(method: &str) -> Option<usize> {
    match method.strip_prefix(INTERFACE).and_then(|name| name.strip_prefix('.')) {
        Some("CancelJob" | "Remove") => Some(CLIENTS_WITH_ENDS_MAX),
        Some(
            "Jobs" | "List" | "MirrorStatus" | "SetLogLevel" | "Stats" | "Status" | "Stop"
            | "Version",
        )
        | None => None,
        Some(_) => Some(WORK_MAX),
    }
}

impl Places {
    /// Takes a place for a method. One that only looks takes none.
    ///
    /// # Errors
    /// [`Failure`] if too many others are taken.
    pub(super) fn take(&self, method: &str) -> Result<Option<Taken>, Failure> {
        let Some(max) = limit(method) else { return Ok(None) };
        Taken::of(&self.working, max).map(Some).map_err(|taken| {
            let why = format!("{taken} others are in progress");
            let remedy = "wait for the end of one, or end it; vhost-blk ctl list shows the disks";
            let failure = Failure::run("begin the command", why, remedy);
            Failure { sort: Sort::Busy, ..failure }
        })
    }

    /// Takes a connection. `None`: there are too many.
    pub(super) fn connect(&self) -> Option<Taken> {
        Taken::of(&self.open, CONNECTIONS_MAX).ok()
    }
}

impl Taken {
    /// Takes one more of at most `max`. Returns their number if all are taken.
    fn of(count: &Arc<AtomicUsize>, max: usize) -> Result<Taken, usize> {
        let next = |taken: usize| (taken < max).then_some(taken + 1);
        count.fetch_update(Ordering::Relaxed, Ordering::Relaxed, next)?;
        Ok(Taken(Arc::clone(count)))
    }
}

impl Drop for Taken {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn work_leaves_places_for_ends_and_both_for_looks() {
        let places = Places::default();
        let take = |name: &str| places.take(&format!("{INTERFACE}.{name}"));
        let mut taken: Vec<_> = (0..WORK_MAX).map(|_| take("Snapshot").unwrap()).collect();
        for name in ["Backup", "Events", "Reload"] {
            let failure = take(name).unwrap_err();
            assert!(failure.why.contains("24 others") && failure.sort == Sort::Busy, "{name}");
        }
        taken.extend((WORK_MAX..CLIENTS_WITH_ENDS_MAX).map(|_| take("Remove").unwrap()));
        take("CancelJob").unwrap_err();
        for name in ["Jobs", "List", "Status", "Stop", "Version"] {
            drop(take(name).unwrap());
        }
        drop(places.take("org.varlink.service.GetInfo").unwrap());
        taken.truncate(WORK_MAX - 1);
        drop(take("Backup").unwrap());
    }
}
