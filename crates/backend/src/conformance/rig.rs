// SPDX-License-Identifier: Apache-2.0
//! Runs I/Os on one lane and checks the contract of [`Lane`].

use super::memory::Memory;
use super::{MakeEngine, Target, TestEngine};
use crate::{BufList, Disk, Info, Io, IoError, IoKind, Lane, Slot, Step};
use std::time::Duration;

/// An I/O with its memory.
pub struct Request {
    /// Kind of the I/O.
    pub kind: IoKind,
    /// Start of the range in bytes.
    pub offset: u64,
    /// Length of the range in bytes.
    pub len: u64,
    /// Write-through.
    pub durable: bool,
    /// Memory of a read or write.
    pub memory: Option<Memory>,
}

impl Request {
    /// A read into segments of these lengths.
    pub fn read(offset: u64, lens: &[usize], misalign: usize) -> Request {
        let memory = Memory::new(lens, misalign);
        let len = memory.len_bytes();
        Request { kind: IoKind::Read, offset, len, durable: false, memory: Some(memory) }
    }

    /// A write of `data` from segments of these lengths.
    pub fn write(offset: u64, data: &[u8], lens: &[usize], misalign: usize) -> Request {
        let mut memory = Memory::new(lens, misalign);
        memory.fill(data);
        assert_eq!(memory.len_bytes(), data.len() as u64, "the test's segments fit its data");
        let len = data.len() as u64;
        Request { kind: IoKind::Write, offset, len, durable: false, memory: Some(memory) }
    }

    /// A command without memory.
    pub fn command(kind: IoKind, offset: u64, len: u64) -> Request {
        Request { kind, offset, len, durable: false, memory: None }
    }

    /// The same as a write-through I/O.
    pub fn durable(self) -> Request {
        Request { durable: true, ..self }
    }

    fn make_io(&mut self) -> Io {
        let bufs = self.memory.as_mut().map_or(BufList::EMPTY, Memory::bufs);
        Io { durable: self.durable, ..Io::new(self.kind, self.offset, self.len, bufs) }
    }
}

/// One lane with its own engine.
pub struct Rig {
    lane: Box<dyn Lane>,
    engine: Box<dyn TestEngine>,
    /// Properties of the disk.
    pub info: Info,
    layers: u8,
}

/// Time limit for the completion of an I/O.
const PATIENCE: Duration = Duration::from_secs(30);

impl Rig {
    /// Opens a lane of the target's disk.
    pub fn new(target: &Target) -> Rig {
        Rig::of(&*target.disk, &target.engine)
    }

    /// Opens a lane of `disk`, on the thread that uses it.
    pub fn of(disk: &dyn Disk, engine: &MakeEngine) -> Rig {
        let lane = disk.open_lane().expect("the lane opens");
        let mut engine = engine();
        engine.register(&lane.files()).expect("the engine takes the lane's files");
        Rig { lane, engine, info: disk.info(), layers: disk.layers() }
    }

    /// Runs one I/O to its end.
    pub fn run(&mut self, request: &mut Request) -> Result<(), IoError> {
        self.run_all(std::slice::from_mut(request)).remove(0)
    }

    /// Starts all I/Os in order and runs until every one has ended. Returns the outcomes in the
    /// same order.
    pub fn run_all(&mut self, requests: &mut [Request]) -> Vec<Result<(), IoError>> {
        let mut ios: Vec<Io> = requests.iter_mut().map(Request::make_io).collect();
        let mut outcomes: Vec<Option<Result<(), IoError>>> = vec![None; ios.len()];
        let mut pending = vec![false; ios.len()];
        for (n, io) in ios.iter_mut().enumerate() {
            match self.lane.start(io, Slot(n as u32), &mut *self.engine) {
                Step::Done(outcome) => outcomes[n] = Some(outcome),
                Step::Pending => pending[n] = true,
            }
        }
        while pending.contains(&true) {
            let (n, outcome) = self.next_done(&mut ios, &pending);
            pending[n] = false;
            outcomes[n] = Some(outcome);
        }
        for memory in requests.iter().filter_map(|request| request.memory.as_ref()) {
            memory.check_guards();
        }
        outcomes.into_iter().map(|outcome| outcome.expect("every io ended")).collect()
    }

    /// Delivers events to the lane until an I/O ends.
    fn next_done(&mut self, ios: &mut [Io], pending: &[bool]) -> (usize, Result<(), IoError>) {
        loop {
            let (token, result) =
                self.engine.next_event(PATIENCE).expect("an event follows while an io is pending");
            let n = token.slot.0 as usize;
            assert!(pending[n], "event for slot {n}, which is not pending");
            assert!(
                token.layer < self.layers,
                "event for layer {} of {}",
                token.layer,
                self.layers
            );
            match self.lane.event(&mut ios[n], token, result, &mut *self.engine) {
                Step::Done(outcome) => return (n, outcome),
                Step::Pending => {}
            }
        }
    }

    /// Writes `data` in one aligned segment and panics if it fails.
    pub fn write(&mut self, offset: u64, data: &[u8]) {
        let mut request = Request::write(offset, data, &[data.len()], 0);
        assert_eq!(self.run(&mut request), Ok(()), "write of {} at {offset}", data.len());
    }

    /// Reads `len` bytes in one aligned segment and panics if it fails.
    pub fn read(&mut self, offset: u64, len: usize) -> Vec<u8> {
        let mut request = Request::read(offset, &[len], 0);
        assert_eq!(self.run(&mut request), Ok(()), "read of {len} at {offset}");
        request.memory.expect("a read has memory").content()
    }
}
