// SPDX-License-Identifier: Apache-2.0
//! One queue's set-up as messages gather it: complete, and the queue starts; or nothing happens.

use data_plane::StartedQueue;
use std::fs::File;

/// Where the three areas are, in the front-end's addresses (SET_VRING_ADDR).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct VringAddr {
    pub(crate) desc: u64,
    pub(crate) avail: u64,
    pub(crate) used: u64,
    /// Guest-physical address of the used ring, where writes to it are to be logged.
    pub(crate) used_log: Option<u64>,
}

/// What is known of a queue.
#[derive(Debug, Default)]
pub(crate) struct QueueSlot {
    pub(crate) size: u16,
    pub(crate) addr: Option<VringAddr>,
    pub(crate) base: u32,
    /// SET_VRING_KICK came: with an eventfd, or without (polled).
    pub(crate) kick: Option<Option<File>>,
    pub(crate) call: Option<File>,
    pub(crate) err: Option<File>,
    pub(crate) enabled: bool,
    /// While the data plane owns the queue.
    pub(crate) running: Option<StartedQueue>,
}

impl QueueSlot {
    /// The areas, when everything that a start needs is there.
    pub(crate) fn ready(&self) -> Option<VringAddr> {
        let complete = self.enabled && self.size > 0 && self.kick.is_some();
        self.addr.filter(|_| complete && self.running.is_none())
    }
}
