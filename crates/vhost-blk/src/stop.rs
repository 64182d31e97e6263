// SPDX-License-Identifier: Apache-2.0
//! A request to stop serving a disk: ends its connection and wakes the thread that waits for the
//! next one.

use std::io;
use std::net::Shutdown;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::sync::{Mutex, MutexGuard, PoisonError};
use vhost_user::Waiting;

/// A stop that other threads can request, at most once.
#[derive(Debug)]
pub struct Stop {
    state: Mutex<State>,
    /// Readable (at its end) after the request.
    asked: UnixStream,
}

#[derive(Debug)]
struct State {
    /// The other end of `asked` until the request.
    ask: Option<UnixStream>,
    connection: Option<UnixStream>,
    /// The front-ends that wait for its end.
    waiting: Waiting,
}

impl Stop {
    /// A stop that was not requested. It also ends the connections of `waiting`.
    ///
    /// # Errors
    /// The error of the system call, if no file descriptor is left.
    pub fn of(waiting: Waiting) -> io::Result<Stop> {
        let (asked, ask) = UnixStream::pair()?;
        let state = State { ask: Some(ask), connection: None, waiting };
        Ok(Stop { state: Mutex::new(state), asked })
    }

    /// Requests the stop.
    pub fn request(&self) {
        let mut state = self.lock();
        state.ask = None;
        if let Some(connection) = &state.connection {
            let _ = connection.shutdown(Shutdown::Both); // the peer may have closed it
        }
        state.waiting.close();
    }

    /// Requests the stop if no front-end is connected. Returns whether it did.
    pub fn request_if_idle(&self) -> bool {
        let mut state = self.lock();
        let is_idle = state.connection.is_none() && state.waiting.is_empty();
        if is_idle {
            state.ask = None;
        }
        is_idle
    }

    /// Returns whether the stop was requested.
    pub fn asked(&self) -> bool {
        self.lock().ask.is_none()
    }

    /// A descriptor that is readable after the request.
    pub fn as_fd(&self) -> BorrowedFd<'_> {
        self.asked.as_fd()
    }

    /// Shuts `connection` down at the request, or at once if there was one.
    ///
    /// # Errors
    /// The error of the system call, if no file descriptor is left.
    pub fn watch(&self, connection: &UnixStream) -> io::Result<()> {
        let copy = connection.try_clone()?;
        let mut state = self.lock();
        if state.ask.is_none() {
            copy.shutdown(Shutdown::Both)?;
        }
        state.connection = Some(copy);
        Ok(())
    }

    /// Ends [`Stop::watch`] for the connection.
    pub fn forget(&self) {
        self.lock().connection = None;
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Read;

    #[test]
    fn a_request_ends_the_connection_of_now_and_a_later_one() {
        let stop = Stop::of(Waiting::default()).unwrap();
        let (mut peer, ours) = UnixStream::pair().unwrap();
        stop.watch(&ours).unwrap();
        assert!(!stop.request_if_idle() && !stop.asked());
        stop.request();
        assert_eq!(peer.read(&mut [0; 1]).unwrap(), 0);
        stop.forget();
        let (mut peer, ours) = UnixStream::pair().unwrap();
        stop.watch(&ours).unwrap();
        assert_eq!(peer.read(&mut [0; 1]).unwrap(), 0);
        assert!(stop.asked());
    }

    #[test]
    fn an_idle_disk_is_stopped() {
        let stop = Stop::of(Waiting::default()).unwrap();
        assert!(stop.request_if_idle() && stop.asked());
    }
}
