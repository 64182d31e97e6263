// SPDX-License-Identifier: Apache-2.0
//! The disks of a thread and their queues, by number: the fast path finds them by two indices.

use crate::event::QueueId;
use crate::limits::Share;
use crate::running::RunningQueue;
use crate::submit::Storage;
use std::sync::Arc;

/// Maximum disks of a thread.
pub(crate) const DISKS_MAX: u16 = 4096;

/// A disk on a thread. Its queues of other threads are not here.
pub(super) struct DiskOnThread {
    pub(super) storage: Storage,
    /// Its part in its limits.
    pub(super) share: Arc<Share>,
    queues: Vec<Option<RunningQueue>>,
}

impl DiskOnThread {
    pub(super) fn new(storage: Storage, share: Arc<Share>) -> Self {
        DiskOnThread { storage, share, queues: Vec::new() }
    }

    /// A running queue, and the storage of the disk.
    #[inline]
    pub(super) fn queue(&mut self, number: u16) -> (&mut RunningQueue, &mut Storage) {
        let queue = self.queues[usize::from(number)].as_mut();
        (queue.expect("a queue stays until it is drained"), &mut self.storage)
    }

    /// The running queues.
    pub(super) fn queues(&mut self) -> impl Iterator<Item = &mut RunningQueue> {
        self.queues.iter_mut().flatten()
    }

    /// Returns whether no queue of the disk runs.
    pub(super) fn is_idle(&self) -> bool {
        self.queues.iter().all(Option::is_none)
    }

    /// The number of the next queue.
    pub(super) fn free_queue(&self) -> u16 {
        first_free(&self.queues) as u16 // a device has few queues
    }

    pub(super) fn insert(&mut self, number: u16, queue: RunningQueue) {
        put(&mut self.queues, usize::from(number), queue);
    }

    pub(super) fn remove(&mut self, number: u16) -> Option<RunningQueue> {
        self.queues[usize::from(number)].take()
    }
}

/// The disks of a thread.
#[derive(Default)]
pub(super) struct Disks(Vec<Option<DiskOnThread>>);

impl Disks {
    #[inline]
    pub(super) fn disk(&mut self, number: u16) -> &mut DiskOnThread {
        self.0[usize::from(number)].as_mut().expect("a disk stays until its queues are stopped")
    }

    /// A running queue, and the storage of its disk.
    #[inline]
    pub(super) fn queue(&mut self, id: QueueId) -> (&mut RunningQueue, &mut Storage) {
        self.disk(id.disk).queue(id.queue)
    }

    /// The running queues of all disks.
    pub(super) fn queues(&mut self) -> impl Iterator<Item = &mut RunningQueue> {
        self.0.iter_mut().flatten().flat_map(DiskOnThread::queues)
    }

    /// The number of the next disk; `None`: there are [`DISKS_MAX`].
    pub(super) fn free_disk(&self) -> Option<u16> {
        u16::try_from(first_free(&self.0)).ok().filter(|number| *number < DISKS_MAX)
    }

    pub(super) fn insert(&mut self, number: u16, disk: DiskOnThread) {
        put(&mut self.0, usize::from(number), disk);
    }

    pub(super) fn remove(&mut self, number: u16) -> Option<DiskOnThread> {
        self.0[usize::from(number)].take()
    }
}

fn first_free<T>(list: &[Option<T>]) -> usize {
    list.iter().position(Option::is_none).unwrap_or(list.len())
}

fn put<T>(list: &mut Vec<Option<T>>, at: usize, item: T) {
    if at == list.len() {
        list.push(None);
    }
    list[at] = Some(item);
}
