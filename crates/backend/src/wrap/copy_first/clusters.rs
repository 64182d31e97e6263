// SPDX-License-Identifier: Apache-2.0
//! The clusters of a disk that is copied, and the I/Os that wait for them.
//!
//! | State | Begins | Copier | Writes of the guest |
//! |---|---|---|---|
//! | held | at the start | reads it | wait, and tell the copier |
//! | free | [`Clusters::free`]: the copier has read it, or knows that it is a hole | leaves it alone | start |
//!
//! A copy of changes begins with the free clusters that [`Clusters::hold_only`] leaves out; afterwards
//! no cluster becomes held again. There is one copier, which reads held clusters only, and a write
//! starts on free clusters only: so no read of the copier meets a write. After [`Clusters::end`] every
//! write starts, whatever it touches.

use crate::wrap::Written;
use crate::wrap::track::{PARTS_MAX, part_bytes_of};
use crate::{Remote, Token};
use std::collections::VecDeque;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

/// Smallest size of a cluster.
pub const CLUSTER_BYTES: u64 = 64 << 10;
/// Largest size of a cluster: a write of the guest waits for its copy.
pub const CLUSTER_BYTES_MAX: u64 = 1 << 20;
/// Capacity of the largest disk: 128 TiB.
const CAPACITY_MAX: u64 = CLUSTER_BYTES_MAX * PARTS_MAX;

/// The refusal of a disk that is too large to be copied while it is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "its size of {capacity_bytes} bytes is more than the {CAPACITY_MAX} bytes of a disk that is copied while it is \
     written; take a snapshot (vhost-blk ctl snapshot), and copy the files below the overlay"
)]
pub struct TooLarge {
    /// Capacity of the disk in bytes.
    capacity_bytes: u64,
}

/// The state of all clusters. Lanes and the copier share it.
#[derive(Debug)]
pub struct Clusters {
    capacity_bytes: u64,
    cluster_bytes: u64,
    /// A bit for each cluster: set if it is free.
    free: Box<[AtomicU64]>,
    /// Bytes of the clusters that are held.
    held_bytes: AtomicU64,
    /// Bytes of those that were held at the start.
    total_bytes: AtomicU64,
    ended: AtomicBool,
    waiting: Mutex<VecDeque<Waiting>>,
    /// An I/O waits, or the copy has ended.
    changed: Condvar,
}

/// An I/O that waits.
#[derive(Debug)]
struct Waiting {
    /// Its clusters from the first held one on.
    rest: Range<u64>,
    remote: Remote,
    token: Token,
}

/// The next task of the copier.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Turn {
    /// An I/O waits for this cluster, which is held.
    Wanted(u64),
    /// No I/O waits, and the time of the copier's own work has come.
    Own,
    /// The copy has ended.
    Ended,
}

impl Clusters {
    /// The clusters of a disk of `capacity_bytes`, all of them held. They take 16 MiB of memory at most.
    ///
    /// # Errors
    /// [`TooLarge`].
    pub fn new(capacity_bytes: u64) -> Result<Self, TooLarge> {
        match capacity_bytes <= CAPACITY_MAX {
            true => Ok(Clusters::all_held(capacity_bytes)),
            false => Err(TooLarge { capacity_bytes }),
        }
    }

    fn all_held(capacity_bytes: u64) -> Self {
        let cluster_bytes = part_bytes_of(capacity_bytes, CLUSTER_BYTES);
        let words = capacity_bytes.div_ceil(cluster_bytes).div_ceil(64);
        Clusters {
            capacity_bytes,
            cluster_bytes,
            free: (0..words).map(|_| AtomicU64::new(0)).collect(),
            held_bytes: AtomicU64::new(capacity_bytes),
            total_bytes: AtomicU64::new(capacity_bytes),
            ended: AtomicBool::new(false),
            waiting: Mutex::default(),
            changed: Condvar::new(),
        }
    }

    /// Capacity of the disk in bytes.
    pub fn capacity_bytes(&self) -> u64 {
        self.capacity_bytes
    }

    /// Size of a cluster in bytes: a power of two from [`CLUSTER_BYTES`] to [`CLUSTER_BYTES_MAX`].
    pub fn cluster_bytes(&self) -> u64 {
        self.cluster_bytes
    }

    /// Number of clusters.
    pub fn len(&self) -> u64 {
        self.capacity_bytes.div_ceil(self.cluster_bytes)
    }

    /// Returns whether there is no cluster.
    pub fn is_empty(&self) -> bool {
        self.capacity_bytes == 0
    }

    /// Bytes of the clusters that were held at the start.
    pub fn total_bytes(&self) -> u64 {
        self.total_bytes.load(Ordering::Relaxed)
    }

