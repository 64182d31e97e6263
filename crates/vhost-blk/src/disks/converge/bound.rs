// SPDX-License-Identifier: Apache-2.0
//! The bound of the changes of the guest while a copy comes to its end.

/// Begins above the noted parts, and sinks by half of what is copied until few are left. So the guest
/// writes at half the pace of the copy at least, and a copy of twice the noted parts is enough.
#[derive(Debug)]
pub(super) struct Bound {
    /// Bytes that the drained disk can copy.
    few: u64,
    bytes: u64,
}

impl Bound {
    /// A bound for so many noted bytes.
    pub(super) fn new(noted: u64, few: u64) -> Self {
        Bound { few, bytes: noted + few }
    }

    /// Bytes that may be noted or in flight.
    pub(super) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// It cannot sink further.
    pub(super) fn is_least(&self) -> bool {
        self.bytes == self.few
    }

    /// Takes the copy of a piece into account.
    pub(super) fn copied(&mut self, bytes: u64) {
        self.bytes = self.bytes.saturating_sub(bytes / 2).max(self.few);
    }

    /// Takes the end of a pass into account, after which so many bytes are noted.
    pub(super) fn passed(&mut self, noted: u64) {
        self.bytes = self.bytes.min(noted + self.few).max(self.few);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FEW: u64 = 4 << 20;
    const PIECE: u64 = 1 << 20;

    /// Lets the guest write as much as the bound admits after each piece. Returns the copied bytes.
    fn converge(noted: u64, guest_writes: bool) -> u64 {
        let (mut bound, mut left, mut copied) = (Bound::new(noted, FEW), noted, 0);
        while !bound.is_least() {
            let mut pass = left;
            while pass > 0 {
                let piece = pass.min(PIECE);
                (left, pass, copied) = (left - piece, pass - piece, copied + piece);
                bound.copied(piece);
                let room = bound.bytes() - left;
                assert!(room >= piece / 2, "writes wait for the copy of {left} bytes");
                left += if guest_writes { room } else { 0 };
            }
            bound.passed(left);
        }
        assert!(left <= FEW);
        copied
    }

    #[test]
    fn writes_go_on_during_the_copy_of_many_parts_which_comes_to_an_end() {
        let noted = 10 << 30;
        assert_eq!(converge(noted, false), noted);
        let copied = converge(noted, true);
        assert!(copied <= 2 * noted + FEW, "{copied}");
        assert_eq!(converge(0, true), 0);
    }
}
