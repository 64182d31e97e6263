// SPDX-License-Identifier: Apache-2.0
//! A disk that loses power, and the writes in its volatile cache with it.
//!
//! A device writes a physical block as a whole. So a write that was in the cache is on the disk
//! afterwards whole, not at all, or with its first or its last physical blocks.

use std::ops::Range;

use crate::rng::Rng;

/// Physical block that software must expect at least, in bytes.
pub const SECTOR: u32 = 512;

/// Physical block in bytes that ext4 needs.
///
/// ext4 writes its superblock of 1024 bytes in place, and the kernel checks the checksum of the
/// superblock before it replays the journal. So it refuses a file system whose superblock is torn.
/// XFS needs blocks of [`SECTOR`] only.
pub const EXT4_BLOCK: u32 = 4096;

/// Range of a write that survives, in bytes from its start. The write begins at byte `offset` of
/// the disk; `physical_block_bytes` is a power of two.
pub fn survivors(
    rng: &mut Rng,
    offset: u64,
    bytes: usize,
    physical_block_bytes: u32,
) -> Range<usize> {
    let block = physical_block_bytes as usize;
    let lead = (offset % u64::from(physical_block_bytes)) as usize;
    let blocks = (lead + bytes).div_ceil(block) as u64;
    let part = (rng.below(blocks + 1) as usize * block).clamp(lead, lead + bytes) - lead;
    match rng.below(4) {
        0 => 0..0,
        1 => 0..part,
        2 => part..bytes,
        _ => 0..bytes,
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn a_write_is_torn_between_physical_blocks_only() {
        let mut rng = Rng::new(1);
        // From the middle of the first block to the middle of the third.
        let ranges: BTreeSet<_> = (0..400)
            .map(|_| survivors(&mut rng, 2048, 8192, EXT4_BLOCK))
            .filter(|range| !range.is_empty())
            .map(|range| (range.start, range.end))
            .collect();
        assert_eq!(
            Vec::from_iter(ranges),
            [(0, 2048), (0, 6144), (0, 8192), (2048, 8192), (6144, 8192)]
        );
    }

    #[test]
    fn a_write_within_a_physical_block_survives_whole_or_not_at_all() {
        let mut rng = Rng::new(1);
        for _ in 0..400 {
            let range = survivors(&mut rng, 1024, 1024, EXT4_BLOCK);
            assert!(range.is_empty() || range == (0..1024), "{range:?}");
        }
    }
}
