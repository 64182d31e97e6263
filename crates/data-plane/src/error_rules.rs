// SPDX-License-Identifier: Apache-2.0
//! The rules of a disk for storage that fails or hangs.

use std::time::Duration;

/// Errors of the storage that halt the disk; all others reach the guest.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ErrorPolicy {
    /// None.
    #[default]
    Report,
    /// Every error.
    Stop,
    /// ENOSPC and EDQUOT.
    Enospc,
}

/// The errors that halt the disk, by the kind of the request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ErrorPolicies {
    /// Errors of reads.
    pub reads: ErrorPolicy,
    /// Errors of all other requests.
    pub others: ErrorPolicy,
}

impl ErrorPolicies {
    /// Returns whether some error halts the disk.
    pub fn can_halt(&self) -> bool {
        [self.reads, self.others].iter().any(|policy| *policy != ErrorPolicy::Report)
    }

    /// Returns whether reads have another policy than the other requests.
    pub fn are_apart(&self) -> bool {
        self.reads != self.others
    }
}

/// One policy for all requests.
impl From<ErrorPolicy> for ErrorPolicies {
    fn from(policy: ErrorPolicy) -> Self {
        ErrorPolicies { reads: policy, others: policy }
    }
}

/// The treatment of storage that fails or hangs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ErrorRules {
    /// The errors that halt the disk.
    pub policies: ErrorPolicies,
    /// The time after which a request in flight is a stall; `None`: never.
    pub io_timeout: Option<Duration>,
}
