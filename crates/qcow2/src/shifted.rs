// SPDX-License-Identifier: Apache-2.0
//! The engine as the lane of one file of the chain sees it: with files and layers of its own.

use backend::{Engine, FileIndex, Op, Remote, Token};

/// Shifts the files and the layer of a file's lane to its place in the chain.
pub(crate) struct Shifted<'a> {
    pub(crate) engine: &'a mut dyn Engine,
    pub(crate) first_file: u32,
    pub(crate) layer: u8,
}

impl Engine for Shifted<'_> {
    fn push(&mut self, op: Op, token: Token) {
        let place = |file: FileIndex| FileIndex(file.0 + self.first_file);
        let op = match op {
            Op::Read { file, bufs, offset } => Op::Read { file: place(file), bufs, offset },
            Op::Write { file, bufs, offset, dsync } => {
                Op::Write { file: place(file), bufs, offset, dsync }
            }
            Op::Fdatasync { file } => Op::Fdatasync { file: place(file) },
            Op::Fallocate { file, mode, offset, len } => {
                Op::Fallocate { file: place(file), mode, offset, len }
            }
            Op::Discard { file, offset, len } => Op::Discard { file: place(file), offset, len },
            Op::Nop | Op::Timer { .. } | Op::EndTimer => op,
        };
        self.engine.push(op, Token { slot: token.slot, layer: self.layer });
    }

    fn remote(&mut self) -> Remote {
        assert_eq!(
            self.layer, 0,
            "only writers wait for others, and only the image itself is written"
        );
        self.engine.remote()
    }
}
