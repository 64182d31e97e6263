// SPDX-License-Identifier: Apache-2.0
//! The dirty log of live migration (vhost-user, "Migration"): one bit per 4096 bytes of guest
//! memory, set after the device wrote there.
// UNSAFETY: the log is memory shared with the front-end.
#![expect(unsafe_code)]

use crate::memory::{MemoryError, refuse_short_file};
use std::fs::File;
use std::sync::atomic::{AtomicU8, Ordering};
use vm_memory::{FileOffset, MmapRegion};

/// Bytes of guest memory that one bit stands for.
pub const PAGE_BYTES: u64 = 4096;

/// A mapped dirty log.
#[derive(Debug)]
pub struct DirtyLog {
    mapping: MmapRegion,
    offset: usize,
    len: usize,
}

impl DirtyLog {
    /// Maps `len` bytes of `file` from `offset` on.
    ///
    /// # Errors
    /// A file that is too short, or a failed `mmap`.
    pub fn map(file: File, offset: u64, len: u64) -> Result<Self, MemoryError> {
        let failed = |cause: String| MemoryError::Map { addr: 0, cause };
        let end = offset
            .checked_add(len)
            .and_then(|end| usize::try_from(end).ok())
            .filter(|_| len > 0)
            .ok_or_else(|| failed(format!("a dirty log of {len} bytes at {offset}")))?;
        refuse_short_file(&file, end as u64).map_err(failed)?;
        let mapping = MmapRegion::build(
            Some(FileOffset::new(file, 0)),
            end,
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_SHARED,
        )
        .map_err(|e| failed(e.to_string()))?;
        Ok(DirtyLog { mapping, offset: offset as usize, len: len as usize })
    }

    /// This process's address of the first byte.
    pub fn host(&self) -> *mut u8 {
        self.mapping.as_ptr().wrapping_add(self.offset)
    }

    /// Length in bytes; never 0.
    #[expect(clippy::len_without_is_empty, reason = "a log is never empty")]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Marks the pages of `len` bytes at guest-physical `addr`. Pages beyond the log are outside
    /// what the front-end migrates and are ignored, as the kernel's vhost does.
    pub fn mark(&self, addr: u64, len: u64) {
        if len == 0 {
            return;
        }
        let last = addr.saturating_add(len - 1) / PAGE_BYTES;
        for page in addr / PAGE_BYTES..=last {
            let byte = usize::try_from(page / 8).unwrap_or(usize::MAX);
            if byte >= self.len {
                return;
            }
            // SAFETY: `offset + byte` lies in the mapping, which `self` keeps alive.
            let cell = unsafe { AtomicU8::from_ptr(self.mapping.as_ptr().add(self.offset + byte)) };
            // Release: the front-end that reads and clears the bit must see the data.
            cell.fetch_or(1 << (page % 8), Ordering::Release);
        }
    }
}
