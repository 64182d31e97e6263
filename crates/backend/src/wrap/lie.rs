// SPDX-License-Identifier: Apache-2.0
//! A disk that reports success without doing the I/O: the negative control of durability tests.

use super::{OpSet, wrapped_info};
use crate::{Disk, Engine, Info, Io, Lane, ResizeError, Slot, Step, Token};
use std::os::fd::RawFd;
use std::sync::Arc;

/// Completes selected I/Os successfully without doing them.
pub(super) struct Lie {
    inner: Arc<dyn Disk>,
    ops: OpSet,
}

impl Lie {
    pub(super) fn new(inner: Arc<dyn Disk>, ops: OpSet) -> Self {
        Lie { inner, ops }
    }
}

impl Disk for Lie {
    fn info(&self) -> Info {
        wrapped_info(&*self.inner, "lying")
    }

    fn resize(&self, bytes: Option<u64>) -> Result<(), ResizeError> {
        self.inner.resize(bytes)
    }

    fn sync(&self) -> std::io::Result<()> {
        self.inner.sync()
    }

    fn open_lane(&self) -> std::io::Result<Box<dyn Lane>> {
        Ok(Box::new(LieLane { inner: self.inner.open_lane()?, ops: self.ops }))
    }

    fn layers(&self) -> u8 {
        self.inner.layers() + 1
    }
}

struct LieLane {
    inner: Box<dyn Lane>,
    ops: OpSet,
}

impl Lane for LieLane {
    fn files(&self) -> Vec<RawFd> {
        self.inner.files()
    }

    fn start(&mut self, io: &mut Io, slot: Slot, engine: &mut dyn Engine) -> Step {
        match self.ops.has(io.kind) {
            true => Step::Done(Ok(())),
            false => self.inner.start(io, slot, engine),
        }
    }

    fn event(&mut self, io: &mut Io, token: Token, result: i32, engine: &mut dyn Engine) -> Step {
        self.inner.event(io, token, result, engine)
    }
}
