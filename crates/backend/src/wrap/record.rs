// SPDX-License-Identifier: Apache-2.0
//! A disk that notes what happens in which order.
//!
//! A start is noted before the inner disk sees the io, an end after the inner disk has told it.
//! So an end that is noted before a start has truly come before it, on any lane.

use super::ops;
use super::slots::BySlot;
use super::wrapped_info;
use crate::{BufList, Disk, Engine, Info, Io, IoError, IoKind, Lane, Slot, Step, Token};
use std::fmt;
use std::fs::File;
use std::io::{self, Write};
use std::os::fd::RawFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// What happened to an io.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    /// It is handed to the inner disk.
    Start,
    /// It has ended.
    End(Result<(), IoError>),
    /// The inner disk was busy: its start did not happen; it comes again under a new number.
    Withdrawn,
}

/// One line of the log.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Entry {
    /// Number of the io, in the order of starts.
    pub number: u64,
    /// What happened.
    pub phase: Phase,
    /// The io's kind.
    pub kind: IoKind,
    /// First sector.
    pub sector: u64,
    /// Length in sectors.
    pub sectors: u64,
    /// Whether it was write-through.
    pub durable: bool,
    /// FNV-1a (64 bits) of the data of a write, as it was at its start.
    pub checksum: Option<u64>,
}

impl fmt::Display for Entry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.phase {
            Phase::Start => write!(f, "start")?,
            Phase::End(_) => write!(f, "end")?,
            Phase::Withdrawn => write!(f, "withdrawn")?,
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

/// Where the entries go; clones share it.
#[derive(Clone)]
pub struct Log(Arc<Mutex<Sink>>);

struct Sink {
    /// Number of the next io.
    next: u64,
    target: Output,
    error: Option<io::Error>,
}

enum Output {
    Memory(Vec<Entry>),
    Lines(File),
}

impl Log {
    fn new(target: Output) -> Log {
        Log(Arc::new(Mutex::new(Sink { next: 0, target, error: None })))
    }

    fn sink(&self) -> MutexGuard<'_, Sink> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The entries so far; empty for a log that goes to a file.
    pub fn entries(&self) -> Vec<Entry> {
        match &self.sink().target {
            Output::Memory(entries) => entries.clone(),
            Output::Lines(_) => Vec::new(),
        }
    }

    /// Takes the error that ended writing to the log's file, if there was one.
    pub fn take_error(&self) -> Option<io::Error> {
        self.sink().error.take()
    }

    /// Notes a start under the next number.
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
                    self.error = Some(why);
                    self.target = Output::Memory(Vec::new());
                }
            }
        }
    }
}

/// Notes the order of starts and ends.
pub struct Record {
    inner: Arc<dyn Disk>,
    log: Log,
}

impl Record {
    /// Records in memory without bound, for a test to read.
    pub fn in_memory(inner: Arc<dyn Disk>) -> Self {
        Record { inner, log: Log::new(Output::Memory(Vec::new())) }
    }

    /// Records as lines of text at the end of `file`.
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
        let phase = match step {
            Step::Pending => return step,
            Step::Done(outcome) => Phase::End(outcome),
            Step::Busy => Phase::Withdrawn,
        };
        if let Some(entry) = self.started.take(slot) {
            self.log.sink().note(Entry { phase, ..entry });
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

/// FNV-1a of 64 bits.
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
