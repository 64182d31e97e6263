// SPDX-License-Identifier: Apache-2.0
//! The io_uring data plane of one disk: the control plane's handle on its part of the threads.

use crate::error::{KernelError, QueueStartError, StartError};
use crate::event::QueueId;
use crate::lanes::Lanes;
use crate::limit_change::{LimitChange, LimitError};
use crate::limits::{Limiter, Limits, Member, Share};
use crate::mail::{Mail, NewCall, PendingReply, Postbox};
use crate::plane::{AtStop, DataPlane, QueueReport, QueueSetup, QueueState};
use crate::pool::{UringOptions, UringPool};
use backend::Disk;
use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::sync::Arc;
use virtqueue::{GuestMemory, VirtQueue};

/// The io_uring data plane of one disk. Dropping it removes the disk from the threads, after its
/// queues have stopped.
pub struct UringPlane {
    lanes: Lanes,
    member: Member,
    /// The thread of queue 0; the other queues follow in turn.
    first_thread: usize,
    queues: BTreeMap<u16, QueueLocation>,
    /// Kept while it is registered.
    memory: Option<Arc<GuestMemory>>,
}

/// The thread of a running queue, and the thread's number of the queue.
struct QueueLocation {
    thread: usize,
    id: QueueId,
    new_call: Arc<NewCall>,
}

impl UringPlane {
    /// Starts threads for `disk` alone.
    ///
    /// # Errors
    /// [`StartError`]; the threads that have started end.
    pub fn new(disk: Arc<dyn Disk>, options: &UringOptions) -> Result<Self, StartError> {
        UringPool::new(options)?.add_disk(disk)
    }

    /// Adds `disk` to the threads of a pool, with queue 0 on thread `first_thread`.
    pub(crate) fn in_pool(
        pool: UringPool,
        disk: Arc<dyn Disk>,
        first_thread: usize,
    ) -> Result<Self, StartError> {
        let member = Limiter::new(None).join();
        Ok(UringPlane {
            lanes: Lanes::open(pool, disk, member.share())?,
            member,
            first_thread,
            queues: BTreeMap::new(),
            memory: None,
        })
    }

    /// Opens each thread's lane anew: `Lanes::reopen`.
    ///
    /// # Errors
    /// The first error. A thread keeps its old lane if it cannot have the new one.
    pub fn reopen_lanes(&self) -> io::Result<()> {
        self.lanes.reopen()
    }

    /// Opens lanes of another storage beside the present ones.
    pub(crate) fn open_lanes(&self, disk: Arc<dyn Disk>) -> Result<Lanes, StartError> {
        Lanes::open(self.lanes.pool().clone(), disk, self.member.share())
    }

    /// Makes the queues use `lanes` from [`UringPlane::open_lanes`], and closes the present ones. No
    /// queue may run.
    pub(crate) fn use_lanes(&mut self, lanes: Lanes) {
        assert!(self.queues.is_empty(), "no queue of the disk runs");
        // Pinned twice, the memory could exceed the limit.
        let memory = self.memory.clone();
        self.set_memory(None);
        drop(std::mem::replace(&mut self.lanes, lanes));
        if memory.is_some() {
            self.set_memory(memory);
        }
    }

    /// The limits of the disk and of the others of its group.
    pub fn limits(&self) -> Limits {
        self.member.limiter().limits()
    }

    /// Name of the group of disks that share the limits.
    pub fn limit_group(&self) -> Option<&Arc<str>> {
        self.member.limiter().group()
    }

    /// Replaces the limits of the disk and of the others of its group. Without a limit, the disk
    /// leaves its group, which keeps its own.
    pub fn set_limits(&mut self, limits: &Limits) {
        if !limits.is_set() && self.limit_group().is_some() {
            return self.become_member(Limiter::new(None).join());
        }
        self.member.limiter().set(limits);
        self.limits_changed();
    }

    /// Changes the limits of the disk and of the others of its group. Returns whether they differ.
    ///
    /// # Errors
    /// [`LimitError::Last`]: the old ones hold.
    pub(crate) fn change_limits(&self, change: LimitChange) -> Result<bool, LimitError> {
        let changed = self.member.limiter().change(change)?;
        if changed {
            self.limits_changed();
        }
        Ok(changed)
    }

    /// Makes waiting queues adopt the limits.
    pub(crate) fn limits_changed(&self) {
        let limiter = self.member.limiter();
        let tell = |postbox: &Postbox| postbox.send(Mail::LimitsChanged(Arc::clone(limiter)));
        self.lanes.pool().postboxes().for_each(tell);
    }

    /// Makes the disk share the limits of a group, in place of its present ones. A new group has none.
    pub fn join_limit_group(&mut self, name: &str) {
        if let Some(member) = self.new_member(name) {
            self.become_member(member);
        }
    }

