// SPDX-License-Identifier: Apache-2.0
//! The connection to a server: whole messages, with a time limit, until it is hung up.

use super::NbdError;
use socket2::{Domain, SockAddr, Socket, Type};
use std::io::{self, Read, Write};
use std::net::Shutdown;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// A connection.
#[derive(Debug)]
pub(super) struct Wire {
    stream: UnixStream,
    hung_up: Arc<AtomicBool>,
}

/// Ends a connection from another thread.
#[derive(Debug)]
pub(crate) struct Hangup {
    stream: UnixStream,
    hung_up: Arc<AtomicBool>,
}

impl Hangup {
    /// Ends the connection. Its user gets [`NbdError::HungUp`].
    pub(crate) fn hang_up(&self) {
        // The user's error follows the shutdown, and so sees the flag.
        self.hung_up.store(true, Ordering::Release);
        let _ = self.stream.shutdown(Shutdown::Both); // it may have ended
    }
}

/// The time limit of a message.
#[derive(Clone, Copy, Debug)]
pub(super) struct Limit {
    whole: Duration,
    end: Option<Instant>,
}

impl Limit {
    /// So much time from now on; `None`: until the connection is hung up.
    pub(super) fn of(whole: Option<Duration>) -> Limit {
        Limit { whole: whole.unwrap_or_default(), end: whole.map(|whole| Instant::now() + whole) }
    }

    fn passed(self) -> NbdError {
        NbdError::Silent(self.whole.as_secs())
    }

    /// The rest for a socket, where zero would be no limit.
    fn left(self) -> Result<Option<Duration>, NbdError> {
        let Some(end) = self.end else { return Ok(None) };
        let left = end.saturating_duration_since(Instant::now());
        if left.is_zero() { Err(self.passed()) } else { Ok(Some(left)) }
    }
}

impl Wire {
    /// Connects at once or not at all.
    pub(super) fn connect(path: &Path) -> Result<Wire, NbdError> {
        let connect = || {
            let socket = Socket::new(Domain::UNIX, Type::STREAM, None)?;
            // A blocking connect waits for a free place without a limit.
            socket.set_nonblocking(true)?;
            socket.connect(&SockAddr::unix(path)?)?;
            socket.set_nonblocking(false)?;
            Ok(socket)
        };
        let socket = connect().map_err(|why: io::Error| match why.kind() {
            io::ErrorKind::WouldBlock => NbdError::Busy,
            _ => NbdError::Unreachable(why),
        })?;
        Ok(Wire::of(OwnedFd::from(socket).into()))
    }

    pub(super) fn of(stream: UnixStream) -> Wire {
        Wire { stream, hung_up: Arc::default() }
    }

    pub(super) fn hangup(&self) -> Result<Hangup, NbdError> {
        let stream = self.stream.try_clone().map_err(NbdError::Socket)?;
        Ok(Hangup { stream, hung_up: Arc::clone(&self.hung_up) })
    }

    /// Sends all bytes.
    pub(super) fn send(&mut self, mut bytes: &[u8], limit: Limit) -> Result<(), NbdError> {
        while !bytes.is_empty() {
            self.stream.set_write_timeout(limit.left()?).map_err(NbdError::Socket)?;
            let sent = self.stream.write(bytes);
            bytes = &bytes[self.count(sent, limit)?..];
        }
        Ok(())
    }

    /// Fills the buffer.
    pub(super) fn receive(&mut self, buffer: &mut [u8], limit: Limit) -> Result<(), NbdError> {
        let mut done = 0;
        while done < buffer.len() {
            self.stream.set_read_timeout(limit.left()?).map_err(NbdError::Socket)?;
            let received = self.stream.read(&mut buffer[done..]);
            done += self.count(received, limit)?;
        }
        Ok(())
    }

    /// An array of bytes.
    pub(super) fn take<const N: usize>(&mut self, limit: Limit) -> Result<[u8; N], NbdError> {
        let mut bytes = [0; N];
        self.receive(&mut bytes, limit)?;
        Ok(bytes)
    }

    /// The bytes of a step; 0 after an interrupt.
    fn count(&self, moved: io::Result<usize>, limit: Limit) -> Result<usize, NbdError> {
        let error = match moved {
            Ok(0) => NbdError::Ended,
            Ok(count) => return Ok(count),
            Err(why) => match why.kind() {
                io::ErrorKind::Interrupted => return Ok(0),
                io::ErrorKind::WouldBlock => limit.passed(),
                io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionReset => NbdError::Ended,
                _ => NbdError::Socket(why),
            },
        };
        Err(if self.hung_up.load(Ordering::Acquire) { NbdError::HungUp } else { error })
    }
}
