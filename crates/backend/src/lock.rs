// SPDX-License-Identifier: Apache-2.0
//! The image lock, byte for byte as QEMU takes it, so that QEMU and this daemon exclude each
//! other.
//!
//! Two groups of bytes of the image are locked shared: byte 100+n says "I use permission n", byte
//! 200+n says "nobody else may use permission n". After taking its own, each side looks whether
//! somebody uses what it does not share, or does not share what it uses. The locks belong to the
//! open file description and vanish with it.

mod holder;
mod ofd;

use std::fs::File;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

const USED_BASE: u64 = 100;
const NOT_SHARED_BASE: u64 = 200;

/// QEMU's permissions that matter between processes; the number is the byte's place.
const CONSISTENT_READ: u64 = 0;
const WRITE: u64 = 1;
const RESIZE: u64 = 3;

/// What the image is used for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// Any number of readers, no writer.
    Read,
    /// One writer, and nobody who counts on the content staying as it is.
    Write,
}

impl Access {
    /// What a disk needs that is read-only or not.
    pub fn of(read_only: bool) -> Self {
        if read_only { Access::Read } else { Access::Write }
    }

    fn used(self) -> &'static [u64] {
        match self {
            Access::Read => &[CONSISTENT_READ],
            Access::Write => &[CONSISTENT_READ, WRITE],
        }
    }

    /// The same for both: nobody else may write or resize, anybody may read who bears what the
    /// others use.
    fn not_shared(self) -> &'static [u64] {
        &[WRITE, RESIZE]
    }
}

/// How often a locked image is tried.
const RETRY: Duration = Duration::from_millis(20);

/// Why an image cannot be locked.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LockError {
    /// Somebody else uses it.
    #[error(
        "{}: in use by {}; stop that, or give `--lock off` to share the image knowingly \
         (two writers destroy a file system)",
        .path.display(),
        .holder.as_deref().unwrap_or("another program")
    )]
    InUse {
        /// The image.
        path: PathBuf,
        /// The program and process, where it can be found.
        holder: Option<String>,
    },
    /// The file system cannot lock.
    #[error("{}: cannot be locked: {source}; give `--lock off` if nobody else uses it", .path.display())]
    Refused {
        /// The image.
        path: PathBuf,
        /// The system's answer.
        source: std::io::Error,
    },
}

/// Locks the image open as `file`, for as long as the open file description lives.
///
/// # Errors
/// [`LockError::InUse`] names the holder where the system tells; no lock is kept then.
pub fn lock_image(file: &File, path: &Path, access: Access) -> Result<(), LockError> {
    let outcome = take_and_check(file, access);
    if !matches!(outcome, Ok(true)) {
        release(file);
    }
    match outcome {
        Ok(true) => Ok(()),
        Ok(false) => Err(LockError::InUse { path: path.into(), holder: holder::of_locks_on(file) }),
        Err(source) => Err(LockError::Refused { path: path.into(), source }),
    }
}

/// As [`lock_image`], but waits for `patience` while the image is in use: a daemon that was killed
/// keeps its lock until the kernel has carried out what it submitted.
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
        match lock_image(file, path, access) {
            Err(LockError::InUse { .. }) if Instant::now() < deadline => {
                std::thread::sleep(RETRY);
            }
            outcome => return outcome,
        }
    }
}

/// Whether the lock was had. Both sides take before they look, so that of two that start at once
/// at least one sees the other.
fn take_and_check(file: &File, access: Access) -> std::io::Result<bool> {
    let used = access.used().iter();
    let not_shared = access.not_shared().iter();
    for byte in used.clone().map(|n| USED_BASE + n) {
        ofd::lock_shared(file, byte)?;
    }
    for byte in not_shared.clone().map(|n| NOT_SHARED_BASE + n) {
        ofd::lock_shared(file, byte)?;
    }
    for byte in not_shared.map(|n| USED_BASE + n).chain(used.map(|n| NOT_SHARED_BASE + n)) {
        if ofd::others_hold(file, byte)? {
            return Ok(false);
        }
    }
    Ok(true)
}

fn release(file: &File) {
    for base in [USED_BASE, NOT_SHARED_BASE] {
        // Nothing can be done about a failure, and closing the file releases them too.
        let _ = ofd::unlock(file, base, RESIZE + 1);
    }
}
