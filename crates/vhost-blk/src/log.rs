// SPDX-License-Identifier: Apache-2.0
//! Log lines on stderr.

use crate::values::{LogFormat, LogLevel};
use std::io::IsTerminal;
use std::time::{Duration, Instant};
use tracing::level_filters::LevelFilter;

/// Starts logging; called once.
pub fn start(level: LogLevel, format: LogFormat) {
    let level = match level {
        LogLevel::Error => LevelFilter::ERROR,
        LogLevel::Warn => LevelFilter::WARN,
        LogLevel::Info => LevelFilter::INFO,
        LogLevel::Debug => LevelFilter::DEBUG,
        LogLevel::Trace => LevelFilter::TRACE,
    };
    let builder = tracing_subscriber::fmt()
        .with_max_level(level)
        // A report of a failed log line would go to stderr and panic if stderr is a closed pipe.
        // Lose the line and keep the disk.
        .log_internal_errors(false)
        .with_writer(std::io::stderr)
        .with_ansi(std::io::stderr().is_terminal());
    match format {
        LogFormat::Text => builder.init(),
        LogFormat::Json => builder.json().flatten_event(true).init(),
    }
}

/// Limits log lines that a front-end can cause to one per second, and counts the suppressed ones.
#[derive(Debug, Default)]
pub struct OncePerSecond {
    last: Option<Instant>,
    not_shown: u64,
}

impl OncePerSecond {
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