    /// Bytes of those that are free by now.
    pub fn freed_bytes(&self) -> u64 {
        self.total_bytes().saturating_sub(self.held_bytes.load(Ordering::Relaxed))
    }

    /// Holds only the clusters of the noted parts, and those behind the capacity of the notes. No I/O
    /// has begun, and no cluster was freed.
    pub fn hold_only(&self, written: &Written) {
        self.free.iter().for_each(|word| word.store(u64::MAX, Ordering::Relaxed));
        let mut held_bytes = 0;
        written.each(self.capacity_bytes, |range| {
            for number in range.start / self.cluster_bytes..range.end.div_ceil(self.cluster_bytes) {
                let (word, bit) = self.place(number);
                if word.fetch_and(!bit, Ordering::AcqRel) & bit != 0 {
                    held_bytes += self.len_of(number);
                }
            }
        });
        self.total_bytes.store(held_bytes, Ordering::Relaxed);
        self.held_bytes.store(held_bytes, Ordering::Relaxed);
    }

    /// A second list of the clusters that are held now. No I/O waits for those.
    #[must_use]
    pub fn held_now(&self) -> Clusters {
        let copy = Clusters::all_held(self.capacity_bytes);
        for (to, from) in copy.free.iter().zip(&self.free) {
            to.store(from.load(Ordering::Acquire), Ordering::Relaxed);
        }
        for (to, from) in
            [(&copy.held_bytes, &self.held_bytes), (&copy.total_bytes, &self.total_bytes)]
        {
            to.store(from.load(Ordering::Relaxed), Ordering::Relaxed);
        }
        copy
    }

    /// The bytes of clusters.
    pub fn bytes_of(&self, numbers: Range<u64>) -> Range<u64> {
        let end = |number: u64| (number * self.cluster_bytes).min(self.capacity_bytes);
        end(numbers.start)..end(numbers.end)
    }

    fn len_of(&self, number: u64) -> u64 {
        let bytes = self.bytes_of(number..number + 1);
        bytes.end - bytes.start
    }

    /// The first run of held clusters in a range, of at most `max` clusters.
    pub fn first_held(&self, numbers: Range<u64>, max: u64) -> Option<Range<u64>> {
        let start = numbers.clone().find(|&number| !self.is_free(number))?;
        let limit = numbers.end.min(start.saturating_add(max));
        let end = (start..limit).find(|&number| self.is_free(number)).unwrap_or(limit);
        Some(start..end)
    }

    /// Frees clusters, and starts the I/Os that wait for no other one.
    pub fn free(&self, numbers: Range<u64>) {
        for number in numbers {
            let (word, bit) = self.place(number);
            // Pairs with `is_free`: the copier's read precedes the write that sees the bit.
            if word.fetch_or(bit, Ordering::AcqRel) & bit == 0 {
                self.held_bytes.fetch_sub(self.len_of(number), Ordering::Relaxed);
            }
        }
        let mut ready = Vec::new();
        self.lock().retain_mut(|waiting| {
            let is_held = self.advance(waiting);
            if !is_held {
                ready.push((waiting.remote.clone(), waiting.token));
            }
            is_held
        });
        ready.into_iter().for_each(|(remote, token)| remote.complete(token, 0));
    }

    /// Ends the copy, and starts all I/Os that wait.
    pub fn end(&self) {
        let mut queue = self.lock();
        self.ended.store(true, Ordering::Release);
        let waiting = std::mem::take(&mut *queue);
        drop(queue);
        self.changed.notify_all();
        waiting.into_iter().for_each(|Waiting { remote, token, .. }| remote.complete(token, 0));
    }

    /// Returns whether the copy has ended.
    pub fn has_ended(&self) -> bool {
        self.ended.load(Ordering::Acquire)
    }

    /// Returns whether an I/O waits.
    pub fn has_waiting(&self) -> bool {
        !self.lock().is_empty()
    }

