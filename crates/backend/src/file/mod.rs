// SPDX-License-Identifier: Apache-2.0
//! A disk in a regular file or on a block device.

mod bounce;
mod error;
mod lane;
mod probe;
pub(crate) mod sys;
mod zeroes;

pub use error::FileError;

use crate::lock::{self, Access, LockError};
use crate::{Disk, Info, Lane};
use lane::{FileLane, LaneLimits};
use probe::Facts;
use std::fs;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::{FileTypeExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

/// How to open a [`File`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FileOptions {
    /// Refuse everything that writes.
    pub read_only: bool,
    /// Bypass the host's page cache (`O_DIRECT`) if the file system can.
    pub direct: bool,
    /// Logical block size to present; the storage's own if `None`.
    pub logical_block_bytes: Option<u32>,
    /// Offer DISCARD where the storage can.
    pub discard: bool,
    /// Lock the image as QEMU does (see [`crate::lock`]) before anything of it is tried, waiting
    /// so long for another user to go.
    pub lock: Option<Duration>,
}

impl Default for FileOptions {
    fn default() -> Self {
        FileOptions {
            read_only: false,
            direct: true,
            logical_block_bytes: None,
            discard: true,
            lock: None,
        }
    }
}

/// See the module's head.
#[derive(Debug)]
pub struct File {
    path: PathBuf,
    file: Arc<fs::File>,
    info: Info,
    limits: LaneLimits,
    fell_back_from_direct: bool,
    /// A block device whose page cache is in use.
    cached_device: bool,
    notices: Vec<String>,
}

impl File {
    /// Opens the file or block device at `path` and looks at what it can do.
    ///
    /// # Errors
    /// Each [`FileError`] names the cause and what to do about it.
    pub fn open(path: impl AsRef<Path>, options: FileOptions) -> Result<File, FileError> {
        let path = path.as_ref();
        check_kind(path)?;
        let (file, direct) = open_file(path, &options)?;
        if let Some(patience) = options.lock {
            lock::lock_image_within(patience, &file, path, Access::of(options.read_only))?;
        }
        let facts = probe::probe(&file, direct, !options.read_only)
            .map_err(|source| FileError::Probe { path: path.into(), source })?;
        if facts.read_only && !options.read_only {
            return Err(FileError::ReadOnlyDevice { path: path.into() });
        }
        let block = logical_block(path, &options, &facts, direct)?;
        let capacity_bytes = facts.size_bytes & !u64::from(block - 1);
        if capacity_bytes == 0 {
            return Err(FileError::Empty { path: path.into(), block });
        }
        let limits = LaneLimits {
            capacity_bytes,
            logical_block_bytes: block,
            direct_memory_align: facts.memory_align,
            in_memory: facts.in_memory,
            discard: options.discard && facts.discard.is_some() && !options.read_only,
        };
        let fell_back_from_direct = options.direct && !direct;
        Ok(File {
            path: path.into(),
            file: Arc::new(file),
            info: describe(path, direct, &options, &facts, &limits),
            limits,
            fell_back_from_direct,
            cached_device: facts.is_device && !direct,
            notices: notices(path, &facts, &limits, fell_back_from_direct),
        })
    }

    /// `O_DIRECT` was wanted and the file system refused it.
    pub fn fell_back_from_direct(&self) -> bool {
        self.fell_back_from_direct
    }

    /// What the user should know of how the file was opened, one line each.
    pub fn notices(&self) -> &[String] {
        &self.notices
    }

    /// Locks the image as QEMU does (see [`crate::lock`]), until the disk and its lanes are gone.
    ///
    /// # Errors
    /// When another program uses the image.
    pub fn lock(&self) -> Result<(), LockError> {
        lock::lock_image(&self.file, &self.path, Access::of(self.info.read_only))
    }

    /// Where the file is.
    pub fn path(&self) -> &Path {
        &self.path
    }
}

impl Disk for File {
    fn info(&self) -> Info {
        self.info.clone()
    }

