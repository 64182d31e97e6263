// SPDX-License-Identifier: Apache-2.0
//! A disk whose completions wait until the test releases them.

use backend::{Disk, Engine, Info, Io, IoError, Lane, Op, Slot, Step, Token};
use std::collections::HashMap;
use std::os::fd::RawFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// Interval at which a waiting completion checks for a permit.
const LOOK: Duration = Duration::from_millis(1);

/// The permits of a [`Gate`]: one for each completion.
#[derive(Clone)]
pub struct Permits(Arc<AtomicU64>);

impl Permits {
    /// Releases `count` more completions.
    pub fn release(&self, count: u64) {
        self.0.fetch_add(count, Ordering::AcqRel);
    }

    /// Releases all completions from now on.
    pub fn open(&self) {
        self.0.store(u64::MAX / 2, Ordering::Release);
    }

    /// Releases none from now on.
    pub fn close(&self) {
        self.0.store(0, Ordering::Release);
    }

    fn take(&self) -> bool {
        let fewer = |left: u64| left.checked_sub(1);
        self.0.fetch_update(Ordering::AcqRel, Ordering::Acquire, fewer).is_ok()
    }
}

/// A disk that holds back completions until [`Permits`] release them.
pub struct Gate {
    inner: Arc<dyn Disk>,
    permits: Permits,
    /// It stands before the I/Os at this offset only.
    only_at: Option<u64>,
}

impl Gate {
    /// A closed gate before `inner`.
    pub fn new(inner: Arc<dyn Disk>) -> (Self, Permits) {
        let permits = Permits(Arc::default());
        (Gate { inner, permits: permits.clone(), only_at: None }, permits)
    }

    /// A closed gate before the I/Os of `inner` that begin at this sector.
    pub fn of_sector(inner: Arc<dyn Disk>, sector: u64) -> (Self, Permits) {
        let (gate, permits) = Gate::new(inner);
        (Gate { only_at: Some(sector * 512), ..gate }, permits)
    }
}

impl Disk for Gate {
    fn info(&self) -> Info {
        self.inner.info()
    }

    fn sync(&self) -> std::io::Result<()> {
        self.inner.sync()
    }

    fn open_lane(&self) -> std::io::Result<Box<dyn Lane>> {
        Ok(Box::new(GateLane {
            inner: self.inner.open_lane()?,
            layer: self.inner.layers(),
            permits: self.permits.clone(),
            only_at: self.only_at,
            held: HashMap::new(),
        }))
    }

    fn layers(&self) -> u8 {
        self.inner.layers() + 1
    }
}

struct GateLane {
    inner: Box<dyn Lane>,
    layer: u8,
    permits: Permits,
    only_at: Option<u64>,
    held: HashMap<u32, Result<(), IoError>>,
}

impl GateLane {
    fn hold(&mut self, step: Step, io: &Io, slot: Slot, engine: &mut dyn Engine) -> Step {
        let Step::Done(outcome) = step else { return step };
        if self.only_at.is_some_and(|offset| offset != io.offset_bytes) {
            return step;
        }
        self.held.insert(slot.0, outcome);
        engine.push(Op::Timer { delay: LOOK }, Token { slot, layer: self.layer });
        Step::Pending
    }
}

impl Lane for GateLane {
    fn files(&self) -> Vec<RawFd> {
        self.inner.files()
    }

    fn start(&mut self, io: &mut Io, slot: Slot, engine: &mut dyn Engine) -> Step {
        let step = self.inner.start(io, slot, engine);
        self.hold(step, io, slot, engine)
    }

    fn event(&mut self, io: &mut Io, token: Token, result: i32, engine: &mut dyn Engine) -> Step {
        if token.layer != self.layer {
            let step = self.inner.event(io, token, result, engine);
            return self.hold(step, io, token.slot, engine);
        }
        if !self.permits.take() {
            engine.push(Op::Timer { delay: LOOK }, token);
            return Step::Pending;
        }
        Step::Done(self.held.remove(&token.slot.0).expect("an outcome is held"))
    }
}
