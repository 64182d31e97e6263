// SPDX-License-Identifier: Apache-2.0
//! Requests that failed and halted the disk: they stay in flight, and the queue takes them again
//! after the halt.
//!
//! | Ring fault | Halted | Keeps | Takes | Drained when nothing is in flight, and also |
//! |---|---|---|---|---|
//! | no | no | nothing new | kept requests, then new ones | no kept request is left |
//! | no | yes | failed requests | nothing | nothing more: the stop ends the kept ones |
//! | yes | no, yes | nothing: failed requests get their error | nothing | nothing more |

use super::RunningQueue;
use crate::failure::StorageFailure;
use crate::health::Verdict;
use crate::latency::Clock;
use crate::request_table::Taken;
use backend::{Io, IoError};
use virtio_blk::{Completion, Kind, Request};

impl RunningQueue {
    /// Counts and judges the failed I/O of a request. Halts the disk if its policy says so. A queue with a ring fault
    /// keeps no request: it would never take that again. An error of guest memory belongs to this front-end, and does
    /// not count as a failure of the storage.
    #[cold]
    pub(crate) fn handle_failure(&mut self, kind: Kind, io: &Io, error: IoError) -> Verdict {
        if error.is_of_memory() {
            return Verdict::Report;
        }
        if let Some(failure) = StorageFailure::of_io(kind, io.offset_bytes, error) {
            self.stats.failures[failure.kind as usize] += 1;
            self.health.record_failure(failure);
        }
        let verdict = self.health.judge(kind, error);
        if verdict != Verdict::Report {
            self.health.halt(kind, error);
            self.halted = true;
        }
        match verdict {
            Verdict::Keep if self.faulted => Verdict::ReportAndHalt,
            verdict => verdict,
        }
    }

    /// Keeps a failed request: its chain stays in flight, and is taken again after the halt.
    #[cold]
    pub(crate) fn keep(&mut self, taken: Taken, request: Request) {
        self.inflight_bytes -= request.kind.inflight_bytes();
        let index = taken.index();
        let head = self.requests.release(taken);
        let inflight = self.virtqueue.keep(head, &self.requests.entry(index).chain);
        self.resubmit.push_back(inflight);
    }

    /// Answers kept requests with an error, if the stop wants that and the disk is halted.
    #[cold]
    pub(crate) fn end_kept(&mut self, clock: &mut Clock) {
        let fails = self.kept_at_stop.fails(self.region.is_some());
        if !self.halted || !fails || self.resubmit.is_empty() {
            return;
        }
        self.recovering = 0; // none is carried out
        while let Some(mut taken) = self.take_resubmitted() {
            taken.at = clock.recent();
            match self.parse(&taken) {
                Ok(request) => {
                    let failed = Completion::of(request.kind, Err(IoError::Errno(libc::EIO)), 0);
                    self.complete(taken, request, failed);
                }
                Err(refused) => self.refuse(taken, refused),
            }
        }
        let finished = self.publish(clock);
        self.notify_if_due(finished, clock);
    }
}
