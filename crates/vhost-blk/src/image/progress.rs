// SPDX-License-Identifier: Apache-2.0
//! The progress of a copy on a terminal, and its end by a signal.

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM, SIGXFSZ};
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// The progress. From its start on, SIGINT, SIGTERM and SIGHUP end the copy instead of the process.
#[derive(Debug)]
pub(super) struct Progress {
    bar: ProgressBar,
    stopped: Arc<AtomicBool>,
}

/// A bar on standard error; it is not drawn if that is no terminal.
pub(crate) fn bar() -> io::Result<ProgressBar> {
    let style = ProgressStyle::with_template(
        "{percent:>3}% [{bar:40}] {bytes} of {total_bytes}, {eta} left",
    );
    let style = style.map_err(io::Error::other)?.progress_chars("=> ");
    let bar = ProgressBar::with_draw_target(Some(0), ProgressDrawTarget::stderr());
    Ok(bar.with_style(style))
}

impl Progress {
    pub(super) fn start() -> io::Result<Progress> {
        let stopped = Arc::new(AtomicBool::new(false));
        for signal in [SIGINT, SIGTERM, SIGHUP] {
            signal_hook::flag::register(signal, Arc::clone(&stopped))?;
        }
        // A write beyond the limit on file sizes then fails with EFBIG.
        signal_hook::flag::register(SIGXFSZ, Arc::default())?;
        Ok(Progress { bar: bar()?, stopped })
    }

    /// Shows the progress. Returns whether the copy goes on.
    pub(super) fn tell(&mut self, done: u64, all: u64) -> bool {
        self.bar.set_length(all);
        self.bar.set_position(done);
        !self.stopped.load(Ordering::Relaxed)
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        self.bar.finish_and_clear();
    }
}
