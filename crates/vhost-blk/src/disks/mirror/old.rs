// SPDX-License-Identifier: Apache-2.0
//! The old storage of a mirror, to be read.
//!
//! | State of the reader | Begins | Next |
//! |---|---|---|
//! | free | at the start | lent; closed |
//! | lent | a read begins | free, at its end; closed |
//! | closed | [`Old::close`] | |
//!
//! Only the thread of the target reads. No lock is held meanwhile: a slow storage delays neither the look at the
//! state nor the close. A reader that is lent at the close is dropped at the end of the read.

use super::copier::CopyError;
use crate::backup::ImageReader;
use std::mem;
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// A reader that the worker takes back from a copier whose new storage hangs: the image is not kept open.
#[derive(Clone)]
pub(super) struct Old(Arc<Lendable<ImageReader>>);

impl Old {
    pub(super) fn new(reader: ImageReader) -> Self {
        Old(Arc::new(Lendable(Mutex::new(Place::Free(reader)))))
    }

    /// Closes the reader. Later reads are refused.
    pub(super) fn close(&self) {
        self.0.close();
    }

    /// Reads a range, unless another program may have written to the image.
    pub(super) fn read(&self, range: Range<u64>) -> Result<Vec<u8>, CopyError> {
        let at = range.start;
        self.lend(|reader| {
            reader.read(range).map_err(|why| CopyError::Read(at, why))?;
            check(reader)?;
            Ok(reader.content().to_vec())
        })
    }

    /// The first position in a range that may have data; its end if all of it is known to be zero.
    pub(super) fn skip_hole(&self, range: Range<u64>) -> Result<u64, CopyError> {
        let at = range.start;
        self.lend(|reader| {
            let data = reader.skip_hole(range).map_err(|why| CopyError::Read(at, why))?;
            check(reader)?;
            Ok(data)
        })
    }

    /// Returns an error if another program may write to the image. A read in progress looks itself at its
    /// end.
    pub(super) fn check_handover(&self) -> Result<(), CopyError> {
        match &*self.0.lock() {
            Place::Free(reader) => check(reader),
            Place::Lent => Ok(()),
            Place::Closed => Err(CopyError::Closed),
        }
    }

    fn lend<T>(
        &self,
        act: impl FnOnce(&mut ImageReader) -> Result<T, CopyError>,
    ) -> Result<T, CopyError> {
        self.0.lend(act).unwrap_or(Err(CopyError::Closed))
    }
}

fn check(reader: &ImageReader) -> Result<(), CopyError> {
    if reader.was_handed_over() { Err(CopyError::HandedOver) } else { Ok(()) }
}

/// A value that one thread uses at a time.
struct Lendable<R>(Mutex<Place<R>>);

enum Place<R> {
    Free(R),
    Lent,
    Closed,
}

impl<R> Lendable<R> {
    /// Uses the value. `None`: it is closed, or in use.
    fn lend<T>(&self, act: impl FnOnce(&mut R) -> T) -> Option<T> {
        let mut value = self.take()?;
        let done = act(&mut value);
        // The guard goes before the value, if that was closed meanwhile.
        let mut place = self.lock();
        if matches!(*place, Place::Lent) {
            *place = Place::Free(value);
        }
        Some(done)
    }

    fn take(&self) -> Option<R> {
        let mut place = self.lock();
        match mem::replace(&mut *place, Place::Lent) {
            Place::Free(value) => Some(value),
            other => {
                *place = other;
                None
            }
        }
    }

    fn close(&self) {
        let before = mem::replace(&mut *self.lock(), Place::Closed);
        drop(before); // without the lock
    }

    fn lock(&self) -> MutexGuard<'_, Place<R>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_value_in_use_delays_neither_a_look_nor_the_close_and_is_dropped_after_its_use() {
        let (value, lendable) = (Arc::new(()), Lendable(Mutex::new(Place::Closed)));
        *lendable.lock() = Place::Free(Arc::clone(&value));
        assert_eq!(lendable.lend(|_| 1), Some(1));
        assert!(matches!(*lendable.lock(), Place::Free(_)));
        let used = lendable.lend(|_| {
            assert!(matches!(*lendable.lock(), Place::Lent));
            lendable.close();
            Arc::strong_count(&value)
        });
        assert_eq!((used, Arc::strong_count(&value)), (Some(2), 1));
        assert_eq!(lendable.lend(|_| 1), None);
    }
}
