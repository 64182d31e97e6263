// SPDX-License-Identifier: Apache-2.0
//! Log lines on their way to stderr. One thread writes them, so that a pipe without a reader, or a file on storage
//! that hangs, delays no disk and no command.
//!
//! `tracing-appender` has such a writer, too. It has no flush for an `exec`, and its end prints to stdout if the
//! queue is full.

use crate::subscription::lock;
use std::collections::VecDeque;
use std::io::{self, Write};
use std::mem;
use std::sync::{Condvar, Mutex, PoisonError};
use std::time::Duration;

/// Most lines in the queue; later ones are lost.
const LINES_MAX: usize = 4096;
/// Longest wait of [`Queue::flush`].
const FLUSH_MAX: Duration = Duration::from_millis(200);

/// State of the queue, which one lock protects.
#[derive(Debug)]
struct State {
    lines: VecDeque<Vec<u8>>,
    /// The thread has taken a line and not written it yet.
    is_writing: bool,
    /// Lines lost since the last report.
    lost: u64,
}

/// The queue of one writer.
#[derive(Debug)]
pub(super) struct Queue {
    state: Mutex<State>,
    /// A line was added.
    added: Condvar,
    /// The last line was written.
    idle: Condvar,
}

impl Queue {
    pub(super) const fn new() -> Queue {
        let state = State { lines: VecDeque::new(), is_writing: false, lost: 0 };
        Queue { state: Mutex::new(state), added: Condvar::new(), idle: Condvar::new() }
    }

    /// Adds a line, or loses it if the queue is full. Does not wait for the writer.
    pub(super) fn push(&self, line: &[u8]) {
        let line = line.to_vec();
        let mut state = lock(&self.state);
        if state.lines.len() < LINES_MAX {
            state.lines.push_back(line);
            self.added.notify_one();
        } else {
            state.lost += 1;
        }
    }

    /// Writes lines to `to` without end. Calls `has_lost` with the number of lines that were lost as soon as others
    /// find room. Ignores errors: a log that has failed stops no disk.
    pub(super) fn write_to(&self, mut to: impl Write, has_lost: impl Fn(u64)) {
        loop {
            let (line, lost) = self.take();
            let _ = to.write_all(&line);
            if lost > 0 {
                has_lost(lost);
            }
        }
    }

    /// Waits for a line, and takes it with the number of lost ones.
    fn take(&self) -> (Vec<u8>, u64) {
        let mut state = lock(&self.state);
        state.is_writing = false;
        loop {
            if let Some(line) = state.lines.pop_front() {
                state.is_writing = true;
                return (line, mem::take(&mut state.lost));
            }
            self.idle.notify_all();
            state = self.added.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Waits until all lines are written, at most [`FLUSH_MAX`]. Returns whether they are.
    pub(super) fn flush(&self) -> bool {
        self.flush_within(FLUSH_MAX)
    }

    fn flush_within(&self, limit: Duration) -> bool {
        let has_more = |state: &mut State| state.is_writing || !state.lines.is_empty();
        let waited = self.idle.wait_timeout_while(lock(&self.state), limit, has_more);
        !waited.unwrap_or_else(PoisonError::into_inner).1.timed_out()
    }
}

/// Adds each line, which the subscriber writes at once, to the queue.
impl Write for &Queue {
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        self.push(line);
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;
    use std::sync::mpsc::{Receiver, SyncSender, channel, sync_channel};

    /// A pipe for one line at a time.
    struct Narrow(SyncSender<Vec<u8>>);

    impl Write for Narrow {
        fn write(&mut self, line: &[u8]) -> io::Result<usize> {
            self.0.send(line.to_vec()).map_err(io::Error::other)?;
            Ok(line.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    /// A queue with its thread, its lines and its reports of lost ones.
    fn queue() -> (Arc<Queue>, Receiver<Vec<u8>>, Receiver<u64>) {
        let queue = Arc::new(Queue::new());
        let (written, lines) = sync_channel(0);
        let (reported, reports) = channel();
        let of_thread = Arc::clone(&queue);
        std::thread::spawn(move || {
            of_thread.write_to(Narrow(written), |lost| reported.send(lost).unwrap());
        });
        (queue, lines, reports)
    }

    #[test]
    fn a_writer_that_hangs_loses_late_lines_and_says_how_many() {
        let (queue, lines, reports) = queue();
        queue.push(b"first");
        while !lock(&queue.state).lines.is_empty() {
            std::thread::yield_now();
        }
        let all: Vec<_> = (0..LINES_MAX + 3).map(|n| n.to_string().into_bytes()).collect();
        all.iter().for_each(|line| queue.push(line));
        assert!(!queue.flush());
        assert_eq!(lines.recv().unwrap(), b"first");
        for line in &all[..LINES_MAX] {
            assert_eq!(lines.recv().unwrap(), *line);
        }
        assert_eq!(reports.recv().unwrap(), 3);
        queue.push(b"last");
        assert_eq!(lines.recv().unwrap(), b"last");
        assert!(queue.flush_within(Duration::from_secs(60)));
        assert!(reports.try_recv().is_err());
    }

    #[test]
    fn a_flush_returns_when_the_last_line_is_written() {
        let (queue, lines, _reports) = queue();
        assert!(queue.flush_within(Duration::from_secs(60)));
        let reader = std::thread::spawn(move || lines.iter().take(3).collect::<Vec<_>>());
        [b"a", b"b", b"c"].iter().for_each(|line| queue.push(*line));
        assert!(queue.flush_within(Duration::from_secs(60)));
        assert_eq!(reader.join().unwrap(), [b"a", b"b", b"c"]);
    }
}
