// SPDX-License-Identifier: Apache-2.0
//! Handles SIGTERM and SIGINT (stop all disks, drain, exit) and SIGHUP (read the configuration
//! again; without one, the same as SIGTERM, unless `nohup` has it ignored). Ignores SIGXFSZ.

use crate::disks::StopReason;
use crate::failure::Failure;
use crate::log;
use crate::stop_signals::{StopSignals, Taken, is_ignored};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM, SIGXFSZ};
use signal_hook::low_level::signal_name;
use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Maximum time to drain; then the program exits with I/O in flight. The guest has seen no
/// completion of that I/O.
pub(crate) const EXIT_DRAIN_MAX: Duration = Duration::from_millis(900);

/// Maximum time that disks without requests in flight have after that, for the end of their copies, and for their
/// bitmaps and tables. The packaged units kill the daemon after 5 s.
const EXIT_CLOSE_MAX: Duration = Duration::from_secs(3);
/// Time that the main thread then has to end the process.
const MAIN_MAX: Duration = Duration::from_millis(500);
/// Interval of the looks at them.
const END_LOOK: Duration = Duration::from_millis(10);

/// The signals, which wait for [`install`].
#[derive(Debug)]
pub struct Blocked(StopSignals);

/// The acts of a process at its signals.
pub struct Acts {
    /// Requests the stop of all disks; must not wait for one.
    pub stop: Box<dyn FnOnce(StopReason) + Send>,
    /// Reads the configuration again; must not block. Without it SIGHUP requests the stop, as a terminal that has
    /// gone does.
    pub reload: Option<Box<dyn FnMut() + Send>>,
    /// Looks at the disks after the request to stop.
    pub remaining: Box<dyn Fn() -> Remaining + Send>,
    /// Runs before an exit without a drain.
    pub last: Box<dyn FnOnce() + Send>,
}

/// Work that is left to disks that were asked to stop.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Remaining {
    /// Disks have requests in flight.
    pub requests: bool,
    /// A disk without requests in flight ends its copy, or writes what the next program needs.
    pub closing: bool,
}

impl Remaining {
    /// No disk is left.
    pub const NOTHING: Remaining = Remaining { requests: false, closing: false };
}

/// Lets another thread act only while no stop was requested.
#[derive(Clone, Debug, Default)]
pub struct Gate {
    /// A stop was requested.
    asked: Arc<Mutex<bool>>,
}

impl Gate {
    /// Calls `act`, unless a stop was requested. A signal that arrives meanwhile stays pending, also
    /// for another program that `act` executes.
    pub fn pass<T>(&self, act: impl FnOnce() -> T) -> Option<T> {
        let asked = self.lock();
        (!*asked).then(act)
    }

    fn lock(&self) -> MutexGuard<'_, bool> {
        self.asked.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Blocks the signals, in this thread and all that it starts later. The caller has started no other thread.
/// `reloads`: SIGHUP reads the configuration again.
///
/// # Errors
/// [`Failure`] if no descriptor is left.
pub fn block(reloads: bool) -> Result<Blocked, Failure> {
    let all = [SIGTERM, SIGINT, SIGHUP];
    let takes_hangup = reloads || !is_ignored(SIGHUP);
    let waited = if takes_hangup { &all[..] } else { &all[..2] };
    StopSignals::block(waited).map(Blocked).map_err(failed)
}

fn failed(error: io::Error) -> Failure {
    Failure::run("wait for signals", error, "raise the limits (ulimit)")
}

/// Starts a thread that waits for the signals as long as the process lives.
///
/// # Errors
/// [`Failure`] if no thread is left.
pub fn install(Blocked(signals): Blocked, acts: Acts) -> Result<Gate, Failure> {
    // A write or a growth beyond the limit on file sizes then fails with EFBIG, instead of
    // ending the process.
    signal_hook::flag::register(SIGXFSZ, Arc::default()).map_err(failed)?;
    let gate = Gate::default();
    let watched = gate.clone();
    let watch = move || {
        if let Err(error) = watch(&signals, acts, &watched) {
            tracing::error!(%error, "signals are not noticed any more");
        }
    };
    let spawned = std::thread::Builder::new().name("signals".into()).spawn(watch);
    spawned.map(|_| gate).map_err(failed)
}

/// The command `stop` is a signal of this process to itself.
fn reason(signal: &Taken) -> StopReason {
    match signal.is_own {
        true => StopReason::Command,
        false => StopReason::Signal(signal_name(signal.number).unwrap_or("unknown")),
    }
}

/// Waits for the end of all disks that were asked to stop, within [`EXIT_DRAIN_MAX`] and [`EXIT_CLOSE_MAX`]. Returns the state of
/// the last look.
pub(crate) fn wait_for_end(remaining: impl Fn() -> Remaining) -> Remaining {
    let begun = Instant::now();
    loop {
        let now = remaining();
        let limit = if now.closing { EXIT_DRAIN_MAX + EXIT_CLOSE_MAX } else { EXIT_DRAIN_MAX };
        if now == Remaining::NOTHING || begun.elapsed() >= limit {
            return now;
        }
        std::thread::sleep(END_LOOK);
    }
}

/// Acts at each signal; after a request to stop, leaves without a drain at the latest at its limit.
fn watch(signals: &StopSignals, acts: Acts, gate: &Gate) -> io::Result<()> {
    let Acts { stop, mut reload, remaining, last } = acts;
    let signal = loop {
        signals.wait()?;
        // Under the lock, for `Gate::pass`.
        let mut asked = gate.lock();
        match (signals.take()?, &mut reload) {
            (None, _) => {}
            (Some(Taken { number: SIGHUP, .. }), Some(reload)) => reload(),
            (Some(signal), _) => {
                *asked = true;
                break signal;
            }
        }
    };
    stop(reason(&signal));
    tracing::info!(signal = signal.number, "asked to stop");
    let left = wait_for_end(remaining);
    if left == Remaining::NOTHING {
        // The main thread ends the process, unless it is stuck.
        std::thread::sleep(MAIN_MAX);
        tracing::warn!(
            "leaving before the end of the main thread: a file system did not answer in time"
        );
    }
    if left.requests {
        tracing::warn!("leaving with I/O in flight: the storage did not complete it in time");
    }
    if left.closing {
        tracing::warn!(
            "leaving without the bitmaps of a disk, or with a qcow2 image marked as in use: a storage did not answer in time"
        );
    }
    last();
    log::flush();
    std::process::exit(0);
}
