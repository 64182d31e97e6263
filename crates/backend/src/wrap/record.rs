// SPDX-License-Identifier: Apache-2.0
//! A disk that records the order of events.
//!
//! A lane records a start before the inner disk sees the I/O, and an end after the inner disk has
//! reported it. An end that is recorded before a start therefore preceded it, on any lane.

use super::ops;
use super::slots::BySlot;
use super::wrapped_info;
use crate::{
    BufList, Disk, Engine, Info, Io, IoError, IoKind, Lane, ResizeError, Slot, Step, Token,
};
use std::fmt;
use std::fs::File;
use std::io::{self, Write};
use std::os::fd::RawFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Event of an I/O.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    /// The inner disk gets the I/O.
    Start,
    /// The I/O ended.
    End(Result<(), IoError>),
}

/// One line of the log.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Entry {
    /// Number of the I/O, in the order of starts.
    pub number: u64,
    /// Event.
    pub phase: Phase,
    /// Kind of the I/O.
    pub kind: IoKind,
    /// First sector.
    pub sector: u64,
    /// Length in sectors.
    pub sectors: u64,
    /// The I/O is write-through.
    pub durable: bool,
    /// FNV-1a (64 bits) of the data of a write at its start.
    pub checksum: Option<u64>,
}

impl fmt::Display for Entry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.phase {
            Phase::Start => write!(f, "start")?,
            Phase::End(_) => write!(f, "end")?,
        }
        let kind = ops::name(self.kind);
        write!(f, " {} {kind} sector={} sectors={}", self.number, self.sector, self.sectors)?;
        if self.durable {
            write!(f, " durable")?;
        }
        if let Some(checksum) = self.checksum {
            write!(f, " fnv1a={checksum:016x}")?;
        }
        match self.phase {
            Phase::End(Ok(())) => write!(f, " ok"),
            Phase::End(Err(why)) => write!(f, " failed: {why}"),
            _ => Ok(()),
        }
    }
}

/// Destination of the entries. Clones share it.
#[derive(Clone)]
pub struct Log(Arc<Mutex<Sink>>);

struct Sink {
    /// Number of the next I/O.
    next: u64,
    target: Output,
    error: Option<io::Error>,
}

enum Output {
    Memory(Vec<Entry>),
    Lines(File),
    /// A file that could not be written; later entries are dropped.
    Ended,
}

impl Log {
    fn new(target: Output) -> Log {
        Log(Arc::new(Mutex::new(Sink { next: 0, target, error: None })))
    }

    fn sink(&self) -> MutexGuard<'_, Sink> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The recorded entries; empty for a log in a file.
    pub fn entries(&self) -> Vec<Entry> {
        match &self.sink().target {
            Output::Memory(entries) => entries.clone(),
            Output::Lines(_) | Output::Ended => Vec::new(),
        }
    }

    /// Takes the error that ended the log in a file, if there was one.
    pub fn take_error(&self) -> Option<io::Error> {
        self.sink().error.take()
    }

    /// Records a start under the next number.
    fn note_start(&self, mut entry: Entry) -> Entry {
        let mut sink = self.sink();
        entry.number = sink.next;
        sink.next += 1;
        sink.note(entry);
        entry
    }
}

impl Sink {
    fn note(&mut self, entry: Entry) {
        match &mut self.target {
            Output::Memory(entries) => entries.push(entry),
            Output::Lines(file) => {
                if let Err(why) = file.write_all(format!("{entry}\n").as_bytes()) {
                    tracing::error!(%why, "the record of the I/O ends here; make room and restart");
                    self.error = Some(why);
                    self.target = Output::Ended;
                }
            }
            Output::Ended => {}
        }
    }
}

/// Records the order of starts and ends.
pub struct Record {
    inner: Arc<dyn Disk>,
    log: Log,
}

impl Record {
    /// Records in memory without a bound, for tests.
    pub fn in_memory(inner: Arc<dyn Disk>) -> Self {
        Record { inner, log: Log::new(Output::Memory(Vec::new())) }
    }

    /// Appends lines of text to `file`.
    pub fn to_file(inner: Arc<dyn Disk>, file: File) -> Self {
        Record { inner, log: Log::new(Output::Lines(file)) }
    }

    /// The log.
    pub fn log(&self) -> Log {
        self.log.clone()
    }
}

impl Disk for Record {
    fn info(&self) -> Info {
        wrapped_info(&*self.inner, "recorded")
    }

    fn resize(&self, bytes: Option<u64>) -> Result<(), ResizeError> {
        self.inner.resize(bytes)
    }

    fn sync(&self) -> io::Result<()> {
        self.inner.sync()
    }

    fn open_lane(&self) -> io::Result<Box<dyn Lane>> {
        let (inner, log) = (self.inner.open_lane()?, self.log.clone());
        Ok(Box::new(RecordLane { inner, log, started: BySlot::new() }))
    }

    fn layers(&self) -> u8 {
        self.inner.layers() + 1
    }
}

struct RecordLane {
    inner: Box<dyn Lane>,
    log: Log,
    started: BySlot<Entry>,
}

impl RecordLane {
    fn note_step(&mut self, slot: Slot, step: Step) -> Step {
        if let Step::Done(outcome) = step
            && let Some(entry) = self.started.take(slot)
        {
            self.log.sink().note(Entry { phase: Phase::End(outcome), ..entry });
        }
        step
    }
}

impl Lane for RecordLane {
    fn files(&self) -> Vec<RawFd> {
        self.inner.files()
    }

    fn start(&mut self, io: &mut Io, slot: Slot, engine: &mut dyn Engine) -> Step {
        let entry = self.log.note_start(Entry {
            number: 0,
            phase: Phase::Start,
            kind: io.kind,
            sector: io.offset_bytes / 512,
            sectors: io.len_bytes / 512,
            durable: io.durable,
            checksum: (io.kind == IoKind::Write).then(|| checksum(&io.bufs)),
        });
        self.started.put(slot, entry);
        let step = self.inner.start(io, slot, engine);
        self.note_step(slot, step)
    }

    fn event(&mut self, io: &mut Io, token: Token, result: i32, engine: &mut dyn Engine) -> Step {
        let step = self.inner.event(io, token, result, engine);
        self.note_step(token.slot, step)
    }
}

/// 64-bit FNV-1a.
fn checksum(bufs: &BufList) -> u64 {
    let mut piece = [0; 4096];
    let (mut sum, mut at) = (0xcbf2_9ce4_8422_2325_u64, 0);
    loop {
        let len = bufs.copy_out(at, &mut piece);
        for byte in &piece[..len] {
            sum = (sum ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3);
        }
        at += len as u64;
        if len < piece.len() {
            return sum;
        }
    }
}