    fn open_lane(&self) -> io::Result<Box<dyn Lane>> {
        Ok(Box::new(FileLane::new(Arc::clone(&self.file), self.limits)))
    }

    fn kernel_file(&self) -> Result<BorrowedFd<'_>, &'static str> {
        match self.cached_device {
            true => Err("the kernel serves a block device around the page cache; use --direct on"),
            false => Ok(self.file.as_fd()),
        }
    }
}

/// Before opening, which would hang on a FIFO.
fn check_kind(path: &Path) -> Result<(), FileError> {
    let opening = |source| FileError::open(path, source, true);
    let kind = fs::metadata(path).map_err(opening)?.file_type();
    match kind.is_file() || kind.is_block_device() {
        true => Ok(()),
        false => Err(FileError::Kind { path: path.into() }),
    }
}

/// The open file, and whether it is direct.
fn open_file(path: &Path, options: &FileOptions) -> Result<(fs::File, bool), FileError> {
    let open = |flags| {
        let mut open = fs::OpenOptions::new();
        open.read(true).write(!options.read_only).custom_flags(flags).open(path)
    };
    let failed = |source| FileError::open(path, source, options.read_only);
    if options.direct {
        match open(libc::O_DIRECT) {
            Err(why) if why.raw_os_error() == Some(libc::EINVAL) => {}
            opened => return Ok((opened.map_err(failed)?, true)),
        }
    }
    Ok((open(0).map_err(failed)?, false))
}

fn logical_block(
    path: &Path,
    options: &FileOptions,
    facts: &Facts,
    direct: bool,
) -> Result<u32, FileError> {
    let wanted = options.logical_block_bytes.unwrap_or(facts.logical_block);
    if !wanted.is_power_of_two() || !(512..=65536).contains(&wanted) {
        return Err(FileError::BlockSize { wanted });
    }
    if wanted < facts.logical_block && (direct || facts.is_device) {
        let (path, least) = (path.into(), facts.logical_block);
        return Err(FileError::BlockTooSmall { path, wanted, least });
    }
    Ok(wanted)
}

fn describe(
    path: &Path,
    direct: bool,
    options: &FileOptions,
    facts: &Facts,
    limits: &LaneLimits,
) -> Info {
    let kind = if facts.is_device { "block device" } else { "file" };
    let cache = if direct { "direct" } else { "cached" };
    let writable = !options.read_only;
    let block = limits.logical_block_bytes;
    let aligned = |range: crate::RangeLimits| crate::RangeLimits {
        align_sectors: range.align_sectors.max(block / 512),
        sectors_max: range.sectors_max,
    };
    Info {
        description: format!("{kind} {} ({cache})", path.display()),
        capacity_sectors: limits.capacity_bytes / 512,
        logical_block_bytes: block,
        physical_block_bytes: facts.physical_block.max(block),
        io_min_bytes: facts.io_min,
        io_opt_bytes: facts.io_opt,
        memory_align_bytes: limits.direct_memory_align.unwrap_or(1),
        read_only: options.read_only,
        volatile_cache: facts.volatile_cache,
        discard: facts.discard.filter(|_| limits.discard).map(aligned),
        write_zeroes: writable.then(|| aligned(facts.zeroing)),
        write_zeroes_unmaps: writable && facts.zeroing_unmaps,
        secure_erase: None,
        io_poll: facts.io_poll,
    }
}

fn notices(path: &Path, facts: &Facts, limits: &LaneLimits, fell_back: bool) -> Vec<String> {
    let path = path.display();
    let mut notices = Vec::new();
    if fell_back {
        notices.push(format!(
            "the file system of {path} refuses O_DIRECT: going through the host's page cache \
             (`--direct off` silences this)"
        ));
    }
    let rest = facts.size_bytes - limits.capacity_bytes;
    if rest > 0 {
        let block = limits.logical_block_bytes;
        notices.push(format!(
            "the last {rest} bytes of {path} are not served: its size is not a multiple of the \
             logical block of {block} bytes"
        ));
    }
    notices
}
