// SPDX-License-Identifier: Apache-2.0
//! Random numbers that a seed repeats.

/// A xorshift generator.
#[derive(Clone, Debug)]
pub(crate) struct Rng(u64);

impl Rng {
    /// A generator that a seed determines.
    pub(crate) fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    /// Any number.
    pub(crate) fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    /// A number below `bound`, which is above 0.
    pub(crate) fn below(&mut self, bound: u64) -> u64 {
        (self.next() >> 11) % bound
    }

    /// True once in `n` times.
    pub(crate) fn one_in(&mut self, n: u64) -> bool {
        self.below(n) == 0
    }

    /// Fills memory.
    pub(crate) fn fill(&mut self, bytes: &mut [u8]) {
        for piece in bytes.chunks_mut(8) {
            piece.copy_from_slice(&self.next().to_le_bytes()[..piece.len()]);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_seed_repeats_its_numbers_and_another_gives_others() {
        let take = |seed| {
            let mut rng = Rng::new(seed);
            [rng.next(), rng.below(1000), rng.next()]
        };
        assert_eq!(take(3), take(3));
        assert_ne!(take(3), take(4));
    }
}
