// SPDX-License-Identifier: Apache-2.0
//! Handles SIGTERM and SIGINT: stop accepting, end the connection, drain, exit. Ignores SIGXFSZ.

use crate::failure::Failure;
use signal_hook::consts::{SIGINT, SIGTERM, SIGXFSZ};
use signal_hook::iterator::Signals;
use std::io;
use std::net::Shutdown;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// Maximum time to drain; then the program exits with I/O in flight. The guest has seen no
/// completion of that I/O.
const DRAIN_MAX: Duration = Duration::from_millis(900);

/// The state of a requested stop.
#[derive(Debug)]
pub struct Stop {
    state: Arc<Mutex<State>>,
    /// Readable (at its end) after a request to stop.
    asked: UnixStream,
}

#[derive(Debug, Default)]
struct State {
    asked: bool,
    connection: Option<UnixStream>,
}

impl Stop {
    /// Installs handlers for SIGTERM and SIGINT, and one that ignores SIGXFSZ. `last` runs before an exit without a drain.
    ///
    /// # Errors
    /// [`Failure`] if no thread or descriptor is left.
    pub fn install(last: impl Fn() + Send + 'static) -> Result<Stop, Failure> {
        let failed =
            |error: io::Error| Failure::run("wait for signals", error, "raise the limits (ulimit)");
        let mut signals = Signals::new([SIGTERM, SIGINT]).map_err(failed)?;
        // A write or a growth beyond the limit on file sizes then fails with EFBIG, instead of
        // ending the process.
        signal_hook::flag::register(SIGXFSZ, Arc::default()).map_err(failed)?;
        let (asked, ask) = UnixStream::pair().map_err(failed)?;
        let state = Arc::new(Mutex::new(State::default()));
        let shared = Arc::clone(&state);
        let watch = move || {
            let Some(signal) = signals.forever().next() else { return };
            {
                let mut state = lock(&shared);
                state.asked = true;
                if let Some(connection) = &state.connection {
                    let _ = connection.shutdown(Shutdown::Both);
                }
            }
            drop(ask);
            tracing::info!(signal, "asked to stop");
            std::thread::sleep(DRAIN_MAX);
            tracing::warn!("leaving with I/O in flight: the storage did not complete it in time");
            last();
            std::process::exit(0);
        };
        std::thread::Builder::new().name("signals".into()).spawn(watch).map_err(failed)?;
        Ok(Stop { state, asked })
    }

    /// Returns whether a stop was requested.
    pub fn asked(&self) -> bool {
        lock(&self.state).asked
    }

    /// A descriptor that is readable after a request to stop.
    pub fn as_fd(&self) -> BorrowedFd<'_> {
        self.asked.as_fd()
    }

    /// Shuts `connection` down at a request to stop, or at once if there was one.
    ///
    /// # Errors
    /// The error of the system call, if no file descriptor is left.
    pub fn watch(&self, connection: &UnixStream) -> io::Result<()> {
        let copy = connection.try_clone()?;
        let mut state = lock(&self.state);
        if state.asked {
            copy.shutdown(Shutdown::Both)?;
        }
        state.connection = Some(copy);
        Ok(())
    }

    /// Ends [`Stop::watch`] for the connection.
    pub fn forget(&self) {
        lock(&self.state).connection = None;
    }
}

fn lock(state: &Mutex<State>) -> MutexGuard<'_, State> {
    state.lock().unwrap_or_else(PoisonError::into_inner)
}
