// SPDX-License-Identifier: Apache-2.0
//! A disk in a regular file or on a block device.

mod adopt;
mod bounce;
mod error;
mod gather;
mod image_lock;
mod lane;
mod ops;
mod piece;
mod probe;
mod range_lock;
mod reader;
mod results;
mod size;
mod stack;
mod sync;
pub(crate) mod sys;
mod write_cache;
mod zeroes;

pub use adopt::{OpenAs, device_of, identity_of, identity_of_device, place};
pub use error::FileError;
pub use image_lock::ImageLock;
pub use reader::Reader;
pub use stack::made_of;

use crate::lock::{self, Access, ImageFile, LockError};
use crate::mark;
use crate::{Disk, Info, Lane, ResizeError};
use lane::{FileLane, LaneLimits, Shared};
use probe::{Facts, WANTS_BLOCKS};
use range_lock::RangeLock;
use size::Size;
use std::fs;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::{FileExt, FileTypeExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicU32;
use std::sync::{Arc, Mutex};
use std::time::Duration;
use sync::SyncFailure;

/// Options of [`File::open`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FileOptions {
    /// Refuse every I/O that changes data.
    pub read_only: bool,
    /// Bypass the host's page cache (`O_DIRECT`) if the file system supports it.
    pub direct: bool,
    /// Logical block size in bytes. `None`: the block size of a device, and 512 for a file; a guest
    /// then finds the same disk on every file system.
    pub logical_block_bytes: Option<u32>,
    /// Free space if the storage supports it: offer DISCARD, and let WRITE_ZEROES unmap.
    pub discard: bool,
    /// Lock the image as QEMU does (see [`crate::lock`]) before any other access, and wait up to
    /// this time for another program to release it.
    pub lock: Option<Duration>,
    /// The file is the container of an image format: positions are those of the format, and the
    /// file grows while it is served.
    pub container: bool,
    /// The mark of the file ([`mark`]) is to be removed: it does not prevent writes.
    pub ignores_mark: bool,
    /// Serve this part of a larger block device until its size is adopted by a change of the size.
    pub first_bytes: Option<u64>,
    /// The file system of a regular file punches holes, as [`File::punches`] of an earlier opening has told.
    /// `None`: it is tried.
    pub punches: Option<bool>,
}

impl Default for FileOptions {
    fn default() -> Self {
        FileOptions {
            read_only: false,
            direct: true,
            logical_block_bytes: None,
            discard: true,
            lock: None,
            container: false,
            ignores_mark: false,
            first_bytes: None,
            punches: None,
        }
    }
}

/// A disk in a regular file or on a block device.
#[derive(Debug)]
pub struct File {
    path: PathBuf,
    shared: Arc<Shared>,
    /// The properties at the opening; the size of now is in `size`.
    info: Info,
    limits: LaneLimits,
    size: Mutex<Size>,
    is_device: bool,
    fell_back_from_direct: bool,
    /// A block device that is open without O_DIRECT.
    cached_device: bool,
    notices: Vec<String>,
    /// Its state at the opening.
    found: fs::Metadata,
    /// The file system punches holes, if it was tried.
    punches: Option<bool>,
}

impl File {
    /// Opens the file or block device at `path` and probes its properties.
    ///
    /// # Errors
    /// [`FileError`]; its text names the cause and the remedy.
    pub fn open(path: impl AsRef<Path>, options: FileOptions) -> Result<File, FileError> {
        File::open_as(path.as_ref(), path.as_ref(), options)
    }

    /// As [`File::open`] for a descriptor that another process passed: `opened` is its path below
    /// `/proc/self/fd`. Descriptions and messages name `path` instead.
    ///
    /// # Errors
    /// As [`File::open`].
    pub fn open_as(opened: &Path, path: &Path, options: FileOptions) -> Result<File, FileError> {
        check_kind(opened)?;
        let (file, direct) = open_file(opened, &options)?;
        File::of(path, file, direct, options)
    }

