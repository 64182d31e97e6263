// SPDX-License-Identifier: Apache-2.0
//! Events that other threads deliver to a ring's thread: a list and an eventfd that the ring polls.

use backend::{Deliver, Token};
use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::sync::{Arc, Mutex, PoisonError};
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

/// Events of other threads for the thread of one ring.
pub(crate) struct RemoteEvents {
    events: Mutex<Vec<(u16, Token, i32)>>,
    wake: EventFd,
}

impl RemoteEvents {
    pub(crate) fn new() -> io::Result<Self> {
        Ok(RemoteEvents { events: Mutex::default(), wake: EventFd::new(EFD_NONBLOCK)? })
    }

    /// The eventfd that is signalled after each delivery.
    pub(crate) fn fd(&self) -> RawFd {
        self.wake.as_raw_fd()
    }

    /// Takes the delivered events, oldest first: disk, token, result.
    pub(crate) fn take(&self) -> Vec<(u16, Token, i32)> {
        std::mem::take(&mut *self.events.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

/// Delivers events to the lane of one disk of the thread.
pub(crate) struct Sender {
    pub(crate) remote_events: Arc<RemoteEvents>,
    /// The thread's number of the disk.
    pub(crate) disk: u16,
}

impl Deliver for Sender {
    fn deliver(&self, token: Token, result: i32) {
        let RemoteEvents { events, wake } = &*self.remote_events;
        events.lock().unwrap_or_else(PoisonError::into_inner).push((self.disk, token, result));
        // The counter never fills up: each write adds 1, and every write signals the poll.
        let _ = wake.write(1);
    }
}
