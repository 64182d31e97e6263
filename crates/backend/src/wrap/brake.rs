// SPDX-License-Identifier: Apache-2.0
//! Slows the writes of a disk to the pace of a copy that follows it.
//!
//! | State | Begins | Writes of the guest |
//! |---|---|---|
//! | off | at the start, and with [`Brake::release`] | start at once, and are not counted |
//! | on | [`Brake::hold`] | start while the parts that are noted, and those of the writes in flight, are at most so many bytes; others wait in their order |
//!
//! So the changes that are not copied stay few, however fast the guest writes. Reads do not wait. The
//! writes in flight at [`Brake::hold`] are not counted: they complete soon, and are noted then.
//!
//! With many noted parts the bound begins above them, and sinks with the copy by less than is copied: no write
//! waits for the copy of all of them.

use super::{BySlot, Written, wrapped_info};
use crate::{Disk, Engine, Info, Io, Lane, Remote, ResizeError, Slot, Step, Token};
use std::collections::VecDeque;
use std::io;
use std::os::fd::{BorrowedFd, RawFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// The brake of a disk whose changes are noted. Its lanes and the copier share it.
#[derive(Debug)]
pub struct Brake {
    written: Arc<Written>,
    /// A look without the lock: the state itself is below it.
    is_on: AtomicBool,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    /// Most bytes that are noted or in flight; `None`: the brake is off.
    max_bytes: Option<u64>,
    /// Bytes of the parts of counted writes in flight.
    in_flight: u64,
    waiting: VecDeque<Waiting>,
}

/// A write that waits.
#[derive(Debug)]
struct Waiting {
    bytes: u64,
    remote: Remote,
    token: Token,
}

impl State {
    /// Counts a write of so many bytes if it may start. One that is larger than the bound starts alone.
    fn admits(&mut self, noted: u64, bytes: u64) -> bool {
        let present = noted + self.in_flight;
        let is_admitted = self.max_bytes.is_none_or(|max| present + bytes <= max || present == 0);
        if is_admitted {
            self.in_flight += bytes;
        }
        is_admitted
    }
}

impl Brake {
    /// A brake that is off, for a disk whose changes `written` notes.
    pub fn new(written: Arc<Written>) -> Self {
        Brake { written, is_on: AtomicBool::new(false), state: Mutex::default() }
    }

    /// The notes.
    pub fn written(&self) -> &Arc<Written> {
        &self.written
    }

    /// Puts the brake on: so many bytes are noted or in flight at most.
    pub fn hold(&self, max_bytes: u64) {
        self.lock().max_bytes = Some(max_bytes);
        self.is_on.store(true, Ordering::Release);
    }

    /// Changes the bound. `false`: the brake was released, and stays off.
    pub fn lower(&self, max_bytes: u64) -> bool {
        let mut state = self.lock();
        let is_on = state.max_bytes.is_some();
        if is_on {
            state.max_bytes = Some(max_bytes);
        }
        is_on
    }

    /// Returns whether the brake is on.
    pub fn is_on(&self) -> bool {
        self.is_on.load(Ordering::Acquire)
    }

    /// Takes the brake off, and starts all writes that wait.
    pub fn release(&self) {
        self.is_on.store(false, Ordering::Release);
        self.lock().max_bytes = None;
        self.proceed();
    }

    /// Starts the writes that may start by now: noted parts were copied.
    pub fn proceed(&self) {
        let mut ready = Vec::new();
        let mut state = self.lock();
        while let Some(first) = state.waiting.pop_front() {
            if !state.admits(self.written.bytes(), first.bytes) {
                state.waiting.push_front(first);
                break;
            }
            ready.push(first);
        }
        drop(state);
        ready.into_iter().for_each(|Waiting { remote, token, .. }| remote.complete(token, 0));
    }

    /// Number of writes that wait.
    pub fn waiting(&self) -> usize {
        self.lock().waiting.len()
    }

    /// Bytes of the parts of a range.
    fn bytes_of(&self, io: &Io) -> u64 {
        let part = self.written.part_bytes();
        let end = io.offset_bytes.saturating_add(io.len_bytes).min(self.written.capacity_bytes());
        (end.div_ceil(part) * part).saturating_sub(io.offset_bytes / part * part)
    }

    /// Counts a write that may start, or lets it wait behind the others.
    fn admit(&self, bytes: u64, remote: impl FnOnce() -> Remote, token: Token) -> Admission {
        let mut state = self.lock();
        if state.max_bytes.is_none() {
            return Admission::Free;
        }
        if state.waiting.is_empty() && state.admits(self.written.bytes(), bytes) {
            return Admission::Counted;
        }
        state.waiting.push_back(Waiting { bytes, remote: remote(), token });
        Admission::Waits
    }

    /// Ends a counted write, whose parts are noted.
    fn end(&self, bytes: u64) {
        self.lock().in_flight -= bytes;
        self.proceed();
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The answer to a write that wants to start.
enum Admission {
    /// The brake is off.
    Free,
    /// It starts, and is counted until its end.
    Counted,
    /// An event tells it to start; it is counted then.
    Waits,
}

/// Slows the writes to the disk `inner`, which notes its changes.
pub struct Braked {
    inner: Arc<dyn Disk>,
    brake: Arc<Brake>,
}

impl Braked {
    /// A disk around `inner`, which notes its changes in those of the brake.
    pub fn new(inner: Arc<dyn Disk>, brake: Arc<Brake>) -> Self {
        Braked { inner, brake }
    }
}

impl Disk for Braked {
    fn info(&self) -> Info {
        wrapped_info(&*self.inner, "followed by a copy")
    }

    fn resize(&self, bytes: Option<u64>) -> Result<(), ResizeError> {
        self.inner.resize(bytes)
    }

    fn sync(&self) -> io::Result<()> {
        self.inner.sync()
    }

    fn open_lane(&self) -> io::Result<Box<dyn Lane>> {
        Ok(Box::new(BrakedLane {
            inner: self.inner.open_lane()?,
            layer: self.inner.layers(),
            brake: Arc::clone(&self.brake),
            remote: None,
            counted: BySlot::new(),
        }))
    }

    fn layers(&self) -> u8 {
        self.inner.layers() + 1
    }

    fn kernel_file(&self) -> Result<BorrowedFd<'_>, &'static str> {
        self.inner.kernel_file()
    }

    fn sync_failed(&self, errno: i32) {
        self.inner.sync_failed(errno);
    }
}

struct BrakedLane {
    inner: Box<dyn Lane>,
    layer: u8,
    brake: Arc<Brake>,
    remote: Option<Remote>,
    /// Bytes of the counted writes.
    counted: BySlot<u64>,
}

impl BrakedLane {
    /// The step of an I/O that was started, whose count ends with it.
    fn after(&mut self, slot: Slot, step: Step) -> Step {
        if step != Step::Pending
            && let Some(bytes) = self.counted.take(slot)
        {
            self.brake.end(bytes);
        }
        step
    }
}

impl Lane for BrakedLane {
    fn files(&self) -> Vec<RawFd> {
        self.inner.files()
    }

    fn moves_data_itself(&self) -> bool {
        self.inner.moves_data_itself()
    }

    fn start(&mut self, io: &mut Io, slot: Slot, engine: &mut dyn Engine) -> Step {
        // A write that misses the change of the flag is one that was in flight.
        if !io.writes() || !self.brake.is_on() {
            return self.inner.start(io, slot, engine);
        }
        let bytes = self.brake.bytes_of(io);
        let remote = self.remote.get_or_insert_with(|| engine.remote()).clone();
        let token = Token { slot, layer: self.layer };
        match self.brake.admit(bytes, || remote, token) {
            Admission::Free => return self.inner.start(io, slot, engine),
            Admission::Counted => self.counted.put(slot, bytes),
            Admission::Waits => return Step::Pending,
        }
        let step = self.inner.start(io, slot, engine);
        self.after(slot, step)
    }

    fn event(&mut self, io: &mut Io, token: Token, result: i32, engine: &mut dyn Engine) -> Step {
        if token.layer != self.layer {
            let step = self.inner.event(io, token, result, engine);
            return self.after(token.slot, step);
        }
        // The write has waited.
        self.counted.put(token.slot, self.brake.bytes_of(io));
        let step = self.inner.start(io, token.slot, engine);
        self.after(token.slot, step)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::conformance::Delivered;
    use crate::{BufList, IoKind};

    const PART: u64 = 64 << 10;

    fn parts(first: u64, count: u64) -> Io {
        let kind = IoKind::WriteZeroes { unmap: false };
        Io::new(kind, first * PART, count * PART, BufList::EMPTY)
    }

    #[test]
    fn a_range_counts_with_all_of_its_parts() {
        let brake = Brake::new(Arc::new(Written::new(10 * PART)));
        assert_eq!(brake.bytes_of(&parts(2, 3)), 3 * PART);
        let across = Io { offset_bytes: PART - 512, len_bytes: 1024, ..parts(0, 1) };
        assert_eq!(brake.bytes_of(&across), 2 * PART);
        let behind = Io { offset_bytes: u64::MAX, ..parts(0, 1) };
        assert_eq!(brake.bytes_of(&behind), 0);
    }

    #[test]
    fn writes_start_in_order_while_few_parts_are_noted_or_in_flight() {
        let brake = Brake::new(Arc::new(Written::new(100 * PART)));
        let mut delivered = Delivered::default();
        let remote = delivered.remote();
        let admit = |slot: u32, bytes: u64| {
            let token = Token { slot: Slot(slot), layer: 1 };
            brake.admit(bytes, || remote.clone(), token)
        };
        assert!(matches!(admit(0, PART), Admission::Free));
        brake.hold(2 * PART);
        assert!(matches!(admit(1, 2 * PART), Admission::Counted));
        assert!(matches!(admit(2, 3 * PART), Admission::Waits));
        assert!(matches!(admit(3, PART), Admission::Waits));
        assert_eq!((brake.waiting(), delivered.poll()), (2, None));
        // The larger one starts alone, and the one behind it after its end.
        brake.end(2 * PART);
        assert_eq!(delivered.poll().map(|(token, _)| token.slot), Some(Slot(2)));
        assert_eq!((brake.waiting(), delivered.poll()), (1, None));
        brake.end(3 * PART);
        assert_eq!(delivered.poll().map(|(token, _)| token.slot), Some(Slot(3)));
        assert!(matches!(admit(4, 2 * PART), Admission::Waits));
        assert!(brake.lower(PART));
        brake.proceed();
        assert_eq!(delivered.poll(), None);
        brake.release();
        assert!(!brake.lower(PART), "it stays off");
        assert_eq!(delivered.poll().map(|(token, _)| token.slot), Some(Slot(4)));
        assert_eq!((brake.waiting(), delivered.poll()), (0, None));
    }
}