    /// As [`File::open`], with a file that an earlier program has opened at `path`, and locked
    /// unless it shares the image. If it is not `is_at_path`, that is only its name: the file may have
    /// moved, or come as a descriptor.
    ///
    /// # Errors
    /// [`FileError`], also if the options say another access, or `path` should name the file and names
    /// another one by now.
    pub fn adopt(
        path: impl AsRef<Path>,
        file: fs::File,
        is_at_path: bool,
        options: FileOptions,
    ) -> Result<File, FileError> {
        let path = path.as_ref();
        if is_at_path {
            adopt::check_path(path, &file, &options)?;
        }
        let direct = adopt::check(path, &file, &options)?;
        File::of(path, file, direct, options)
    }

    fn of(
        path: &Path,
        file: fs::File,
        direct: bool,
        options: FileOptions,
    ) -> Result<File, FileError> {
        let file = ImageFile(file);
        if let Some(patience) = options.lock {
            lock::lock_image_within(patience, &file, path, Access::of(options.read_only))?;
        }
        let unknown = |source| FileError::Probe { path: path.into(), source };
        if !options.read_only && !options.ignores_mark {
            // Under the lock: a program that marks a file has it locked.
            mark::refusal_of_writer(&file, path)?.map_or(Ok(()), Err)?;
        }
        let found = file.metadata().map_err(unknown)?;
        let writable = !options.read_only;
        let mut facts = probe::probe(&file, direct, writable, options.punches).map_err(unknown)?;
        let first = options.first_bytes.filter(|_| facts.is_device);
        facts.size_bytes = facts.size_bytes.min(first.unwrap_or(u64::MAX));
        if facts.read_only && !options.read_only {
            return Err(FileError::ReadOnlyDevice { path: path.into() });
        }
        let block = probe::logical_block(path, &options, &facts)?;
        let size = match options.container {
            true => Size::of_container(),
            false => Size::of(facts.size_bytes, block, facts.direct),
        };
        if size.capacity_bytes == 0 {
            return Err(FileError::Empty { path: path.into(), block });
        }
        let limits = lane_limits(&options, &facts, &size, block);
        let fell_back_from_direct = options.direct && !direct;
        let mut notices = notices(path, &facts, &limits, fell_back_from_direct);
        if !facts.is_device && !options.container {
            notices.extend(partition_table_notice(path, &file, block));
        }
        let info = describe(path, direct, &options, &facts, &limits);
        Ok(File {
            path: path.into(),
            shared: Arc::new(Shared {
                file,
                name: path.display().to_string(),
                write_cache: facts.write_cache,
                sync_failure: SyncFailure::default(),
                writers: RangeLock::default(),
                handovers: AtomicU32::new(0),
            }),
            info,
            limits,
            size: Mutex::new(size),
            is_device: facts.is_device,
            fell_back_from_direct,
            cached_device: facts.is_device && !direct,
            notices,
            found,
            punches: (writable && !facts.is_device).then_some(facts.zeroing_unmaps),
        })
    }

    /// Returns whether the file system punches holes, for a later [`File::adopt`]. `None`: it was not tried.
    pub fn punches(&self) -> Option<bool> {
        self.punches
    }

    /// The state of the file at the opening: under the lock that was taken then, and before the probes,
    /// which set the times of the file.
    pub fn found(&self) -> &fs::Metadata {
        &self.found
    }

    /// Returns whether the file system refused `O_DIRECT`.
    pub fn fell_back_from_direct(&self) -> bool {
        self.fell_back_from_direct
    }

    /// Notices for the user about this file, one line each.
    pub fn notices(&self) -> &[String] {
        &self.notices
    }

    /// Locks the image as QEMU does (see [`crate::lock`]), until the disk and its lanes are
    /// dropped.
    ///
    /// # Errors
    /// [`LockError`], for example if another program uses the image.
    pub fn lock(&self) -> Result<(), LockError> {
        lock::lock_image(&self.shared.file, &self.path, Access::of(self.info.read_only))
    }

