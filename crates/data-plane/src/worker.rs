// SPDX-License-Identifier: Apache-2.0
//! The loop of the io_uring data plane: one thread, its ring, and its queues.
//!
//! [`Worker::turn`] shows the whole life of a request in the six stage words of the project.

use crate::event::{Event, queue_and_entry};
use crate::latency::Clock;
use crate::limits::Limiter;
use crate::mail::Mail;
use crate::plane::{QueueSetup, QueueState};
use crate::poll::AdaptivePoll;
use crate::portion::Portion;
use crate::running::RunningQueue;
use crate::submit::Storage;
use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender};
use std::time::Duration;
use virtqueue::VirtQueue;
use vmm_sys_util::eventfd::EventFd;

/// Maximum chains that a queue takes before the thread serves the other queues and publishes
/// completions; a portion of I/O to submit ends it sooner.
pub const BATCH_CHAINS_MAX: usize = 32;
/// Maximum polls of a kick descriptor that end in a row without a chain. The poll of an eventfd
/// stays armed; a descriptor that ends each poll at once would keep the thread busy forever.
const KICK_REARMS_MAX: u32 = 1000;
/// Interval at which a sleeping thread polls a queue without a kick eventfd.
const KICKLESS_LOOK: Duration = Duration::from_micros(100);

/// One data-plane thread.
pub(crate) struct Worker {
    queues: Vec<Option<RunningQueue>>,
    storage: Storage,
    limiter: Arc<Limiter>,
    clock: Clock,
    poll: AdaptivePoll,
    portion: Portion,
    events: Vec<(Event, i32)>,
    mail: Receiver<Mail>,
    mail_fd: EventFd,
    stops: usize,
    exit: bool,
}

impl Worker {
    pub(crate) fn new(
        storage: Storage,
        limiter: Arc<Limiter>,
        poll_max: Duration,
        portion: Portion,
        mail: Receiver<Mail>,
        mail_fd: EventFd,
    ) -> Self {
        Worker {
            queues: Vec::new(),
            storage,
            limiter,
            clock: Clock::default(),
            poll: AdaptivePoll::new(poll_max),
            portion,
            events: Vec::with_capacity(256),
            mail,
            mail_fd,
            stops: 0,
            exit: false,
        }
    }

    /// Runs until the control plane ends the thread.
    pub(crate) fn run(&mut self) {
        self.storage.engine.poll_eventfd(self.mail_fd.as_raw_fd(), Event::Mail { armed: true });
        while !self.exit {
            if self.turn() {
                self.poll.worked();
                continue;
            }
            self.clock.forget();
            if self.poll.look_again() {
                std::hint::spin_loop();
            } else {
                self.sleep();
            }
        }
        self.storage.engine.unregister_files();
    }

    /// One turn: take a portion, submit it, reap a portion, publish once, call once. Returns whether
    /// there was work.
    fn turn(&mut self) -> bool {
        let mut worked = false;
        let portion = self.portion.size();
        let Worker { queues, storage, clock, .. } = self;
        for (number, queue) in (0u16..).zip(queues.iter_mut()) {
            let Some(queue) = queue else { continue };
            queue.look_at_limits();
            let full = storage.engine.queued() + portion;
            for _ in 0..BATCH_CHAINS_MAX {
                if !queue.may_take() || queue.batch.is_full() || !storage.stalled.is_empty() {
                    break;
                }
                if storage.engine.queued() >= full {
                    break; // the device starts on these while the thread takes more
                }
                // 1 chain
                let Some(taken) = queue.take(clock) else {
                    queue.batch.emptied();
                    break;
                };
                // 2 request
                match queue.parse(&taken) {
                    // 3 submit; one system call below passes all of them to the kernel
                    Ok(request) => storage.submit(queue, number, taken, request),
                    // 4 completion of a refused request
                    Err(refused) => queue.refuse(taken, refused),
                }
                worked = true;
            }
        }
        let submitted = storage.engine.queued();
        storage.engine.submit();
        storage.engine.reap(&mut self.events, portion);
        self.portion.turned(submitted, self.events.len());
        worked |= !self.events.is_empty();
        // 4 completion of requests that the storage has finished
        self.handle_events();
        for queue in self.queues.iter_mut().flatten() {
            // 5 used
            queue.publish(&mut self.clock);
            // 6 notify
            queue.notify_if_asked();
        }
        if self.stops > 0 {
            self.finish_stops();
        }
        worked
    }

    fn handle_events(&mut self) {
        let mut events = std::mem::take(&mut self.events);
        for (event, result) in events.drain(..) {
            match event {
                Event::Lane(token) => {
                    let (number, _) = queue_and_entry(token.slot);
                    let queue = self.queues[number].as_mut().expect("a draining queue stays");
                    self.storage.event(queue, token, result);
                }
                Event::Kick { queue, armed } => self.kicked(queue, armed, result),
                Event::Mail { armed } => self.open_mail(armed),
                // `reap` turns timers and deliveries into lane events
                Event::Timer(_) | Event::Remote { .. } | Event::Ignored => {}
            }
        }
        self.events = events; // keeps the allocation
        self.retry_stalled();
    }

    /// Repeats the start of stalled I/Os in order, until the lane is busy again.
    fn retry_stalled(&mut self) {
        while let Some(&slot) = self.storage.stalled.front() {
            let (number, _) = queue_and_entry(slot);
            let queue = self.queues[number].as_mut().expect("a draining queue stays");
            if !self.storage.retry(queue, slot) {
                return;
            }
            self.storage.stalled.pop_front();
        }
    }

