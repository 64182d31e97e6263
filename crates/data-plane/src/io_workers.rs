// SPDX-License-Identifier: Apache-2.0
//! The bound on the kernel threads of a ring (`io-wq`), which carry out the operations that would keep the
//! thread of the ring.
//!
//! All disks of a thread share them. Storage that does not answer, such as a frozen file system or a device
//! without a path, keeps a kernel thread for each operation that has to wait in its submission. So that
//! the other disks still find some, the bound grows by the requests that have no answer for some time, and
//! shrinks after it. No check runs below [`IO_WORKERS_MAX`] requests in flight.
//!
//! So that this needs a bounded number of kernel threads, [`room`] bounds the requests that the storage of
//! a thread has.

use crate::affinity::cpu_set;
use crate::event::Event;
use crate::uring::Uring;
use io_uring::{opcode, squeue};
use std::io;
use std::time::Duration;

/// Maximum kernel threads of a ring, of either kind (bounded and unbounded work), for storage that answers.
const IO_WORKERS_MAX: u32 = 16;
/// Requests that the storage of a thread's disks may have, beside [`OWN`] of each queue.
const IN_STORAGE_MAX: u32 = 3072;
/// Requests of a queue that the storage may have in any case.
const OWN: u32 = 16;
/// Time without an answer after which a request counts as one that blocks a kernel thread.
pub(crate) const BLOCKED_AFTER: Duration = Duration::from_millis(250);

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

/// Number of further requests that a queue may give to the storage, which has `queue` requests of it, `disk` of its disk
/// and `thread` of all disks of the thread.
///
/// It is about the largest n with `(queue + n) + (disk + n) + (thread + n) <= IN_STORAGE_MAX`, and at least
/// `OWN - queue`. So one full queue has room; queues of a disk, and disks, that want more have the same number each
/// as soon as some complete; and storage that does not answer never takes the room of the other disks.
#[inline]
pub(crate) fn room(queue: u32, disk: u32, thread: u32) -> u32 {
    let left = IN_STORAGE_MAX.saturating_sub(queue + disk + thread);
    left.div_ceil(3).max(OWN.saturating_sub(queue))
}

/// The bound while so many requests have no answer. Few steps make few system calls.
fn max_with(blocked: u32) -> u32 {
    IO_WORKERS_MAX + blocked.next_multiple_of(IO_WORKERS_MAX)
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

    /// Returns whether blocked requests could occupy all io-wq workers and no check is scheduled.
    #[inline]
    pub(crate) fn needs_timer(&self) -> bool {
        self.in_storage >= IO_WORKERS_MAX && !self.io_workers.watches
    }

    /// Requests [`Event::IoWorkers`].
    #[cold]
    pub(crate) fn watch_io_workers(&mut self) {
        self.io_workers.watches = true;
        self.notify_in(BLOCKED_AFTER, Event::IoWorkers);
    }

    /// Makes the kernel start threads for operations that wait for one: it does so only when another one
    /// arrives.
    fn wake_io_workers(&mut self) {
        let nothing = opcode::Nop::new().build().flags(squeue::Flags::ASYNC);
        self.push_entry(&nothing.user_data(Event::Ignored.to_user_data()));
    }

    /// Adapts the bound to the number of requests without an answer, after [`Event::IoWorkers`].
    pub(crate) fn resize_io_workers(&mut self, blocked: u32) {
        let max = max_with(blocked);
        if max != self.io_workers.max && self.bound_io_workers(max).is_ok() {
            tracing::debug!(blocked, max, "requests have no answer: other bound on kernel threads");
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
        for (blocked, max) in [(0, 16), (1, 32), (16, 32), (17, 48), (3072, 3088), (3073, 3104)] {
            assert_eq!(max_with(blocked), max, "{blocked}");
        }
    }

    /// Fills queues of one thread until none has room, each as far as it can before the next one. A number
    /// is the disk of a queue. Returns the requests of each.
    fn filled(disks: &[usize]) -> Vec<u32> {
        let mut queues = vec![0; disks.len()];
        for n in 0..queues.len() {
            loop {
                let of_disk = |(queue, disk): (&u32, &usize)| (*disk == disks[n]).then_some(*queue);
                let disk = queues.iter().zip(disks).filter_map(of_disk).sum();
                match room(queues[n], disk, queues.iter().sum()).min(1024 - queues[n]) {
                    0 => break,
                    more => queues[n] += more,
                }
            }
        }
        queues
    }

    #[test]
    fn one_full_queue_has_room_and_storage_that_hangs_leaves_some_for_others() {
        assert_eq!(filled(&[0]), [1024]);
        assert_eq!(filled(&[0, 0, 0]), [1024, 342, 114]);
        assert_eq!(filled(&[0, 0, 0, 1]), [1024, 342, 114, 531]);
        let many = filled(&(0..1000).collect::<Vec<_>>());
        assert_eq!(many.iter().min(), Some(&OWN), "a disk finds no room");
        assert!(many.iter().sum::<u32>() <= IN_STORAGE_MAX + 1000 * OWN, "the bound does not hold");
        assert_eq!(room(OWN, 64 * OWN, 1 << 20), 0);
    }

    #[test]
    fn queues_that_want_more_have_the_same_number_after_some_time() {
        let mut queues = [1024, 16];
        for n in 0..10_000 {
            queues[n % 2] -= 1; // a request completes, and the driver has more in both queues
            for n in [0, 1] {
                let all = queues.iter().sum();
                queues[n] += room(queues[n], all, all).min(1);
            }
        }
        assert!(queues[0].abs_diff(queues[1]) <= 2, "{queues:?}");
    }

    /// The data-plane threads for which the service manager lets storage that hangs keep kernel threads.
    const THREADS: u32 = 8;

    #[test]
    fn the_units_allow_the_kernel_threads() {
        let single = include_str!("../../../packaging/vhost-blk@.service");
        for unit in [single, include_str!("../../../packaging/vhost-blk.service")] {
            let tasks =
                unit.lines().find_map(|line| line.strip_prefix("TasksMax=")).expect("a bound");
            let tasks: u32 = tasks.parse().expect("a number");
            assert!(tasks >= THREADS * max_with(IN_STORAGE_MAX + 64 * OWN), "{tasks}");
        }
    }

    #[test]
    fn the_kernel_learns_the_bound_and_its_end() {
        let mut uring = Uring::new().expect("a ring");
        uring.start_io_workers(&[]).expect("Linux 5.15");
        uring.resize_io_workers(100);
        assert_eq!(max_of_kernel(&uring), [128; 2]);
        assert!(uring.io_workers.watches, "nobody would look for the end");
        uring.resize_io_workers(0);
        assert_eq!(max_of_kernel(&uring), [16; 2]);
        assert!(!uring.io_workers.watches, "an idle thread would wake up");
    }

    #[test]
    fn a_thread_with_few_requests_in_flight_never_looks() {
        let mut uring = Uring::new().expect("a ring");
        for (in_storage, wants) in [(0, false), (15, false), (16, true), (500, true)] {
            uring.in_storage = in_storage;
            assert_eq!(uring.needs_timer(), wants, "{in_storage}");
        }
        uring.watch_io_workers();
        assert!(!uring.needs_timer(), "it looks already");
        let mut events = Vec::new();
        uring.wait(None);
        uring.reap(&mut events, 10);
        assert_eq!(events.iter().map(|(event, _)| *event).collect::<Vec<_>>(), [Event::IoWorkers]);
    }
}
