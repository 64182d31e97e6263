// SPDX-License-Identifier: Apache-2.0
//! Log lines on stderr.

mod queue;

use crate::failure::Failure;
use crate::subscription::lock;
use crate::values::{LogFormat, LogLevel};
use queue::Queue;
use std::io::IsTerminal;
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
        .with_ansi(std::io::stderr().is_terminal());
    let lines = match format {
        LogFormat::Text if is_journal() => {
            lines.event_format(Journal(fmt::format().without_time())).boxed()
        }
        LogFormat::Text => lines.boxed(),
        LogFormat::Json => lines.json().flatten_event(true).with_span_list(false).boxed(),
    };
    tracing_subscriber::registry().with(filter).with(lines).init();
    let _ = LEVEL.set(handle); // it is the first call
    let has_lost = |lines| tracing::warn!(lines, "log lines were lost: the log was not read");
    let body = move || LINES.write_to(std::io::stderr(), has_lost);
    let spawned = std::thread::Builder::new().name("log".into()).spawn(body);
    spawned.map_err(|error| Failure::run("write the log", error, "raise the limits (ulimit)"))?;
    let report = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        flush();
        report(panic);
    }));
    Ok(())
}

/// Waits until all lines are written, before the program ends or another one takes its place. A log that is not read
/// delays it for a moment only.
pub fn flush() {
    LINES.flush();
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
    let found = rustix::fs::fstat(std::io::stderr()).ok();
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
