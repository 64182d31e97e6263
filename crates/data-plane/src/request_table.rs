// SPDX-License-Identifier: Apache-2.0
//! The table of a queue's requests in flight. A request changes its type with its stage: [`Taken`]
//! (stage *chain*), [`Request`] (stage *request*), [`Submitted`] (stage *submit*).

use crate::latency::Nanos;
use backend::Io;
use virtio_blk::{RangeList, Request};
use virtqueue::{Chain, ChainHead};

/// Maximum requests of one queue in flight, for any size of the queue.
pub(crate) const DEPTH_MAX: u16 = 1024;
/// Initial room of an entry for segments: 128 KiB of single pages, header and status. A longer chain
/// grows its entry once.
const SEGMENTS_INITIAL: usize = 34;

/// A taken chain and its entry of the table. It must be returned by [`RequestTable::release`].
#[derive(Debug)]
#[must_use = "a taken chain must reach the used ring"]
pub(crate) struct Taken {
    index: u16,
    /// Time at which the chain was taken.
    pub(crate) at: Nanos,
    head: ChainHead,
}

impl Taken {
    /// Index of the entry.
    #[inline]
    pub(crate) fn index(&self) -> u16 {
        self.index
    }
}

/// A request whose I/O the lane has.
#[derive(Debug)]
pub(crate) struct Submitted {
    pub(crate) taken: Taken,
    pub(crate) request: Request,
    /// The current I/O; a request with ranges has one after another.
    pub(crate) io: Io,
}

/// One entry of the table. Later requests reuse its buffers.
#[derive(Debug)]
pub(crate) struct Entry {
    pub(crate) chain: Chain,
    pub(crate) ranges: RangeList,
    /// Set from *submit* to *completion*. It stays in place: the lane borrows the I/O.
    pub(crate) submitted: Option<Submitted>,
}

/// The table. An entry is free or belongs to one taken chain.
#[derive(Debug)]
pub(crate) struct RequestTable {
    entries: Vec<Entry>,
    free: Vec<u16>,
}

impl RequestTable {
    pub(crate) fn new(queue_size: u16) -> Self {
        let depth = queue_size.min(DEPTH_MAX);
        let entry = || Entry {
            chain: Chain::with_capacity(SEGMENTS_INITIAL),
            ranges: RangeList::default(),
            submitted: None,
        };
        RequestTable {
            entries: (0..depth).map(|_| entry()).collect(),
            free: (0..depth).rev().collect(),
        }
    }

    /// Lets `take` take a chain into a free entry. Returns `None` if no entry is free, or `take` finds
    /// no chain.
    #[inline]
    pub(crate) fn take<E>(
        &mut self,
        take: impl FnOnce(&mut Chain) -> Result<Option<ChainHead>, E>,
    ) -> Result<Option<Taken>, E> {
        let Some(&index) = self.free.last() else { return Ok(None) };
        let Some(head) = take(&mut self.entries[usize::from(index)].chain)? else {
            return Ok(None);
        };
        self.free.pop();
        Ok(Some(Taken { index, at: 0, head }))
    }

    #[inline]
    pub(crate) fn entry(&mut self, index: u16) -> &mut Entry {
        &mut self.entries[usize::from(index)]
    }

    /// The request of an event. Events carry only the index of the entry through the kernel.
    #[inline]
    pub(crate) fn submitted(&mut self, index: u16) -> &mut Submitted {
        self.entry(index).submitted.as_mut().expect("an event belongs to a submitted request")
    }

    /// Removes the request that has completed from its entry.
    #[inline]
    pub(crate) fn take_submitted(&mut self, index: u16) -> Submitted {
        self.entry(index).submitted.take().expect("only a submitted request completes")
    }

    /// Frees the entry of a completed request. Returns the head of its chain, which must be pushed.
    #[inline]
    pub(crate) fn release(&mut self, taken: Taken) -> ChainHead {
        self.free.push(taken.index);
        taken.head
    }

    /// The time at which the oldest request in flight was taken.
    pub(crate) fn oldest(&self) -> Option<Nanos> {
        let submitted = self.entries.iter().filter_map(|entry| entry.submitted.as_ref());
        submitted.map(|submitted| submitted.taken.at).min()
    }

    /// Number of requests in flight that were taken at `before` or earlier. Looks at the first entries only: the free
    /// entry that was used last is taken next.
    pub(crate) fn taken_by(&self, before: Nanos) -> u32 {
        let submitted = self.entries.iter().filter_map(|entry| entry.submitted.as_ref());
        let old = submitted
            .take(self.in_flight() as usize)
            .filter(|submitted| submitted.taken.at <= before);
        old.count() as u32 // at most DEPTH_MAX
    }

    /// Number of requests in flight.
    #[inline]
    pub(crate) fn in_flight(&self) -> u32 {
        (self.entries.len() - self.free.len()) as u32 // at most DEPTH_MAX
    }

    /// Returns whether an entry is free.
    #[inline]
    pub(crate) fn has_free(&self) -> bool {
        !self.free.is_empty()
    }

    /// Returns whether no request is in flight.
    #[inline]
    pub(crate) fn is_empty(&self) -> bool {
        self.free.len() == self.entries.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_submitted_request_takes_no_more_room_than_its_parts_in_an_entry() {
        type Parts = (Nanos, Option<ChainHead>, Option<Request>, Option<Io>);
        assert!(size_of::<Option<Submitted>>() <= size_of::<Parts>());
    }
}
