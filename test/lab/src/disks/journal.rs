// SPDX-License-Identifier: Apache-2.0
//! A disk in memory with a volatile cache that records every write and flush in order, so that the
//! lab can make the image that a power cut at any point would leave.
//!
//! A write is in the cache when it completes. A flush makes all writes durable that completed
//! before it. So after a power cut the disk has everything up to the last flush, and any part of
//! the writes after it ([`kit::power_cut`]).

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use anyhow::{Result, ensure};
use backend::{Disk, Engine, Info, Io, IoError, IoKind, Lane, RangeLimits, Slot, Step, Token};
use kit::power_cut::{self, survivors};
use kit::rng::Rng;

use super::served::sized_file;

const SECTOR: usize = 512;

/// Maximum total bytes of all writes.
const KEPT_BYTES_MAX: usize = 1 << 30;

enum Entry {
    Write { offset: u64, data: Vec<u8>, durable: bool },
    Zero { offset: u64, bytes: u64, durable: bool },
    Flush,
}

#[derive(Default)]
struct State {
    store: Vec<u8>,
    entries: Vec<Entry>,
    kept: usize,
    /// No request is answered.
    held: bool,
}

#[derive(Default)]
struct Shared {
    physical_block_bytes: u32,
    state: Mutex<State>,
    released: Condvar,
}

/// The entries of a journal.
#[derive(Clone)]
pub(super) struct Log(Arc<Shared>);

/// A disk that records its writes and flushes in a [`Log`].
pub(super) struct Journal {
    shared: Arc<Shared>,
    bytes: u64,
}

struct JournalLane(Arc<Shared>);

impl Journal {
    /// Creates a zeroed disk and its log. `physical_block_bytes` is a power of two, at least 512.
    pub(super) fn new(bytes: u64, physical_block_bytes: u32) -> Result<(Self, Log)> {
        ensure!(
            physical_block_bytes >= power_cut::SECTOR && physical_block_bytes.is_power_of_two(),
            "a physical block of {physical_block_bytes} bytes"
        );
        let store = vec![0; usize::try_from(bytes)?];
        let state = Mutex::new(State { store, ..State::default() });
        let shared = Arc::new(Shared { physical_block_bytes, state, ..Shared::default() });
        Ok((Self { shared: Arc::clone(&shared), bytes }, Log(shared)))
    }
}

impl Disk for Journal {
    fn info(&self) -> Info {
        let any = Some(RangeLimits { sectors_max: 1 << 16, align_sectors: 1 });
        Info {
            description: "a journal in memory".to_owned(),
            capacity_sectors: self.bytes / SECTOR as u64,
            logical_block_bytes: SECTOR as u32,
            physical_block_bytes: self.shared.physical_block_bytes,
            io_min_bytes: 0,
            io_opt_bytes: 0,
            memory_align_bytes: 1,
            read_only: false,
            volatile_cache: true,
            discard: any,
            write_zeroes: any,
            write_zeroes_unmaps: true,
            secure_erase: None,
            io_poll: false,
            submission_blocks: false,
            grows_in_block: false,
        }
    }

    fn sync(&self) -> std::io::Result<()> {
        Err(io::ErrorKind::Unsupported.into())
    }

    fn open_lane(&self) -> io::Result<Box<dyn Lane>> {
        Ok(Box::new(JournalLane(Arc::clone(&self.shared))))
    }
}

impl Lane for JournalLane {
    fn moves_data_itself(&self) -> bool {
        true
    }

    fn start(&mut self, io: &mut Io, _: Slot, _: &mut dyn Engine) -> Step {
        let mut state = lock(&self.0);
        while state.held {
            state = self.0.released.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        if !io.fits(state.store.len() as u64) {
            return Step::Done(Err(IoError::EndOfStorage));
        }
        let at = io.offset_bytes as usize;
        let range = at..at + io.len_bytes as usize;
        Step::Done(match io.kind {
            IoKind::Read => {
                io.bufs.copy_in(0, &state.store[range]);
                Ok(())
            }
            IoKind::Flush => state.keep(Entry::Flush),
            IoKind::Write => {
                io.bufs.copy_out(0, &mut state.store[range.clone()]);
                let data = state.store[range].to_vec();
                state.keep(Entry::Write { offset: io.offset_bytes, data, durable: io.durable })
            }
            IoKind::Discard | IoKind::WriteZeroes { .. } | IoKind::SecureErase => {
                state.store[range].fill(0);
                let (offset, bytes, durable) = (io.offset_bytes, io.len_bytes, io.durable);
                state.keep(Entry::Zero { offset, bytes, durable })
            }
        })
    }

    fn event(&mut self, _: &mut Io, _: Token, _: i32, _: &mut dyn Engine) -> Step {
        Step::Done(Err(IoError::Unsupported)) // No op was pushed, so none can end.
    }
}

impl State {
    fn keep(&mut self, entry: Entry) -> Result<(), IoError> {
        if let Entry::Write { data, .. } = &entry {
            self.kept += data.len();
        }
        if self.kept > KEPT_BYTES_MAX {
            eprintln!("helper: the journal is full");
            return Err(IoError::EndOfStorage);
        }
        self.entries.push(entry);
        Ok(())
    }
}

impl Log {
    /// Number of entries.
    pub(super) fn entries(&self) -> u64 {
        lock(&self.0).entries.len() as u64
    }