    /// Gives the group of the disk the limits of a file. Returns whether they differ from the present ones.
    pub(crate) fn set_limits_of_file(&self, disk: &str, limits: &Limits) -> bool {
        let share = self.member.share();
        let differs = self.member.limiter().set_of_file(share, disk, limits);
        if differs {
            self.limits_changed();
        }
        differs
    }

    /// A membership in a group; `None`: the disk is in the group already.
    pub(crate) fn new_member(&self, name: &str) -> Option<Member> {
        let is_other = self.limit_group().is_none_or(|group| **group != *name);
        is_other.then(|| self.lanes.pool().join_limit_group(name))
    }

    /// The part of the disk in the limits of its group.
    pub(crate) fn share_of_group(&self) -> Option<Arc<Share>> {
        self.limit_group().map(|_| Arc::clone(self.member.share()))
    }

    /// The limits of a group; `None`: it has none, or no disk.
    pub fn limits_of_group(&self, name: &str) -> Option<Limits> {
        self.lanes.pool().limits_of_group(name).filter(Limits::is_set)
    }

    /// Makes the disk share the limits of this membership.
    pub(crate) fn become_member(&mut self, member: Member) {
        self.member = member;
        let tell = |(postbox, number): (&Postbox, u16)| {
            postbox.send(Mail::Share(number, Arc::clone(self.member.share())));
        };
        self.lanes.threads().for_each(tell);
    }

    /// Makes the queues look at the health of the disk again.
    pub fn wake(&self) {
        self.lanes.threads().for_each(|(postbox, number)| postbox.send(Mail::Wake(number)));
    }

    fn location(&self, index: u16) -> (&Postbox, QueueId) {
        let QueueLocation { thread, id, .. } = self.queues[&index];
        (self.lanes.pool().postbox(thread), id)
    }
}

impl DataPlane for UringPlane {
    fn check(&self) -> Result<(), KernelError> {
        Ok(())
    }

    fn set_memory(&mut self, memory: Option<Arc<GuestMemory>>) {
        if !self.lanes.pool().options().pin_memory {
            return;
        }
        for (postbox, number) in self.lanes.threads() {
            let result = postbox.ask(|reply| Mail::Memory(number, memory.clone(), reply));
            if let Err(error) = result {
                crate::log_once_per_second!(warn, %error, "guest memory cannot be pinned; raise RLIMIT_MEMLOCK to its size, or set --pin-memory off; continuing without");
            }
        }
        self.memory = memory; // unmap the old memory only after the threads have unregistered it
    }

    fn start_queue(&mut self, setup: QueueSetup) -> Result<(), QueueStartError> {
        let virtqueue = VirtQueue::start(&setup.ring)?;
        let index = setup.index;
        let pool = self.lanes.pool();
        let thread = (self.first_thread + usize::from(index)) % pool.threads();
        let (disk, queue) = (self.lanes.number(thread), Box::new((setup, virtqueue)));
        let id = pool.postbox(thread).ask(|reply| Mail::Start(disk, queue, reply));
        self.queues.insert(index, QueueLocation { thread, id, new_call: Arc::default() });
        Ok(())
    }

    fn stop_queues(&mut self, indices: &[u16], at_stop: AtStop) -> Vec<QueueState> {
        let stop = |index: &u16| {
            let (postbox, id) = self.location(*index);
            postbox.request(|reply| Mail::Stop(id, at_stop, reply))
        };
        let answers: Vec<PendingReply<QueueState>> = indices.iter().map(stop).collect();
        let stopped = answers.into_iter().map(PendingReply::wait).collect();
        self.queues.retain(|index, _| !indices.contains(index));
        stopped
    }

    fn set_call(&mut self, index: u16, call: Option<File>) -> Result<(), KernelError> {
        let (postbox, id) = self.location(index);
        let new_call = &self.queues[&index].new_call;
        if new_call.put(call) {
            postbox.send(Mail::SetCall(id, Arc::clone(new_call)));
        }
        Ok(())
    }

    /// The threads read the cache mode with every request.
    fn cache_mode_changed(&mut self) -> Result<(), KernelError> {
        Ok(())
    }

    fn device_counters(&self) -> io::Result<Vec<(String, String)>> {
        Ok(Vec::new())
    }

    fn queue_report(&self, index: u16, _: &[(String, String)]) -> QueueReport {
        let (postbox, id) = self.location(index);
        postbox.ask(|reply| Mail::State(id, reply)).report()
    }
}

impl Drop for UringPlane {
    fn drop(&mut self) {
        let running: Vec<u16> = self.queues.keys().copied().collect();
        self.stop_queues(&running, AtStop::LeaveInRegion);
    }
}
