// SPDX-License-Identifier: Apache-2.0
//! The loop of the io_uring data plane: one thread, its ring, its disks and their queues.
//!
//! [`Worker::turn`] and [`Worker::take_batches`] show the whole life of a request in the six stage
//! words of the project.

mod disks;
mod mail;
mod parking;
#[cfg(test)]
mod tests;

pub(crate) use disks::DISKS_MAX;

use crate::arrivals::RunDelay;
use crate::batch_size::BatchSize;
use crate::event::{Event, QueueId, queue_and_entry};
use crate::io_workers::BLOCKED_AFTER;
use crate::latency::{Clock, Nanos};
use crate::mail::Mail;
use crate::plane::Coalesce;
use crate::poll::{Polled, Polls};
use crate::running::RunningQueue;
use crate::trace::is_any_traced;
use crate::uring::Uring;
use backend::Token;
use disks::Disks;
use parking::ActiveQueues;
use std::os::fd::AsRawFd;
use std::sync::mpsc::Receiver;
use std::time::Duration;
use vmm_sys_util::eventfd::EventFd;

/// Maximum chains that a queue takes before the thread serves the other queues and publishes
/// completions; a batch of I/O to submit ends it sooner.
pub const BATCH_CHAINS_MAX: usize = 32;
/// Maximum polls of a kick descriptor that end in a row without a chain. The poll of an eventfd
/// stays armed; a descriptor that ends each poll at once would keep the thread busy forever.
const KICK_REARMS_MAX: u32 = 1000;
/// Interval at which a sleeping thread polls a queue without a kick eventfd.
const KICKLESS_LOOK: Duration = Duration::from_micros(100);

/// One data-plane thread.
pub(crate) struct Worker {
    disks: Disks,
    active: ActiveQueues,
    uring: Uring,
    clock: Clock,
    run_delay: RunDelay,
    polls: Polls,
    batch_size: BatchSize,
    /// Coalescing of the calls of new queues, and the maximum of polling.
    coalesce: (Coalesce, Duration),
    /// A queue holds a call.
    holding: bool,
    events: Vec<(Event, i32)>,
    mail: Receiver<Mail>,
    mail_fd: EventFd,
    /// Number of running queues.
    running: usize,
    /// Queues that the control plane waits for.
    stopping: Vec<QueueId>,
    exit: bool,
}

impl Worker {
    pub(crate) fn new(
        uring: Uring,
        poll_max: Duration,
        batch_size: BatchSize,
        coalesce: Coalesce,
        mail: Receiver<Mail>,
        mail_fd: EventFd,
    ) -> Self {
        Worker {
            disks: Disks::default(),
            active: ActiveQueues::default(),
            uring,
            clock: Clock::default(),
            run_delay: RunDelay::default(),
            polls: Polls::new(poll_max),
            batch_size,
            coalesce: (coalesce, poll_max),
            holding: false,
            events: Vec::with_capacity(256),
            mail,
            mail_fd,
            running: 0,
            stopping: Vec::new(),
            exit: false,
        }
    }

    /// Runs until the control plane ends the thread.
    pub(crate) fn run(&mut self) {
        self.uring.poll_eventfd(self.mail_fd.as_raw_fd(), Event::Mail { armed: true });
        while !self.exit {
            self.turn_or_wait();
        }
    }

    /// Takes a turn. Polls or sleeps after one without work.
    fn turn_or_wait(&mut self) {
        if self.turn() {
            if let Some(poll) = self.polls.worked() {
                self.count_poll(poll);
            }
        } else if self.holding
            || self.polls.look_again(self.uring.in_storage, self.uring.in_kernel_threads)
        {
            self.clock.forget();
            std::hint::spin_loop();
        } else {
            self.sleep();
        }
    }

    /// Counts a poll for each active queue: it was for all of them. They share its time.
    fn count_poll(&mut self, poll: Polled) {
        let ids = self.active.ids();
        let nanos = poll.nanos / ids.len().max(1) as Nanos;
        for &id in ids {
            self.disks.queue(id).0.stats.polled(poll.won, nanos);
        }
    }

    /// One turn: take a batch, submit it, reap a batch, publish once, call once at most. Visits
    /// active queues only. Returns whether there was work.
    fn turn(&mut self) -> bool {
        let batch_size = self.batch_size.size();
        let mut worked = self.take_batches(batch_size);
        if self.uring.needs_timer() {
            self.uring.watch_io_workers();
        }
        let submitted = self.uring.queued();
        let reaping_at = is_any_traced().then(|| self.clock.recent());
        self.uring.submit();
        if submitted > 0 {
            self.clock.forget(); // the cached time is stale after the system call
        }
        let events_max = batch_size * self.active.ids().len().max(1);
        let reaped_all = self.uring.reap(&mut self.events, events_max);
        worked |= !self.events.is_empty();
        let (in_storage, mut finished, mut depth) = (self.uring.in_storage as usize, 0, 0);
        // 4 completion of requests that the storage has finished
        self.handle_events();
        if reaped_all || reaping_at.is_none() {
            self.active.kicks_seen = reaping_at;
        }
        self.holding = false;
        for &id in self.active.ids() {
            let (queue, _) = self.disks.queue(id);
            // 5 used
            let published = queue.publish(&mut self.clock);
            finished += published;
            if published > 0 {
                depth = depth.max(queue.depth_before(published));
            }
            // 6 notify
            self.holding |= queue.notify_if_due(published, &mut self.clock);
        }
        self.batch_size.record_turn(submitted, (finished, depth), in_storage);
        if worked {
            self.active.worked(&mut self.disks);
        }
        // A queue is drained also without work here: another one may have halted the disk, which keeps its requests.
        self.finish_stops();
        worked
    }

