// SPDX-License-Identifier: Apache-2.0
//! What a case is, and how it ends.

use crate::env::Env;
use lab_case::outcome::expect_log;
use std::fmt;

/// When a case is run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Tier {
    /// Part of every test run, on every kernel; short.
    Gating,
    /// Long, or needs more.
    Full,
}

impl fmt::Display for Tier {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Gating => "gating",
            Self::Full => "full",
        })
    }
}

/// One row of the registry.
pub(crate) struct Case {
    /// Its name on the command line.
    pub(crate) name: &'static str,
    /// When it is run.
    pub(crate) tier: Tier,
    /// What it shows, in one sentence.
    pub(crate) about: &'static str,
    /// The case. An error is a failure, or, with [`lab_case::outcome::Skip`] at its root, a reason not to run.
    pub(crate) run: fn(&Env) -> anyhow::Result<()>,
}

/// Says that lockdep will complain about the vhost core: it locks all queues of a device at once when
/// an IOTLB message comes, and lockdep does not know more than eight locks of a kind at once.
pub(crate) fn expect_lockdep_limit() {
    expect_log("looking up invalid subclass");
    expect_log("turning off the locking correctness validator");
}