    fn kicked(&mut self, number: u16, armed: bool, result: i32) {
        let Some(queue) = &mut self.queues[usize::from(number)] else { return };
        queue.kick_armed = armed;
        if result >= 0 {
            queue.stats.kicks += 1;
        } else if queue.stopping.is_none() {
            let error = std::io::Error::from_raw_os_error(-result);
            return queue.fault(&format_args!("its kick descriptor cannot be waited for: {error}"));
        }
        if !armed && queue.stopping.is_none() {
            queue.kick_rearms += 1;
            if queue.kick_rearms > KICK_REARMS_MAX {
                return queue.fault(&"its kick descriptor is not an eventfd");
            }
            self.arm_kick(number);
        }
    }

    fn arm_kick(&mut self, number: u16) {
        let Some(queue) = &mut self.queues[usize::from(number)] else { return };
        if let Some(kick) = &queue.kick {
            let event = Event::Kick { queue: number, armed: true };
            self.storage.engine.poll_eventfd(kick.as_raw_fd(), event);
            queue.kick_armed = true;
        }
    }

    /// Asks for kicks and sleeps until there is work.
    fn sleep(&mut self) {
        if self.storage.engine.has_events() {
            return;
        }
        // With a stalled I/O the queues take no chain: sleep until the completion it waits for.
        if self.storage.stalled.is_empty() && self.arm() {
            return;
        }
        let kickless = |queue: &RunningQueue| queue.kick.is_none() && queue.may_take();
        let kickless = self.queues.iter().flatten().any(kickless).then_some(KICKLESS_LOOK);
        let throttled = self.queues.iter().flatten().filter_map(RunningQueue::throttled_for).min();
        let timeout = kickless.into_iter().chain(throttled).min();
        let before = self.clock.read();
        self.storage.engine.wait(timeout);
        self.poll.slept(Duration::from_nanos(self.clock.read().saturating_sub(before)));
        self.queues.iter_mut().flatten().for_each(RunningQueue::suppress);
    }

    /// Asks for kicks for all queues. If a chain is already available, withdraws the request and
    /// returns `true`.
    fn arm(&mut self) -> bool {
        let found = self.queues.iter_mut().flatten().any(RunningQueue::arm);
        if found {
            self.queues.iter_mut().flatten().for_each(RunningQueue::suppress);
        }
        found
    }

    #[cold]
    fn open_mail(&mut self, armed: bool) {
        if !armed {
            let event = Event::Mail { armed: true };
            self.storage.engine.poll_eventfd(self.mail_fd.as_raw_fd(), event);
        }
        while let Ok(mail) = self.mail.try_recv() {
            match mail {
                Mail::Start(start, reply) => {
                    // The control plane waits for the answer; it can only be gone with the queue.
                    let (setup, ring) = *start;
                    let _ = reply.send(self.start_queue(setup, ring));
                }
                Mail::Stop(number, reply) => self.stop_queue(number, reply),
                Mail::SetCall(number, call) => {
                    if let Some(queue) = &mut self.queues[usize::from(number)] {
                        queue.call = call;
                        queue.call(); // the old eventfd may have missed a call
                    }
                }
                Mail::State(number, reply) => {
                    let queue = self.queues[usize::from(number)].as_ref();
                    let _ = reply.send(queue.expect("the queue runs").state());
                }
                Mail::Limits => {
                    self.queues.iter_mut().flatten().for_each(RunningQueue::limits_changed);
                }
                Mail::OpenLane(disk, reply) => {
                    assert!(self.queues.iter().all(Option::is_none), "no queue runs");
                    let _ = reply.send(self.storage.open_lane(&*disk));
                }
                Mail::Memory(memory, reply) => {
                    let result = match memory {
                        Some(memory) => self.storage.engine.register_memory(&memory),
                        None => {
                            self.storage.engine.unregister_memory();
                            Ok(())
                        }
                    };
                    let _ = reply.send(result);
                }
                Mail::Exit => self.exit = true,
            }
        }
    }

    /// Takes ownership of a queue. The next turn finds waiting chains without a kick.
    fn start_queue(&mut self, setup: QueueSetup, ring: VirtQueue) -> u16 {
        let slow_start = self.storage.lane.moves_data_itself();
        let limiter = Arc::clone(&self.limiter);
        let mut queue = RunningQueue::new(setup, ring, slow_start, limiter);
        if queue.ring.may_wait_for_call() {
            queue.call();
        }
        let free = self.queues.iter().position(Option::is_none);
        let number = free.unwrap_or_else(|| {
            self.queues.push(None);
            self.queues.len() - 1
        });
        self.queues[number] = Some(queue);
        self.arm_kick(number as u16);
        number as u16
    }

    fn stop_queue(&mut self, number: u16, reply: Sender<QueueState>) {
        let Some(queue) = &mut self.queues[usize::from(number)] else { return };
        queue.stopping = Some(reply);
        self.stops += 1;
        if queue.kick_armed {
            self.storage.engine.cancel(Event::Kick { queue: number, armed: true });
        }
    }

    /// Returns drained queues to the control plane.
    #[cold]
    fn finish_stops(&mut self) {
        for queue in &mut self.queues {
            let drained = |queue: &mut RunningQueue| queue.stopping.is_some() && queue.is_drained();
            if let Some(mut stopped) = queue.take_if(drained) {
                self.stops -= 1;
                let (state, reply) = (stopped.state(), stopped.stopping.take());
                drop(stopped); // release guest memory before the control plane continues
                if let Some(reply) = reply {
                    let _ = reply.send(state);
                }
            }
        }
    }
}
