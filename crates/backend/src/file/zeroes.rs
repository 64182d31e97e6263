// SPDX-License-Identifier: Apache-2.0
//! Zeroes to write if the file system cannot zero a range.
// UNSAFETY: passes the address of a static buffer to the kernel.
#![expect(unsafe_code)]

use crate::BufList;
use libc::iovec;

const ZERO_BYTES: usize = 64 << 10;
const SECTOR_BYTES: usize = 512;
/// Maximum full segments of one operation (4 MiB).
const FULL_SEGMENTS: usize = 64;

#[repr(C, align(4096))]
struct Zeroes([u8; ZERO_BYTES]);
static ZEROES: Zeroes = Zeroes([0; ZERO_BYTES]);

/// Prepared lists of segments that all name the same zeroes. They are constant: any number of
/// operations may use them at the same time.
pub(super) struct ZeroLists {
    /// Segments of 64 KiB each.
    full: Box<[iovec]>,
    /// Segment `n` has `n` sectors.
    by_sectors: Box<[iovec]>,
}

// SAFETY: the lists are constant, and the addresses in them are those of static memory.
unsafe impl Send for ZeroLists {}

impl ZeroLists {
    pub(super) fn new() -> Self {
        let segment = |iov_len| iovec { iov_base: (&raw const ZEROES).cast_mut().cast(), iov_len };
        ZeroLists {
            full: vec![segment(ZERO_BYTES); FULL_SEGMENTS].into(),
            by_sectors: (0..=ZERO_BYTES / SECTOR_BYTES)
                .map(|n| segment(n * SECTOR_BYTES))
                .collect(),
        }
    }

    /// Zeroes for the first part of a range of `len` bytes (a multiple of 512). The caller must
    /// only write from the list, and must not advance it.
    pub(super) fn first_part_of(&self, len: u64) -> BufList {
        let full = (len / ZERO_BYTES as u64).min(FULL_SEGMENTS as u64) as usize;
        let (list, count) = match full {
            0 => (&self.by_sectors[len as usize / SECTOR_BYTES], 1),
            _ => (&self.full[0], full),
        };
        // SAFETY: boxes of the lane, which outlives its operations, own the lists; the memory is
        // static. Writes only read it, and no lane advances this list.
        unsafe { BufList::new(std::ptr::from_ref(list).cast_mut(), count) }
    }
}
