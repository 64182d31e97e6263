// SPDX-License-Identifier: Apache-2.0
//! Random operations on a file, compared with a copy in memory.

use std::fs::{File, OpenOptions};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;

use anyhow::{Context, Result, ensure};
use kit::rng::Rng;
use rustix::fs::{FallocateFlags, OFlags, fallocate};

use crate::guest::load::memory::Aligned;

/// Largest size of the file in bytes.
const FILE_BYTES_MAX: usize = 4 << 20;
/// Largest transfer in bytes.
const TRANSFER_BYTES_MAX: usize = 128 << 10;
/// Unit of direct I/O in bytes.
const BLOCK: usize = 4096;

/// A file and its expected content.
pub(crate) struct FileOps {
    file: File,
    direct: File,
    model: Vec<u8>,
    rng: Rng,
    buffer: Aligned,
}

impl FileOps {
    /// Creates an empty file.
    pub(crate) fn new(path: &Path, seed: u64) -> Result<Self> {
        let mut options = OpenOptions::new();
        options.read(true).write(true).create(true).truncate(true);
        let file = options.open(path).with_context(|| path.display().to_string())?;
        let flags = OFlags::DIRECT.bits() as i32;
        let direct = OpenOptions::new().read(true).write(true).custom_flags(flags).open(path)?;
        let (model, rng) = (Vec::new(), Rng::new(seed));
        Ok(Self { file, direct, model, rng, buffer: Aligned::new(TRANSFER_BYTES_MAX) })
    }

    /// Executes one random operation.
    pub(crate) fn step(&mut self) -> Result<()> {
        match self.rng.below(16) {
            0..=3 => self.write(),
            4..=5 => self.write_direct(),
            6..=8 => self.read(),
            9..=10 => self.read_direct(),
            11 => self.truncate(),
            12 => self.punch(FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE),
            13 => self.punch(FallocateFlags::ZERO_RANGE | FallocateFlags::KEEP_SIZE),
            14 => Ok(self.file.sync_data()?),
            _ => Ok(self.file.sync_all()?),
        }
    }

    /// Compares the whole file.
    pub(crate) fn check(&self) -> Result<()> {
        let mut bytes = vec![0; self.model.len()];
        ensure!(self.file.metadata()?.len() == bytes.len() as u64, "the file has another size");
        self.file.read_exact_at(&mut bytes, 0)?;
        compare(&bytes, &self.model, 0)
    }

    fn write(&mut self) -> Result<()> {
        let (at, len) = self.range(1);
        let bytes = &mut self.buffer.bytes()[..len];
        self.rng.fill(bytes);
        self.file.write_all_at(bytes, at as u64)?;
        put(&mut self.model, at, bytes);
        Ok(())
    }

    fn write_direct(&mut self) -> Result<()> {
        let (at, len) = self.range(BLOCK);
        let bytes = &mut self.buffer.bytes()[..len];
        self.rng.fill(bytes);
        self.direct.write_all_at(bytes, at as u64)?;
        put(&mut self.model, at, bytes);
        Ok(())
    }

    fn read(&mut self) -> Result<()> {
        let (at, len) = self.range(1);
        let len = len.min(self.model.len().saturating_sub(at));
        let bytes = &mut self.buffer.bytes()[..len];
        self.file.read_exact_at(bytes, at as u64)?;
        compare(bytes, &self.model[self.model.len().min(at)..][..len], at)
    }

    fn read_direct(&mut self) -> Result<()> {
        let (at, len) = self.range(BLOCK);
        let expected = self.model.len().saturating_sub(at).min(len);
        let bytes = &mut self.buffer.bytes()[..len];
        let got = self.direct.read_at(bytes, at as u64)?;
        ensure!(got == expected, "{got} bytes at {at}, not {expected}");
        compare(&bytes[..got], &self.model[self.model.len().min(at)..][..got], at)
    }

    fn truncate(&mut self) -> Result<()> {
        let len = self.rng.below(FILE_BYTES_MAX as u64) as usize;
        self.file.set_len(len as u64)?;
        self.model.resize(len, 0);
        Ok(())
    }

    /// Zeroes a range without writing to it.
    fn punch(&mut self, how: FallocateFlags) -> Result<()> {
        let (at, len) = self.range(1);
        fallocate(&self.file, how, at as u64, len as u64)?;
        let end = self.model.len().min(at + len);
        if at < end {
            self.model[at..end].fill(0);
        }
        Ok(())
    }

    /// An offset and a length, both multiples of `unit`.
    fn range(&mut self, unit: usize) -> (usize, usize) {
        let len = (1 + self.rng.below((TRANSFER_BYTES_MAX / unit) as u64) as usize) * unit;
        let places = (FILE_BYTES_MAX - len) / unit + 1;
        (self.rng.below(places as u64) as usize * unit, len)
    }
}

fn put(model: &mut Vec<u8>, at: usize, bytes: &[u8]) {
    let end = at + bytes.len();
    if model.len() < end {
        model.resize(end, 0);
    }
    model[at..end].copy_from_slice(bytes);
}

fn compare(bytes: &[u8], expected: &[u8], at: usize) -> Result<()> {
    let wrong = bytes.iter().zip(expected).position(|(one, other)| one != other);
    ensure!(wrong.is_none(), "byte {} of the file is wrong", at + wrong.unwrap_or(0));
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_that_is_left_alone_is_right_and_a_changed_one_is_not() {
        let dir = tempfile::tempdir_in(env!("CARGO_MANIFEST_DIR")).unwrap();
        let path = dir.path().join("file");
        let mut ops = FileOps::new(&path, 5).unwrap();
        for _ in 0..300 {
            ops.step().unwrap();
        }
        ops.write().unwrap();
        ops.check().unwrap();
        let last = ops.model.len() as u64 - 1;
        ops.file.write_all_at(&[ops.model[last as usize] ^ 1], last).unwrap();
        assert!(ops.check().is_err());
    }
}
