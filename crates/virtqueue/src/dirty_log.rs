// SPDX-License-Identifier: Apache-2.0
//! The dirty log of live migration (vhost-user, "Migration"): one bit for each 4096 bytes of guest
//! memory. The device sets a bit after it has written to that page.
// UNSAFETY: the log is memory shared with the front-end.
#![expect(unsafe_code)]

use crate::memory::MemoryError;
use crate::shared_mapping::SharedMapping;
use std::fs::File;
use std::sync::atomic::{AtomicU8, Ordering};

/// Bytes of guest memory that one bit covers.
pub const PAGE_BYTES: u64 = 4096;
/// Maximum bytes of a log: one bit for each page of 52 bits of address, the most of any processor.
/// The front-end may add memory at any address after it has sent the log.
const LOG_BYTES_MAX: u64 = 1 << 37;

/// A mapped dirty log.
#[derive(Debug)]
pub struct DirtyLog {
    mapping: SharedMapping,
}

impl DirtyLog {
    /// Maps `len` bytes of `file` from byte `offset` on.
    ///
    /// # Errors
    /// [`MemoryError::Map`] if `len` is 0 or more than any guest needs, or the file cannot be mapped.
    pub fn map(file: File, offset: u64, len: u64) -> Result<Self, MemoryError> {
        let mapping = match len {
            1..=LOG_BYTES_MAX => SharedMapping::map(file, offset, len),
            _ => Err(format!("a dirty log of {len} bytes; it has 1 to {LOG_BYTES_MAX}")),
        };
        let mapping = mapping.map_err(|cause| MemoryError::Map { addr: 0, cause })?;
        Ok(DirtyLog { mapping })
    }

    /// The address of the first byte in this process.
    pub fn host(&self) -> *mut u8 {
        self.mapping.as_ptr()
    }

    /// The mapped file, and the offset of the first byte in it.
    pub fn file(&self) -> (&File, u64) {
        self.mapping.file()
    }

    /// Length in bytes; never 0.
    #[expect(clippy::len_without_is_empty, reason = "a log is never empty")]
    pub fn len(&self) -> usize {
        self.mapping.size()
    }

    /// Returns whether a mark found that the front-end has truncated a part of the log.
    #[inline]
    pub(crate) fn is_lost(&self) -> bool {
        self.mapping.is_lost()
    }

    /// Marks the pages of `len` bytes at guest-physical address `addr`. Ignores pages beyond the
    /// log: the front-end does not migrate them. The vhost code of the kernel does the same.
    pub fn mark(&self, addr: u64, len: u64) {
        if len == 0 {
            return;
        }
        let last = addr.saturating_add(len - 1) / PAGE_BYTES;
        for page in addr / PAGE_BYTES..=last {
            let byte = usize::try_from(page / 8).unwrap_or(usize::MAX);
            if byte >= self.len() {
                return;
            }
            // SAFETY: `byte` lies in the mapping, which `self` keeps alive.
            let cell = unsafe { AtomicU8::from_ptr(self.host().add(byte)) };
            // Release: a front-end that reads and clears the bit sees the data.
            cell.fetch_or(1 << (page % 8), Ordering::Release);
        }
    }
}
