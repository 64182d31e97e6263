// SPDX-License-Identifier: Apache-2.0
//! Memory of a test's I/O: segments of any length and alignment, with guard bytes between them.
// UNSAFETY: passes the addresses of the segments to lanes.
#![expect(unsafe_code)]

use crate::BufList;
use libc::iovec;
use std::ops::Range;

const GUARD: u8 = 0xee;
const PAGE: usize = 4096;

/// Segments with guard bytes between them.
pub struct Memory {
    bytes: Vec<u8>,
    pieces: Vec<Range<usize>>,
    iovs: Vec<iovec>,
}

impl Memory {
    /// Segments of these lengths, each at `misalign` bytes (below 4096) after the start of a page.
    pub fn new(lens: &[usize], misalign: usize) -> Memory {
        let room: usize = lens.iter().map(|len| len.next_multiple_of(PAGE) + 2 * PAGE).sum();
        let bytes = vec![GUARD; room + 2 * PAGE];
        let mut at = bytes.as_ptr().align_offset(PAGE);
        let mut pieces = Vec::new();
        for &len in lens {
            pieces.push(at + misalign..at + misalign + len);
            at += len.next_multiple_of(PAGE) + 2 * PAGE;
        }
        Memory { bytes, pieces, iovs: Vec::new() }
    }

    /// Stores `data` in the segments, in order.
    pub fn fill(&mut self, data: &[u8]) {
        let mut rest = data;
        for piece in self.pieces.clone() {
            let (here, later) = rest.split_at(piece.len().min(rest.len()));
            self.bytes[piece][..here.len()].copy_from_slice(here);
            rest = later;
        }
    }

    /// Content of the segments.
    pub fn content(&self) -> Vec<u8> {
        self.pieces.iter().flat_map(|piece| &self.bytes[piece.clone()]).copied().collect()
    }

    /// Total length of the segments in bytes.
    pub fn len_bytes(&self) -> u64 {
        self.pieces.iter().map(|piece| piece.len() as u64).sum()
    }

    /// The list for a lane. The caller must not access `self` until the I/O completes.
    pub fn bufs(&mut self) -> BufList {
        let base = self.bytes.as_mut_ptr();
        let segment = |piece: &Range<usize>| iovec {
            iov_base: base.wrapping_add(piece.start).cast(),
            iov_len: piece.len(),
        };
        self.iovs = self.pieces.iter().map(segment).collect();
        // SAFETY: `self` owns the list and its memory; the rig keeps it until the I/O completes.
        unsafe { BufList::new(self.iovs.as_mut_ptr(), self.iovs.len()) }
    }

    /// Panics if a byte outside the segments has changed.
    pub fn check_guards(&self) {
        let mut at = 0;
        for piece in &self.pieces {
            let untouched = self.bytes[at..piece.start].iter().all(|byte| *byte == GUARD);
            assert!(untouched, "bytes before segment {piece:?} were changed");
            at = piece.end;
        }
        let untouched = self.bytes[at..].iter().all(|byte| *byte == GUARD);
        assert!(untouched, "bytes behind the last segment were changed");
    }
}
