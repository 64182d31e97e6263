// SPDX-License-Identifier: Apache-2.0
//! Events that other threads deliver to a ring's thread: a list and an eventfd that the ring polls.

use backend::{Deliver, Token};
use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::sync::{Mutex, PoisonError};
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

/// The events of other threads for one ring.
pub(crate) struct Inbox {
    events: Mutex<Vec<(Token, i32)>>,
    wake: EventFd,
}

impl Inbox {
    pub(crate) fn new() -> io::Result<Self> {
        Ok(Inbox { events: Mutex::default(), wake: EventFd::new(EFD_NONBLOCK)? })
    }

    /// The eventfd that is signalled after each delivery.
    pub(crate) fn fd(&self) -> RawFd {
        self.wake.as_raw_fd()
    }

    /// Takes the delivered events, oldest first.
    pub(crate) fn take(&self) -> Vec<(Token, i32)> {
        std::mem::take(&mut *self.events.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

impl Deliver for Inbox {
    fn deliver(&self, token: Token, result: i32) {
        self.events.lock().unwrap_or_else(PoisonError::into_inner).push((token, result));
        // The counter never fills up: each write adds 1, and every write signals the poll.
        let _ = self.wake.write(1);
    }
}
