// SPDX-License-Identifier: Apache-2.0
//! Log lines on stderr.

mod queue;

use crate::failure::Failure;
use crate::subscription::lock;
use crate::values::{LogFormat, LogLevel};
use queue::Queue;
use rustix::fs::FileType;
use std::backtrace::{Backtrace, BacktraceStatus};
use std::fs::File;
use std::io::{self, IsTerminal};
use std::os::fd::AsFd;
use std::sync::{Mutex, OnceLock};
use tracing::level_filters::LevelFilter;
use tracing::{Event, Level, Subscriber};
use tracing_subscriber::fmt::format::{Format, Full, Writer};
use tracing_subscriber::fmt::{FmtContext, FormatEvent, FormatFields};
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::registry::LookupSpan;
use tracing_subscriber::util::SubscriberInitExt;
use tracing_subscriber::{Layer, Registry, fmt, reload};

/// Changes the level of the running program.
static LEVEL: OnceLock<reload::Handle<LevelFilter, Registry>> = OnceLock::new();

/// The level of a command, in place of that of the command line.
static SET: Mutex<Option<LogLevel>> = Mutex::new(None);

/// The lines of this program.
static LINES: Queue = Queue::new();

/// Starts logging; called once, when this thread blocks the signals that another one waits for.
///
/// # Errors
/// [`Failure`] if no thread is left.
pub fn start(level: LogLevel, format: LogFormat) -> Result<(), Failure> {
    let (filter, handle) = reload::Layer::new(filter_of(level));
    let lines = fmt::layer()
        // A report of a failed log line would go to stderr and panic if stderr is a closed pipe.
        .log_internal_errors(false)
        .with_writer(|| &LINES)
        .with_ansi(io::stderr().is_terminal());
    let lines = match format {
        LogFormat::Text if is_journal() => {
            lines.event_format(Journal(fmt::format().without_time())).boxed()
        }
        LogFormat::Text => lines.boxed(),
        LogFormat::Json => lines.json().flatten_event(true).with_span_list(false).boxed(),
    };
    tracing_subscriber::registry().with(filter).with(lines).init();
    let _ = LEVEL.set(handle); // it is the first call
    write_lines()
        .map_err(|error| Failure::run("write the log", error, "raise the limits (ulimit)"))?;
    // The usual report would wait for the reader of a full pipe.
    std::panic::set_hook(Box::new(|panic| {
        let trace = Backtrace::capture();
        let is_wanted = trace.status() == BacktraceStatus::Captured;
        let trace = if is_wanted { trace.to_string() } else { String::new() };
        LINES.push(format!("{panic}\n{trace}").as_bytes());
        LINES.flush();
    }));
    Ok(())
}

/// Starts the thread that writes the lines. Its descriptor is its own: the lock of `std`'s stderr would be held as long
/// as a write hangs.
fn write_lines() -> io::Result<()> {
    let stderr = File::from(io::stderr().as_fd().try_clone_to_owned()?);
    let has_lost = |lines| tracing::error!(lines, "log lines were lost: the log was not read");
    let body = move || LINES.write_to(stderr, has_lost);
    std::thread::Builder::new().name("log".into()).spawn(body).map(drop)
}

/// Waits until all lines are written, before the program ends. A log that is not read delays it for a moment only.
pub fn flush() {
    LINES.flush();
}

/// As [`flush`], before another program takes the place of this one.
///
/// # Errors
/// The file of the log hangs, and so would the exchange of the program, which waits for the end of all threads. The
/// write to a pipe, a socket or a terminal can be interrupted.
pub fn flush_for_exec() -> io::Result<()> {
    let is_file = || {
        let found = rustix::fs::fstat(io::stderr())?;
        let kind = FileType::from_raw_mode(found.st_mode);
        Ok::<_, io::Error>(matches!(kind, FileType::RegularFile | FileType::BlockDevice))
    };
    match LINES.flush() || !is_file()? {
        true => Ok(()),
        false => Err(io::Error::other("the log file does not accept lines")),
    }
}

/// The form of lines in the journal, which notes the time itself and takes the severity from their begin
/// (`sd-daemon(3)`).
struct Journal(Format<Full, ()>);

impl<S, N> FormatEvent<S, N> for Journal
where
    S: Subscriber + for<'a> LookupSpan<'a>,
    N: for<'a> FormatFields<'a> + 'static,
{
    fn format_event(
        &self,
        context: &FmtContext<'_, S, N>,
        mut writer: Writer<'_>,
        event: &Event<'_>,
    ) -> std::fmt::Result {
        let severity = match *event.metadata().level() {
            Level::ERROR => 3,
            Level::WARN => 4,
            Level::INFO => 6,
            Level::DEBUG | Level::TRACE => 7,
        };
        write!(writer, "<{severity}>")?;
        self.0.format_event(context, writer, event)
    }
}

/// Returns whether stderr is the stream to the journal that the service manager has named.
fn is_journal() -> bool {
    let named = std::env::var("JOURNAL_STREAM").ok();
    let found = rustix::fs::fstat(io::stderr()).ok();
    let found = found.map(|found| format!("{}:{}", found.st_dev, found.st_ino));
    named.is_some() && named == found
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
