// SPDX-License-Identifier: Apache-2.0
//! A disk in memory with a volatile cache that keeps every write and flush in order, so that the
//! image can be made which a power cut at any point would have left.
//!
//! A write is in the cache when it completes. A flush makes durable what completed before it. So
//! after a power cut there is everything up to the last flush, and of the writes after it any
//! part: each of them, or of a long one the first or last sectors, or nothing.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use anyhow::Result;
use backend::{Disk, Engine, Info, Io, IoError, IoKind, Lane, RangeLimits, Slot, Step, Token};
use lab_case::rng::Rng;

use super::served::sized_file;

const SECTOR: usize = 512;

/// Most bytes that all writes together may have.
const KEPT_BYTES_MAX: usize = 1 << 30;

enum Entry {
    Write { offset: u64, data: Vec<u8>, durable: bool },
    Zero { offset: u64, bytes: u64, durable: bool },
    Flush,
}

struct State {
    store: Vec<u8>,
    entries: Vec<Entry>,
    kept: usize,
}

/// The entries of a journal.
#[derive(Clone)]
pub(super) struct Log(Arc<Mutex<State>>);

/// See the module's head.
pub(super) struct Journal {
    state: Arc<Mutex<State>>,
    bytes: u64,
}

struct JournalLane(Arc<Mutex<State>>);

impl Journal {
    /// A zeroed disk, and its log.
    pub(super) fn new(bytes: u64) -> Result<(Self, Log)> {
        let store = vec![0; usize::try_from(bytes)?];
        let state = Arc::new(Mutex::new(State { store, entries: Vec::new(), kept: 0 }));
        Ok((Self { state: Arc::clone(&state), bytes }, Log(state)))
    }
}

impl Disk for Journal {
    fn info(&self) -> Info {
        let any = Some(RangeLimits { sectors_max: 1 << 16, align_sectors: 1 });
        Info {
            description: "a journal in memory".to_owned(),
            capacity_sectors: self.bytes / SECTOR as u64,
            logical_block_bytes: SECTOR as u32,
            physical_block_bytes: SECTOR as u32,
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
        }
    }

    fn open_lane(&self) -> io::Result<Box<dyn Lane>> {
        Ok(Box::new(JournalLane(Arc::clone(&self.state))))
    }
}

impl Lane for JournalLane {
    fn moves_data_itself(&self) -> bool {
        true
    }

    fn start(&mut self, io: &mut Io, _: Slot, _: &mut dyn Engine) -> Step {
        let mut state = lock(&self.0);
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
    /// How many there are.
    pub(super) fn entries(&self) -> u64 {
        lock(&self.0).entries.len() as u64
    }

    /// Makes the image that a power cut would leave when `at` entries had come.
    /// Returns how many writes are lost, as a whole or in part.
    pub(super) fn cut(&self, path: &Path, at: u64, seed: u64) -> Result<u64> {
        let state = lock(&self.0);
        let image = sized_file(path, state.store.len() as u64)?;
        let seen = state.entries.len().min(usize::try_from(at)?);
        let entries = &state.entries[..seen];
        let flushed = entries.iter().rposition(|entry| matches!(entry, Entry::Flush));
        let mut rng = Rng::new(seed);
        let mut lost = 0;
        for (index, entry) in entries.iter().enumerate() {
            lost += u64::from(!entry.apply(&image, (flushed < Some(index)).then_some(&mut rng))?);
        }
        Ok(lost)
    }
}

impl Entry {
    /// Writes the entry to the image; with random numbers perhaps, and perhaps not whole. Says
    /// whether it is there whole.
    fn apply(&self, image: &File, volatile: Option<&mut Rng>) -> Result<bool> {
        let (offset, bytes, durable) = match self {
            Entry::Flush => return Ok(true),
            Entry::Write { offset, data, durable } => (*offset, data.len(), *durable),
            Entry::Zero { offset, bytes, durable } => (*offset, *bytes as usize, *durable),
        };
        let (from, to) = match volatile {
            Some(rng) if !durable => survivors(rng, bytes),
            _ => (0, bytes),
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

/// Which bytes of a write are there after a power cut: all, none, the first or the last sectors.
fn survivors(rng: &mut Rng, bytes: usize) -> (usize, usize) {
    let sectors = (bytes / SECTOR) as u64;
    let part = rng.below(sectors + 1) as usize * SECTOR;
    match rng.below(4) {
        0 => (0, 0),
        1 => (0, part),
        2 => (part, bytes),
        _ => (0, bytes),
    }
}

fn lock(state: &Mutex<State>) -> MutexGuard<'_, State> {
    state.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn log_of(entries: Vec<Entry>) -> Log {
        let store = vec![0; 64 * SECTOR];
        Log(Arc::new(Mutex::new(State { store, entries, kept: 0 })))
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
