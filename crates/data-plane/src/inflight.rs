// SPDX-License-Identifier: Apache-2.0
//! The table of a queue's requests in flight: the only list of open ones.

use backend::Io;
use virtio_blk::{RangeList, Request};
use virtqueue::{Chain, ChainHead};

/// Most requests of one queue in flight, whatever its size.
pub(crate) const DEPTH_MAX: u16 = 1024;
/// Segments that a fresh entry has room for: 128 KiB of single pages, header and status. A longer
/// chain grows its entry once.
const SEGMENTS_INITIAL: usize = 34;

/// One place in the table; its buffers are reused from request to request.
#[derive(Debug)]
pub(crate) struct Entry {
    /// Set from *chain* to *used*.
    pub(crate) head: Option<ChainHead>,
    /// Set from *request* to *completion*.
    pub(crate) request: Option<Request>,
    pub(crate) chain: Chain,
    pub(crate) ranges: RangeList,
    pub(crate) io: Option<Io>,
}

/// The table. An entry is free, or it belongs to one taken chain.
#[derive(Debug)]
pub(crate) struct Inflight {
    entries: Vec<Entry>,
    free: Vec<u16>,
}

impl Inflight {
    pub(crate) fn new(queue_size: u16) -> Self {
        let depth = queue_size.min(DEPTH_MAX);
        let entry = || Entry {
            head: None,
            request: None,
            chain: Chain::with_capacity(SEGMENTS_INITIAL),
            ranges: RangeList::default(),
            io: None,
        };
        Inflight {
            entries: (0..depth).map(|_| entry()).collect(),
            free: (0..depth).rev().collect(),
        }
    }

    /// A free entry, not yet claimed: [`Inflight::claim`] it once a chain was taken into it.
    #[inline]
    pub(crate) fn next_free(&mut self) -> Option<&mut Entry> {
        let index = *self.free.last()?;
        Some(&mut self.entries[usize::from(index)])
    }

    /// Claims the entry that [`Inflight::next_free`] gave; returns its index.
    #[inline]
    pub(crate) fn claim(&mut self, head: ChainHead) -> u16 {
        let index = self.free.pop().expect("next_free gave an entry");
        self.entries[usize::from(index)].head = Some(head);
        index
    }

    #[inline]
    pub(crate) fn entry(&mut self, index: u16) -> &mut Entry {
        &mut self.entries[usize::from(index)]
    }

    /// Frees a completed entry, and gives its debt out to be paid.
    #[inline]
    pub(crate) fn release(&mut self, index: u16) -> ChainHead {
        let entry = &mut self.entries[usize::from(index)];
        entry.io = None;
        self.free.push(index);
        entry.head.take().expect("a released entry was claimed")
    }

    /// No request is in flight.
    #[inline]
    pub(crate) fn is_empty(&self) -> bool {
        self.free.len() == self.entries.len()
    }
}
