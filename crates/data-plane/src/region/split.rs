// SPDX-License-Identifier: Apache-2.0
//! A split queue's part: `QueueRegionSplit` and `DescStateSplit` of the vhost-user specification.

use super::{Part, VERSION, in_order};
use std::sync::atomic::{Ordering, fence};

const HEADER_BYTES: usize = 16;
const ENTRY_BYTES: usize = 16;

/// Offsets in the header ...
const VERSION_AT: usize = 8;
const DESC_NUM_AT: usize = 10;
const LAST_BATCH_HEAD_AT: usize = 12;
const USED_IDX_AT: usize = 14;
/// ... and in an entry.
const INFLIGHT_AT: usize = 0;
const NEXT_AT: usize = 6;
const COUNTER_AT: usize = 8;

pub(super) fn bytes(queue_size: u16) -> usize {
    HEADER_BYTES + ENTRY_BYTES * usize::from(queue_size)
}

fn entry(head: u16) -> usize {
    HEADER_BYTES + ENTRY_BYTES * usize::from(head)
}

/// Clears the batch that a previous daemon published but did not clear.
fn finish_last_batch(part: &Part, size: u16, used_index: u16) {
    let published = used_index.wrapping_sub(part.load_u16(USED_IDX_AT));
    let mut head = part.load_u16(LAST_BATCH_HEAD_AT);
    for _ in 0..published.min(size) {
        if head >= size {
            return;
        }
        part.store_u8(entry(head) + INFLIGHT_AT, 0);
        head = part.load_u16(entry(head) + NEXT_AT);
    }
}

#[derive(Debug)]
pub(crate) struct SplitPart {
    part: Part,
    counter: u64,
    last_batch_head: u16,
    /// Heads of pushed and unpublished chains.
    batch: Vec<u16>,
}

impl SplitPart {
    /// Prepares the part for a queue of `size` descriptors with the used index `used_index`.
    /// Returns the heads that a previous daemon left in flight, in the order in which it took them,
    /// and keeps their marks; `None` if there was no previous daemon.
    pub(super) fn open(part: Part, size: u16, used_index: u16) -> (Self, Option<Vec<u16>>) {
        let mut left = Vec::new();
        let known = part.load_u16(VERSION_AT) == VERSION && part.load_u16(DESC_NUM_AT) == size;
        if known {
            finish_last_batch(&part, size, used_index);
            let marked = |head: &u16| part.load_u8(entry(*head) + INFLIGHT_AT) == 1;
            let counter = |head| part.load_u64(entry(head) + COUNTER_AT);
            left.extend(in_order((0..size).filter(marked), counter));
        } else {
            (0..size).for_each(|head| part.store_u8(entry(head) + INFLIGHT_AT, 0));
        }
        part.store_u16(DESC_NUM_AT, size);
        part.store_u16(USED_IDX_AT, used_index);
        // For the next daemon, if this one ends here: with this index no batch is unfinished.
        fence(Ordering::Release);
        part.store_u16(LAST_BATCH_HEAD_AT, 0);
        part.store_u16(VERSION_AT, VERSION);
        let batch = Vec::with_capacity(usize::from(size));
        let counter = left.last().map_or(0, |(counter, _)| counter.wrapping_add(1));
        let heads = left.into_iter().map(|(_, head)| head).collect();
        (SplitPart { part, counter, last_batch_head: 0, batch }, known.then_some(heads))
    }

    #[inline]
    pub(super) fn is_lost(&self) -> bool {
        self.part.is_lost()
    }

    #[inline]
    pub(super) fn taken(&mut self, head: u16) {
        self.part.store_u64(entry(head) + COUNTER_AT, self.counter);
        self.counter = self.counter.wrapping_add(1);
        self.part.store_u8(entry(head) + INFLIGHT_AT, 1);
    }

    #[inline]
    pub(super) fn pushing(&mut self, head: u16) {
        self.part.store_u16(entry(head) + NEXT_AT, self.last_batch_head);
        self.last_batch_head = head;
        self.part.store_u16(LAST_BATCH_HEAD_AT, head);
        self.batch.push(head);
    }

    /// For the next daemon: the index of the used ring is stored before the entries are cleared,
    /// and they are cleared before `used_idx` changes. `used_idx` thus shows whether the last batch
    /// was cleared.
    #[inline]
    pub(super) fn published(&mut self, used_index: u16) {
        if self.batch.is_empty() {
            return;
        }
        fence(Ordering::Release);
        for head in self.batch.drain(..) {
            self.part.store_u8(entry(head) + INFLIGHT_AT, 0);
        }
        fence(Ordering::Release);
        self.part.store_u16(USED_IDX_AT, used_index);
    }
}
