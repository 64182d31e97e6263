// SPDX-License-Identifier: Apache-2.0
//! The lanes of one disk, one on each thread of a pool.

use crate::error::StartError;
use crate::limits::Share;
use crate::mail::{AddDisk, Mail, PendingReply, Postbox};
use crate::plane::IoPoll;
use crate::pool::UringPool;
use backend::{Disk, Lane};
use std::io;
use std::sync::Arc;

/// The lanes of a disk. Dropping them removes the disk from the threads; no queue of it may run.
pub(crate) struct Lanes {
    pool: UringPool,
    disk: Arc<dyn Disk>,
    /// Each thread's number of the disk.
    numbers: Vec<u16>,
}

impl Lanes {
    /// Opens a lane of `disk` for each thread. The disk has `share` in limits.
    pub(crate) fn open(
        pool: UringPool,
        disk: Arc<dyn Disk>,
        share: &Arc<Share>,
    ) -> Result<Self, StartError> {
        let mut lanes = Lanes { pool, disk, numbers: Vec::new() };
        let info = lanes.disk.info();
        let force_async = info.submission_blocks;
        let iopoll = match lanes.pool.options().iopoll {
            IoPoll::Auto if !info.io_poll => IoPoll::Off,
            chosen => chosen,
        };
        for thread in 0..lanes.pool.threads() {
            let lane = lanes.disk.open_lane().map_err(StartError::Lane)?;
            let disk = AddDisk { lane, share: Arc::clone(share), iopoll, force_async };
            let number = lanes.pool.postbox(thread).ask(|reply| Mail::AddDisk(disk, reply))?;
            lanes.numbers.push(number);
        }
        Ok(lanes)
    }

    pub(crate) fn pool(&self) -> &UringPool {
        &self.pool
    }

    /// The number that `thread` has given the disk.
    pub(crate) fn number(&self, thread: usize) -> u16 {
        self.numbers[thread]
    }

    /// The threads that have the disk, each with its number of the disk.
    pub(crate) fn threads(&self) -> impl Iterator<Item = (&Postbox, u16)> {
        self.pool.postboxes().zip(self.numbers.iter().copied())
    }

    /// Opens each lane anew, so that it has the present capacity of the disk. No queue may run.
    ///
    /// # Errors
    /// The first error. A thread keeps its old lane if it cannot have the new one.
    pub(crate) fn reopen(&self) -> io::Result<()> {
        let lanes: Vec<_> =
            self.numbers.iter().map(|_| self.disk.open_lane()).collect::<io::Result<_>>()?;
        let replace = |((postbox, number), lane): ((&Postbox, u16), Box<dyn Lane>)| {
            postbox.request(|reply| Mail::ReplaceLane(number, lane, reply))
        };
        let answers: Vec<_> = self.threads().zip(lanes).map(replace).collect();
        let outcomes: Vec<_> = answers.into_iter().map(|answer| answer.wait().1).collect();
        outcomes.into_iter().collect()
    }
}

impl Drop for Lanes {
    fn drop(&mut self) {
        let remove = |(postbox, number): (&Postbox, u16)| {
            postbox.request(|reply| Mail::RemoveDisk(number, reply))
        };
        let answers: Vec<PendingReply<Box<dyn Lane>>> = self.threads().map(remove).collect();
        answers.into_iter().for_each(|answer| drop(answer.wait()));
    }
}
