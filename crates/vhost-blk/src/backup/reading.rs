// SPDX-License-Identifier: Apache-2.0
//! The copier's read of the disk. A backing file on storage that hangs must not hold writes of the guest to other
//! storage: the backup ends then, and its thread is left to that storage.

use backend::wrap::Clusters;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// The read that is in progress. The copier begins and ends it; another thread looks at it.
#[derive(Clone, Debug, Default)]
pub(super) struct Reading(Arc<Mutex<Option<Read>>>);

#[derive(Clone, Copy, Debug)]
struct Read {
    begun: Instant,
    /// A write of the guest waits for it.
    is_wanted: bool,
}

impl Reading {
    /// Reads. `is_wanted`: a write of the guest waits for it.
    pub(super) fn with<T>(&self, is_wanted: bool, read: impl FnOnce() -> T) -> T {
        *self.lock() = Some(Read { begun: Instant::now(), is_wanted });
        let done = read();
        *self.lock() = None;
        done
    }

    /// Returns whether the read takes longer than `patience`, and a write of the guest waits meanwhile, or the end of
    /// the copy.
    pub(super) fn is_stuck(&self, clusters: &Clusters, patience: Duration) -> bool {
        let read = *self.lock();
        read.is_some_and(|read| {
            read.begun.elapsed() >= patience
                && (read.is_wanted || clusters.has_waiting() || clusters.has_ended())
        })
    }

    fn lock(&self) -> MutexGuard<'_, Option<Read>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc::channel;

    #[test]
    fn a_read_is_stuck_only_while_a_write_of_the_guest_or_a_cancel_waits_for_it() {
        let clusters = Clusters::new(1 << 20).unwrap();
        let reading = Reading::default();
        assert!(!reading.is_stuck(&clusters, Duration::ZERO));
        for is_wanted in [false, true] {
            let (begun, has_begun) = channel();
            let (end, is_over) = channel::<()>();
            let of_thread = reading.clone();
            let body = move || {
                of_thread.with(is_wanted, || {
                    begun.send(()).unwrap();
                    is_over.recv().unwrap();
                });
            };
            let thread = std::thread::spawn(body);
            has_begun.recv().unwrap();
            assert_eq!(reading.is_stuck(&clusters, Duration::ZERO), is_wanted);
            assert!(!reading.is_stuck(&clusters, Duration::from_secs(3600)));
            let ended = Clusters::new(1 << 20).unwrap();
            ended.end();
            assert!(reading.is_stuck(&ended, Duration::ZERO));
            end.send(()).unwrap();
            thread.join().unwrap();
            assert!(!reading.is_stuck(&clusters, Duration::ZERO));
        }
    }
}
