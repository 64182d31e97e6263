// SPDX-License-Identifier: Apache-2.0
//! The log of dm-log-writes (Documentation/admin-guide/device-mapper/log-writes.rst), and the disks
//! that result from a power cut.
//!
//! A write enters the log when a FLUSH that began after the end of the write has ended, or at once
//! if it has FUA. So all entries up to the last FLUSH before a cut are durable. Any part of the
//! writes between that FLUSH and the cut can be on the disk, because the disk loses its cache.

use anyhow::{Context, Result, ensure};
use kit::power_cut::survivors;
use kit::rng::Rng;
use std::collections::{BTreeSet, HashMap};
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;

const MAGIC: u64 = 0x006a_7366_7773_6872;
const VERSION: u64 = 1;
const FLUSH: u64 = 1 << 0;
const FUA: u64 = 1 << 1;
const DISCARD: u64 = 1 << 2;
const MARK: u64 = 1 << 3;
/// Bytes of an entry's head; the text of a mark follows it in the same sector.
const HEAD_BYTES: usize = 32;
const SECTOR: usize = 512;
/// Unit in which an image records the written ranges.
const CHUNK: usize = 64 << 10;

/// One entry of the log.
#[derive(Debug, Default)]
pub(super) struct Entry {
    sector: u64,
    flush: bool,
    fua: bool,
    discarded: u64,
    data: Vec<u8>,
    /// Text of the mark, if the entry is one.
    pub(super) mark: Option<String>,
}

/// Reads the whole log from a device that dm-log-writes has released.
pub(super) fn read(path: &Path) -> Result<Vec<Entry>> {
    let file = File::open(path).with_context(|| path.display().to_string())?;
    let mut sector = vec![0; SECTOR];
    file.read_exact_at(&mut sector, 0)?;
    let word = |bytes: &[u8], n: usize| {
        u64::from_le_bytes(bytes[n * 8..n * 8 + 8].try_into().expect("8 bytes"))
    };
    ensure!(word(&sector, 0) == MAGIC && word(&sector, 1) == VERSION, "no log of dm-log-writes");
    let (count, sector_bytes) = (word(&sector, 2), word(&sector, 3) as u32);
    ensure!(sector_bytes as usize == SECTOR, "the log has sectors of {sector_bytes} bytes");
    let mut entries = Vec::new();
    let mut at = SECTOR as u64;
    for _ in 0..count {
        file.read_exact_at(&mut sector, at)?;
        at += SECTOR as u64;
        let flags = word(&sector, 2);
        let text = HEAD_BYTES..HEAD_BYTES + (word(&sector, 3) as usize).min(SECTOR - HEAD_BYTES);
        let mut entry = Entry {
            sector: word(&sector, 0),
            flush: flags & FLUSH != 0,
            fua: flags & FUA != 0,
            mark: (flags & MARK != 0).then(|| String::from_utf8_lossy(&sector[text]).into_owned()),
            ..Entry::default()
        };
        if flags & DISCARD != 0 {
            entry.discarded = word(&sector, 1);
        } else {
            entry.data = vec![0; word(&sector, 1) as usize * SECTOR];
            file.read_exact_at(&mut entry.data, at)?;
            at += entry.data.len() as u64;
        }
        entries.push(entry);
    }
    Ok(entries)
}

/// Positions from `from` on at which a FLUSH begins that at least half as many writes wait for as
/// for any other. A cut there loses something almost certainly.
pub(super) fn full_caches(log: &[Entry], from: usize) -> Vec<usize> {
    let (mut waiting, mut flushes) = (0, Vec::new());
    for (at, entry) in log.iter().enumerate() {
        if entry.flush && waiting > 0 && at >= from {
            flushes.push((at, waiting));
        }
        waiting = if entry.flush { 0 } else { waiting };
        waiting += u32::from(!entry.fua && !entry.data.is_empty());
    }
    let most = flushes.iter().map(|&(_, waiting)| waiting).max().unwrap_or(0);
    flushes.retain(|&(_, waiting)| waiting * 2 >= most);
    flushes.into_iter().map(|(at, _)| at).collect()
}

/// Content that is certainly on the disk.
struct Image {
    bytes: Vec<u8>,
    written: BTreeSet<usize>,
}

impl Image {
    fn apply(&mut self, entry: &Entry) -> Result<()> {
        let from = entry.sector as usize * SECTOR;
        let to = from + entry.data.len().max(entry.discarded as usize * SECTOR);
        ensure!(to <= self.bytes.len(), "an entry lies outside of the disk: sector {from}");
        if !entry.data.is_empty() {
            self.bytes[from..to].copy_from_slice(&entry.data);
            self.written.extend(from / CHUNK..to.div_ceil(CHUNK));
        } else {
            let chunks = from / CHUNK..to.div_ceil(CHUNK);
            for &chunk in self.written.range(chunks) {
                self.bytes[from.max(chunk * CHUNK)..to.min((chunk + 1) * CHUNK)].fill(0);
            }
        }
        Ok(())
    }
}

/// Applies a log from its start, to later and later cuts.
pub(super) struct Replay<'a> {
    log: &'a [Entry],
    image: Image,
    /// Number of entries that the image contains.
    applied: usize,
    physical_block_bytes: u32,
}

/// The disk after a power cut.
pub(super) struct Cut<'a> {
    image: &'a Image,
    /// Sectors that differ from the image.
    survived: HashMap<u64, &'a [u8]>,
    /// Number of writes that were lost completely or in part.
    pub(super) lost: u64,
}

