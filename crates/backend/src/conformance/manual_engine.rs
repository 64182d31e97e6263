// SPDX-License-Identifier: Apache-2.0
//! An engine that only records operations: the test supplies the results.

use super::Delivered;
use crate::{Engine, Op, Remote, Token};

/// An engine that only records operations.
#[derive(Debug, Default)]
pub struct ManualEngine {
    /// Pushed operations that the test has not taken, oldest first.
    pub pushed: Vec<(Op, Token)>,
    /// Events of other threads.
    pub delivered: Delivered,
}

impl ManualEngine {
    /// An engine without operations.
    pub fn new() -> Self {
        Self::default()
    }

    /// Takes the only pushed operation; panics if there is not exactly one.
    pub fn take_one(&mut self) -> (Op, Token) {
        assert_eq!(self.pushed.len(), 1, "one op was to be pushed: {:?}", self.pushed);
        self.pushed.remove(0)
    }
}

impl Engine for ManualEngine {
    fn push(&mut self, op: Op, token: Token) {
        self.pushed.push((op, token));
    }

    fn remote(&mut self) -> Remote {
        self.delivered.remote()
    }
}
