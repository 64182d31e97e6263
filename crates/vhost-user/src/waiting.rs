// SPDX-License-Identifier: Apache-2.0
//! Front-ends that wait while another one is served.
//!
//! A connection in the backlog of the listening socket keeps the descriptors that were sent over it. If one of them
//! is the other end of the served connection, that connection does not end with its VMM, and the backlog is not read
//! before it ends. So connections are accepted while another one is served, and closed if they have sent a
//! descriptor: a front-end sends none before the answer to its first request.

use crate::message;
use rustix::net::SocketFlags;
use std::collections::VecDeque;
use std::io;
use std::net::Shutdown;
use std::os::fd::{AsRawFd, BorrowedFd, RawFd};
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// Maximum number of waiting front-ends; the next one is closed.
const WAITING_MAX: usize = 16;

/// Interval between two looks at waiting front-ends.
pub(crate) const LOOK: Duration = Duration::from_secs(1);

/// The waiting front-ends of a device.
#[derive(Clone, Debug, Default)]
pub struct Waiting(Arc<Mutex<Queue>>);

#[derive(Debug, Default)]
struct Queue {
    /// In the order of their arrival.
    streams: VecDeque<UnixStream>,
    is_closed: bool,
}

impl Waiting {
    /// Ends the connections of now and later ones.
    pub fn close(&self) {
        let mut queue = self.lock();
        queue.is_closed = true;
        for stream in &queue.streams {
            // The descriptors stay open: an upgrade may pass them on in this moment.
            let _ = stream.shutdown(Shutdown::Both); // the peer may have closed it
        }
    }

    /// Returns whether no front-end waits.
    pub fn is_empty(&self) -> bool {
        self.lock().streams.is_empty()
    }

    /// Accepts the next front-end of a socket.
    pub(crate) fn accept(&self, listener: BorrowedFd<'_>) -> io::Result<()> {
        let stream = UnixStream::from(rustix::net::accept_with(listener, SocketFlags::CLOEXEC)?);
        self.add(stream);
        Ok(())
    }

    /// Adds a front-end, or closes it if there is no room.
    pub(crate) fn add(&self, stream: UnixStream) {
        let mut queue = self.lock();
        queue.look();
        if queue.streams.len() < WAITING_MAX && !queue.is_closed {
            queue.streams.push_back(stream);
        }
    }

    /// Closes those that have hung up, and those that must not wait. Returns whether any is left.
    pub(crate) fn look(&self) -> bool {
        self.lock().look()
    }

    /// Removes the first one.
    pub(crate) fn pop(&self) -> Option<UnixStream> {
        let mut queue = self.lock();
        queue.look();
        queue.streams.pop_front()
    }

    pub(crate) fn descriptors(&self) -> Vec<RawFd> {
        self.lock().streams.iter().map(AsRawFd::as_raw_fd).collect()
    }

    fn lock(&self) -> MutexGuard<'_, Queue> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Queue {
    fn look(&mut self) -> bool {
        self.streams.retain(|stream| message::may_wait(stream).unwrap_or(false));
        !self.streams.is_empty()
    }
}
