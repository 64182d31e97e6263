// SPDX-License-Identifier: Apache-2.0
//! The options that a running disk can adopt.

use crate::options::DiskArgs;

/// A part of these options.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Live {
    /// Each of them.
    All,
    /// The limits.
    Limits,
    /// The cache mode.
    Cache,
    /// The treatment of errors.
    Errors,
}

impl Live {
    /// Returns whether the part has the option with this key of the configuration file.
    pub(super) fn has(self, key: &str) -> bool {
        match self {
            Live::All => true,
            Live::Limits => key.starts_with("limit-"),
            Live::Cache => key == "cache",
            Live::Errors => ["on-error", "on-read-error", "io-timeout"].contains(&key),
        }
    }

    /// `old` with this part of `new`.
    pub(super) fn put(self, new: &DiskArgs, old: DiskArgs) -> DiskArgs {
        let mut args = old;
        if self.has("limit-") {
            args.limit_iops = new.limit_iops;
            args.limit_bandwidth = new.limit_bandwidth;
            args.limit_burst = new.limit_burst;
            args.limit_group.clone_from(&new.limit_group);
        }
        if self.has("cache") {
            args.cache = new.cache;
        }
        if self.has("on-error") {
            args.on_error = new.on_error;
            args.on_read_error = new.on_read_error;
            args.io_timeout = new.io_timeout;
        }
        args
    }
}
