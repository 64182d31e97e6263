// SPDX-License-Identifier: Apache-2.0
//! A mapping of a file that a front-end shares. It survives that the front-end truncates the file.
// UNSAFETY: calls `fstatfs` and `madvise` for a new mapping.
#![expect(unsafe_code)]

use crate::guard::{Guard, MAPPINGS_MAX};
use rustix::mm::{Advice, madvise};
use std::fs::File;
use std::os::fd::AsRawFd;
use vm_memory::{FileOffset, MmapRegion};

const PAGE_BYTES: usize = 4096;

/// A shared, writable mapping of the first bytes of a file.
#[derive(Debug)]
pub struct SharedMapping {
    /// Dropped before the mapping.
    guard: Guard,
    mapping: MmapRegion,
}

impl SharedMapping {
    /// Maps the first `len` bytes of `file`: `mmap` refuses an offset inside a huge page. Keeps them
    /// out of core dumps of this process.
    ///
    /// # Errors
    /// The reason as text.
    pub fn map(file: File, len: usize) -> Result<Self, String> {
        let page_bytes = page_bytes_of(&file);
        let prot = libc::PROT_READ | libc::PROT_WRITE;
        let flags = libc::MAP_SHARED | libc::MAP_NORESERVE;
        let mapping = MmapRegion::build(Some(FileOffset::new(file, 0)), len, prot, flags)
            .map_err(|error| error.to_string())?;
        // SAFETY: the range is the whole new mapping; the advice changes no content.
        unsafe { madvise(mapping.as_ptr().cast(), len, Advice::LinuxDontDump) }
            .map_err(|error| error.to_string())?;
        let guard = Guard::new(mapping.as_ptr() as usize, len, page_bytes)
            .ok_or_else(|| format!("this process has {MAPPINGS_MAX} mappings already"))?;
        Ok(SharedMapping { guard, mapping })
    }

    /// Address of the first byte in this process.
    pub fn as_ptr(&self) -> *mut u8 {
        self.mapping.as_ptr()
    }

    /// Length in bytes.
    pub fn size(&self) -> usize {
        self.mapping.size()
    }

    /// The mapped file.
    pub fn file(&self) -> &File {
        self.mapping.file_offset().expect("the mapping was made with its file").file()
    }

    /// Leaves a SIGBUS to its default action.
    #[cfg(test)]
    pub(crate) fn unguard(&self) {
        self.guard.disable();
    }

    /// Returns whether an access found that pages of the file are gone.
    pub fn is_lost(&self) -> bool {
        self.guard.is_lost()
    }
}

/// Size of the pages of a mapping of `file`; huge pages can only be replaced as a whole.
fn page_bytes_of(file: &File) -> usize {
    // SAFETY: an all-zero `statfs` is valid.
    let mut stat: libc::statfs = unsafe { std::mem::zeroed() };
    // SAFETY: descriptor and structure are valid for the call.
    let told = unsafe { libc::fstatfs(file.as_raw_fd(), &mut stat) } == 0;
    let huge = told && stat.f_type == libc::HUGETLBFS_MAGIC;
    if huge { usize::try_from(stat.f_bsize).unwrap_or(PAGE_BYTES) } else { PAGE_BYTES }
}
