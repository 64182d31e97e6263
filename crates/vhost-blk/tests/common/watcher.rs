// SPDX-License-Identifier: Apache-2.0
//! A program that prints a stream of the daemon.

use crate::common::wait_until;
use crate::rig::Rig;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use serde_json::Value;
use std::io::{BufRead, BufReader, Read};
use std::process::{Child, ChildStdout, Stdio};

/// A running `vhost-blk ctl --json` that prints a stream; killed when dropped.
pub(crate) struct Watcher {
    child: Child,
    lines: BufReader<ChildStdout>,
}

impl Watcher {
    pub(crate) fn start(rig: &Rig, words: &str) -> Watcher {
        let mut command = rig.command(&format!("--json {words}"));
        let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap());
        Watcher { child, lines }
    }

    /// The next message; `None`: the stream has ended.
    pub(crate) fn next(&mut self) -> Option<Value> {
        let mut line = String::new();
        if self.lines.buffer().is_empty() {
            let mut ready = [PollFd::new(self.lines.get_ref(), PollFlags::IN)];
            let limit = Timespec { tv_sec: 60, tv_nsec: 0 };
            assert_ne!(poll(&mut ready, Some(&limit)).unwrap(), 0, "waited in vain for a message");
        }
        self.lines.read_line(&mut line).unwrap();
        (!line.is_empty()).then(|| serde_json::from_str(&line).unwrap())
    }

    /// The exit code and standard error, after the end of the stream.
    pub(crate) fn end(&mut self) -> (Option<i32>, String) {
        let mut told = String::new();
        self.child.stderr.take().unwrap().read_to_string(&mut told).unwrap();
        (self.child.wait().unwrap().code(), told)
    }

    /// Waits until the stream has begun: it has a pause.
    pub(crate) fn wait_for_begin(&mut self, rig: &Rig) {
        std::thread::scope(|scope| {
            let first = scope.spawn(|| self.next());
            wait_until("the first event", || {
                rig.ok("pause a");
                rig.ok("resume a");
                first.is_finished()
            });
        });
    }
}

impl Drop for Watcher {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
