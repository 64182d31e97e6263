// SPDX-License-Identifier: Apache-2.0
//! How many requests that finish at once (refused, or by storage that does not wait) are gathered
//! before they are published.
//!
//! The driver works on what is published while the thread goes on. Where a request takes long
//! (storage that moves the data itself), the first is published alone, so that a driver that
//! sleeps wakes up early, and while there is more to take the batch doubles, so that a deep queue
//! pays for few publications.

/// The largest batch; measured best for a null disk and for files in memory.
const BATCH_MAX: u32 = 8;

/// One queue's batch.
#[derive(Debug)]
pub(crate) struct Batch {
    unpublished: u32,
    limit: u32,
    first_limit: u32,
}

impl Batch {
    /// `slow_start`: publish the first request alone.
    pub(crate) fn new(slow_start: bool) -> Self {
        let first_limit = if slow_start { 1 } else { BATCH_MAX };
        Batch { unpublished: 0, limit: first_limit, first_limit }
    }

    /// A chain was pushed to the used ring.
    #[inline]
    pub(crate) fn pushed(&mut self) {
        self.unpublished += 1;
    }

    /// Time to publish.
    #[inline]
    pub(crate) fn is_full(&self) -> bool {
        self.unpublished >= self.limit
    }

    /// What was pushed is published.
    #[inline]
    pub(crate) fn published(&mut self) {
        if self.is_full() {
            self.limit = (self.limit * 2).min(BATCH_MAX);
        }
        self.unpublished = 0;
    }

    /// The driver has made nothing more available.
    #[inline]
    pub(crate) fn emptied(&mut self) {
        self.limit = self.first_limit;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fill(batch: &mut Batch) -> u32 {
        let mut pushed = 0;
        while !batch.is_full() {
            batch.pushed();
            pushed += 1;
        }
        batch.published();
        pushed
    }

    #[test]
    fn batches_double_while_there_is_more_to_take() {
        let mut batch = Batch::new(true);
        let sizes: Vec<u32> = (0..6).map(|_| fill(&mut batch)).collect();
        assert_eq!(sizes, [1, 2, 4, 8, 8, 8]);
    }

    #[test]
    fn without_a_slow_start_batches_are_large_from_the_first() {
        let mut batch = Batch::new(false);
        batch.emptied();
        assert_eq!(fill(&mut batch), BATCH_MAX);
    }

    #[test]
    fn after_the_queue_was_empty_the_first_is_published_alone() {
        let mut batch = Batch::new(true);
        (0..4).for_each(|_| assert_ne!(fill(&mut batch), 0));
        batch.emptied();
        assert_eq!(fill(&mut batch), 1);
    }
}
