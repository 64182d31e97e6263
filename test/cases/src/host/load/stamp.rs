// SPDX-License-Identifier: Apache-2.0
//! The content that a load writes: every sector contains its own number, its generation and a
//! checksum of both.

use kit::rng::mix;

/// Bytes of a sector.
pub(crate) const SECTOR: usize = 512;

/// Fills one sector. Generation 0 means a sector of zeroes.
pub(crate) fn fill(bytes: &mut [u8], sector: u64, generation: u32) {
    if generation == 0 {
        return bytes.fill(0);
    }
    let key = mix(sector << 32 ^ u64::from(generation));
    for (n, word) in (0_u64..).zip(bytes.chunks_exact_mut(8)) {
        word.copy_from_slice(&key.rotate_left(n as u32).wrapping_add(n).to_le_bytes());
    }
    bytes[..8].copy_from_slice(&sector.to_le_bytes());
    bytes[8..12].copy_from_slice(&generation.to_le_bytes());
    bytes[SECTOR - 8..].copy_from_slice(&key.to_le_bytes());
}

/// The generation of a whole sector of number `sector`; `None` if it is torn, or from another
/// place.
pub(crate) fn generation_of(bytes: &[u8], sector: u64) -> Option<u32> {
    let generation = u32::from_le_bytes(bytes[8..12].try_into().expect("4 bytes"));
    let mut expected = [0; SECTOR];
    fill(&mut expected, sector, generation);
    (bytes == expected).then_some(generation)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sector_tells_its_generation_and_no_other_sector_passes_for_it() {
        let mut bytes = [0; SECTOR];
        fill(&mut bytes, 77, 5);
        assert_eq!(generation_of(&bytes, 77), Some(5));
        assert_eq!(generation_of(&bytes, 78), None);
        assert_eq!(generation_of(&[0; SECTOR], 78), Some(0));
    }

    #[test]
    fn any_changed_byte_is_noticed() {
        let mut bytes = [0; SECTOR];
        fill(&mut bytes, 3, 9);
        for at in 0..SECTOR {
            bytes[at] ^= 0x10;
            assert_eq!(generation_of(&bytes, 3), None, "byte {at}");
            bytes[at] ^= 0x10;
        }
    }
}
