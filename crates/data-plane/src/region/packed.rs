// SPDX-License-Identifier: Apache-2.0
//! A packed queue's part: `QueueRegionPacked` and `DescStatePacked` of the vhost-user
//! specification. It contains copies of the descriptors, because used entries overwrite the ring.

use super::{Part, VERSION, in_order};
use std::sync::atomic::{Ordering, fence};
use virtio_spec::packed::Desc;

const HEADER_BYTES: usize = 32;
const ENTRY_BYTES: usize = 32;

/// Offsets in the header ...
const VERSION_AT: usize = 8;
const DESC_NUM_AT: usize = 10;
const FREE_HEAD_AT: usize = 12;
const OLD_FREE_HEAD_AT: usize = 14;
const USED_IDX_AT: usize = 16;
const OLD_USED_IDX_AT: usize = 18;
const USED_WRAP_AT: usize = 20;
const OLD_USED_WRAP_AT: usize = 21;
/// The positions begin here; the last two of the eight bytes are padding.
const POSITIONS_AT: usize = USED_IDX_AT;
/// ... and in an entry.
const INFLIGHT_AT: usize = 0;
const NEXT_AT: usize = 2;
const LAST_AT: usize = 4;
const NUM_AT: usize = 6;
const COUNTER_AT: usize = 8;
const ID_AT: usize = 16;
const FLAGS_AT: usize = 18;
const LEN_AT: usize = 20;
const ADDR_AT: usize = 24;

pub(super) fn bytes(queue_size: u16) -> usize {
    HEADER_BYTES + ENTRY_BYTES * usize::from(queue_size)
}

fn entry(index: u16) -> usize {
    HEADER_BYTES + ENTRY_BYTES * usize::from(index)
}

/// A chain in flight: its first and last entry.
#[derive(Clone, Copy, Debug)]
struct Taken {
    id: u16,
    head: u16,
    last: u16,
}

/// The state that a previous daemon left.
pub(super) struct Left {
    pub(super) used_index: u16,
    /// The chains in flight, in the order in which they were taken.
    pub(super) chains: Vec<LeftChain>,
}

/// A chain that a previous daemon left in flight.
pub(super) struct LeftChain {
    /// Copies of its ring descriptors.
    pub(super) descs: Vec<Desc>,
    /// Their entries in the part.
    entries: Vec<u16>,
    pub(super) counter: u64,
}

/// Reads the state that a previous daemon left of a queue of `size` descriptors; `None` if there is
/// none or it is invalid. `was_used` returns whether the ring's entry at a used position was
/// published.
pub(super) fn left(part: &Part, size: u16, was_used: impl Fn(u16) -> bool) -> Option<Left> {
    if part.load_u16(VERSION_AT) != VERSION || part.load_u16(DESC_NUM_AT) != size {
        return None;
    }
    let position = |index_at, wrap_at| {
        part.load_u16(index_at) & 0x7fff | u16::from(part.load_u8(wrap_at) & 1) << 15
    };
    let old = position(OLD_USED_IDX_AT, OLD_USED_WRAP_AT);
    let new = position(USED_IDX_AT, USED_WRAP_AT);
    // The last batch was published, or is rolled back.
    let committed = new != old && was_used(old);
    let used_index = if committed { new } else { old };
    let mut free = part.load_u16(if committed { FREE_HEAD_AT } else { OLD_FREE_HEAD_AT });
    let mut is_free = vec![false; usize::from(size)];
    while free < size && !std::mem::replace(&mut is_free[usize::from(free)], true) {
        free = part.load_u16(entry(free) + NEXT_AT);
    }
    let marked = |index: &u16| {
        !is_free[usize::from(*index)] && part.load_u8(entry(*index) + INFLIGHT_AT) == 1
    };
    let heads = in_order((0..size).filter(marked), |head| part.load_u64(entry(head) + COUNTER_AT));
    let chains = heads
        .into_iter()
        .map(|head| chain(part, size, head, &mut is_free))
        .collect::<Option<_>>()?;
    let sane = used_index & 0x7fff < size;
    sane.then_some(Left { used_index, chains })
}

/// Reads the chain with this counter and the head entry `head`; `None` if it is invalid. Each entry belongs
/// to at most one chain: `claimed` marks the entries that are free or belong to another chain.
fn chain(
    part: &Part,
    size: u16,
    (counter, head): (u64, u16),
    claimed: &mut [bool],
) -> Option<LeftChain> {
    let count = part.load_u16(entry(head) + NUM_AT);
    let mut index = head;
    let (mut descs, mut entries) = (Vec::new(), Vec::new());
    for _ in 0..count {
        if index >= size || std::mem::replace(&mut claimed[usize::from(index)], true) {
            return None;
        }
        let at = entry(index);
        descs.push(Desc {
            addr: part.load_u64(at + ADDR_AT),
            len: part.load_u32(at + LEN_AT),
            id: part.load_u16(at + ID_AT),
            flags: part.load_u16(at + FLAGS_AT),
        });
        entries.push(index);
        index = part.load_u16(at + NEXT_AT);
    }
    (!descs.is_empty()).then_some(LeftChain { descs, entries, counter })
}

#[derive(Debug)]
pub(crate) struct PackedPart {
    part: Part,
    counter: u64,
    /// Copy of the free list in the part.
    next: Vec<u16>,
    free_head: u16,
    free_count: usize,
    taken: Vec<Taken>,
    /// Pushed and unpublished chains.
    batch: Vec<Taken>,
    /// The used position before the batch.
    old_used: u16,
}

