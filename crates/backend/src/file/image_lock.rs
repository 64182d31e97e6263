// SPDX-License-Identifier: Apache-2.0
//! The lock of an open image, for an owner that takes it and gives it up while the image is open: the
//! lock follows a guest that migrates.

use super::lane::Shared;
use super::sys;
use crate::lock::{self, Access, LockError};
use crate::mark;
use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

/// A handle on the lock. Dropping it changes nothing: the open image releases the lock at its end.
#[derive(Clone, Debug)]
pub struct ImageLock {
    pub(super) shared: Arc<Shared>,
    pub(super) path: PathBuf,
    pub(super) access: Access,
    /// The image has no lock: the handle only notes that the guest leaves.
    pub(super) is_off: bool,
}

impl ImageLock {
    /// The same for an image that is not locked.
    pub fn without_lock(self) -> ImageLock {
        ImageLock { is_off: true, ..self }
    }

    /// Returns whether the image is not locked.
    pub fn is_off(&self) -> bool {
        self.is_off
    }

    /// Takes the lock; waits up to `patience` for another program to release it. Afterwards reads
    /// see the last writes of that program: clean pages of the page cache are dropped.
    ///
    /// # Errors
    /// [`LockError`]; the lock is not held then.
    pub fn take(&self, patience: Duration) -> Result<(), LockError> {
        let Shared { file, .. } = &*self.shared;
        if self.is_off {
            sys::drop_cached_pages(file);
            return Ok(());
        }
        lock::lock_image_within(patience, file, &self.path, self.access)?;
        // The other program may have put an overlay over the image.
        if self.access == Access::Write {
            let found = mark::refusal_of_writer(file, &self.path);
            let writable =
                found.and_then(|found| found.map_or(Ok(()), |marked| Err(marked.into())));
            writable.inspect_err(|_| lock::release(file))?;
        }
        sys::drop_cached_pages(file);
        Ok(())
    }

    /// Makes all completed writes durable and releases the lock. No I/O may be in flight.
    ///
    /// # Errors
    /// The errno of a sync that failed, now or earlier: a completed write may be lost, so this
    /// program keeps the lock, and no other one goes on with the image unnoticed.
    pub fn give_up(&self) -> io::Result<()> {
        // Another program writes only after this: `Reader::was_handed_over`. Without a lock, or if the lock is not
        // seen there, it may do so also after an error.
        self.shared.handovers.fetch_add(1, Ordering::AcqRel);
        if self.access == Access::Write {
            self.shared.sync()?;
        }
        if !self.is_off {
            lock::release(&self.shared.file);
        }
        Ok(())
    }
}
