// SPDX-License-Identifier: Apache-2.0
//! Limits log lines that a guest or a front-end can cause at will.

use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Limits log lines of one kind to one per second, and counts the suppressed ones.
#[derive(Debug, Default)]
pub struct OncePerSecond {
    last: Option<Instant>,
    not_shown: u64,
}

impl OncePerSecond {
    /// The first line is due at once.
    pub const fn new() -> Self {
        OncePerSecond { last: None, not_shown: 0 }
    }

    /// Returns the number of suppressed lines if a line is due at `now`, and `None` if it is not.
    pub fn due(&mut self, now: Instant) -> Option<u64> {
        let is_due = self.last.is_none_or(|last| now - last >= Duration::from_secs(1));
        if !is_due {
            self.not_shown += 1;
            return None;
        }
        self.last = Some(now);
        Some(std::mem::take(&mut self.not_shown))
    }
}

/// A limit that all threads and disks of the process share: one for each kind of line.
#[derive(Debug)]
pub struct LogLimit(Mutex<OncePerSecond>);

impl LogLimit {
    /// The first line is due at once.
    #[expect(clippy::new_without_default, reason = "a limit is a static")]
    pub const fn new() -> Self {
        LogLimit(Mutex::new(OncePerSecond::new()))
    }

    /// Calls `log` if a line is due now, with the number of suppressed lines; `None`: there is none.
    #[cold]
    pub fn log(&self, log: impl FnOnce(Option<u64>)) {
        let due = self.0.lock().unwrap_or_else(PoisonError::into_inner).due(Instant::now());
        if let Some(not_shown) = due {
            log(Some(not_shown).filter(|not_shown| *not_shown > 0));
        }
    }
}

/// Logs a line of this place in the code, at most one a second in the process, with the number of suppressed ones: as
/// `tracing` does, with the level first.
#[macro_export]
macro_rules! log_once_per_second {
    ($level:ident, $($line:tt)+) => {{
        static LINES: $crate::LogLimit = $crate::LogLimit::new();
        LINES.log(|not_shown| ::tracing::$level!(not_shown, $($line)+));
    }};
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_line_of_a_second_is_shown_and_the_next_one_counts_what_was_not() {
        let mut lines = OncePerSecond::default();
        let start = Instant::now();
        let after = |millis| start + Duration::from_millis(millis);
        let shown = [0, 1, 500, 999, 1000, 1999, 5000].map(|millis| lines.due(after(millis)));
        assert_eq!(shown, [Some(0), None, None, None, Some(3), None, Some(1)]);
    }
}
