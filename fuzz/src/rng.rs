// SPDX-License-Identifier: Apache-2.0
//! A small generator of pseudo-random numbers (splitmix64): the same seed, the same run.

/// The generator.
#[derive(Clone, Debug)]
pub struct Rng(u64);

impl Rng {
    /// The generator of one iteration of a run.
    pub fn new(seed: u64, iteration: u64) -> Self {
        let mut rng = Rng(seed ^ iteration.wrapping_mul(0x9e37_79b9_7f4a_7c15));
        rng.next();
        rng
    }

    /// 64 bits.
    #[expect(clippy::should_implement_trait, reason = "it never ends, so it is no iterator")]
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut x = self.0;
        x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        x ^ (x >> 31)
    }

    /// A number below `bound`, which is at least 1.
    pub fn below(&mut self, bound: u64) -> u64 {
        self.next() % bound
    }

    /// True once in `n` times.
    pub fn one_in(&mut self, n: u64) -> bool {
        self.below(n) == 0
    }

    /// One of `items`.
    pub fn pick<T: Copy>(&mut self, items: &[T]) -> T {
        items[self.below(items.len() as u64) as usize]
    }
}
