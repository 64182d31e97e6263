// SPDX-License-Identifier: Apache-2.0
//! The bound on the kernel threads of a ring (`io-wq`), which carry out the operations that would keep the
//! thread of the ring.
//!
//! All disks of a thread share them. Storage that does not answer, such as a frozen file system or a device
//! without a path, keeps a kernel thread for each operation that has to wait in its submission. So that
//! the other disks still find some, the bound grows by the requests that have no answer for some time, and
//! shrinks after it. Without [`IO_WORKERS_MAX`] requests in flight nobody looks.

use crate::affinity::cpu_set;
use crate::event::Event;
use crate::uring::Uring;
use io_uring::{opcode, squeue};
use std::io;
use std::time::Duration;

/// Maximum kernel threads of a ring, of either kind (bounded and unbounded work), for storage that answers.
const IO_WORKERS_MAX: u32 = 16;
/// Requests without an answer for which the bound grows. With more, disks of the thread wait for each other.
const KEPT_MAX: u32 = 2048;
/// Time without an answer after which a request counts as one that keeps a kernel thread.
pub(crate) const KEPT_AFTER: Duration = Duration::from_millis(250);

/// The bound on the kernel threads of a ring.
#[derive(Debug)]
pub(crate) struct IoWorkers {
    max: u32,
    /// [`Event::IoWorkers`] will come.
    watches: bool,
}

impl Default for IoWorkers {
    fn default() -> Self {
        IoWorkers { max: IO_WORKERS_MAX, watches: false }
    }
}

/// The bound while so many requests have no answer. Few steps make few system calls.
fn max_with(kept: u32) -> u32 {
    IO_WORKERS_MAX + kept.min(KEPT_MAX).next_multiple_of(IO_WORKERS_MAX)
}

impl Uring {
    /// Bounds the kernel threads that work for the calling thread, and pins them to `cpus` (empty:
    /// to no CPU).
    pub(crate) fn start_io_workers(&self, cpus: &[usize]) -> io::Result<()> {
        self.bound_io_workers(IO_WORKERS_MAX)?;
        match cpus {
            [] => Ok(()),
            cpus => self.ring.submitter().register_iowq_aff(&cpu_set(cpus)?),
        }
    }

    fn bound_io_workers(&self, max: u32) -> io::Result<()> {
        self.ring.submitter().register_iowq_max_workers(&mut [max; 2])
    }

    /// Returns whether requests in flight could keep all kernel threads, and nobody looks.
    #[inline]
    pub(crate) fn wants_watch(&self) -> bool {
        self.in_storage >= IO_WORKERS_MAX && !self.io_workers.watches
    }

    /// Requests [`Event::IoWorkers`].
    #[cold]
    pub(crate) fn watch_io_workers(&mut self) {
        self.io_workers.watches = true;
        self.notify_in(KEPT_AFTER, Event::IoWorkers);
    }

    /// Makes the kernel start threads for operations that wait for one: it does so only when another one
    /// arrives.
    fn wake_io_workers(&mut self) {
        let nothing = opcode::Nop::new().build().flags(squeue::Flags::ASYNC);
        self.push_entry(&nothing.user_data(Event::Ignored.to_user_data()));
    }

    /// Adapts the bound to the number of requests without an answer, after [`Event::IoWorkers`].
    pub(crate) fn looked_at_io_workers(&mut self, kept: u32) {
        let max = max_with(kept);
        if max != self.io_workers.max && self.bound_io_workers(max).is_ok() {
            tracing::debug!(kept, max, "requests have no answer: other bound on kernel threads");
            if max > self.io_workers.max {
                self.wake_io_workers();
            }
            self.io_workers.max = max;
        }
        self.io_workers.watches = false;
        if max > IO_WORKERS_MAX {
            self.watch_io_workers();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::event::Event;

    /// The bound that the kernel has; to ask for it changes nothing.
    fn max_of_kernel(uring: &Uring) -> [u32; 2] {
        let mut max = [0; 2];
        uring.ring.submitter().register_iowq_max_workers(&mut max).expect("Linux 5.15");
        max
    }

    #[test]
    fn the_usual_threads_stay_free_beside_those_that_requests_keep() {
        for (kept, max) in [(0, 16), (1, 32), (16, 32), (17, 48), (1024, 1040), (u32::MAX, 2064)] {
            assert_eq!(max_with(kept), max, "{kept}");
        }
    }

    #[test]
    fn the_kernel_learns_the_bound_and_its_end() {
        let mut uring = Uring::new().expect("a ring");
        uring.start_io_workers(&[]).expect("Linux 5.15");
        uring.looked_at_io_workers(100);
        assert_eq!(max_of_kernel(&uring), [128; 2]);
        assert!(uring.io_workers.watches, "nobody would look for the end");
        uring.looked_at_io_workers(0);
        assert_eq!(max_of_kernel(&uring), [16; 2]);
        assert!(!uring.io_workers.watches, "an idle thread would wake up");
    }

    #[test]
    fn a_thread_with_few_requests_in_flight_never_looks() {
        let mut uring = Uring::new().expect("a ring");
        for (in_storage, wants) in [(0, false), (15, false), (16, true), (500, true)] {
            uring.in_storage = in_storage;
            assert_eq!(uring.wants_watch(), wants, "{in_storage}");
        }
        uring.watch_io_workers();
        assert!(!uring.wants_watch(), "it looks already");
        let mut events = Vec::new();
        uring.wait(None);
        uring.reap(&mut events, 10);
        assert_eq!(events.iter().map(|(event, _)| *event).collect::<Vec<_>>(), [Event::IoWorkers]);
    }
}
