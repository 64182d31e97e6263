// SPDX-License-Identifier: Apache-2.0
//! Goals that several comparisons share.

use kit::metric::{IDLE_CPU, Row};
use kit::report::Goal;

/// The best variant in names of goals, which stay when another variant is the best one.
pub(crate) const BEST_QSD: &str = "the best of qemu-storage-daemon";

/// Idle CPU of a server with a connected client, in percent of one core.
const IDLE_PERCENT_MAX: f64 = 0.1;

/// The goal for a server without requests.
pub(crate) fn idle(what: &str, row: &Row) -> Goal {
    Goal::below(format!("idle CPU percent, {what}"), row.median(IDLE_CPU), IDLE_PERCENT_MAX)
}
