// SPDX-License-Identifier: Apache-2.0
//! The old storage of a mirror, to be read.

use super::copier::CopyError;
use crate::backup::ImageReader;
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// A reader that the worker takes back from a copier whose new storage hangs: the image is not kept open.
#[derive(Clone)]
pub(super) struct Old(Arc<Mutex<Option<ImageReader>>>);

impl Old {
    pub(super) fn new(reader: ImageReader) -> Self {
        Old(Arc::new(Mutex::new(Some(reader))))
    }

    /// Closes the reader. Later reads are refused.
    pub(super) fn close(&self) {
        *self.lock() = None;
    }

    /// Reads a range, unless another program may have written to the image.
    pub(super) fn read(&self, range: Range<u64>) -> Result<Vec<u8>, CopyError> {
        let at = range.start;
        let mut reader = self.lock();
        let reader = reader.as_mut().ok_or(CopyError::Closed)?;
        reader.read(range).map_err(|why| CopyError::Read(at, why))?;
        check(reader)?;
        Ok(reader.content().to_vec())
    }

    /// The first position in a range that may have data; its end if all of it is known to be zero.
    pub(super) fn skip_hole(&self, range: Range<u64>) -> Result<u64, CopyError> {
        let at = range.start;
        let mut reader = self.lock();
        let reader = reader.as_mut().ok_or(CopyError::Closed)?;
        let data = reader.skip_hole(range).map_err(|why| CopyError::Read(at, why))?;
        check(reader)?;
        Ok(data)
    }

    /// Returns an error if another program may write to the image.
    pub(super) fn check_handover(&self) -> Result<(), CopyError> {
        self.lock().as_ref().map_or(Err(CopyError::Closed), check)
    }

    fn lock(&self) -> MutexGuard<'_, Option<ImageReader>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn check(reader: &ImageReader) -> Result<(), CopyError> {
    if reader.was_handed_over() { Err(CopyError::HandedOver) } else { Ok(()) }
}
