// SPDX-License-Identifier: Apache-2.0
//! Sets of I/O kinds.

use crate::IoKind;

/// The kinds of I/O that a wrapper acts on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OpSet(u8);

const NAMES: [&str; 6] = ["read", "write", "flush", "discard", "write-zeroes", "secure-erase"];

impl OpSet {
    /// Every kind.
    pub const ALL: OpSet = OpSet(0b11_1111);

    /// Parses a text such as `read+write`, or `all`.
    pub fn parse(text: &str) -> Option<OpSet> {
        if text == "all" {
            return Some(OpSet::ALL);
        }
        let bit = |name| NAMES.iter().position(|known| *known == name).map(|at| 1 << at);
        text.split('+').try_fold(OpSet(0), |set, name| Some(OpSet(set.0 | bit(name)?)))
    }

    /// Returns whether the set contains this kind.
    pub fn has(self, kind: IoKind) -> bool {
        self.0 & 1 << place(kind) != 0
    }
}

fn place(kind: IoKind) -> usize {
    match kind {
        IoKind::Read => 0,
        IoKind::Write => 1,
        IoKind::Flush => 2,
        IoKind::Discard => 3,
        IoKind::WriteZeroes { .. } => 4,
        IoKind::SecureErase => 5,
    }
}

/// The kind's name in specifications and logs.
pub(super) fn name(kind: IoKind) -> &'static str {
    NAMES[place(kind)]
}