    /// Takes the lock beside another [`File`] of this process, which is locked for writing, writes no
    /// more, and will be dropped: see [`crate::lock`].
    ///
    /// # Errors
    /// The error of the system call.
    pub fn take_over_lock(&self) -> io::Result<()> {
        lock::take_over(&self.shared.file, Access::of(self.info.read_only))
    }

    /// Makes the lock of this reader that of a writer, as long as the result exists.
    ///
    /// # Errors
    /// [`LockError`]; the lock is as before.
    pub fn raise_lock(self: &Arc<Self>) -> Result<RaisedLock, LockError> {
        let path = || self.path.clone();
        match lock::raise(&self.shared.file) {
            Ok(true) => Ok(RaisedLock(Arc::clone(self))),
            Ok(false) => Err(LockError::InUse { path: path(), holder: None }),
            Err(source) => Err(LockError::Refused { path: path(), source }),
        }
    }

    /// The open file, for its attributes.
    pub(crate) fn as_file(&self) -> &fs::File {
        &self.shared.file
    }

    /// A handle on the lock that [`File::lock`] takes.
    pub fn image_lock(&self) -> ImageLock {
        let access = Access::of(self.info.read_only);
        ImageLock {
            shared: Arc::clone(&self.shared),
            path: self.path.clone(),
            access,
            is_off: false,
        }
    }

    /// A second descriptor of the open file, with the same lock, for a later program.
    ///
    /// # Errors
    /// The error of the system call, if no file descriptor is left.
    pub fn share(&self) -> io::Result<fs::File> {
        self.shared.file.try_clone()
    }

    /// The state of the file now.
    ///
    /// # Errors
    /// The error of the system call.
    pub fn metadata(&self) -> io::Result<fs::Metadata> {
        self.shared.file.metadata()
    }

    /// The identity of the open file and its access, to compare with those of another program.
    ///
    /// # Errors
    /// The error of the system call.
    pub fn opened_as(&self) -> io::Result<OpenAs> {
        OpenAs::of(&self.shared.file)
    }

    /// Refuses this file if it is not the one of this [`OpenAs::identity`], which was opened before.
    ///
    /// # Errors
    /// [`FileError::Replaced`], or the error of the system call.
    pub fn check_identity(&self, identity: (u64, u64)) -> Result<(), FileError> {
        let path = || self.path.clone();
        let own = self.opened_as().map_err(|source| FileError::Probe { path: path(), source })?;
        if own.identity == identity { Ok(()) } else { Err(FileError::Replaced { path: path() }) }
    }

    /// [`place`] of the open file.
    pub fn place(&self) -> PathBuf {
        place(&self.shared.file.0)
    }

    /// The path that was opened.
    pub fn path(&self) -> &Path {
        &self.path
    }
}

/// The lock of a writer that [`File::raise_lock`] took.
#[derive(Debug)]
pub struct RaisedLock(Arc<File>);

impl Drop for RaisedLock {
    fn drop(&mut self) {
        lock::lower(&self.0.shared.file);
    }
}

impl Disk for File {
    fn info(&self) -> Info {
        let capacity_sectors = self.size().capacity_bytes / 512;
        Info { capacity_sectors, ..self.info.clone() }
    }

    fn resize(&self, bytes: Option<u64>) -> Result<(), ResizeError> {
        self.set_size(bytes)
    }

    fn sync(&self) -> io::Result<()> {
        self.shared.sync()
    }

    fn open_lane(&self) -> io::Result<Box<dyn Lane>> {
        let Size { capacity_bytes, tail } = self.size();
        let limits = LaneLimits { capacity_bytes, tail, ..self.limits };
        Ok(Box::new(FileLane::new(Arc::clone(&self.shared), limits)?))
    }

