// SPDX-License-Identifier: Apache-2.0
//! The options for storage that fails or hangs.

use super::decimal_in_range;
use clap::ValueEnum;
use data_plane::{ErrorPolicies, ErrorPolicy};
use std::time::Duration;

/// Effect of an error of the storage.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum OnError {
    /// The guest gets it.
    Report,
    /// The disk halts.
    Stop,
    /// The disk halts if the storage has no space; the guest gets other errors.
    Enospc,
}

/// Effect of an error of the storage in a read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum OnReadError {
    /// The guest gets it.
    Report,
    /// The disk halts.
    Stop,
}

impl From<OnError> for ErrorPolicy {
    fn from(policy: OnError) -> Self {
        match policy {
            OnError::Report => ErrorPolicy::Report,
            OnError::Stop => ErrorPolicy::Stop,
            OnError::Enospc => ErrorPolicy::Enospc,
        }
    }
}

impl From<ErrorPolicy> for OnError {
    fn from(policy: ErrorPolicy) -> Self {
        match policy {
            ErrorPolicy::Report => OnError::Report,
            ErrorPolicy::Stop => OnError::Stop,
            ErrorPolicy::Enospc => OnError::Enospc,
        }
    }
}

impl From<OnReadError> for ErrorPolicy {
    fn from(policy: OnReadError) -> Self {
        match policy {
            OnReadError::Report => ErrorPolicy::Report,
            OnReadError::Stop => ErrorPolicy::Stop,
        }
    }
}

impl OnReadError {
    /// The option of these policies; `None`: reads have that of the other requests.
    pub fn of(policies: ErrorPolicies) -> Option<Self> {
        match policies.reads {
            _ if !policies.are_apart() => None,
            ErrorPolicy::Report => Some(OnReadError::Report),
            // No read fails by a lack of space.
            ErrorPolicy::Stop | ErrorPolicy::Enospc => Some(OnReadError::Stop),
        }
    }
}

/// Longest time limit of a request.
const IO_TIMEOUT_MAX: Duration = Duration::from_secs(86400);

/// Time limit of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IoTimeout(pub Duration);

/// A time limit in seconds.
pub fn io_timeout(text: &str) -> Result<IoTimeout, String> {
    let seconds = decimal_in_range(text, "seconds", 0.1, IO_TIMEOUT_MAX.as_secs_f64())?;
    Ok(IoTimeout(Duration::from_secs_f64(seconds)))
}

/// A new time limit of a request, or none.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NewIoTimeout(pub Option<IoTimeout>);

/// A time limit in seconds, or 0 for none.
pub fn new_io_timeout(text: &str) -> Result<NewIoTimeout, String> {
    match text {
        "0" => Ok(NewIoTimeout(None)),
        _ => match io_timeout(text) {
            Ok(limit) => Ok(NewIoTimeout(Some(limit))),
            Err(why) => Err(format!("{why}, or 0 for none")),
        },
    }
}
