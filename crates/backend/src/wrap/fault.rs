// SPDX-License-Identifier: Apache-2.0
//! A disk that fails selected I/Os.

use super::OpSet;
use super::wrapped_info;
use crate::{Disk, Engine, Info, Io, IoError, Lane, ResizeError, Slot, Step, Token};
use std::ops::RangeInclusive;
use std::os::fd::RawFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Selects the I/Os that fail, and their error.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FaultRule {
    /// Kinds that fail.
    pub ops: OpSet,
    /// Sectors that a failing I/O touches; a flush touches none. `None`: every sector.
    pub sectors: Option<RangeInclusive<u64>>,
    /// Interval of failures among the I/Os that match `ops` and `sectors`; 1: all of them fail.
    pub every: u64,
    /// Error of the failing I/Os.
    pub error: IoError,
}

/// Fails the I/Os that match its rule; the inner disk does not see them.
pub struct Fault {
    inner: Arc<dyn Disk>,
    shared: Arc<Shared>,
}

struct Shared {
    rule: FaultRule,
    /// Number of I/Os of all lanes that matched.
    matched: AtomicU64,
}

impl Fault {
    /// A disk around `inner` that fails I/Os by `rule`.
    pub fn new(inner: Arc<dyn Disk>, rule: FaultRule) -> Self {
        Fault { inner, shared: Arc::new(Shared { rule, matched: AtomicU64::new(0) }) }
    }
}

impl Disk for Fault {
    fn info(&self) -> Info {
        wrapped_info(&*self.inner, "with faults")
    }

    fn resize(&self, bytes: Option<u64>) -> Result<(), ResizeError> {
        self.inner.resize(bytes)
    }

    fn sync(&self) -> std::io::Result<()> {
        self.inner.sync()
    }

    fn open_lane(&self) -> std::io::Result<Box<dyn Lane>> {
        let (inner, shared) = (self.inner.open_lane()?, Arc::clone(&self.shared));
        Ok(Box::new(FaultLane { inner, shared }))
    }

    fn layers(&self) -> u8 {
        self.inner.layers() + 1
    }
}

impl FaultRule {
    fn matches(&self, io: &Io) -> bool {
        let touches = |sectors: &RangeInclusive<u64>| {
            let first = io.offset_bytes / 512;
            let end = io.offset_bytes.saturating_add(io.len_bytes).div_ceil(512);
            first <= *sectors.end() && end > *sectors.start() && io.len_bytes > 0
        };
        self.ops.has(io.kind) && self.sectors.as_ref().is_none_or(touches)
    }
}

struct FaultLane {
    inner: Box<dyn Lane>,
    shared: Arc<Shared>,
}

impl Lane for FaultLane {
    fn files(&self) -> Vec<RawFd> {
        self.inner.files()
    }

    fn start(&mut self, io: &mut Io, slot: Slot, engine: &mut dyn Engine) -> Step {
        let Shared { rule, matched } = &*self.shared;
        if !rule.matches(io) {
            return self.inner.start(io, slot, engine);
        }
        let number = matched.fetch_add(1, Ordering::Relaxed) + 1;
        if number.is_multiple_of(rule.every) {
            return Step::Done(Err(rule.error));
        }
        self.inner.start(io, slot, engine)
    }

    fn event(&mut self, io: &mut Io, token: Token, result: i32, engine: &mut dyn Engine) -> Step {
        self.inner.event(io, token, result, engine)
    }
}
