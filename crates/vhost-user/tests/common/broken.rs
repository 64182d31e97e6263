// SPDX-License-Identifier: Apache-2.0
//! A disk that fails while the test wants it to.

use backend::{Disk, Engine, Info, Io, IoError, Lane, Op, ResizeError, Slot, Step, Token};
use std::os::fd::RawFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicI32, AtomicU64, Ordering};
use std::time::Duration;

/// Time of an I/O that fails by an event.
const DELAY: Duration = Duration::from_millis(20);

/// The error of each I/O.
#[derive(Clone, Default)]
pub struct Trouble(Arc<State>);

#[derive(Default)]
struct State {
    errno: AtomicI32,
    /// I/Os that have started, and the number of them before which none fails by an event.
    started: AtomicU64,
    gathered: AtomicU64,
}

impl Trouble {
    /// Fails all I/O with `errno`; 0: none.
    pub fn set(&self, errno: i32) {
        self.0.errno.store(errno, Ordering::Release);
    }

    /// Lets no I/O fail by an event before `count` more have started.
    pub fn gather(&self, count: u64) {
        let started = self.0.started.load(Ordering::Acquire);
        self.0.gathered.store(started + count, Ordering::Release);
    }

    fn get(&self) -> Option<i32> {
        Some(self.0.errno.load(Ordering::Acquire)).filter(|errno| *errno != 0)
    }

    fn start(&self) {
        self.0.started.fetch_add(1, Ordering::AcqRel);
    }

    fn gathers(&self) -> bool {
        self.0.started.load(Ordering::Acquire) < self.0.gathered.load(Ordering::Acquire)
    }
}

/// A disk in front of `inner`.
pub struct Broken {
    inner: Arc<dyn Disk>,
    trouble: Trouble,
    by_event: bool,
}

impl Broken {
    /// A disk that works. It fails I/O after a while (`by_event`) or at once.
    pub fn new(inner: Arc<dyn Disk>, by_event: bool) -> (Self, Trouble) {
        let trouble = Trouble::default();
        (Broken { inner, trouble: trouble.clone(), by_event }, trouble)
    }
}

impl Disk for Broken {
    fn info(&self) -> Info {
        self.inner.info()
    }

    fn resize(&self, bytes: Option<u64>) -> Result<(), ResizeError> {
        self.inner.resize(bytes)
    }

    fn sync(&self) -> std::io::Result<()> {
        self.inner.sync()
    }

    fn open_lane(&self) -> std::io::Result<Box<dyn Lane>> {
        Ok(Box::new(BrokenLane {
            inner: self.inner.open_lane()?,
            layer: self.inner.layers(),
            trouble: self.trouble.clone(),
            by_event: self.by_event,
        }))
    }

    fn layers(&self) -> u8 {
        self.inner.layers() + 1
    }
}

struct BrokenLane {
    inner: Box<dyn Lane>,
    layer: u8,
    trouble: Trouble,
    by_event: bool,
}

impl Lane for BrokenLane {
    fn files(&self) -> Vec<RawFd> {
        self.inner.files()
    }

    fn start(&mut self, io: &mut Io, slot: Slot, engine: &mut dyn Engine) -> Step {
        self.trouble.start();
        if self.by_event {
            engine.push(Op::Timer { delay: DELAY }, Token { slot, layer: self.layer });
            return Step::Pending;
        }
        match self.trouble.get() {
            Some(errno) => Step::Done(Err(IoError::Errno(errno))),
            None => self.inner.start(io, slot, engine),
        }
    }

    fn event(&mut self, io: &mut Io, token: Token, result: i32, engine: &mut dyn Engine) -> Step {
        if token.layer != self.layer {
            return self.inner.event(io, token, result, engine);
        }
        match self.trouble.get() {
            Some(_) if self.trouble.gathers() => {
                engine.push(Op::Timer { delay: DELAY }, token);
                Step::Pending
            }
            Some(errno) => Step::Done(Err(IoError::Errno(errno))),
            None => self.inner.start(io, token.slot, engine),
        }
    }
}
