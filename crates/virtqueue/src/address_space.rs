// SPDX-License-Identifier: Apache-2.0
//! The share of this process' address space that mappings of front-ends' memory may take.
//!
//! A sparse file has any length. Without a bound, its mapping would leave no address for the stacks
//! and allocations of other disks, and an allocation that fails aborts the process.

use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;

/// Maximum bytes of all mappings: half of the 47 bits of addresses that Linux gives a process.
pub(crate) const MAPPED_BYTES_MAX: u64 = 64 << 40;

static SPACE: Space = Space { taken: AtomicU64::new(0) };

#[derive(Debug)]
struct Space {
    taken: AtomicU64,
}

/// Bytes of the address space that one mapping takes. Drop it after the mapping is unmapped.
#[derive(Debug)]
pub(crate) struct Reservation {
    space: &'static Space,
    bytes: u64,
}

impl Reservation {
    /// Takes `bytes` of the process' address space.
    ///
    /// # Errors
    /// The reason as text, if all mappings together would exceed [`MAPPED_BYTES_MAX`].
    pub(crate) fn take(bytes: u64) -> Result<Self, String> {
        SPACE.take(bytes)
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        self.space.taken.fetch_sub(self.bytes, Relaxed);
    }
}

impl Space {
    // Relaxed: the number orders no other access.
    fn take(&'static self, bytes: u64) -> Result<Reservation, String> {
        let sum = |taken: u64| taken.checked_add(bytes).filter(|sum| *sum <= MAPPED_BYTES_MAX);
        match self.taken.fetch_update(Relaxed, Relaxed, sum) {
            Ok(_) => Ok(Reservation { space: self, bytes }),
            Err(taken) => Err(format!(
                "it takes {} GiB, and all guests of this process have {} of at most {} GiB; serve \
                 some disks by another process",
                bytes.div_ceil(1 << 30),
                taken >> 30,
                MAPPED_BYTES_MAX >> 30
            )),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_limit_is_for_all_reservations_together_and_a_dropped_one_is_free_again() {
        static SPACE: Space = Space { taken: AtomicU64::new(0) };
        let half = SPACE.take(MAPPED_BYTES_MAX / 2).unwrap();
        let rest = SPACE.take(MAPPED_BYTES_MAX / 2).unwrap();
        for bytes in [1, MAPPED_BYTES_MAX, u64::MAX] {
            let why = SPACE.take(bytes).unwrap_err();
            assert!(why.contains("have 65536 of at most 65536 GiB"), "{why}");
        }
        drop(half);
        assert!(SPACE.take(MAPPED_BYTES_MAX / 2 + 1).is_err());
        drop((SPACE.take(MAPPED_BYTES_MAX / 2).unwrap(), rest));
        assert_eq!(SPACE.taken.load(Relaxed), 0);
    }
}
