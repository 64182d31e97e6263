// SPDX-License-Identifier: Apache-2.0
//! Entries of L1 and L2 tables (the qcow2 specification, "Cluster mapping").

/// Place in an entry of an L1, an L2 or a refcount table.
pub(crate) const PLACE: u64 = 0x00ff_ffff_ffff_fe00;
/// Flag: the cluster has exactly one reference.
pub(crate) const EXCLUSIVE: u64 = 1 << 63;
/// Flag of an L2 entry: the cluster is compressed.
pub(crate) const COMPRESSED: u64 = 1 << 62;
/// Flag of an L2 entry without [`COMPRESSED`]: the cluster reads as zeroes.
pub(crate) const ZERO: u64 = 1;
/// Bits of an L2 entry without [`COMPRESSED`] that have to be zero.
pub(crate) const RESERVED: u64 = 0x3f00_0000_0000_01fe;
/// Unit of the length of compressed data in bytes.
const COMPRESSED_UNIT: u64 = 512;

/// An entry of an L2 table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Entry {
    /// No place in the file.
    None,
    /// A cluster at this place.
    Cluster(u64),
    /// Compressed data: place and length in bytes.
    Compressed(u64, u64),
}

impl Entry {
    pub(crate) fn of(entry: u64, cluster_bits: u32) -> Self {
        if entry & COMPRESSED != 0 {
            let bits = 62 - (cluster_bits - 8);
            let at = entry & ((1 << bits) - 1);
            let units = ((entry & !(EXCLUSIVE | COMPRESSED)) >> bits) + 1;
            return Entry::Compressed(at, units * COMPRESSED_UNIT - at % COMPRESSED_UNIT);
        }
        match entry & PLACE {
            0 => Entry::None,
            at => Entry::Cluster(at),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn compressed_data_has_its_place_within_a_sector_and_its_length_from_there() {
        // Clusters of 64 KiB have 54 bits for the place, and 8 for the length.
        let entry = COMPRESSED | 2 << 54 | ((7 << 16) + 500);
        assert_eq!(Entry::of(entry, 16), Entry::Compressed((7 << 16) + 500, 3 * 512 - 500));
        assert_eq!(Entry::of(EXCLUSIVE | 7 << 16 | 1, 16), Entry::Cluster(7 << 16));
        assert_eq!(Entry::of(EXCLUSIVE | 1, 16), Entry::None);
    }
}