    /// Makes the disk withhold its answers, or release them.
    pub(super) fn hold(&self, held: bool) {
        lock(&self.0).held = held;
        self.0.released.notify_all();
    }

    /// Makes the image that a power cut would leave after `at` entries. Returns the number of
    /// writes that are lost, as a whole or in part.
    pub(super) fn cut(&self, path: &Path, at: u64, seed: u64) -> Result<u64> {
        let state = lock(&self.0);
        let image = sized_file(path, state.store.len() as u64)?;
        let seen = state.entries.len().min(usize::try_from(at)?);
        let entries = &state.entries[..seen];
        let flushed = entries.iter().rposition(|entry| matches!(entry, Entry::Flush));
        let mut rng = Rng::new(seed);
        let mut lost = 0;
        for (index, entry) in entries.iter().enumerate() {
            let volatile = (flushed < Some(index)).then_some(&mut rng);
            lost += u64::from(!entry.apply(&image, volatile, self.0.physical_block_bytes)?);
        }
        Ok(lost)
    }
}

impl Entry {
    /// Writes the entry to the image. With `volatile`, a write that is not durable may be lost in
    /// whole or in part. Returns true if the image has the whole entry.
    fn apply(&self, image: &File, volatile: Option<&mut Rng>, block: u32) -> Result<bool> {
        let (offset, bytes, durable) = match self {
            Entry::Flush => return Ok(true),
            Entry::Write { offset, data, durable } => (*offset, data.len(), *durable),
            Entry::Zero { offset, bytes, durable } => (*offset, *bytes as usize, *durable),
        };
        let Range { start: from, end: to } = match volatile {
            Some(rng) if !durable => survivors(rng, offset, bytes, block),
            _ => 0..bytes,
        };
        match self {
            Entry::Write { data, .. } => {
                image.write_all_at(&data[from..to], offset + from as u64)?
            }
            _ => image.write_all_at(&vec![0; to - from], offset + from as u64)?,
        }
        Ok((from, to) == (0, bytes))
    }
}

fn lock(shared: &Shared) -> MutexGuard<'_, State> {
    shared.state.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn log_of(entries: Vec<Entry>) -> Log {
        let state = State { store: vec![0; 64 * SECTOR], entries, ..State::default() };
        Log(Arc::new(Shared {
            physical_block_bytes: power_cut::SECTOR,
            state: Mutex::new(state),
            ..Shared::default()
        }))
    }

    fn write(sector: usize, byte: u8, durable: bool) -> Entry {
        Entry::Write { offset: (sector * SECTOR) as u64, data: vec![byte; SECTOR], durable }
    }

    #[test]
    fn what_was_flushed_survives_every_cut_and_what_was_not_is_lost_in_some() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("image");
        let log = log_of(vec![write(0, 1, false), Entry::Flush, write(1, 2, false)]);
        let mut lost_once = false;
        for seed in 0..20 {
            let lost = log.cut(&path, 3, seed).unwrap();
            let image = std::fs::read(&path).unwrap();
            assert_eq!(image[0], 1);
            assert_eq!(image[SECTOR] == 0, lost == 1);
            lost_once |= lost == 1;
        }
        assert!(lost_once);
    }

    #[test]
    fn a_durable_write_needs_no_flush_and_a_later_one_has_not_come() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("image");
        let log = log_of(vec![write(0, 1, true), write(1, 2, true)]);
        for seed in 0..20 {
            log.cut(&path, 1, seed).unwrap();
            let image = std::fs::read(&path).unwrap();
            assert_eq!((image[0], image[SECTOR]), (1, 0));
        }
    }
}
