// SPDX-License-Identifier: Apache-2.0
//! Ring faults.
//!
//! A data plane signals a ring fault by the err eventfd of the queue, in the daemon and in the kernel. All queues get
//! one eventfd of the daemon in place of the front-end's, which a front-end could block. The thread of the connection
//! passes the signal on.

use crate::control::Notice;
use crate::session::Session;
use data_plane::{PlaneKind, QueueHandle, signal};
use rustix::event::{EventfdFlags, eventfd};
use std::fs::File;
use std::io::{self, Read};

/// The err eventfd of the daemon, which does not block.
pub(crate) fn err_eventfd() -> io::Result<File> {
    Ok(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?.into())
}

impl Session<'_> {
    /// Tells the front-end and the observer of the queues that have faulted.
    pub(crate) fn pass_faults_on(&mut self) {
        // EAGAIN: there was no signal.
        let mut is_unexplained = (&self.device.faults).read(&mut [0; 8]).is_ok();
        // Without them the signal passes on to all queues there.
        let counters = self.device.planes.device_counters().unwrap_or_else(|error| {
            tracing::warn!(%error, "the counters of the kernel module cannot be read");
            Vec::new()
        });
        for (index, slot) in self.queues.iter_mut().enumerate() {
            let Some(running) = slot.running.as_ref().filter(|_| !slot.fault_told) else {
                continue;
            };
            if !self.device.planes.queue_report(running, &counters).faulted {
                continue;
            }
            (slot.fault_told, is_unexplained) = (true, false);
            if let Some(err) = &mut slot.err {
                let _ = signal(err); // a front-end that has blocked it learns of nothing
            }
            self.device.tell(Notice::Faulted(index as u16));
        }
        if is_unexplained {
            self.pass_kernel_errors_on();
        }
    }

    /// Passes a signal on for which no queue has stopped: the kernel cannot write to the dirty log, or to a status
    /// byte.
    fn pass_kernel_errors_on(&mut self) {
        let runs_there = |queue: &QueueHandle| queue.plane() == PlaneKind::Kernel;
        for slot in &mut self.queues {
            if let (Some(err), true) =
                (&mut slot.err, slot.running.as_ref().is_some_and(runs_there))
            {
                let _ = signal(err);
            }
        }
    }
}