    /// Waits for the next task of the copier, whose own work is due at `own`. I/Os take turns, so that
    /// a long one does not delay the others.
    pub fn turn(&self, own: Instant) -> Turn {
        let mut queue = self.lock();
        loop {
            if self.has_ended() {
                return Turn::Ended;
            }
            if let Some(waiting) = queue.pop_front() {
                let number = waiting.rest.start;
                queue.push_back(waiting);
                return Turn::Wanted(number);
            }
            let left = own.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Turn::Own;
            }
            let waited = self.changed.wait_timeout(queue, left);
            queue = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// The clusters of a range of bytes, if one of them is held.
    pub(super) fn held(&self, offset_bytes: u64, len_bytes: u64) -> Option<Range<u64>> {
        if len_bytes == 0 || self.has_ended() {
            return None;
        }
        let end = offset_bytes.saturating_add(len_bytes).div_ceil(self.cluster_bytes);
        let numbers = offset_bytes / self.cluster_bytes..end.min(self.len());
        let is_held = numbers.clone().any(|number| !self.is_free(number));
        is_held.then_some(numbers)
    }

    /// Lets an I/O wait for clusters, and completes `token` then. `false`: they are free by now.
    pub(super) fn wait(&self, numbers: Range<u64>, remote: Remote, token: Token) -> bool {
        let mut waiting = Waiting { rest: numbers, remote, token };
        let mut queue = self.lock();
        // Checked under the lock: `free` and `end` take it after their change.
        if self.has_ended() || !self.advance(&mut waiting) {
            return false;
        }
        queue.push_back(waiting);
        drop(queue);
        self.changed.notify_all();
        true
    }

    /// Skips free clusters. Returns whether a held one is left.
    fn advance(&self, waiting: &mut Waiting) -> bool {
        while !waiting.rest.is_empty() && self.is_free(waiting.rest.start) {
            waiting.rest.start += 1;
        }
        !waiting.rest.is_empty()
    }

    fn is_free(&self, number: u64) -> bool {
        let (word, bit) = self.place(number);
        word.load(Ordering::Acquire) & bit != 0
    }

    fn place(&self, number: u64) -> (&AtomicU64, u64) {
        (&self.free[(number / 64) as usize], 1 << (number % 64))
    }

    fn lock(&self) -> MutexGuard<'_, VecDeque<Waiting>> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::conformance::Delivered;
    use crate::io::Slot;

    fn clusters_of(capacity_bytes: u64) -> Clusters {
        Clusters::new(capacity_bytes).expect("it is small")
    }

    #[test]
    fn the_clusters_of_a_large_disk_take_little_memory_and_a_larger_disk_is_refused() {
        let (small, large) = (8 << 40, 128 << 40);
        assert_eq!(clusters_of(small).cluster_bytes(), CLUSTER_BYTES);
        assert_eq!(clusters_of(small + 512).cluster_bytes(), 2 * CLUSTER_BYTES);
        let clusters = clusters_of(large);
        assert_eq!(clusters.cluster_bytes(), CLUSTER_BYTES_MAX);
        assert!(clusters.free.len() * 8 <= 16 << 20);
        assert_eq!(clusters.held(large - 512, 512), Some(clusters.len() - 1..clusters.len()));
        clusters.free(1..clusters.len());
        let first = Some(0..CLUSTER_BYTES_MAX);
        assert_eq!(clusters.first_held(0..9, 9).map(|held| clusters.bytes_of(held)), first);
        assert_eq!(clusters.freed_bytes(), large - CLUSTER_BYTES_MAX);
        for beyond in [large + 512, 1 << 60, u64::MAX / 512 * 512] {
            let told = Clusters::new(beyond).expect_err("it is too large").to_string();
            assert!(told.contains(&beyond.to_string()) && told.contains("; take a"), "{told}");
        }
    }

    /// The copier may free the clusters between the look of a lane and its wait.
    #[test]
    fn nothing_waits_for_clusters_that_have_become_free_or_after_the_end() {
        let (clusters, mut delivered) = (clusters_of(4 * CLUSTER_BYTES), Delivered::default());
        let token = Token { slot: Slot(0), layer: 1 };
        let numbers = clusters.held(0, CLUSTER_BYTES).expect("it is held");
        clusters.free(0..1);
        assert!(!clusters.wait(numbers, delivered.remote(), token));
        let numbers = clusters.held(0, 2 * CLUSTER_BYTES).expect("the second one is held");
        clusters.end();
        assert!(!clusters.wait(numbers, delivered.remote(), token));
        assert_eq!(clusters.held(0, 4 * CLUSTER_BYTES), None);
        assert_eq!(delivered.poll(), None);
    }

    #[test]
    fn a_copy_of_changes_holds_the_changed_clusters_and_the_new_ones() {
        let written = Written::new(3 * CLUSTER_BYTES + 512);
        let clusters = clusters_of(5 * CLUSTER_BYTES + 512);
        clusters.hold_only(&written);
        // The cluster with the former end, and all behind it.
        assert_eq!(clusters.first_held(0..6, 9), Some(3..6));
        assert_eq!((clusters.total_bytes(), clusters.freed_bytes()), (2 * CLUSTER_BYTES + 512, 0));
        let again = clusters.held_now();
        clusters.free(0..5);
        assert_eq!(clusters.freed_bytes(), 2 * CLUSTER_BYTES);
        assert_eq!((again.first_held(0..6, 9), again.freed_bytes()), (Some(3..6), 0));
        // The first one is noted, too.
        let first = Written::new(CLUSTER_BYTES);
        first.note_all(&Written::new(512));
        written.note_all(&first);
        assert_eq!(written.bytes(), 3 * CLUSTER_BYTES + 512, "the disk has gained the rest");
    }
}
