// SPDX-License-Identifier: Apache-2.0
//! The set-up of one queue, as messages collect it. The queue starts when the set-up is complete.

use data_plane::QueueHandle;
use std::fs::File;
use virtqueue::InflightChain;

/// The addresses of the three areas in the front-end (SET_VRING_ADDR).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct VringAddr {
    pub(crate) desc: u64,
    pub(crate) avail: u64,
    pub(crate) used: u64,
    /// Guest-physical address of the used ring, if the front-end asks for logging of its writes.
    pub(crate) used_log: Option<u64>,
}

/// The state of one queue.
#[derive(Debug, Default)]
pub(crate) struct QueueSlot {
    pub(crate) size: u16,
    pub(crate) addr: Option<VringAddr>,
    pub(crate) base: u32,
    /// SET_VRING_KICK was received, with an eventfd or without one (polled).
    pub(crate) kick: Option<Option<File>>,
    pub(crate) call: Option<File>,
    pub(crate) err: Option<File>,
    /// The front-end knows of the ring fault of the running queue.
    pub(crate) fault_told: bool,
    pub(crate) enabled: bool,
    /// Requests that a halted disk kept when the queue stopped. It starts with them.
    pub(crate) kept: Vec<InflightChain>,
    /// The queue runs on a data plane.
    pub(crate) running: Option<QueueHandle>,
}

impl QueueSlot {
    /// The areas, if the set-up is complete and the queue does not run.
    pub(crate) fn ready(&self) -> Option<VringAddr> {
        let complete = self.enabled && self.size > 0 && self.kick.is_some();
        self.addr.filter(|_| complete && self.running.is_none())
    }
}
