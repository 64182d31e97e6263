// SPDX-License-Identifier: Apache-2.0
//! A digest of the content of a disk, taken in any order. It finds accidents, and no forgery.

use std::hash::{DefaultHasher, Hasher};

const SECTOR: usize = 512;

/// The sum of the hashes of all sectors with their positions. Zeroes count nothing, so that holes need
/// not be read.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Digest(u64);

impl Digest {
    /// Adds data at a position of the disk; both are whole sectors. No sector is added twice.
    pub(super) fn add(&mut self, at: u64, data: &[u8]) {
        for (sector, data) in (at / SECTOR as u64..).zip(data.chunks(SECTOR)) {
            if *data != [0; SECTOR][..data.len()] {
                let mut hasher = DefaultHasher::new();
                hasher.write_u64(sector);
                hasher.write(data);
                self.0 = self.0.wrapping_add(hasher.finish());
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn digest(parts: &[(u64, &[u8])]) -> Digest {
        let mut digest = Digest::default();
        parts.iter().for_each(|(at, data)| digest.add(*at, data));
        digest
    }

    #[test]
    fn order_and_zeroes_do_not_count_and_content_and_place_do() {
        let (a, b) = ([1; 1024], [2; 512]);
        let both = digest(&[(0, &a), (4096, &b)]);
        assert_eq!(
            digest(&[(4096, &b), (512, &a[512..]), (8192, &[0; 2048]), (0, &a[512..])]),
            both
        );
        let mut other = a;
        other[1023] ^= 1;
        assert_ne!(digest(&[(0, &other), (4096, &b)]), both);
        assert_ne!(digest(&[(0, &a), (4608, &b)]), both);
        assert_ne!(digest(&[(0, &a)]), both);
    }
}
