// SPDX-License-Identifier: Apache-2.0
//! The wait for the exchange of a running disk's storage.

use std::sync::mpsc::RecvTimeoutError;
use std::time::{Duration, Instant};
use vhost_user::Replacing;

/// Maximum wait for the requests in flight. Neither a reload nor an upgrade begins meanwhile.
pub const DRAIN_MAX: Duration = Duration::from_secs(10);
/// Interval of the look at the client.
const LOOK: Duration = Duration::from_millis(100);

/// An exchange that has no good end. The texts have the remedy.
#[derive(Debug, thiserror::Error)]
pub enum Unfinished {
    /// The old storage serves on.
    #[error("{0}")]
    Failed(String),
    /// No thread waits for it any more. The old storage serves on.
    #[error("it was cancelled; repeat the command")]
    Cancelled,
    /// The disk has gone, after the exchange perhaps.
    #[error("the disk has gone meanwhile; see vhost-blk ctl list")]
    Gone {
        /// The new storage was not in use.
        is_over: bool,
    },
}

impl Unfinished {
    /// Returns whether the new storage is not in use and will not be.
    pub fn is_over(&self) -> bool {
        !matches!(self, Unfinished::Gone { is_over: false })
    }
}

/// Waits for the end of an exchange as long as `go_on` says so, and for its begin at most `patience`.
/// Returns the time in which the disk took no request.
///
/// # Errors
/// [`Unfinished`].
pub fn wait(
    order: &Replacing,
    patience: Duration,
    go_on: impl FnMut() -> bool,
) -> Result<Duration, Unfinished> {
    wait_and(order, patience, LOOK, go_on)
}

/// As [`wait`], with a call of `go_on` in each interval of `look`.
///
/// # Errors
/// [`Unfinished`].
pub fn wait_and(
    order: &Replacing,
    patience: Duration,
    look: Duration,
    mut go_on: impl FnMut() -> bool,
) -> Result<Duration, Unfinished> {
    let ordered = Instant::now();
    loop {
        match order.wait(look) {
            Ok(answer) => return answer.map_err(Unfinished::Failed),
            Err(RecvTimeoutError::Disconnected) => {
                return Err(Unfinished::Gone { is_over: order.withdraw() });
            }
            Err(RecvTimeoutError::Timeout) if !go_on() => {
                if order.withdraw() {
                    return Err(Unfinished::Cancelled);
                }
            }
            Err(RecvTimeoutError::Timeout) => {
                if ordered.elapsed() > patience && order.withdraw() {
                    return Err(Unfinished::Failed(format!(
                        "its requests in flight did not complete in {} s; check its storage, or try \
                         again under less load",
                        patience.as_secs()
                    )));
                }
            }
        }
    }
}
