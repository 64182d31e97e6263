// SPDX-License-Identifier: Apache-2.0
//! Splits a transfer into operations that O_DIRECT accepts.
//!
//! The guest's logical block has 512 bytes, so a transfer may begin and end inside a larger block
//! of O_DIRECT. A read covers whole blocks. A write of a part of a block is a read-modify-write. A
//! write of a partial block at the end of the file uses the page cache, because a whole block would
//! extend the file.

use std::ops::Range;

/// Alignments that O_DIRECT needs, in bytes; powers of two.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct DirectAlign {
    /// Alignment of memory addresses.
    pub(super) memory: u32,
    /// Alignment of positions and lengths of writes; at least 512.
    pub(super) write: u32,
    /// Alignment of positions and lengths of reads; at least 512, at most `write`.
    pub(super) read: u32,
}

/// The next operation of a write. Lengths and positions are in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum WritePiece {
    /// Whole blocks of this total length.
    Whole(u64),
    /// A part of a block.
    Part {
        /// Start of the block in the file.
        block: u64,
        /// Length of the write in this block.
        len: u64,
    },
    /// A write of this length in the incomplete last block of the file.
    Tail(u64),
}

/// The next piece of a write of the bytes `left`. `tail` is the start of the file's last block, if
/// that is incomplete. The caller may shorten a `Whole` piece by any number of blocks.
pub(super) fn write_piece(left: Range<u64>, align: u32, tail: u64) -> WritePiece {
    let mask = u64::from(align) - 1;
    let end = left.end.min(tail);
    if left.start >= tail {
        WritePiece::Tail(left.end - left.start)
    } else if left.start & mask != 0 || end - left.start <= mask {
        let block = left.start & !mask;
        WritePiece::Part { block, len: end.min(block + mask + 1) - left.start }
    } else {
        WritePiece::Whole((end - left.start) & !mask)
    }
}

/// Extends `range` to whole blocks of `align` bytes.
pub(super) fn widened(range: &Range<u64>, align: u32) -> Range<u64> {
    let align = u64::from(align);
    let end = range.end.checked_next_multiple_of(align).unwrap_or(u64::MAX);
    range.start & !(align - 1)..end
}

#[cfg(test)]
mod tests {
    use super::*;

    const NO_TAIL: u64 = u64::MAX;

    #[test]
    fn whole_blocks_stay_together() {
        assert_eq!(write_piece(8192..20480, 4096, NO_TAIL), WritePiece::Whole(12288));
        assert_eq!(write_piece(8192..20480, 512, NO_TAIL), WritePiece::Whole(12288));
    }

    #[test]
    fn parts_of_blocks_are_told_apart() {
        let part = |block, len| WritePiece::Part { block, len };
        assert_eq!(write_piece(512..1024, 4096, NO_TAIL), part(0, 512));
        assert_eq!(write_piece(3584..12800, 4096, NO_TAIL), part(0, 512));
        assert_eq!(write_piece(4096..12800, 4096, NO_TAIL), WritePiece::Whole(8192));
        assert_eq!(write_piece(12288..12800, 4096, NO_TAIL), part(12288, 512));
    }

    #[test]
    fn what_the_file_has_only_a_part_of_is_its_tail() {
        assert_eq!(write_piece(4096..8704, 4096, 8192), WritePiece::Whole(4096));
        assert_eq!(write_piece(8192..8704, 4096, 8192), WritePiece::Tail(512));
        assert_eq!(write_piece(7680..8704, 4096, 8192), WritePiece::Part { block: 4096, len: 512 });
        assert_eq!(write_piece(512..1024, 4096, 0), WritePiece::Tail(512));
    }

    #[test]
    fn ranges_widen_to_blocks() {
        assert_eq!(widened(&(512..1024), 4096), 0..4096);
        assert_eq!(widened(&(4096..8192), 4096), 4096..8192);
    }
}
