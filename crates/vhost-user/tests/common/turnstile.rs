// SPDX-License-Identifier: Apache-2.0
//! A disk with one resource for each lane: all I/Os but one are stalled.

use backend::{Disk, Engine, Info, Io, Lane, Slot, Step, Token};
use std::os::fd::RawFd;
use std::sync::Arc;

/// A disk that carries out one I/O of a lane at a time.
pub struct Turnstile(pub Arc<dyn Disk>);

impl Disk for Turnstile {
    fn info(&self) -> Info {
        self.0.info()
    }

    fn sync(&self) -> std::io::Result<()> {
        self.0.sync()
    }

    fn open_lane(&self) -> std::io::Result<Box<dyn Lane>> {
        Ok(Box::new(TurnstileLane { inner: self.0.open_lane()?, busy: false }))
    }

    fn layers(&self) -> u8 {
        self.0.layers()
    }
}

struct TurnstileLane {
    inner: Box<dyn Lane>,
    busy: bool,
}

impl TurnstileLane {
    fn note(&mut self, step: Step) -> Step {
        self.busy = step == Step::Pending;
        step
    }
}

impl Lane for TurnstileLane {
    fn files(&self) -> Vec<RawFd> {
        self.inner.files()
    }

    fn start(&mut self, io: &mut Io, slot: Slot, engine: &mut dyn Engine) -> Step {
        if self.busy {
            return Step::Busy;
        }
        let step = self.inner.start(io, slot, engine);
        self.note(step)
    }

    fn event(&mut self, io: &mut Io, token: Token, result: i32, engine: &mut dyn Engine) -> Step {
        let step = self.inner.event(io, token, result, engine);
        self.note(step)
    }
}
