// SPDX-License-Identifier: Apache-2.0
//! Log lines on stderr.

use crate::subscription::lock;
use crate::values::{LogFormat, LogLevel};
use std::io::IsTerminal;
use std::sync::{Mutex, OnceLock};
use tracing::level_filters::LevelFilter;
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::SubscriberInitExt;
use tracing_subscriber::{Layer, Registry, fmt, reload};

/// Changes the level of the running program.
static LEVEL: OnceLock<reload::Handle<LevelFilter, Registry>> = OnceLock::new();

/// The level of a command, in place of that of the command line.
static SET: Mutex<Option<LogLevel>> = Mutex::new(None);

/// Starts logging; called once.
pub fn start(level: LogLevel, format: LogFormat) {
    let (filter, handle) = reload::Layer::new(filter_of(level));
    let lines = fmt::layer()
        // A report of a failed log line would go to stderr and panic if stderr is a closed pipe.
        // Lose the line and keep the disk.
        .log_internal_errors(false)
        .with_writer(std::io::stderr)
        .with_ansi(std::io::stderr().is_terminal());
    let lines = match format {
        LogFormat::Text => lines.boxed(),
        LogFormat::Json => lines.json().flatten_event(true).with_span_list(false).boxed(),
    };
    tracing_subscriber::registry().with(filter).with(lines).init();
    let _ = LEVEL.set(handle); // it is the first call
}

/// Changes the minimum severity of log lines, also of later programs of this process.
pub fn set_level(level: LogLevel) {
    *lock(&SET) = Some(level);
    if let Some(handle) = LEVEL.get() {
        let _ = handle.modify(|filter| *filter = filter_of(level)); // the subscriber is global
    }
}

/// The level that [`set_level`] has set.
pub fn set() -> Option<LogLevel> {
    *lock(&SET)
}

fn filter_of(level: LogLevel) -> LevelFilter {
    match level {
        LogLevel::Error => LevelFilter::ERROR,
        LogLevel::Warn => LevelFilter::WARN,
        LogLevel::Info => LevelFilter::INFO,
        LogLevel::Debug => LevelFilter::DEBUG,
        LogLevel::Trace => LevelFilter::TRACE,
    }
}
