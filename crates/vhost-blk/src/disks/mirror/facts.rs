// SPDX-License-Identifier: Apache-2.0
//! The state of a mirror for its user.

use super::state::{Mirror, Phase};
use crate::disks::Entry;
use std::path::PathBuf;

/// The state of a mirror.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Facts {
    /// Path of the new storage.
    pub target: PathBuf,
    /// Its phase.
    pub phase: Phase,
    /// Bytes of the disk that were copied at least once, holes included.
    pub copied_bytes: u64,
    /// Size of the disk in bytes.
    pub total_bytes: u64,
    /// Bytes of the parts that the guest has changed since their last copy.
    pub changed_bytes: u64,
}

impl Mirror {
    /// `None`: it is over.
    pub(in crate::disks) fn facts(&self) -> Option<Facts> {
        let (phase, copied_bytes) = self.progress();
        let written = self.brake().written();
        let is_over = matches!(phase, Phase::Moved | Phase::Ended);
        (!is_over).then(|| Facts {
            target: self.target().to_owned(),
            phase,
            copied_bytes,
            total_bytes: written.capacity_bytes(),
            changed_bytes: written.bytes(),
        })
    }
}

impl Entry {
    /// The state of its mirror, if it has one.
    pub(in crate::disks) fn mirror(&self) -> Option<Facts> {
        self.job.as_ref()?.mirror()?.facts()
    }
}
