// SPDX-License-Identifier: Apache-2.0
//! The image lock. It uses the same bytes as QEMU: QEMU and this daemon exclude each other.
//!
//! Each program takes shared locks on two groups of bytes of the image: byte 100+n means "this
//! program uses permission n", byte 200+n means "no other program may use permission n". Then it
//! checks the bytes of the other programs for a conflict. The locks belong to the open file
//! description, which may outlive the process: `ImageFile` releases them explicitly.

mod holder;
mod ofd;

use std::fs::{File, OpenOptions};
use std::ops::Deref;
use std::os::unix::fs::{FileTypeExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

const USED_BASE: u64 = 100;
const NOT_SHARED_BASE: u64 = 200;

/// Permissions of QEMU that apply between processes; the number selects the byte.
const CONSISTENT_READ: u64 = 0;
const WRITE: u64 = 1;
const RESIZE: u64 = 3;

/// Use of an image.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// Any number of readers and no writer.
    Read,
    /// One writer, and no reader that needs constant content.
    Write,
}

impl Access {
    /// The access that a disk needs.
    pub fn of(read_only: bool) -> Self {
        if read_only { Access::Read } else { Access::Write }
    }

    fn used(self) -> &'static [u64] {
        match self {
            Access::Read => &[CONSISTENT_READ],
            Access::Write => &[CONSISTENT_READ, WRITE],
        }
    }

    /// Permissions that no other program may use: write and resize, for either access.
    fn not_shared(self) -> &'static [u64] {
        &[WRITE, RESIZE]
    }
}

/// An open image; dropping it releases its locks. Closing it does not suffice: an io_uring with
/// this registered file keeps the open file description until the kernel has destroyed the ring,
/// some time after the process has ended.
#[derive(Debug)]
pub(crate) struct ImageFile(pub(crate) File);

impl Deref for ImageFile {
    type Target = File;

    fn deref(&self) -> &File {
        &self.0
    }
}

impl Drop for ImageFile {
    fn drop(&mut self) {
        release(&self.0);
    }
}

/// A holder that is no process which this one sees.
const UNSEEN: &str = "another program: of another user, container or host (see `lslocks`), or by I/O of an ended one";
/// Interval between attempts to lock an image.
const RETRY: Duration = Duration::from_millis(20);

/// Errors of [`lock_image`].
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LockError {
    /// Another program uses the image.
    #[error(
        "{}: in use by {}; stop that, or give `--lock off` to share the image knowingly \
         (two writers destroy a file system)",
        .path.display(),
        .holder.as_deref().unwrap_or(UNSEEN)
    )]
    InUse {
        /// The image.
        path: PathBuf,
        /// Name and process id of the other program. `None`: no process that this one sees has the
        /// locked image; the program has ended, and the kernel still completes its I/O, or it runs in
        /// another container or on another host.
        holder: Option<String>,
    },
    /// A block device belongs to the host.
    #[error(
        "{}: mounted, or claimed by RAID, LVM, swap or another program of this host, and a second \
         writer destroys its data; release it there, or give `--read-only`",
        .path.display()
    )]
    Claimed {
        /// The device.
        path: PathBuf,
    },
    /// The image is the backing file of another one.
    #[error(transparent)]
    Marked(#[from] crate::mark::Marked),
    /// The marks of the image cannot be read.
    #[error(
        "{}: its marks cannot be read, and it may be the backing file of another image, which a write corrupts: \
         {source}; check its storage",
        .path.display()
    )]
    MarkUnknown {
        /// The image.
        path: PathBuf,
        /// Error of the system call.
        source: std::io::Error,
    },
    /// The file system does not support the lock.
    #[error("{}: cannot be locked: {source}; give `--lock off` if no other program uses it", .path.display())]
    Refused {
        /// The image.
        path: PathBuf,
        /// Error of the system call.
        source: std::io::Error,
    },
}

impl LockError {
    /// The other program that uses the image.
    pub fn user(&self) -> Option<&str> {
        match self {
            LockError::InUse { holder, .. } => Some(holder.as_deref().unwrap_or(UNSEEN)),
            _ => None,
        }
    }
}

/// Locks the image `file` for the lifetime of the open file description, which `path` names. A
/// writer is also refused a block device that something on this host has claimed, as a mounted file
/// system has.
///
/// # Errors
/// [`LockError`]; no lock is held then.
pub fn lock_image(file: &File, path: &Path, access: Access) -> Result<(), LockError> {
    lock_image_within(Duration::ZERO, file, path, access)
}