    /// Takes and submits a batch of each active queue. Returns whether there was a chain.
    #[inline]
    fn take_batches(&mut self, batch_size: usize) -> bool {
        let mut worked = false;
        let Worker { disks, active, uring, clock, batch_size: batch_sizes, .. } = self;
        for &id in active.ids() {
            let (queue, storage) = disks.queue(id);
            queue.look_at_disk(clock);
            let (full, room) = (uring.queued() + batch_size, storage.room_for(queue, uring));
            queue.has_room = room > 0;
            for _ in 0..BATCH_CHAINS_MAX.min(room) {
                if !queue.may_take() || queue.batch.is_full() {
                    break;
                }
                if uring.queued() >= full {
                    if batch_sizes.wants_depth() && queue.look_for_work() {
                        batch_sizes.left_chain();
                    }
                    break; // the device starts on these while the thread takes more
                }
                // 1 chain
                let Some(taken) = queue.take(clock) else {
                    queue.batch.emptied();
                    break;
                };
                // 2 request
                match queue.parse(&taken) {
                    // 3 submit; one system call in `turn` passes all of them to the kernel
                    Ok(request) => storage.submit(uring, queue, taken, request),
                    // 4 completion of a refused request
                    Err(refused) => queue.refuse(taken, refused),
                }
                worked = true;
            }
        }
        worked
    }

    fn handle_events(&mut self) {
        let mut events = std::mem::take(&mut self.events);
        for (event, result) in events.drain(..) {
            match event {
                Event::Lane { disk, token } => self.lane_event(disk, token, result),
                Event::Kick { queue, armed } => self.kicked(queue, armed, result),
                Event::Mail { armed } => self.handle_mails(armed),
                Event::IoWorkers => self.look_at_io_workers(),
                // `reap` turns these into lane events
                Event::Timer { .. }
                | Event::InKernelThread { .. }
                | Event::Remote { .. }
                | Event::Ignored => {}
            }
        }
        self.events = events; // keeps the allocation
    }

    /// Delivers the result of an operation, and makes its queue active: it has a request to publish
    /// or room for another one.
    #[inline]
    fn lane_event(&mut self, disk: u16, token: Token, result: i32) {
        let (queue, _) = queue_and_entry(token.slot);
        let (queue, storage) = self.disks.queue(QueueId { disk, queue });
        storage.event(&mut self.uring, queue, token, result);
        self.active.wake(queue);
    }

    /// Raises the bound on io-wq threads by the number of requests without an answer for [`BLOCKED_AFTER`].
    #[cold]
    fn look_at_io_workers(&mut self) {
        let before = self.clock.read().saturating_sub(BLOCKED_AFTER.as_nanos() as Nanos);
        let blocked = self.disks.queues().map(|queue| queue.requests.taken_by(before)).sum();
        self.uring.resize_io_workers(blocked);
    }

    fn kicked(&mut self, id: QueueId, armed: bool, result: i32) {
        let (queue, _) = self.disks.queue(id);
        queue.kick_armed = armed;
        if result >= 0 {
            queue.stats.kicks += 1;
            self.active.wake(queue);
        } else if queue.stopping.is_none() {
            let error = std::io::Error::from_raw_os_error(-result);
            return queue.fault(&format_args!("its kick descriptor cannot be waited for: {error}"));
        }
        if !armed && queue.stopping.is_none() {
            queue.kick_rearms += 1;
            if queue.kick_rearms > KICK_REARMS_MAX {
                return queue.fault(&"its kick descriptor is not an eventfd");
            }
            arm_kick(&mut self.uring, queue);
        }
    }

    /// Asks for kicks and sleeps until there is work.
    fn sleep(&mut self) {
        if self.uring.has_events() || self.active.arm_and_park(&mut self.disks) {
            return self.clock.forget();
        }
        // The cached time, if there is one, is from the publication just before.
        let before = self.clock.recent();
        let timeout = self.timeout(before);
        let delayed = if is_any_traced() { self.run_delay.read() } else { None };
        self.uring.wait(timeout);
        let now = self.clock.read();
        if let Some(poll) = self.polls.slept(Duration::from_nanos(now.saturating_sub(before))) {
            self.count_poll(poll);
        }
        if is_any_traced() {
            // An event woke the thread, which then waited for a CPU.
            let delay = delayed.zip(self.run_delay.read());
            let woken_at = delay.map(|(before, after)| now.saturating_sub(after - before));
            self.active.woken(&mut self.disks, woken_at);
        }
        self.active.suppress(&mut self.disks);
    }

    /// The time after which an active queue has to be looked at; `None`: there is none.
    fn timeout(&mut self, now: Nanos) -> Option<Duration> {
        let wait = |&id: &QueueId| {
            let (queue, _) = self.disks.queue(id);
            let kickless = queue.is_kickless().then_some(KICKLESS_LOOK);
            let waits = [kickless, queue.throttled_for(), queue.stall_check_in(now)];
            waits.into_iter().flatten().min()
        };
        self.active.ids().iter().filter_map(wait).min()
    }
}

/// Requests an event for each kick of a queue.
fn arm_kick(uring: &mut Uring, queue: &mut RunningQueue) {
    if let Some(kick) = &queue.kick {
        let event = Event::Kick { queue: queue.id, armed: true };
        uring.poll_eventfd(kick.as_raw_fd(), event);
        queue.kick_armed = true;
    }
}
