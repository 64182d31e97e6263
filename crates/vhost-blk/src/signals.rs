// SPDX-License-Identifier: Apache-2.0
//! Handles SIGTERM and SIGINT (stop all disks, drain, exit) and SIGHUP (read the configuration
//! again). Ignores SIGXFSZ.

use crate::failure::Failure;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM, SIGXFSZ};
use signal_hook::iterator::Signals;
use std::io;
use std::time::Duration;

/// Maximum time to drain; then the program exits with I/O in flight. The guest has seen no
/// completion of that I/O.
const DRAIN_MAX: Duration = Duration::from_millis(900);

/// The acts of a process at its signals.
pub struct Acts {
    /// Requests the stop of all disks; must not wait for one.
    pub stop: Box<dyn FnOnce() + Send>,
    /// Reads the configuration again; must not block. Without it SIGHUP ends the process.
    pub reload: Option<Box<dyn FnMut() + Send>>,
    /// Runs before an exit without a drain.
    pub last: Box<dyn FnOnce() + Send>,
}

/// Installs the handlers. Their thread lives as long as the process.
///
/// # Errors
/// [`Failure`] if no thread or descriptor is left.
pub fn install(acts: Acts) -> Result<(), Failure> {
    let failed =
        |error: io::Error| Failure::run("wait for signals", error, "raise the limits (ulimit)");
    let mut signals = Signals::new([SIGTERM, SIGINT]).map_err(failed)?;
    if acts.reload.is_some() {
        signals.handle().add_signal(SIGHUP).map_err(failed)?;
    }
    // A write or a growth beyond the limit on file sizes then fails with EFBIG, instead of
    // ending the process.
    signal_hook::flag::register(SIGXFSZ, std::sync::Arc::default()).map_err(failed)?;
    let Acts { stop, mut reload, last } = acts;
    let watch = move || {
        let stopped_by = loop {
            let Some(signal) = signals.forever().next() else { return };
            match (&mut reload, signal) {
                (Some(reload), SIGHUP) => reload(),
                _ => break signal,
            }
        };
        stop();
        tracing::info!(signal = stopped_by, "asked to stop");
        std::thread::sleep(DRAIN_MAX);
        tracing::warn!("leaving with I/O in flight: the storage did not complete it in time");
        last();
        std::process::exit(0);
    };
    std::thread::Builder::new().name("signals".into()).spawn(watch).map(drop).map_err(failed)
}
