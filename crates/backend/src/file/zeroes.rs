// SPDX-License-Identifier: Apache-2.0
//! Zeroes to write where the file system cannot zero a range by itself.
// UNSAFETY: a static buffer is handed to the kernel by address.
#![expect(unsafe_code)]

use crate::BufList;
use libc::iovec;

const ZERO_BYTES: usize = 64 << 10;
const SECTOR_BYTES: usize = 512;
/// Full segments of one op, so that an op writes 4 MiB at most.
const FULL_SEGMENTS: usize = 64;

#[repr(C, align(4096))]
struct Zeroes([u8; ZERO_BYTES]);
static ZEROES: Zeroes = Zeroes([0; ZERO_BYTES]);

/// Ready lists of segments that all name the same zeroes; never changed, so any number of ops
/// may use them at once.
pub(super) struct ZeroLists {
    /// Segments of 64 KiB each.
    full: Box<[iovec]>,
    /// Segment `n` has `n` sectors.
    by_sectors: Box<[iovec]>,
}

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

    /// Zeroes for the first part of a range of `len` bytes (a multiple of 512); only to be written
    /// from, never advanced.
    pub(super) fn first_part_of(&self, len: u64) -> BufList {
        let full = (len / ZERO_BYTES as u64).min(FULL_SEGMENTS as u64) as usize;
        let (list, count) = match full {
            0 => (&self.by_sectors[len as usize / SECTOR_BYTES], 1),
            _ => (&self.full[0], full),
        };
        // SAFETY: the lists live in boxes of the lane, which outlives its ops, and their memory is
        // static. Writes only read it, and no lane advances this list.
        unsafe { BufList::new(std::ptr::from_ref(list).cast_mut(), count) }
    }
}
