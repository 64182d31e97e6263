// SPDX-License-Identifier: Apache-2.0
//! The meaning of a ring completion, packed into its 64 bits of user data.

use crate::request_table::DEPTH_MAX;
use backend::{Slot, Token};

const TAG_LANE: u64 = 0;
const TAG_KICK: u64 = 1;
const TAG_MAIL: u64 = 2;
const TAG_IGNORED: u64 = 3;
const TAG_TIMER: u64 = 4;
const TAG_REMOTE: u64 = 5;
const TAG_IO_WORKERS: u64 = 6;
const TAG_IN_KERNEL_THREAD: u64 = 7;

/// Bits of a slot that hold the index of an entry of a queue's request table. Slots are dense:
/// wrappers keep a list with a place for each slot.
const ENTRY_BITS: u32 = DEPTH_MAX.ilog2();

/// Identity of a queue within one thread: its disk's index in `Disks`, and its index in
/// `DiskOnThread`. It is not the queue's index in the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct QueueId {
    pub(crate) disk: u16,
    pub(crate) queue: u16,
}

/// The meaning of a completion.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Event {
    /// An operation of the lane of `disk` ended.
    Lane { disk: u16, token: Token },
    /// The same of an operation that a thread of the kernel carries out.
    InKernelThread { disk: u16, token: Token },
    /// A timer of the lane of `disk` expired.
    Timer { disk: u16, token: Token },
    /// The kick eventfd of a queue was signalled.
    Kick {
        /// The queue.
        queue: QueueId,
        /// The poll stays armed; `false`: it has ended.
        armed: bool,
    },
    /// The control plane sent mail to the worker.
    Mail {
        /// The poll stays armed.
        armed: bool,
    },
    /// Another thread delivered events ([`crate::remote`]).
    Remote {
        /// The poll stays armed.
        armed: bool,
    },
    /// The time to look at the requests that keep threads of the kernel ([`crate::io_workers`]).
    IoWorkers,
    /// A completion without effect.
    Ignored,
}

impl Event {
    pub(crate) fn to_user_data(self) -> u64 {
        match self {
            Event::Lane { disk, token } => TAG_LANE << 56 | disk_bits(disk) | token_bits(token),
            Event::InKernelThread { disk, token } => {
                TAG_IN_KERNEL_THREAD << 56 | disk_bits(disk) | token_bits(token)
            }
            Event::Timer { disk, token } => TAG_TIMER << 56 | disk_bits(disk) | token_bits(token),
            Event::Kick { queue: QueueId { disk, queue }, .. } => {
                TAG_KICK << 56 | disk_bits(disk) | u64::from(queue)
            }
            Event::Mail { .. } => TAG_MAIL << 56,
            Event::Remote { .. } => TAG_REMOTE << 56,
            Event::IoWorkers => TAG_IO_WORKERS << 56,
            Event::Ignored => TAG_IGNORED << 56,
        }
    }

    /// Disk and token, if the user data is that of [`Event::Lane`].
    #[inline]
    pub(crate) fn lane_of(data: u64) -> Option<(u16, Token)> {
        (data >> 56 == TAG_LANE).then(|| (disk_of(data), token_of(data)))
    }

    pub(crate) fn from_user_data(data: u64, armed: bool) -> Self {
        match data >> 56 {
            TAG_LANE => Event::Lane { disk: disk_of(data), token: token_of(data) },
            TAG_IN_KERNEL_THREAD => {
                Event::InKernelThread { disk: disk_of(data), token: token_of(data) }
            }
            TAG_TIMER => Event::Timer { disk: disk_of(data), token: token_of(data) },
            TAG_KICK => {
                Event::Kick { queue: QueueId { disk: disk_of(data), queue: data as u16 }, armed }
            }
            TAG_MAIL => Event::Mail { armed },
            TAG_REMOTE => Event::Remote { armed },
            TAG_IO_WORKERS => Event::IoWorkers,
            _ => Event::Ignored,
        }
    }
}

#[inline]
fn disk_bits(disk: u16) -> u64 {
    u64::from(disk) << 40
}

#[inline]
fn disk_of(data: u64) -> u16 {
    (data >> 40) as u16
}

#[inline]
fn token_bits(token: Token) -> u64 {
    u64::from(token.layer) << 32 | u64::from(token.slot.0)
}

#[inline]
fn token_of(data: u64) -> Token {
    Token { slot: Slot(data as u32), layer: (data >> 32) as u8 }
}

/// Packs the disk's number of a queue and the index of an entry of its request table.
#[inline]
pub(crate) fn slot_of(queue: u16, entry: u16) -> Slot {
    debug_assert!(entry < DEPTH_MAX);
    Slot(u32::from(queue) << ENTRY_BITS | u32::from(entry))
}

/// The inverse of [`slot_of`].
#[inline]
pub(crate) fn queue_and_entry(slot: Slot) -> (u16, u16) {
    ((slot.0 >> ENTRY_BITS) as u16, (slot.0 & ((1 << ENTRY_BITS) - 1)) as u16)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn user_data_gives_the_event_back() {
        let token = Token { slot: slot_of(63, DEPTH_MAX - 1), layer: 7 };
        let queue = QueueId { disk: 4095, queue: 9 };
        let events = [
            Event::Lane { disk: 4095, token },
            Event::InKernelThread { disk: 7, token },
            Event::Timer { disk: 1, token },
            Event::Kick { queue, armed: true },
            Event::Mail { armed: true },
            Event::Remote { armed: true },
            Event::IoWorkers,
            Event::Ignored,
        ];
        let back = events.map(|event| Event::from_user_data(event.to_user_data(), true));
        assert_eq!(back, events);
        assert_eq!(queue_and_entry(token.slot), (63, DEPTH_MAX - 1));
    }
}
