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

impl Progress {
    pub(super) fn start() -> io::Result<Progress> {
        let stopped = Arc::new(AtomicBool::new(false));
        for signal in [SIGINT, SIGTERM, SIGHUP] {
            signal_hook::flag::register(signal, Arc::clone(&stopped))?;
        }
        // A write beyond the limit on file sizes then fails with EFBIG.
        signal_hook::flag::register(SIGXFSZ, Arc::default())?;
        let style = ProgressStyle::with_template(
            "{percent:>3}% [{bar:40}] {bytes} of {total_bytes}, {eta} left",
        );
        let style = style.map_err(io::Error::other)?.progress_chars("=> ");
        // Nothing is drawn if standard error is no terminal.
        let bar = ProgressBar::with_draw_target(Some(0), ProgressDrawTarget::stderr());
        Ok(Progress { bar: bar.with_style(style), stopped })
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
