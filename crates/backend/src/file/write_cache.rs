// SPDX-License-Identifier: Apache-2.0
//! The write cache of a block device, as the kernel knows it.
//!
//! A FLUSH of a device whose cache is write-through does nothing: the block layer ends it at once
//! (`Documentation/block/writeback_cache_control.rst`). io_uring would still pass it to a kernel thread.
//! The kind of the cache can change while the device is in use: an operator writes the attribute, or
//! the driver reads the device again. So each FLUSH asks.

use super::probe::Queue;
use std::fs::File;
use std::os::unix::fs::FileExt;

const WRITE_THROUGH: &[u8] = b"write through\n";

/// The attribute `write_cache` of a block device that is open with `O_DIRECT`. `None` for a file, for a
/// device behind the page cache, and without sysfs: they have to be synced.
#[derive(Debug)]
pub(super) struct WriteCache(Option<File>);

impl WriteCache {
    /// Storage that has to be synced.
    pub(super) const UNKNOWN: WriteCache = WriteCache(None);

    /// The cache of the device that has this queue; data of its writes is not in the page cache.
    pub(super) fn of_device(queue: &Queue) -> Self {
        WriteCache(queue.open("write_cache"))
    }

    /// Returns whether completed writes are durable without a sync, now.
    pub(super) fn is_write_through(&self) -> bool {
        let Some(attribute) = &self.0 else { return false };
        let mut text = [0; WRITE_THROUGH.len()];
        matches!(attribute.read_at(&mut text, 0), Ok(bytes) if &text[..bytes] == WRITE_THROUGH)
    }

    #[cfg(test)]
    pub(super) fn of_attribute(attribute: File) -> Self {
        WriteCache(Some(attribute))
    }
}