/// Both positions as the part has them. One store changes them together: after a half of one, the next daemon would
/// roll a published batch back.
fn positions(used: u16, old_used: u16) -> u64 {
    let word = |used: u16| (u64::from(used & 0x7fff), u64::from(used >> 15));
    let ((index, wrap), (old_index, old_wrap)) = (word(used), word(old_used));
    index | old_index << 16 | wrap << 32 | old_wrap << 40
}

impl PackedPart {
    /// Prepares the part for a queue of `size` descriptors with the used position `used_index` and
    /// the chains `left` in flight. Keeps the entries of these chains: no other record of them
    /// exists if this daemon ends now. All other entries become the free list.
    pub(super) fn open(part: Part, size: u16, used_index: u16, left: &[LeftChain]) -> Self {
        let capacity = usize::from(size);
        let mut next = vec![size; capacity];
        let mut is_taken = vec![false; capacity];
        let mut taken = Vec::with_capacity(capacity);
        for LeftChain { descs, entries, .. } in left {
            entries.iter().for_each(|index| is_taken[usize::from(*index)] = true);
            entries.windows(2).for_each(|pair| next[usize::from(pair[0])] = pair[1]);
            let (head, last) = (entries[0], entries[entries.len() - 1]);
            taken.push(Taken { id: descs[descs.len() - 1].id, head, last });
        }
        let free = || (0..size).rev().filter(|index| !is_taken[usize::from(*index)]);
        free().for_each(|index| part.store_u8(entry(index) + INFLIGHT_AT, 0));
        // For the next daemon: while the list is incomplete, only chains in flight are marked.
        fence(Ordering::Release);
        let mut free_head = size;
        for index in free() {
            part.store_u16(entry(index) + NEXT_AT, free_head);
            next[usize::from(index)] = free_head;
            free_head = index;
        }
        part.store_u16(DESC_NUM_AT, size);
        part.store_u16(FREE_HEAD_AT, free_head);
        part.store_u16(OLD_FREE_HEAD_AT, free_head);
        let free_count = is_taken.iter().filter(|taken| !**taken).count();
        let counter = left.last().map_or(0, |chain| chain.counter.wrapping_add(1));
        let batch = Vec::with_capacity(capacity);
        let old_used = used_index;
        part.store_u64(POSITIONS_AT, positions(used_index, old_used));
        part.store_u16(VERSION_AT, VERSION);
        PackedPart { part, counter, next, free_head, free_count, taken, batch, old_used }
    }

    #[inline]
    pub(super) fn is_lost(&self) -> bool {
        self.part.is_lost()
    }

    /// Records the ring descriptors of a chain. Records nothing if the chain has more descriptors
    /// than there are free entries: it is then not recoverable. If a driver reuses an id in flight,
    /// `pushing` may free the entry of the other chain.
    pub(super) fn taken(&mut self, id: u16, descs: &[Desc]) {
        if descs.is_empty() || descs.len() > self.free_count {
            return;
        }
        self.free_count -= descs.len();
        let head = self.free_head;
        let mut last = head;
        for desc in descs {
            last = self.free_head;
            let at = entry(last);
            self.part.store_u64(at + ADDR_AT, desc.addr);
            self.part.store_u32(at + LEN_AT, desc.len);
            self.part.store_u16(at + FLAGS_AT, desc.flags);
            self.part.store_u16(at + ID_AT, desc.id);
            self.free_head = self.next[usize::from(last)];
        }
        self.part.store_u16(entry(head) + NUM_AT, descs.len() as u16);
        self.part.store_u16(entry(head) + LAST_AT, last);
        self.part.store_u64(entry(head) + COUNTER_AT, self.counter);
        self.counter = self.counter.wrapping_add(1);
        // For the next daemon: the copy is complete before it is valid.
        fence(Ordering::Release);
        self.part.store_u8(entry(head) + INFLIGHT_AT, 1);
        self.part.store_u16(FREE_HEAD_AT, self.free_head);
        self.part.store_u16(OLD_FREE_HEAD_AT, self.free_head);
        self.taken.push(Taken { id, head, last });
    }

    /// Adds a chain to the batch. Its entries do not change until the publication: a later daemon
    /// may have to roll the batch back.
    pub(super) fn pushing(&mut self, id: u16) {
        if let Some(at) = self.taken.iter().position(|taken| taken.id == id) {
            self.batch.push(self.taken.swap_remove(at));
        }
    }

    /// Frees the entries of the batch and advances `used_idx` before the ring's flags change. A
    /// later daemon reads the ring to determine whether the batch was published, and commits or
    /// rolls back.
    pub(super) fn publishing(&mut self, used_index: u16) {
        if self.batch.is_empty() {
            return;
        }
        for Taken { head, last, .. } in self.batch.iter().copied() {
            let mut index = head;
            self.free_count += 1;
            while index != last {
                index = self.next[usize::from(index)];
                self.free_count += 1;
            }
            self.next[usize::from(last)] = self.free_head;
            self.part.store_u16(entry(last) + NEXT_AT, self.free_head);
            self.free_head = head;
        }
        self.part.store_u16(FREE_HEAD_AT, self.free_head);
        self.part.store_u64(POSITIONS_AT, positions(used_index, self.old_used));
        // For the next daemon: if the ring has the batch, the part has it, too.
        fence(Ordering::Release);
    }

    pub(super) fn published(&mut self, used_index: u16) {
        if self.batch.is_empty() {
            return;
        }
        // For the next daemon: if entries are cleared, the ring has the batch.
        fence(Ordering::Release);
        for Taken { head, .. } in self.batch.drain(..) {
            self.part.store_u8(entry(head) + INFLIGHT_AT, 0);
        }
        self.part.store_u16(OLD_FREE_HEAD_AT, self.free_head);
        self.old_used = used_index;
        self.part.store_u64(POSITIONS_AT, positions(used_index, self.old_used));
    }
}