    fn kernel_file(&self) -> Result<BorrowedFd<'_>, &'static str> {
        if self.cached_device {
            return Err("the kernel serves a block device without the page cache; use --direct on");
        }
        if self.has_failed_sync() {
            return Err(
                "a sync of the disk has failed, and the kernel data plane would not report it; \
                 check the storage and restart the daemon",
            );
        }
        Ok(self.shared.file.as_fd())
    }

    fn sync_failed(&self, errno: i32) {
        self.shared.sync_failure.remember(errno, &self.shared.name);
    }
}

/// Checks the file type before the file is opened: opening a FIFO would block.
fn check_kind(path: &Path) -> Result<(), FileError> {
    let opening = |source| FileError::open(path, source, true);
    let kind = fs::metadata(path).map_err(opening)?.file_type();
    match kind.is_file() || kind.is_block_device() {
        true => Ok(()),
        false => Err(FileError::Kind { path: path.into() }),
    }
}

/// Opens the file; also returns whether it is open with O_DIRECT.
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

fn lane_limits(options: &FileOptions, facts: &Facts, size: &Size, block: u32) -> LaneLimits {
    let frees = options.discard && !options.read_only;
    LaneLimits {
        capacity_bytes: size.capacity_bytes,
        logical_block_bytes: block,
        direct: facts.direct,
        tail: size.tail,
        read_only: options.read_only,
        discard: (frees && facts.discard.is_some()).then_some(facts.discard_by),
        unmap: frees && facts.zeroing_unmaps,
        avoids_direct: false,
        in_memory: facts.in_memory,
    }
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
        memory_align_bytes: limits.direct.map_or(1, |align| align.memory),
        read_only: options.read_only,
        volatile_cache: !facts.write_cache.is_write_through(),
        discard: facts.discard.filter(|_| limits.discard.is_some()).map(aligned),
        write_zeroes: writable.then(|| aligned(facts.zeroing)),
        write_zeroes_unmaps: limits.unmap,
        secure_erase: None,
        io_poll: facts.io_poll,
        submission_blocks: facts.submission_blocks,
        grows_in_block: false,
    }
}

fn notices(path: &Path, facts: &Facts, limits: &LaneLimits, fell_back: bool) -> Vec<String> {
    let path = path.display();
    let mut notices = Vec::new();
    if fell_back {
        notices.push(format!(
            "the file system of {path} refuses O_DIRECT: using the host's page cache \
             (`--direct off` silences this)"
        ));
    }
    let block = limits.logical_block_bytes;
    if let Some(wanted) = limits.direct.map(|align| align.write).filter(|&wanted| wanted > block) {
        notices.push(format!(
            "{WANTS_BLOCKS} {wanted} bytes for {path} and the guest has {block}: \
             smaller writes are slow (a new disk may use --logical-block-size {wanted})"
        ));
    }
    let rest = facts.size_bytes.saturating_sub(limits.capacity_bytes);
    if rest > 0 {
        notices.push(format!(
            "the last {rest} bytes of {path} are not served: its size is not a multiple of the \
             logical block of {block} bytes"
        ));
    }
    notices
}

/// A warning if the partition table of the image is for another logical block size than the
/// guest's: the guest would not find it.
fn partition_table_notice(path: &Path, file: &fs::File, block: u32) -> Option<String> {
    const SIGNATURE: &[u8; 8] = b"EFI PART";
    let cached = sync::open_again(file, true, 0).ok()?;
    let is_at = |block: u32| {
        let mut found = [0; SIGNATURE.len()];
        cached.read_exact_at(&mut found, block.into()).is_ok() && &found == SIGNATURE
    };
    let made_for = [512, 4096].into_iter().find(|&other| is_at(other))?;
    (made_for != block && !is_at(block)).then(|| {
        format!(
            "the partition table of {} is for blocks of {made_for} bytes, and the guest does not \
             find it with blocks of {block}: use --logical-block-size {made_for}",
            path.display()
        )
    })
}
