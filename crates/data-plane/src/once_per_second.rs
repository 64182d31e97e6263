// SPDX-License-Identifier: Apache-2.0
//! Limits log lines that a guest or a front-end can cause at will.

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
