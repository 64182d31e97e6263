// SPDX-License-Identifier: Apache-2.0
//! Handles SIGTERM and SIGINT: stop accepting, end the connection, drain, exit. Ignores SIGXFSZ.

use crate::failure::Failure;
use crate::stop_signals::StopSignals;
use signal_hook::consts::SIGXFSZ;
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
    /// Starts a thread that waits for SIGTERM and SIGINT, and ignores SIGXFSZ. `last` runs before an
    /// exit without a drain. The caller has started no other thread.
    ///
    /// # Errors
    /// [`Failure`] if no thread or descriptor is left.
    pub fn install(last: impl Fn() + Send + 'static) -> Result<Stop, Failure> {
        let failed =
            |error: io::Error| Failure::run("wait for signals", error, "raise the limits (ulimit)");
        let signals = StopSignals::block().map_err(failed)?;
        // A write or a growth beyond the limit on file sizes then fails with EFBIG, instead of
        // ending the process.
        signal_hook::flag::register(SIGXFSZ, Arc::default()).map_err(failed)?;
        let (asked, ask) = UnixStream::pair().map_err(failed)?;
        let state = Arc::new(Mutex::new(State::default()));
        let shared = Arc::clone(&state);
        let watch = move || {
            let signal = match ask_to_stop(&signals, &shared) {
                Ok(signal) => signal,
                Err(error) => {
                    tracing::error!(%error, "SIGTERM and SIGINT are not noticed any more");
                    return;
                }
            };
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

    /// A handle for another thread.
    pub fn gate(&self) -> Gate {
        Gate { state: Arc::clone(&self.state) }
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

/// Lets another thread act only while no stop was requested.
#[derive(Clone, Debug)]
pub struct Gate {
    state: Arc<Mutex<State>>,
}

impl Gate {
    /// Calls `act`, unless a stop was requested. A signal that arrives meanwhile stays pending, also
    /// for another program that `act` executes.
    pub fn pass<T>(&self, act: impl FnOnce() -> T) -> Option<T> {
        let state = lock(&self.state);
        (!state.asked).then(act)
    }
}

/// Waits for a signal, takes it, and shuts the connection down. Returns the signal.
fn ask_to_stop(signals: &StopSignals, state: &Mutex<State>) -> io::Result<u32> {
    loop {
        signals.wait()?;
        // Under the lock, for `Gate::pass`.
        let mut state = lock(state);
        let Some(signal) = signals.take()? else { continue };
        state.asked = true;
        if let Some(connection) = &state.connection {
            let _ = connection.shutdown(Shutdown::Both);
        }
        return Ok(signal);
    }
}

fn lock(state: &Mutex<State>) -> MutexGuard<'_, State> {
    state.lock().unwrap_or_else(PoisonError::into_inner)
}
