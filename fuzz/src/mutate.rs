// SPDX-License-Identifier: Apache-2.0
//! Breaks a valid input in a few places.

use crate::Rng;

/// Values at the limits of arithmetic.
const EDGES: [u64; 16] = [
    0,
    1,
    2,
    3,
    4,
    15,
    16,
    17,
    0x7fff,
    0x8000,
    0xffff,
    0x7fff_ffff,
    0xffff_ffff,
    0x7fff_ffff_ffff_ffff,
    0xffff_ffff_ffff_f000,
    u64::MAX,
];

/// Changes `data` in 0 to 8 places; 0 once in 8 times, so that valid inputs are run too.
pub fn mutate(rng: &mut Rng, data: &mut Vec<u8>) {
    let changes = rng.below(8).min(rng.below(9));
    for _ in 0..changes {
        if data.is_empty() {
            return;
        }
        change(rng, data);
    }
}

fn change(rng: &mut Rng, data: &mut Vec<u8>) {
    let len = data.len() as u64;
    let at = rng.below(len) as usize;
    match rng.below(10) {
        0 | 1 => data[at] ^= 1 << rng.below(8),
        2 => data[at] = rng.next() as u8,
        3..=6 => {
            let width = rng.pick(&[1, 2, 4, 8]);
            let value = rng.pick(&EDGES).wrapping_add(rng.below(3)).wrapping_sub(1);
            let at = at / width * width;
            let room = width.min(data.len() - at);
            data[at..at + room].copy_from_slice(&value.to_le_bytes()[..room]);
        }
        7 => {
            let from = rng.below(len) as usize;
            let count = (rng.below(32) as usize).min(data.len() - from.max(at));
            data.copy_within(from..from + count, at);
        }
        8 => data.truncate(at),
        _ => {
            let more = rng.below(16);
            data.extend((0..more).map(|_| rng.next() as u8));
        }
    }
}
