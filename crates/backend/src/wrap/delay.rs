// SPDX-License-Identifier: Apache-2.0
//! A disk that delays completions.

use super::OpSet;
use super::slots::BySlot;
use super::wrapped_info;
use crate::{Disk, Engine, Info, Io, IoError, Lane, Op, ResizeError, Slot, Step, Token};
use std::os::fd::RawFd;
use std::sync::Arc;
use std::time::Duration;

/// Delays the outcome of selected I/Os by a fixed time.
pub struct Delay {
    inner: Arc<dyn Disk>,
    delay: Duration,
    ops: OpSet,
}

impl Delay {
    /// Adds `delay` to each I/O of the kinds `ops`.
    pub fn new(inner: Arc<dyn Disk>, delay: Duration, ops: OpSet) -> Self {
        Delay { inner, delay, ops }
    }
}

impl Disk for Delay {
    fn info(&self) -> Info {
        wrapped_info(&*self.inner, "delayed")
    }

    fn resize(&self, bytes: Option<u64>) -> Result<(), ResizeError> {
        self.inner.resize(bytes)
    }

    fn sync(&self) -> std::io::Result<()> {
        self.inner.sync()
    }

    fn open_lane(&self) -> std::io::Result<Box<dyn Lane>> {
        Ok(Box::new(DelayLane {
            inner: self.inner.open_lane()?,
            layer: self.inner.layers(),
            delay: self.delay,
            ops: self.ops,
            outcomes: BySlot::new(),
        }))
    }

    fn layers(&self) -> u8 {
        self.inner.layers() + 1
    }
}

struct DelayLane {
    inner: Box<dyn Lane>,
    layer: u8,
    delay: Duration,
    ops: OpSet,
    /// Outcomes of the inner lane, until their time is over.
    outcomes: BySlot<Result<(), IoError>>,
}

impl DelayLane {
    fn delay(&mut self, step: Step, io: &Io, slot: Slot, engine: &mut dyn Engine) -> Step {
        match step {
            Step::Done(outcome) if self.ops.has(io.kind) => {
                self.outcomes.put(slot, outcome);
                engine.push(Op::Timer { delay: self.delay }, Token { slot, layer: self.layer });
                Step::Pending
            }
            step => step,
        }
    }
}

impl Lane for DelayLane {
    fn files(&self) -> Vec<RawFd> {
        self.inner.files()
    }

    fn start(&mut self, io: &mut Io, slot: Slot, engine: &mut dyn Engine) -> Step {
        let step = self.inner.start(io, slot, engine);
        self.delay(step, io, slot, engine)
    }

    fn event(&mut self, io: &mut Io, token: Token, result: i32, engine: &mut dyn Engine) -> Step {
        if token.layer == self.layer {
            let outcome = self.outcomes.take(token.slot);
            return Step::Done(outcome.expect("only a held outcome has a timer"));
        }
        let step = self.inner.event(io, token, result, engine);
        self.delay(step, io, token.slot, engine)
    }
}
