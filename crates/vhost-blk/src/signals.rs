// SPDX-License-Identifier: Apache-2.0
//! SIGTERM and SIGINT: accept no more, end the connection, drain, leave.

use crate::failure::Failure;
use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::iterator::Signals;
use std::io;
use std::net::Shutdown;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// How long draining may take before the program leaves without it. What the guest was told is
/// done is done by then; what is still in flight it was never told.
const DRAIN_MAX: Duration = Duration::from_millis(900);

/// Knows whether the program was asked to stop.
#[derive(Debug)]
pub struct Stop {
    state: Arc<Mutex<State>>,
    /// Readable (at its end) once the program was asked to stop.
    asked: UnixStream,
}

#[derive(Debug, Default)]
struct State {
    asked: bool,
    connection: Option<UnixStream>,
}

impl Stop {
    /// Takes over SIGTERM and SIGINT. `last` runs if the program has to leave without draining.
    ///
    /// # Errors
    /// When the signals or descriptors cannot be had.
    pub fn install(last: impl Fn() + Send + 'static) -> Result<Stop, Failure> {
        let failed =
            |error: io::Error| Failure::run("wait for signals", error, "raise the limits (ulimit)");
        let mut signals = Signals::new([SIGTERM, SIGINT]).map_err(failed)?;
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
            tracing::warn!("leaving with I/O in flight: the storage did not finish it in time");
            last();
            std::process::exit(0);
        };
        std::thread::Builder::new().name("signals".into()).spawn(watch).map_err(failed)?;
        Ok(Stop { state, asked })
    }

    /// Whether the program was asked to stop.
    pub fn asked(&self) -> bool {
        lock(&self.state).asked
    }

    /// Readable once the program was asked to stop.
    pub fn as_fd(&self) -> BorrowedFd<'_> {
        self.asked.as_fd()
    }

    /// From now on `connection` is shut down when the program is asked to stop, or at once if it
    /// already was.
    ///
    /// # Errors
    /// When no descriptor is left.
    pub fn watch(&self, connection: &UnixStream) -> io::Result<()> {
        let copy = connection.try_clone()?;
        let mut state = lock(&self.state);
        if state.asked {
            copy.shutdown(Shutdown::Both)?;
        }
        state.connection = Some(copy);
        Ok(())
    }

    /// The connection is over.
    pub fn forget(&self) {
        lock(&self.state).connection = None;
    }
}

fn lock(state: &Mutex<State>) -> MutexGuard<'_, State> {
    state.lock().unwrap_or_else(PoisonError::into_inner)
}