/// One attempt. An error does not name the holder: to find it takes long.
fn try_to_lock(file: &File, path: &Path, access: Access) -> Result<(), LockError> {
    let outcome = take_and_check(file, access);
    let is_claimed = || access == Access::Write && is_claimed(file, path);
    if matches!(outcome, Ok(true)) && !is_claimed() {
        return Ok(());
    }
    release(file);
    match outcome {
        Ok(true) => Err(LockError::Claimed { path: path.into() }),
        Ok(false) => Err(LockError::InUse { path: path.into(), holder: None }),
        Err(source) => Err(LockError::Refused { path: path.into(), source }),
    }
}

/// A program that has an image open and locked.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct User {
    /// Name and process id, if they are known.
    pub holder: Option<String>,
    /// It may write.
    pub writes: bool,
}

/// Returns another program that holds the lock of the image `file`. Takes no lock itself.
///
/// # Errors
/// The error of the system call.
pub fn user_of(file: &File) -> std::io::Result<Option<User>> {
    let holds = |base: u64| {
        (base..=base + RESIZE).try_fold(false, |found, byte| {
            Ok::<_, std::io::Error>(found || ofd::others_hold(file, byte)?)
        })
    };
    if !holds(USED_BASE)? && !holds(NOT_SHARED_BASE)? {
        return Ok(None);
    }
    let writes = ofd::others_hold(file, USED_BASE + WRITE)?;
    Ok(Some(User { holder: holder::of_locks_on(file), writes }))
}

/// As [`lock_image`], but waits up to `patience` while the image is in use: a killed daemon holds
/// its lock, and its claim, until the kernel has completed its I/O.
///
/// # Errors
/// As [`lock_image`].
pub fn lock_image_within(
    patience: Duration,
    file: &File,
    path: &Path,
    access: Access,
) -> Result<(), LockError> {
    let deadline = Instant::now() + patience;
    loop {
        match try_to_lock(file, path, access) {
            Err(LockError::InUse { .. } | LockError::Claimed { .. })
                if Instant::now() < deadline =>
            {
                std::thread::sleep(RETRY);
            }
            // After the last attempt, which has released the locks: the holder is not this process.
            Err(LockError::InUse { path, .. }) => {
                return Err(LockError::InUse { path, holder: holder::of_locks_on(file) });
            }
            outcome => return outcome,
        }
    }
}

/// Returns whether the kernel refuses an exclusive open of a block device.
fn is_claimed(file: &File, path: &Path) -> bool {
    let is_device = file.metadata().is_ok_and(|meta| meta.file_type().is_block_device());
    is_device && {
        let opened = OpenOptions::new().read(true).custom_flags(libc::O_EXCL).open(path);
        // The file is open already; another error says nothing of claims.
        opened.is_err_and(|why| why.raw_os_error() == Some(libc::EBUSY))
    }
}

/// Returns whether the lock was taken. Every program takes its locks before it checks the others:
/// of two that start at the same time at least one sees the other.
fn take_and_check(file: &File, access: Access) -> std::io::Result<bool> {
    take(file, access)?;
    let used = access.used().iter();
    let not_shared = access.not_shared().iter();
    for byte in not_shared.map(|n| USED_BASE + n).chain(used.map(|n| NOT_SHARED_BASE + n)) {
        if ofd::others_hold(file, byte)? {
            return Ok(false);
        }
    }
    Ok(true)
}

/// Takes the locks, which exclude only later programs.
fn take(file: &File, access: Access) -> std::io::Result<()> {
    let used = access.used().iter().map(|n| USED_BASE + n);
    let not_shared = access.not_shared().iter().map(|n| NOT_SHARED_BASE + n);
    used.chain(not_shared).try_for_each(|byte| ofd::lock_shared(file, byte))
}

/// Takes the lock beside another open file of this process, which has the lock of a writer, writes no
/// more, and will be closed: no other program comes in between.
pub(crate) fn take_over(file: &File, access: Access) -> std::io::Result<()> {
    take(file, access)
}

/// Makes the lock of a reader, which this open file has, that of a writer. `false`: another program
/// uses the image, and the lock is as before.
pub(crate) fn raise(file: &File) -> std::io::Result<bool> {
    let raised = take_and_check(file, Access::Write);
    if !matches!(raised, Ok(true)) {
        lower(file);
    }
    raised
}

/// Ends [`raise`].
pub(crate) fn lower(file: &File) {
    // A failure has no remedy, as in `release`.
    let _ = ofd::unlock(file, USED_BASE + WRITE, 1);
}

pub(crate) fn release(file: &File) {
    for base in [USED_BASE, NOT_SHARED_BASE] {
        // A failure has no remedy; the last close releases the locks in any case.
        let _ = ofd::unlock(file, base, RESIZE + 1);
    }
}
