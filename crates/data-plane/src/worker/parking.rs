// SPDX-License-Identifier: Apache-2.0
//! The active queues of a thread: those that it looks at in every turn. All others are parked and
//! cost nothing.
//!
//! | State | Active | Driver is asked for kicks | Next state |
//! |---|---|---|---|
//! | polled | yes | no | parked, after turns or a sleep without a chain |
//! | asleep | yes | yes | polled, when the thread wakes up |
//! | parked | no | yes | polled, by a kick or a completion |
//! | takes nothing: faulted, stopping, full, without room in the storage, or its disk halted | no | no | polled, by a completion, or when its disk is no longer halted |
//! | waits for a limit | yes | no | polled, when the time has come |
//! | the time of its requests is watched | yes | as in the states above | polled, when the time has come |
//! | without a kick eventfd | yes | no matter | it is looked at each [`super::KICKLESS_LOOK`] |
//!
//! No kick is lost: a queue is armed and then looked at once more before it is parked.

use super::disks::Disks;
use crate::event::QueueId;
use crate::latency::Nanos;
use crate::running::RunningQueue;
use crate::trace::is_any_traced;

/// Turns with work after which a queue without work is parked. A thread without any work parks no
/// queue before it sleeps, so that it can poll them.
const IDLE_TURNS: u32 = 64;

/// The active queues.
#[derive(Default)]
pub(super) struct ActiveQueues {
    ids: Vec<QueueId>,
    /// Turns with work since the last look for idle queues.
    turns: u32,
    /// All kicks before this time have been seen; `None`: not known, as no disk was traced.
    pub(super) kicks_seen: Option<Nanos>,
}

impl ActiveQueues {
    #[inline]
    pub(super) fn ids(&self) -> &[QueueId] {
        &self.ids
    }

    /// Reserves room for another queue, so that no request allocates.
    pub(super) fn reserve(&mut self, running: usize) {
        self.ids.reserve(running.saturating_sub(self.ids.len()));
    }

    /// Makes a queue active.
    #[inline]
    pub(super) fn wake(&mut self, queue: &mut RunningQueue) {
        if !queue.is_active {
            queue.is_active = true;
            queue.recent = true;
            if is_any_traced() && queue.armed {
                queue.note_no_kick(self.kicks_seen);
            }
            queue.suppress();
            self.ids.push(queue.id);
        }
    }

    /// Removes a queue that has stopped.
    pub(super) fn remove(&mut self, id: QueueId) {
        self.ids.retain(|active| *active != id);
    }

    /// Counts a turn with work, and sometimes parks the queues that had none.
    #[inline]
    pub(super) fn worked(&mut self, disks: &mut Disks) {
        self.turns += 1;
        if self.turns >= IDLE_TURNS {
            self.turns = 0;
            self.park_idle(disks);
        }
    }

    fn park_idle(&mut self, disks: &mut Disks) {
        self.ids.retain(|&id| {
            let (queue, _) = disks.queue(id);
            let recent = std::mem::take(&mut queue.recent);
            let must_stay = recent || queue.watches_io() || queue.waits_for_time();
            queue.is_active = must_stay || queue.arm();
            if queue.is_active {
                queue.suppress();
            }
            queue.is_active
        });
    }

    /// Asks for kicks for all active queues, and parks those without work since the previous sleep.
    /// If a chain is already available, withdraws the requests, parks none, and returns `true`.
    pub(super) fn arm_and_park(&mut self, disks: &mut Disks) -> bool {
        let found = self.ids.iter().any(|&id| disks.queue(id).0.arm());
        if found {
            self.suppress(disks);
            return true;
        }
        self.ids.retain(|&id| {
            let (queue, _) = disks.queue(id);
            let recent = std::mem::take(&mut queue.recent);
            queue.is_active = recent || queue.watches_io() || queue.waits_for_time();
            queue.is_active
        });
        false
    }

    /// Notes for the trace that no driver had kicked when the thread was woken, at this time, from its
    /// sleep; `None`: not known.
    #[cold]
    pub(super) fn woken(&mut self, disks: &mut Disks, at: Option<Nanos>) {
        self.kicks_seen = at;
        for &id in &self.ids {
            let (queue, _) = disks.queue(id);
            if queue.armed {
                queue.note_no_kick(at);
            }
        }
    }

    /// Asks for no kicks for all active queues.
    pub(super) fn suppress(&self, disks: &mut Disks) {
        self.ids.iter().for_each(|&id| disks.queue(id).0.suppress());
    }
}
