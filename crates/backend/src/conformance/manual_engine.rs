// SPDX-License-Identifier: Apache-2.0
//! An engine that only remembers: the test plays the kernel and invents the results.

use crate::{Engine, Op, Token};

/// See the module's head.
#[derive(Debug, Default)]
pub struct ManualEngine {
    /// What was pushed and not yet taken, oldest first.
    pub pushed: Vec<(Op, Token)>,
}

impl ManualEngine {
    /// An engine with nothing pushed.
    pub fn new() -> Self {
        Self::default()
    }

    /// Takes the only op that was pushed; panics if there is another number of them.
    pub fn take_one(&mut self) -> (Op, Token) {
        assert_eq!(self.pushed.len(), 1, "one op was to be pushed: {:?}", self.pushed);
        self.pushed.remove(0)
    }
}

impl Engine for ManualEngine {
    fn push(&mut self, op: Op, token: Token) {
        self.pushed.push((op, token));
    }
}
