// SPDX-License-Identifier: Apache-2.0
//! Log lines on stderr.

use crate::values::{LogFormat, LogLevel};
use std::io::IsTerminal;
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
