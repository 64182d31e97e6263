// SPDX-License-Identifier: Apache-2.0
//! The batch of completions that a queue collects before it publishes them.
//!
//! It applies to requests that complete at once: refused ones, and those of storage that does not
//! wait. The driver handles published requests while the thread continues. If a request takes long
//! (storage that copies the data itself), the queue publishes the first one alone, which wakes a
//! sleeping driver early. The batch then doubles while more chains are available, so that a deep
//! queue needs few publications.

use backend::COPY_BYTES_MAX;

/// Maximum requests of a batch; measured as best for a null disk and for files in memory.
const BATCH_MAX: u32 = 8;
/// Data bytes that end a batch: a thread whose storage copies the data itself then does other work.
const BATCH_BYTES_MAX: u64 = 32 << 20;

/// One queue's batch.
#[derive(Debug)]
pub(crate) struct CompletionBatch {
    unpublished: u32,
    unpublished_bytes: u64,
    limit: u32,
    /// The storage copies the data itself.
    copies: bool,
}

/// Requests of the first batch after the queue was empty.
fn first_limit(copies: bool) -> u32 {
    if copies { 1 } else { BATCH_MAX }
}

impl CompletionBatch {
    /// An empty batch. If the storage `copies` the data itself, the first request is published alone.
    pub(crate) fn new(copies: bool) -> Self {
        let limit = first_limit(copies);
        CompletionBatch { unpublished: 0, unpublished_bytes: 0, limit, copies }
    }

    /// Counts a chain that was pushed to the used ring.
    #[inline]
    pub(crate) fn pushed(&mut self) {
        self.unpublished += 1;
    }

    /// Counts the data bytes of a request.
    #[inline]
    pub(crate) fn moved(&mut self, bytes: u64) {
        self.unpublished_bytes += bytes;
    }

    /// Counts the part of a request of `bytes` that the storage may have copied itself; the request goes on later.
    #[inline]
    pub(crate) fn began(&mut self, bytes: u64) {
        if self.copies {
            self.moved(bytes.min(COPY_BYTES_MAX));
        }
    }

    /// Returns whether the batch must be published now.
    #[inline]
    pub(crate) fn is_full(&self) -> bool {
        self.unpublished >= self.limit || self.unpublished_bytes >= BATCH_BYTES_MAX
    }

    /// Starts a new batch after a publication. Returns the requests of the old one.
    #[inline]
    pub(crate) fn take_published(&mut self) -> u64 {
        self.unpublished_bytes = 0;
        if self.unpublished >= self.limit {
            self.limit = (self.limit * 2).min(BATCH_MAX);
        }
        std::mem::take(&mut self.unpublished).into()
    }

    /// Resets the size of the batch: no further chain is available.
    #[inline]
    pub(crate) fn emptied(&mut self) {
        self.limit = first_limit(self.copies);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fill(batch: &mut CompletionBatch) -> u32 {
        let mut pushed = 0;
        while !batch.is_full() {
            batch.pushed();
            pushed += 1;
        }
        batch.take_published();
        pushed
    }

    #[test]
    fn batches_double_while_there_is_more_to_take() {
        let mut batch = CompletionBatch::new(true);
        let sizes: Vec<u32> = (0..6).map(|_| fill(&mut batch)).collect();
        assert_eq!(sizes, [1, 2, 4, 8, 8, 8]);
    }

    #[test]
    fn without_a_slow_start_batches_are_large_from_the_first() {
        let mut batch = CompletionBatch::new(false);
        batch.emptied();
        assert_eq!(fill(&mut batch), BATCH_MAX);
    }

    #[test]
    fn much_data_ends_a_batch() {
        let mut batch = CompletionBatch::new(false);
        batch.moved(BATCH_BYTES_MAX - 512);
        assert!(!batch.is_full());
        batch.moved(512);
        assert!(batch.is_full());
        batch.take_published();
        assert!(!batch.is_full());
    }

    #[test]
    fn parts_of_long_requests_end_a_batch_only_if_the_storage_copies() {
        for copies in [true, false] {
            let mut batch = CompletionBatch::new(copies);
            for part in 1..=16 {
                batch.began(1 << 30);
                assert_eq!(batch.is_full(), copies && part == 16, "{copies}, {part}");
            }
        }
    }

    #[test]
    fn after_the_queue_was_empty_the_first_is_published_alone() {
        let mut batch = CompletionBatch::new(true);
        (0..4).for_each(|_| assert_ne!(fill(&mut batch), 0));
        batch.emptied();
        assert_eq!(fill(&mut batch), 1);
    }
}
