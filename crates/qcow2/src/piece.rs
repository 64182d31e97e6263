// SPDX-License-Identifier: Apache-2.0
//! A part of the memory of an I/O, for a request that spans several extents.
// UNSAFETY: `BufList::new` cannot check the lifetime of its list, and raw pointers are not `Send`.
#![expect(unsafe_code)]

use backend::BufList;
use libc::iovec;

/// The segments of a part of an I/O. It stays in its slot until the part is done.
pub(crate) struct Piece {
    _segments: Vec<iovec>,
}

// SAFETY: the segments are those of a `BufList`, which may move to another thread, too.
unsafe impl Send for Piece {}

impl Piece {
    /// The bytes from `skip` on, `len` of them, of `bufs`. The caller keeps the piece until the I/O
    /// with the returned list has ended.
    pub(crate) fn of(bufs: &BufList, mut skip: usize, mut len: usize) -> (Self, BufList) {
        let mut segments = Vec::new();
        for segment in bufs.iovs() {
            if skip >= segment.iov_len {
                skip -= segment.iov_len;
                continue;
            }
            let here = (segment.iov_len - skip).min(len);
            let iov_base = segment.iov_base.cast::<u8>().wrapping_add(skip).cast();
            segments.push(iovec { iov_base, iov_len: here });
            (skip, len) = (0, len - here);
            if len == 0 {
                break;
            }
        }
        // SAFETY: the segments are parts of those of `bufs`, which stay in place for the whole I/O;
        // the heap memory of the list stays in place until the piece is dropped, after the I/O.
        let list = unsafe { BufList::new(segments.as_mut_ptr(), segments.len()) };
        (Piece { _segments: segments }, list)
    }
}