impl<'a> Replay<'a> {
    /// A disk of zeroes, with the size of the blocks that it writes as a whole.
    pub(super) fn new(log: &'a [Entry], bytes: u64, physical_block_bytes: u32) -> Self {
        let image = Image { bytes: vec![0; bytes as usize], written: BTreeSet::new() };
        Self { log, image, applied: 0, physical_block_bytes }
    }

    /// Cuts the power after `at` entries; `at` must not decrease from cut to cut.
    pub(super) fn cut(&mut self, at: usize, rng: &mut Rng) -> Result<Cut<'_>> {
        let flushed = self.log[..at].iter().rposition(|entry| entry.flush).unwrap_or(0);
        while self.applied < flushed {
            self.image.apply(&self.log[self.applied])?;
            self.applied += 1;
        }
        let (mut survived, mut lost) = (HashMap::new(), 0);
        for entry in &self.log[self.applied..at] {
            let (offset, bytes) = (entry.sector * SECTOR as u64, entry.data.len());
            let kept = match entry.fua {
                true => 0..bytes,
                false => survivors(rng, offset, bytes, self.physical_block_bytes),
            };
            lost += u64::from(kept.len() < bytes);
            let first = entry.sector + (kept.start / SECTOR) as u64;
            survived.extend((first..).zip(entry.data[kept].chunks_exact(SECTOR)));
        }
        Ok(Cut { image: &self.image, survived, lost })
    }
}

impl Cut<'_> {
    /// Content of a sector.
    pub(super) fn sector(&self, sector: u64) -> &[u8] {
        let at = sector as usize * SECTOR;
        self.survived.get(&sector).copied().unwrap_or_else(|| &self.image.bytes[at..at + SECTOR])
    }

    /// Writes the disk to a sparse file.
    pub(super) fn write_to(&self, path: &Path) -> Result<()> {
        let file = File::create(path)?;
        file.set_len(self.image.bytes.len() as u64)?;
        for chunk in &self.image.written {
            let bytes = &self.image.bytes[chunk * CHUNK..];
            let bytes = &bytes[..bytes.len().min(CHUNK)];
            if bytes.iter().any(|&byte| byte != 0) {
                file.write_all_at(bytes, (chunk * CHUNK) as u64)?;
            }
        }
        for (sector, bytes) in &self.survived {
            file.write_all_at(bytes, sector * SECTOR as u64)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use kit::power_cut;

    use super::*;

    fn write(sector: u64, byte: u8, fua: bool) -> Entry {
        Entry { sector, fua, data: vec![byte; SECTOR], ..Entry::default() }
    }

    fn flush() -> Entry {
        Entry { flush: true, ..Entry::default() }
    }

    #[test]
    fn what_was_flushed_survives_every_cut_and_what_was_not_is_lost_in_some() {
        let log = [write(0, 1, false), flush(), write(1, 2, false), write(2, 3, true)];
        let mut lost_once = false;
        for seed in 0..20 {
            let mut replay = Replay::new(&log, 8 << 10, power_cut::SECTOR);
            let cut = replay.cut(4, &mut Rng::new(seed)).unwrap();
            assert_eq!((cut.sector(0)[0], cut.sector(2)[0]), (1, 3));
            assert_eq!(cut.sector(1)[0] == 0, cut.lost == 1);
            lost_once |= cut.lost == 1;
        }
        assert!(lost_once);
    }

    #[test]
    fn a_full_cache_is_right_before_a_flush_of_many_writes() {
        let w = || write(0, 1, false);
        let log = [w(), flush(), w(), w(), flush(), write(0, 1, true), flush(), w(), w(), w(), w()];
        assert_eq!(full_caches(&log, 0), [1, 4]);
        assert_eq!(full_caches(&log, 2), [4]);
        assert!(full_caches(&log, 5).is_empty());
    }

    #[test]
    fn the_file_of_a_cut_is_what_its_sectors_are() {
        let discard = Entry { sector: 0, discarded: 1, ..Entry::default() };
        let log = [write(0, 1, false), write(9, 7, false), discard, flush(), write(3, 4, true)];
        let mut replay = Replay::new(&log, 8 << 10, power_cut::SECTOR);
        let cut = replay.cut(5, &mut Rng::new(1)).unwrap();
        let file = tempfile::NamedTempFile::new().unwrap();
        cut.write_to(file.path()).unwrap();
        let bytes = std::fs::read(file.path()).unwrap();
        assert_eq!((bytes[0], bytes[9 * SECTOR], bytes[3 * SECTOR]), (0, 7, 4));
        assert!((0..16).all(|n| cut.sector(n) == &bytes[n as usize * SECTOR..][..SECTOR]));
    }

    #[test]
    fn a_log_is_read_as_the_kernel_writes_it() {
        let mut bytes = vec![0; 5 * SECTOR];
        let mut put = |at: usize, words: &[u64]| {
            for (n, word) in words.iter().enumerate() {
                bytes[at * SECTOR + n * 8..][..8].copy_from_slice(&word.to_le_bytes());
            }
        };
        put(0, &[MAGIC, VERSION, 3, SECTOR as u64]);
        put(1, &[5, 1, FUA, 0]);
        put(2, &[77]);
        put(3, &[0, 0, FLUSH, 0]);
        put(4, &[0, 0, MARK, 2, u64::from(u16::from_le_bytes(*b"hi"))]);
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), &bytes).unwrap();
        let log = read(file.path()).unwrap();
        assert_eq!((log[0].sector, log[0].fua, log[0].data[0]), (5, true, 77));
        assert!(log[1].flush && log[1].data.is_empty());
        assert_eq!(log[2].mark.as_deref(), Some("hi"));
    }
}
